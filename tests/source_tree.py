"""The source of this repository as syntax trees: what modules import, define and call."""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TypeVar

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("broker_io", "snapshots", "txnbuffer")
Found = TypeVar("Found")


def once(find: Callable[[Module], Iterator[Found]]) -> Callable[[Module], tuple[Found, ...]]:
    """Look into each source once in a process: syntax trees take seconds, and too much memory to keep them."""
    return cache(lambda module: tuple(find(module)))


@dataclass(frozen=True)
class Import:
    """`import module`, or `from module import name`. `lazy`: it runs when a function is called, or for types only."""

    module: str
    name: str | None
    line: int
    lazy: bool

    @property
    def dotted(self) -> str:
        return self.module if self.name is None else f"{self.module}.{self.name}"


@dataclass(frozen=True)
class Module:
    """One source file: `path` from the root of the repository, `name` dotted."""

    path: str
    text: str

    @property
    def name(self) -> str:
        return self.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    @property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @property
    def lines(self) -> int:
        return self.text.count("\n")

    @once
    def imports(self) -> Iterator[Import]:
        yield from self._imports(self.tree, lazy=False)

    def _imports(self, node: ast.AST, *, lazy: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                for alias in child.names:
                    yield Import(alias.name, None, child.lineno, lazy)
            elif isinstance(child, ast.ImportFrom):
                for alias in child.names:
                    yield Import(self._absolute(child), alias.name, child.lineno, lazy)
            else:
                if isinstance(child, ast.Call) and (name := _imported_by_call(child)):
                    yield Import(name, None, child.lineno, lazy)
                inside = lazy or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
                yield from self._imports(child, lazy=inside or _for_types_only(child))

    def _absolute(self, node: ast.ImportFrom) -> str:
        if node.level == 0:
            return node.module or ""
        package = self.name.split(".") if self.path.endswith("__init__.py") else self.name.split(".")[:-1]
        base = package[: len(package) - node.level + 1]
        return ".".join([*base, *([node.module] if node.module else [])])

    @once
    def functions(self) -> Iterator[tuple[str, int, int]]:
        """Name, first line and number of lines of each function, decorators and docstring included."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
                yield node.name, first, (node.end_lineno or node.lineno) - first + 1

    @once
    def calls(self) -> Iterator[tuple[str, int]]:
        """The function of each call, if it is a dotted name, and its line."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Call) and (name := _dotted(node.func)):
                yield name, node.lineno

    @once
    def uses(self) -> Iterator[tuple[str, int]]:
        """What the code uses of other modules at run time, as dotted names with the lines: names and their attributes.

        What a call like `importlib.import_module("a.b")` imports counts as used.
        """
        names: dict[str, str] = {}
        for node in _at_run_time(self.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    package = alias.name.partition(".")[0]
                    names[alias.asname or package] = alias.name if alias.asname else package
            elif isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    names[alias.asname or alias.name] = imported = f"{self._absolute(node)}.{alias.name}"
                    yield imported, node.lineno
        for node in _at_run_time(self.tree):
            if isinstance(node, ast.Name | ast.Attribute) and (dotted := _dotted(node)):
                first, dot, rest = dotted.partition(".")
                if first in names:
                    yield f"{names[first]}{dot}{rest}", node.lineno
            elif isinstance(node, ast.Call) and (name := _imported_by_call(node)):
                yield name, node.lineno

    def has_tests(self) -> bool:
        for node in self.tree.body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test"):
                return True
            if isinstance(node, ast.ClassDef) and node.name.startswith("Test") and _class_has_tests(node):
                return True
            if isinstance(node, ast.Assign) and any(_dotted(target).startswith("Test") for target in node.targets):
                return True
        return False


def modules(*directories: str, root: Path = ROOT) -> list[Module]:
    """All modules under some directories of the repository, sorted by path; without generated ones."""
    paths = sorted(path for directory in directories for path in (root / directory).rglob("*.py"))
    written = [path for path in paths if not path.name.endswith("_pb2.py")]
    return [Module(str(path.relative_to(root)), path.read_text()) for path in written]


def tracked_files() -> list[str] | None:
    """Paths of all files under version control; None outside of a checkout."""
    if not (ROOT / ".git").exists():
        return None
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    return [path for path in listed.stdout.split("\0") if path]


def within(name: str, *packages: str) -> bool:
    """Whether a dotted name is one of these packages or inside of one."""
    return any(name == package or name.startswith(package + ".") for package in packages)


def _at_run_time(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes below one, without imports for types; a dotted name counts as one node."""
    for child in ast.iter_child_nodes(node):
        if not _for_types_only(child):
            yield child
            if not _dotted(child):
                yield from _at_run_time(child)


def _for_types_only(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and _dotted(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def _imported_by_call(call: ast.Call) -> str:
    """Return the module that a call like `importlib.import_module("a.b")` imports, or ""."""
    by_name = _dotted(call.func).rpartition(".")[2] in ("import_module", "__import__")
    name = call.args[0] if by_name and call.args else None
    return name.value if isinstance(name, ast.Constant) and isinstance(name.value, str) else ""


def _class_has_tests(node: ast.ClassDef) -> bool:
    return bool(node.bases) or any(isinstance(item, ast.FunctionDef) and item.name[:4] == "test" for item in node.body)


def _dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (base := _dotted(node.value)):
        return f"{base}.{node.attr}"
    return ""
