"""The functions that the architecture page links to exist in the files that it names."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "architecture.md"
FUNCTION = re.compile(r"\[`([\w.]+)`\]\((\.\./[\w/]+\.py)\)")


def names(body: list[ast.stmt], prefix: str = "") -> Iterator[str]:
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield from names(node.body, f"{node.name}.")
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield prefix + node.name


def test_functions_that_the_architecture_page_links_to_exist() -> None:
    linked = FUNCTION.findall(PAGE.read_text())
    assert len(linked) > 15
    for name, path in linked:
        known = set(names(ast.parse((PAGE.parent / path).read_text()).body))
        assert name in known or any(one.endswith(f".{name}") for one in known), f"{path} has no {name}"
