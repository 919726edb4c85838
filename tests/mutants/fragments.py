"""Fragments of code: found in the product by their syntax trees, and replaced in its text.

A fragment is an expression, or one or more statements. Comments, line breaks, quotes and the module of the function
make no difference. `...` stands for any expression, or, as the body of a statement, for any body, which the new
fragment keeps with a `...` of its own. Nothing is found inside of an f-string: its parts have no exact places in Python
3.11.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator, Sequence
from functools import cache, lru_cache
from itertools import accumulate
from pathlib import Path
from typing import TypeAlias

from source_tree import PACKAGES, Module, modules, within

DEFINITIONS = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


class NotPlantable(ValueError):
    """A fragment does not stand exactly once in what is named, or what takes its place is not valid."""


def planted(function: str, old: str, new: str, root: Path) -> Module:
    """The module with a function, class or constant, in which one fragment takes the place of another.

    `function` is a name like `Class.method`, behind its package and a colon if other packages have the name and `old`.
    """
    package, _, name = function.rpartition(":")
    places = [path for path in homes(root).get(name, ()) if not package or within(Module(path, "").name, package)]
    if not places:
        raise NotPlantable(f"nothing is named {function}: change `function` if it has another name now")
    try:
        before, after = ast.parse(old), ast.parse(new)
        if ast.dump(before) == ast.dump(after):
            raise NotPlantable("changes nothing")
        pattern = expression(before) if expression(before) and expression(after) else before.body
        found = [
            (module, *spot)
            for module in (Module(path, (root / path).read_text()) for path in places)
            for known, node in names(tree_of(module))
            if known == name
            for spot in spots(node, pattern)
        ]
        if len(found) != 1:
            raise NotPlantable(
                f"`old` stands {len(found)} times in {function} ({', '.join(places)}), not once: write there what it "
                "has now, or more of it; write `package:` before a name that several packages have; remove the mutant "
                "if its rule is gone"
            )
        module, nodes, rests = found[0]
        changed = Module(module.path, replaced(module.text, nodes, rests, new))
        compile(changed.text, changed.path, "exec", dont_inherit=True)
    except SyntaxError as error:
        raise NotPlantable(f"`old` or `new` is not valid Python: {error}") from error
    return changed


@cache
def homes(root: Path) -> dict[str, list[str]]:
    """The paths of the modules that define a name."""
    found: dict[str, list[str]] = {}
    for module in modules(*PACKAGES, root=root):
        for name in {name for name, _ in names(module.tree)}:
            found.setdefault(name, []).append(module.path)
    return found


@lru_cache(maxsize=4)
def tree_of(module: Module) -> ast.Module:
    return module.tree


def names(node: ast.AST, outer: str = "") -> Iterator[tuple[str, ast.stmt]]:
    """What a module defines, with its qualified name: functions, classes, constants and fields."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, DEFINITIONS):
            yield outer + child.name, child
            yield from names(child, f"{outer}{child.name}.")
        elif isinstance(child, ast.Assign | ast.AnnAssign):
            targets = child.targets if isinstance(child, ast.Assign) else [child.target]
            parts = [part for target in targets for part in getattr(target, "elts", [target])]
            yield from ((outer + part.id, child) for part in parts if isinstance(part, ast.Name))
        elif isinstance(child, ast.stmt):
            yield from names(child, outer)


def expression(tree: ast.Module) -> ast.expr | None:
    """The expression that is all of a tree."""
    return tree.body[0].value if len(tree.body) == 1 and isinstance(tree.body[0], ast.Expr) else None


Spot: TypeAlias = tuple[Sequence[ast.expr | ast.stmt], list[list[ast.stmt]]]


def spots(scope: ast.stmt, pattern: ast.expr | list[ast.stmt] | None) -> Iterator[Spot]:
    """The nodes that have the structure of a fragment, with what each `...` of it stands for."""
    for node in walk(ast.Module([scope], [])):
        rests: list[list[ast.stmt]]
        if not isinstance(pattern, list):
            if isinstance(node, ast.expr) and same(pattern, node, rests := []):
                yield [node], rests
            continue
        for _, body in ast.iter_fields(node):
            if isinstance(body, list) and body and isinstance(body[0], ast.stmt):
                for first in range(len(body) - len(pattern) + 1):
                    if same(pattern, run := body[first : first + len(pattern)], rests := []):
                        yield run, rests


def walk(node: ast.AST) -> Iterator[ast.AST]:
    yield node
    if not isinstance(node, ast.JoinedStr):
        for child in ast.iter_child_nodes(node):
            yield from walk(child)


def same(pattern: object, node: object, rests: list[list[ast.stmt]]) -> bool:
    """Whether a node has the structure of a pattern; `rests` gets what its bodies that are `...` stand for."""
    if isinstance(pattern, ast.Constant) and pattern.value is ... and isinstance(node, ast.expr):
        return True
    if type(pattern) is not type(node):
        return False
    if isinstance(pattern, ast.AST):
        fields = [field for field in pattern._fields if field != "ctx"]
        return all(same(getattr(pattern, field), getattr(node, field), rests) for field in fields)
    if isinstance(pattern, list) and isinstance(node, list):
        if node and isinstance(node[0], ast.stmt) and [ast.unparse(part) for part in pattern] == ["..."]:
            rests.append(node)
            return True
        return len(pattern) == len(node) and all(map(lambda *pair: same(*pair, rests), pattern, node))
    return pattern == node


def replaced(text: str, nodes: Sequence[ast.expr | ast.stmt], rests: list[list[ast.stmt]], new: str) -> str:
    """A text in which `new` takes the place of some nodes."""
    start, end = span(text, nodes)
    source, column = text.encode(), nodes[0].col_offset
    if isinstance(nodes[0], ast.expr):
        middle = f"({new.strip()})"
    else:
        bodies = [body_text(text, rest) for rest in rests]
        middle = re.sub(
            r"^( *)(.+:)? ?\.\.\.$",
            lambda line: with_body(line[1], line[2], bodies.pop(0)) if bodies else line[0],
            new.strip("\n") or "pass",
            flags=re.MULTILINE,
        )
        if source.startswith(b"elif", start):
            middle = with_body("", "else:", middle)
        middle = textwrap.indent(middle, " " * column).lstrip(" ")
    return (source[:start] + middle.encode() + source[end:]).decode()


def span(text: str, nodes: Sequence[ast.expr | ast.stmt]) -> tuple[int, int]:
    """The first byte of some nodes, and that behind them."""
    lines = [0, *accumulate(len(line) for line in text.encode().splitlines(keepends=True))]
    first, last = nodes[0], nodes[-1]
    line = min([first.lineno, *(decorator.lineno for decorator in getattr(first, "decorator_list", ()))])
    return lines[line - 1] + first.col_offset, lines[(last.end_lineno or 0) - 1] + (last.end_col_offset or 0)


def body_text(text: str, body: list[ast.stmt]) -> str:
    """Statements at the beginning of the line."""
    start, end = span(text, body)
    lines = textwrap.dedent(" " * body[0].col_offset + text.encode()[start:end].decode())
    return lines.removeprefix("el") if lines.startswith("elif") else lines


def with_body(pad: str, header: str | None, body: str) -> str:
    return f"{pad}{header}\n{textwrap.indent(body, pad + 4 * ' ')}" if header else textwrap.indent(body, pad)
