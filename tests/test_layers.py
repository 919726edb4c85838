"""The diagram and the table of the architecture page: what they show, and that they are up to date."""

from __future__ import annotations

import layers
from source_tree import PACKAGES, Module, modules


def test_architecture_page_is_up_to_date() -> None:
    page = layers.PAGE.read_text()
    assert layers.refreshed(page) == page, "run make docs"


def test_no_parts_import_each_other() -> None:
    source = modules(*PACKAGES)
    drawings = [layers.Layers(source), layers.Layers(source, split=False), layers.Layers(source, rooms=True)]
    rows = [row for each in drawings for row in each.rows()]
    assert [circle for row in rows for circle in row if len(circle) > 1] == []


SOURCE = [
    Module("low/__init__.py", '"""Below all. More of it."""'),
    Module("high/__init__.py", '"""On top."""\ndef f():\n    import high.a'),
    Module("high/a/__init__.py", "from high.b import one"),
    Module("high/a/inner.py", "import low"),
    Module("high/b.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from . import a\nimport high.c.deep"),
    Module("high/c/__init__.py", '"""Below b, in two\nlines\n\nMore of it."""'),
    Module("high/c/deep.py", '"""Deep."""\nimport os, low'),
]


def test_diagram_has_what_imports_above_what_is_imported() -> None:
    assert layers.diagram(SOURCE) == "\n".join([
        "```",
        "┌── high ───┐",
        "│   high    │",
        "│  a <-> b  │",
        "│     c     │",
        "└───────────┘",
        "┌─── low ───┐",
        "│    low    │",
        "└───────────┘",
        "```",
        "",
    ])  # fmt: skip


def test_table_has_what_each_part_imports() -> None:
    rows = layers.table(SOURCE).splitlines()[2:]
    assert rows == [
        "| `high` | On top | (a) |",
        "| `high.a` | | b, low |",
        "| `high.b` | | (a), c |",
        "| `high.c` | Below b, in two lines | low |",
        "| `low` | Below all | |",
    ]
