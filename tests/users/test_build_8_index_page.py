"""What a package index shows: a README whose links work there, and links to the project once it has an address."""

from __future__ import annotations

import re
import tomllib
from typing import Any

import pytest
from hatchling.metadata.core import ProjectMetadata
from hatchling.plugin.manager import PluginManager
from source_tree import ROOT

import txnbuffer

REPOSITORY = "https://example.org/owner/name"
FILES = f"{REPOSITORY}/blob/v{txnbuffer.__version__}"
LINK = re.compile(r"\]\(([^)]+)\)")


def metadata(repository: str) -> Any:
    """What hatchling puts into a wheel if the setting has this value."""
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())
    config["tool"]["hatch"]["metadata"]["hooks"]["custom"]["repository"] = repository
    return ProjectMetadata(str(ROOT), PluginManager(), config).core


def test_links_of_the_readme_lead_to_the_files_of_the_release() -> None:
    own = [link for link in LINK.findall((ROOT / "README.md").read_text()) if not link.startswith(("http", "#"))]
    assert len(own) > 10
    shown = metadata(f"{REPOSITORY}/")
    links = LINK.findall(shown.readme)
    assert [link for link in links if not link.startswith(("https://", "#"))] == []
    assert {f"{FILES}/{link}" for link in own} <= {*links}
    assert shown.readme_content_type == "text/markdown"


@pytest.mark.parametrize("name", ["Documentation", "Changelog"])
def test_addresses_of_the_project_are_files_of_the_release(name: str) -> None:
    address = metadata(REPOSITORY).urls[name]
    assert address.startswith(f"{FILES}/")
    assert (ROOT / address.removeprefix(f"{FILES}/")).is_file()


def test_without_an_address_the_readme_has_no_broken_links() -> None:
    shown = metadata("")
    assert shown.urls == {}
    assert [link for link in LINK.findall(shown.readme) if not link.startswith(("https://", "#"))] == []
    assert "The tutorial continues from here" in shown.readme
    assert "](docs/" not in shown.readme
