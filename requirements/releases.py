"""Show when each direct dependency had its last release, the longest ago first: `make releases`.

The index is the one that pip uses. A dependency without a release for 18 months is marked: look whether its project has
ended or is merely finished, and what its users went to.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tomllib
import urllib.request
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
OLD = timedelta(days=548)
FORM = "application/vnd.pypi.simple.v1+json"


def direct(document: dict[str, Any]) -> list[str]:
    """The names of all packages that pyproject.toml requires, for any purpose."""
    project, groups = document["project"], document["dependency-groups"].values()
    optional = project["optional-dependencies"].values()
    requirements = [*document["build-system"]["requires"], *project["dependencies"]]
    requirements += [each for part in (*optional, *groups) for each in part if isinstance(each, str)]
    return sorted({re.split(r"[^\w.-]", each)[0].lower() for each in requirements})


def last_release(files: Iterable[dict[str, Any]]) -> tuple[str, datetime]:
    """The name of the first file of the newest release that is neither a preview nor withdrawn, and its time."""
    final = [
        each for each in files if not each.get("yanked") and not re.search(r"-[\d.]+\.?(a|b|rc|dev)", each["filename"])
    ]
    newest = max(final, key=lambda each: each["upload-time"])
    return newest["filename"], datetime.fromisoformat(newest["upload-time"])


def asked(name: str, index: str) -> tuple[datetime, str]:
    """The time of the last release of a package, and a line about it."""
    request = urllib.request.Request(f"{index.rstrip('/')}/{name}/", headers={"Accept": FORM})
    with urllib.request.urlopen(request, timeout=60) as answer:
        file, time = last_release(json.load(answer)["files"])
    mark = " <- more than 18 months ago" if datetime.now(UTC) - time > OLD else ""
    return time, f"{time:%Y-%m-%d} {name} ({file}){mark}"


def main() -> None:
    from pip._internal.models.index import PyPI

    names = direct(tomllib.loads((ROOT / "pyproject.toml").read_text()))
    index = os.environ.get("PIP_INDEX_URL") or PyPI.simple_url
    with ThreadPoolExecutor(4) as pool:
        for _, line in sorted(pool.map(lambda name: asked(name, index), names)):
            print(line)


if __name__ == "__main__":
    sys.exit(main())
