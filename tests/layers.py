"""Writes the diagram and the table of docs/architecture.md from the imports: `make docs`.

A part is each module and sub-package directly in a package; of a sub-package that has no modules, each of its own
sub-packages. Its layer is above those of all parts that it imports, at run time or for types. Parts that import each
other share a layer.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Sequence, Set
from functools import cache

from source_tree import PACKAGES, ROOT, Module, modules

PAGE = ROOT / "docs" / "architecture.md"
BEGIN = "<!-- Made by tests/layers.py from the imports: run `make docs`, don't edit. -->\n"
END = "<!-- End of what tests/layers.py makes. -->\n"
CAPTION = """\
A part imports only parts in the lines below its own. Imports inside functions and imports for types count too.
Where a part imports another one only in these ways, the table has it in brackets.
"""


class Layers:
    """The parts of some modules and what each imports.

    Not `split`: the packages as parts. `rooms`: the sub-packages of each part as parts of their own.
    """

    def __init__(self, source: Sequence[Module], *, split: bool = True, rooms: bool = False) -> None:
        self.modules = {module.name: module for module in source}
        packages = {name.rpartition(".")[0] for name in self.modules} - {""}
        nested = {package.rpartition(".")[0] for package in packages} - {""}
        whole = {package for package in nested if "." in package and not rooms and self._has_modules(package, packages)}
        self._split = nested - whole if split else set()
        self.imports: dict[str, dict[str, bool]] = {self.part(name): {} for name in self.modules}
        """Part → each part that it imports → whether only inside functions or for types."""
        for module in source:
            self._add(self.imports[self.part(module.name)], module)

    def _has_modules(self, package: str, packages: Set[str]) -> bool:
        inside = {name for name in self.modules if name.rpartition(".")[0] == package}
        return bool(inside - packages)

    def part(self, name: str) -> str:
        """Return the part that a module belongs to."""
        words = name.split(".")
        for count in range(1, len(words)):
            if ".".join(words[:count]) not in self._split:
                return ".".join(words[:count])
        return name

    def _add(self, found: dict[str, bool], module: Module) -> None:
        for each in module.imports():
            name = each.dotted if each.dotted in self.modules else each.module
            if name in self.modules and (target := self.part(name)) != self.part(module.name):
                found[target] = found.get(target, True) and each.lazy

    def rows(self) -> list[list[list[str]]]:
        """Return the layers, highest first: lists of circles, which are lists of parts that import each other."""
        reached = {part: self._reached(part) for part in self.imports}
        circles = {part: frozenset(each for each in reached[part] if part in reached[each]) for part in reached}

        @cache
        def level(circle: frozenset[str]) -> int:
            below = {circles[target] for part in circle for target in self.imports[part]} - {circle}
            return max(map(level, below), default=0) + 1

        rows: dict[int, list[list[str]]] = defaultdict(list)
        for circle in set(circles.values()):
            rows[level(circle)].append(sorted(circle))
        return [sorted(rows[each]) for each in sorted(rows, reverse=True)]

    def _reached(self, part: str) -> set[str]:
        """Return the part and all that it imports, directly or not."""
        reached, waiting = {part}, [part]
        while waiting:
            new = self.imports[waiting.pop()].keys() - reached
            reached |= new
            waiting += new
        return reached

    def summary(self, part: str) -> str:
        """Return the first sentence of the docstring of a part; it ends at the first blank line."""
        paragraph = (ast.get_docstring(self.modules[part].tree) or "").partition("\n\n")[0]
        text = " ".join(paragraph.split())
        return re.split(r"(?<=\.)\s", text)[0].removesuffix(".")


def diagram(source: Sequence[Module]) -> str:
    """Return a box for each package, with a line for each layer; packages that import each other share a box."""
    layers = Layers(source).rows()
    boxes = []
    for packages in [circle for row in Layers(source, split=False).rows() for circle in row]:
        lines = []
        for row in layers:
            inside = [circle for circle in row if circle[0].partition(".")[0] in packages]
            lines += ["    ".join(" <-> ".join(map(_short, circle)) for circle in inside)] if inside else []
        boxes.append((f" {', '.join(packages)} ", lines))
    width = max(len(line) for title, lines in boxes for line in [title, *lines]) + 4
    text = []
    for title, lines in boxes:
        text += [f"┌{title:─^{width}}┐", *(f"│{line:^{width}}│" for line in lines), f"└{'':─^{width}}┘"]
    return "\n".join(["```", *text, "```", ""])


def table(source: Sequence[Module]) -> str:
    """Return a table of the parts: a description and the imports of each, of other packages only the package."""
    layers = Layers(source)
    lines = ["| part | what it is | imports |", "|---|---|---|"]
    for part, imports in sorted(layers.imports.items()):
        names: dict[str, bool] = {}
        for target, lazy in imports.items():
            package = target.partition(".")[0]
            name = _short(target) if package == part.partition(".")[0] else package
            names[name] = names.get(name, True) and lazy
        listed = ", ".join(f"({name})" if lazy else name for name, lazy in sorted(names.items()))
        lines.append(f"| `{part}` | {layers.summary(part)} | {listed} |".replace("|  |", "| |"))
    return "\n".join([*lines, ""])


def _short(part: str) -> str:
    return part.partition(".")[2] or part


def refreshed(page: str) -> str:
    """Return the text of the page with the diagram and the table as the imports are now."""
    source = modules(*PACKAGES)
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + "\n".join([BEGIN, diagram(source), CAPTION, table(source), END]) + after


if __name__ == "__main__":
    PAGE.write_text(refreshed(PAGE.read_text()))
