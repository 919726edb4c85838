"""The pages of the documentation site, as its navigation lists them."""

from __future__ import annotations

import re

from source_tree import ROOT


def navigated(kind: str) -> list[str]:
    """The pages that the navigation of the site has under a kind."""
    navigation = (ROOT / "properdocs.yml").read_text().partition("\nnav:\n")[2].partition("\n\n")[0]
    section = navigation.partition(f"  - {kind.replace(' ', '-')}:\n")[2]
    return re.findall(r"- (\S+\.md)$", re.split(r"^  - ", section, flags=re.MULTILINE)[0], re.MULTILINE)
