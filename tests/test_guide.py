"""The snippets of some pages, run in order in an empty directory, print what the page shows."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from page_runner import PageRunner
from source_tree import ROOT

KINDS = {
    "guide.md": {"python", "text", "console"},
    "read.md": {"python", "text"},
    "security.md": {"python", "text", "console", "toml"},
}
"""The pages whose snippets are run, and the kinds of their blocks."""


@pytest.fixture
def runner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PageRunner]:
    """Runs pages with the package of this tree."""
    monkeypatch.chdir(tmp_path)
    binaries = tmp_path / "bin"
    binaries.mkdir()
    txnbuf = binaries / "txnbuf"
    txnbuf.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m txnbuffer "$@"\n')
    txnbuf.chmod(0o755)
    opened = PageRunner(tmp_path, {"PATH": f"{binaries}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)})
    yield opened
    opened.stop()


@pytest.mark.parametrize("page", KINDS)
def test_snippets_print_what_the_page_shows(runner: PageRunner, page: str) -> None:
    runner.run((ROOT / "docs" / page).read_text())
    assert runner.kinds == KINDS[page]


@pytest.mark.parametrize(
    "text",
    [
        "```python\nprint(1)\n```\n",
        "```python\nprint(1)\n```\n```text\n2\n```\n",
        "```python\nprint(1)\n```\nThen\n```text\n1\n```\n",
        "```python\n1\n```\n```text\n1\n```\n",
        "```python\nprint(1)\n```\n```text\n1\n1\n```\n",
        "```console\n$ false\n```\n",
        "```console\n$ echo 1\n2\n```\n",
        "```console\n$ false &\n...\n```\n",
    ],
)
def test_wrong_pages_are_seen(runner: PageRunner, text: str) -> None:
    with pytest.raises(AssertionError):
        runner.run(text)


@pytest.mark.parametrize("first", ["import os\nvalue = 1", "def value() -> int:\n    return 1"])
def test_blocks_are_programs_of_their_own(runner: PageRunner, first: str) -> None:
    with pytest.raises(NameError):
        runner.run(f"```python\n{first}\n```\n```python\nvalue\n```\n")


def test_a_block_can_be_left_to_another_test(runner: PageRunner) -> None:
    runner.run("<!-- tests/test_x.py runs this -->\n\n```python\nvalue\n```\n")
    assert runner.kinds == {"python"}


def test_names_in_the_guide_exist() -> None:
    import txnbuffer
    from txnbuffer import Client, Transaction

    pages = "guide.md", "handle-errors.md", "read.md", "reference/records.md"
    text = "\n".join((ROOT / "docs" / page).read_text() for page in pages)
    known = set(dir(txnbuffer)) | set(dir(Client)) | set(dir(Transaction))
    errors = set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE))
    assert len(errors) == 6
    assert errors <= known
    assert set(re.findall(r"`client\.(\w+)", text)) <= set(dir(Client))
