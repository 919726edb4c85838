"""The drawings of the documentation are what their script draws from a run of this tree."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from source_tree import ROOT

from txnbuffer.cli.svg import SIZE, WIDTH

PICTURES = sorted((ROOT / "docs" / "pictures").glob("*.svg"))
SVG = "{http://www.w3.org/2000/svg}"
SMALLEST = 12
"""Pixels of the text on a page of 500, whose margins take 32."""


@pytest.mark.parametrize("picture", PICTURES, ids=lambda path: path.stem)
def test_drawing_is_what_a_run_draws_now(picture: Path, tmp_path: Path) -> None:
    command = [sys.executable, str(picture.parent / "draw.py"), str(tmp_path), picture.stem]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    drawn = (tmp_path / picture.name).read_text()
    assert drawn == picture.read_text(), f"run docs/pictures/draw.py docs/pictures {picture.stem}"


def test_each_drawing_is_on_a_page() -> None:
    pages = "".join(path.read_text() for path in (ROOT / "docs").glob("*.md"))
    assert len(PICTURES) == 6
    assert [path.name for path in PICTURES if f"](pictures/{path.name})" not in pages] == []


def test_drawings_are_readable() -> None:
    assert SIZE * (500 - 32) / WIDTH >= SMALLEST
    for picture in PICTURES:
        root = ElementTree.parse(picture).getroot()
        title, description = root.find(f"{SVG}title"), root.find(f"{SVG}desc")
        assert title is not None
        assert description is not None
        assert root.attrib["aria-labelledby"] == f"{title.attrib['id']} {description.attrib['id']}"
        style = root.findtext(f"{SVG}style") or ""
        assert "prefers-color-scheme:dark" in style
        assert "[data-md-color-scheme=slate]" in style
        places = [(float(text.attrib["x"]), float(text.attrib["y"])) for text in root.iter(f"{SVG}text")]
        height = float(root.attrib["viewBox"].split()[3])
        assert all(0 < x < WIDTH and 0 < y < height for x, y in places)
