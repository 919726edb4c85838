"""Looks at the documentation site in Chromium: `make screenshots`.

Ten pages, wide and narrow, light and dark: writes a screenshot of each into DIRECTORY, to be looked at, and fails if
anything in one of them is wider than its place and neither scrolls nor wraps. Needs Chromium: its path, or `chromium`
on the PATH.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
from html import unescape
from pathlib import Path

from source_tree import ROOT

PAGES = (
    "index", "docs/guide", "docs/log-protocol", "docs/coordinator", "docs/snapshot-format", "docs/groups",
    "docs/replication", "docs/architecture", "docs/reference/clients", "docs/reference/metrics",
)  # fmt: skip
WIDTHS = (1400, 500)
SCHEMES = {"light": "default", "dark": "slate"}
SECONDS = 120
MEASURE = """<script>
addEventListener('load', () => {
  const OTHERS = '.md-clipboard, .headerlink, svg:not(.drawing)';
  const found = [], width = document.documentElement.clientWidth;
  const scrolls = element => {
    for (let one = element; one && one !== document.body; one = one.parentElement)
      if (['auto', 'scroll'].includes(getComputedStyle(one).overflowX)) return one;
  };
  for (const element of document.querySelectorAll('.md-content *, .md-header__title')) {
    const box = element.getBoundingClientRect(), style = getComputedStyle(element);
    if (!box.width || style.visibility === 'hidden' || element.closest(OTHERS)) continue;
    const kind = element.tagName + '.' + (element.getAttribute('class') || '');
    const name = kind + ': ' + element.textContent.trim().slice(0, 60);
    if (box.right > width + 1 && !scrolls(element)) found.push('beyond the page: ' + name);
    if (element.scrollWidth > element.clientWidth + 1 && style.overflowX === 'hidden' && element.clientWidth)
      found.push('cut: ' + name);
    const wraps = element.matches('pre > code') && !element.closest('.highlighttable');
    if (wraps && element.scrollWidth > element.clientWidth + 1)
      found.push('code scrolls: ' + name);
  }
  for (const drawing of document.querySelectorAll('svg.drawing')) {
    const texts = [...drawing.querySelectorAll('text')].map(one => [one.textContent, one.getBoundingClientRect()]);
    const paper = drawing.getBoundingClientRect();
    texts.forEach(([text, box], at) => {
      if (box.right > paper.right - 4 || box.left < paper.left + 4) found.push('text beyond its drawing: ' + text);
      if (box.height < 13) found.push('small text: ' + text);
      for (const [other, second] of texts.slice(at + 1))
        if (box.left < second.right - 1 && second.left < box.right - 1 &&
            box.top < second.bottom - 3 && second.top < box.bottom - 3)
          found.push('texts overlap: ' + text + ' / ' + other);
    });
  }
  document.title = 'MEASURED ' + JSON.stringify([...new Set(found)]);
});
</script>"""


def chromium_flags(profile: str, width: int, height: int) -> list[str]:
    """Flags of a headless browser whose window has these pixels."""
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={profile}"]
    return [*flags, f"--window-size={width},{height}", "--virtual-time-budget=3000"]


def prepared(page: Path, scheme: str) -> Path:
    """A copy of a page in one colour scheme that measures itself."""
    text = page.read_text()
    text = re.sub(r'(<body[^>]*data-md-color-scheme=")\w+', rf"\g<1>{SCHEMES[scheme]}", text)
    text = re.sub(r"<script>var palette=__md_get.*?</script>", "", text, flags=re.DOTALL)
    text = re.sub(r'<input class="md-option" data-md-color-media[^>]*>', "", text)
    copy = page.with_name(f"{page.stem}.{scheme}.shot.html")
    copy.write_text(text.replace("</body>", f"{MEASURE}</body>"))
    return copy


def look(chromium: str, page: Path, width: int, image: Path | None) -> list[str]:
    """What is cut on a page; writes a screenshot of it."""
    with tempfile.TemporaryDirectory() as profile:
        flags, url = chromium_flags(profile, width, 3000), page.as_uri()
        shown = subprocess.run(
            [chromium, *flags, "--dump-dom", url], capture_output=True, text=True, timeout=SECONDS, check=True
        ).stdout
        if image is not None:
            command = [chromium, *flags, f"--screenshot={image}", url]
            subprocess.run(command, capture_output=True, timeout=SECONDS, check=True)
    measured = re.search(r"<title>MEASURED (.*?)</title>", shown, re.DOTALL)
    assert measured is not None, f"{page} was not measured"
    found: list[str] = json.loads(unescape(measured[1]))
    return found


def main(chromium: str, directory: Path, names: list[str]) -> int:
    directory.mkdir(parents=True, exist_ok=True)
    problems = 0
    with tempfile.TemporaryDirectory() as site:
        command = [sys.executable, "-m", "properdocs", "build", "--strict", "--quiet", "--site-dir", site]
        subprocess.run(command, cwd=ROOT, check=True)
        for name in names or PAGES:
            for scheme in SCHEMES:
                page = prepared(Path(site) / f"{name}.html", scheme)
                for width in WIDTHS:
                    image = directory / f"{name.replace('/', '-')}.{width}.{scheme}.png"
                    for problem in look(chromium, page, width, image):
                        print(f"{name} at {width}, {scheme}: {problem}")
                        problems += 1
    print(f"{len(names or PAGES) * len(WIDTHS) * len(SCHEMES)} screenshots in {directory}; {problems} problems")
    return problems


if __name__ == "__main__":
    found = (sys.argv[1] if len(sys.argv) > 1 else "") or shutil.which("chromium") or ""
    if not found:
        sys.exit("no Chromium: give its path, CHROMIUM=…")
    sys.exit(main(found, Path(sys.argv[2] if len(sys.argv) > 2 else "screenshots"), sys.argv[3:]) > 0)
