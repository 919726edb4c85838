"""The documentation site: it builds, its links work, and it loads nothing from the network."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from source_tree import ROOT

import txnbuffer

CSS_LOADS = re.compile(r"""(?:url\(|@import\s+)["']?((?:https?:)?//[^"')]+)""")


class Page(HTMLParser):
    """An HTML page of the site: the ids in it, the links of its text, and what a browser loads with it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if value is not None and name == "id":
                self.ids.add(value)
            elif value is not None and name in ("href", "src"):
                (self.links if tag == "a" else self.loads).append(value)


def pages(site: Path) -> dict[Path, Page]:
    return {path: Page(path.read_text()) for path in site.rglob("*.html")}


def problems(site: Path) -> list[str]:
    """Return what is wrong with the links and the loads of a built site."""
    found, read = [], pages(site)
    for path, page in read.items():
        for link in [*page.links, *page.loads]:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                found += [f"{path} loads {link}"] if link in page.loads and parts.scheme != "data" else []
                continue
            base = site if parts.path.startswith("/") else path.parent
            target = (base / unquote(parts.path).lstrip("/")).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            if not target.is_file():
                found.append(f"{path}: nothing is at {link}")
            elif parts.fragment and target in read and unquote(parts.fragment) not in read[target].ids:
                found.append(f"{path}: no id for {link}")
    for path in site.rglob("*.css"):
        found += [f"{path} loads {link}" for link in CSS_LOADS.findall(path.read_text())]
    return found


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        ({"a.html": '<a href="b.html">b</a>'}, "nothing is at b.html"),
        ({"x/a.html": '<a href="b.html">b</a>', "b.html": ""}, "nothing is at b.html"),
        ({"a.html": '<a href="#there">b</a> there'}, "no id for #there"),
        ({"a.html": '<a href="b.html#there">b</a>', "b.html": '<p id="here">'}, "no id for b.html#there"),
        ({"a.html": '<img src="b.svg">'}, "nothing is at b.svg"),
        ({"a.html": '<script src="https://example.org/a.js"></script>'}, "loads https://example.org/a.js"),
        ({"a.html": '<link rel="stylesheet" href="//example.org/a.css">'}, "loads //example.org/a.css"),
        ({"a.css": "@import 'https://example.org/b.css'"}, "loads https://example.org/b.css"),
        ({"a.css": "p { src: url(//example.org/font) }"}, "loads //example.org/font"),
    ],
)
def test_problem_of_a_site_is_seen(files: dict[str, str], problem: str, tmp_path: Path) -> None:
    write(tmp_path, files)
    (found,) = problems(tmp_path)
    assert problem in found


def test_site_without_problems(tmp_path: Path) -> None:
    links = ["b.html", "b.html#here", "#top", "x/", "x", "/b.html#here", "https://example.org/not-loaded", "b.html?q=1"]
    text = "".join(f'<a href="{link}">link</a>' for link in links) + '<p id="top"><img src="data:image/png;base64,">'
    write(
        tmp_path,
        {"a.html": text, "b.html": '<p id="here">', "x/index.html": '<a href="../b.html">b</a>', "a.css": "p {}"},
    )
    assert problems(tmp_path) == []


def write(directory: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_text(text)


def test_site_builds_and_its_links_work(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "properdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert problems(tmp_path) == []
    assert [*tmp_path.rglob("__pycache__")] == []
    guide = (tmp_path / "docs" / "guide.html").read_text()
    assert f"txnbuffer {txnbuffer.__version__}" in guide
    assert '<svg xmlns="http://www.w3.org/2000/svg" class="drawing"' in guide
    architecture = (tmp_path / "docs" / "architecture.html").read_text()
    assert architecture.count('<div class="highlight characters" style="--columns: ') == 1
    ids = {each for page in pages(tmp_path).values() for each in page.ids}
    assert [name for name in txnbuffer.__all__ if f"txnbuffer.{name}" not in ids] == [], "not in docs/reference"
    searched = (tmp_path / "search" / "search_index.js").read_text()
    assert "docs/guide.html" in searched
    assert "broker_io/block.html" not in searched
