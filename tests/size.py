"""Prints how large the project is: `make size`. A whole `make test` prints it at its end.

For each package: modules, lines, and statements, without docstrings and generated modules. Then the tests, the mutants,
the modules and functions on the hot paths (the accepted ones, which `tests/test_bench_calls.py` holds), and the seconds
of the tests by folder, of the last whole run: the sums of all workers, with set-up and tear-down.
"""

from __future__ import annotations

import ast
import json
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from source_tree import PACKAGES, ROOT, Module, modules

from bench.calls_table import accepted

SECONDS = ROOT / ".venv" / "test_seconds.json"
"""Folder of tests → seconds, in the last whole run."""
PATHS = {"a transaction": "transaction", "a reader": "read_batch", "a stream": "streamed", "a recovery": "recovered"}


class Size(NamedTuple):
    modules: int
    lines: int
    statements: int


def size(source: Iterable[Module]) -> Size:
    found = [(module.lines, statements(module.tree)) for module in source]
    return Size(len(found), sum(lines for lines, _ in found), sum(count for _, count in found))


def statements(tree: ast.Module) -> int:
    """The statements of a module that are not docstrings."""
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.stmt)]
    return sum(not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)) for node in nodes)


def package(module: Module) -> str:
    parts = Path(module.path).parts
    return "/".join(parts[: min(len(parts) - 1, 2)])


def report() -> Iterator[str]:
    product = [module for module in modules(*PACKAGES) if "_pb2" not in module.path]
    yield f"{'package':28}{'modules':>8}{'lines':>8}{'statements':>12}"
    for name in sorted({package(module) for module in product}):
        yield "{:28}{:8,}{:8,}{:12,}".format(name, *size(module for module in product if package(module) == name))
    yield "{:28}{:8,}{:8,}{:12,}".format("the product", *size(product))
    yield "{:28}{:8,}{:8,}{:12,}".format("tests", *size(modules("tests")))
    mutants = [path.read_text() for path in sorted((ROOT / "tests" / "mutants").glob("*.toml"))]
    count = sum(len(tomllib.loads(text)["mutant"]) for text in mutants)
    yield f"{'mutants':28}{count:8,}{sum(text.count(chr(10)) for text in mutants):8,}"
    table = accepted()
    for name, work in PATHS.items():
        yield f"the path of {name:16}{table[work]['modules']:8.0f} modules, {table[work]['functions']:.0f} functions"
    if SECONDS.exists():
        yield from seconds_by_folder(json.loads(SECONDS.read_text()))


def seconds_by_folder(found: dict[str, float]) -> Iterator[str]:
    yield f"seconds of tests: {sum(found.values()):,.0f}"
    for folder, seconds in sorted(found.items(), key=lambda each: -each[1]):
        yield f"    {folder:32}{seconds:8,.0f}"


def record(reports: Iterable[pytest.TestReport]) -> None:
    """Write the seconds of a run of tests."""
    found: dict[str, float] = defaultdict(float)
    for each in reports:
        found["/".join(each.nodeid.partition("::")[0].split("/")[:-1])] += each.duration
    SECONDS.write_text(json.dumps({folder: round(seconds, 1) for folder, seconds in sorted(found.items())}))


if __name__ == "__main__":
    print("\n".join(report()))
