"""The functions, files and commands that pages link to exist."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "architecture.md"
TESTING = PAGE.with_name("testing.md")
FILE = re.compile(r"\]\((\.\./[\w/.-]+)\)")
COMMAND = re.compile(r"`make ([a-z-]+)")
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


def test_the_page_about_tests_names_files_and_commands_that_exist() -> None:
    text, root = TESTING.read_text(), TESTING.parents[1]
    files, commands = FILE.findall(text), set(COMMAND.findall(text))
    assert len(files) > 40
    assert [file for file in files if not (TESTING.parent / file).exists()] == []
    targets = set(re.findall(r"^([a-z-]+):", (root / "Makefile").read_text(), re.MULTILINE))
    assert commands - targets == set()
