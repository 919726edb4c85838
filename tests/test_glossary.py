"""The glossary: its terms are in order, and each says where there is more."""

from __future__ import annotations

import re

from source_tree import ROOT

GLOSSARY = ROOT / "docs" / "glossary.md"
ENTRY = re.compile(r"^## (.+)\n\n((?:.+\n)+)", re.MULTILINE)
LINK = re.compile(r"\[([^\]]+)\]\(([^)]+)\)")


def entries() -> dict[str, str]:
    """Each term of the glossary with what it says about the term."""
    return dict(ENTRY.findall(GLOSSARY.read_text()))


def test_terms_are_in_order_and_each_says_where_there_is_more() -> None:
    terms = entries()
    assert list(terms) == sorted(terms, key=str.lower)
    assert re.findall(r"^## (.+)$", GLOSSARY.read_text(), re.MULTILINE) == list(terms)
    for term, meaning in terms.items():
        text, see, more = " ".join(meaning.split()).rpartition(" See ")
        assert see, term
        assert LINK.match(more), term
        assert len(re.findall(r"[.:] [A-Z]", text)) <= 1, f"{term} takes more than two sentences"
