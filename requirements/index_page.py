"""What package indexes show of a release: links to the project, and a README whose links work there.

Hatchling calls this for each build. `repository` in pyproject.toml is the address of the public repository, in the form
https://HOST/OWNER/NAME. While it is empty, the release names no address, and the README has the text of its links only.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

LINK = re.compile(r"\[([^\]]+)\]\((?!https?://|#)([^)\s]+)\)")
"""A link to a file of the repository, also one that is broken between lines."""


class IndexPage(MetadataHookInterface):
    """Adds `urls` and `readme` to the metadata of the project."""

    def update(self, metadata: dict[str, Any]) -> None:
        repository = self.config["repository"].rstrip("/")
        files = f"{repository}/blob/v{metadata['version']}" if repository else ""
        text = for_index(Path(self.root, "README.md").read_text(), files)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
        metadata["urls"] = urls(repository, files) if repository else {}


def for_index(text: str, files: str) -> str:
    """A page whose links to files of the repository lead to `files`, or without an address have their text only."""
    return LINK.sub(rf"[\1]({files}/\2)" if files else r"\1", text)


def urls(repository: str, files: str) -> dict[str, str]:
    return {
        "Repository": repository,
        "Documentation": f"{files}/docs/index.md",
        "Changelog": f"{files}/CHANGELOG.md",
        "Issues": f"{repository}/issues",
    }
