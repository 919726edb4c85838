"""The Python code that readers copy or write: blocks of the pages, the programs in examples/, and those of users."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import NamedTuple

from source_tree import ROOT

FENCE = re.compile(r"^( *)```python\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


class CodeBlock(NamedTuple):
    """A block of code: where it is, as `docs/guide.md:10`, and its text."""

    place: str
    source: str


def blocks_of(page: Path) -> list[CodeBlock]:
    """The fenced blocks of Python on a page, in order."""
    text, name = page.read_text(), page.relative_to(ROOT)
    return [
        CodeBlock(f"{name}:{text.count(chr(10), 0, found.start()) + 1}", textwrap.dedent(found[2]))
        for found in FENCE.finditer(text)
    ]


def published_code() -> list[CodeBlock]:
    """All blocks of all pages, all modules of examples/, and the programs that a new user would write."""
    programs = sorted([*(ROOT / "examples").rglob("*.py"), *(ROOT / "tests" / "users" / "programs").rglob("*.py")])
    whole = [CodeBlock(str(path.relative_to(ROOT)), path.read_text()) for path in programs]
    return [block for page in PAGES for block in blocks_of(page)] + whole
