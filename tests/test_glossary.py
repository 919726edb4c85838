"""The glossary: its terms are in order, each says where there is more, and how-to pages link the first use of each."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from site_pages import navigated
from source_tree import ROOT

GLOSSARY = ROOT / "docs" / "glossary.md"
ORDINARY = {"backup", "branch", "checkpoint", "frame", "message", "segment", "session", "term", "unit", "visible"}
"""Terms whose words have another meaning on how-to pages, or the same one as everywhere else."""
ENTRY = re.compile(r"^## (.+)\n\n((?:.+\n)+)", re.MULTILINE)
TARGET = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
NOT_PROSE = re.compile(r"^( *)```[\s\S]*?^\1```$|^#.*$|^ {4,}[^ \-*\d].*$|`[^`]+`|<!--[\s\S]*?-->", re.MULTILINE)
LINK = re.compile(r"\[([^\]]+)\]\(([^)]+)\)")
OTHER_FORMS = {"fence": "fence[sd]?|fencing", "in sync": "in[_ ]sync", "branch": "branch(?:e[sd]|ing)?"}


def entries() -> dict[str, str]:
    """Each term of the glossary with what it says about the term."""
    return dict(ENTRY.findall(GLOSSARY.read_text()))


def pages_with_more(meaning: str) -> set[str]:
    return set(TARGET.findall(meaning))


def spelled(term: str) -> str:
    """A pattern of a term and its plural, also where a line ends between its words."""
    pattern = OTHER_FORMS.get(term) or (f"{term[:-1]}(?:y|ies)" if term.endswith("y") else f"{term}s?")
    return pattern.replace(" ", r"\s+")


def first_uses(text: str, terms: list[str]) -> dict[str, tuple[str, bool]]:
    """Of each term its first use in the prose of a page, and whether that is in the text of a link."""
    prose = NOT_PROSE.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), text)
    linked = [found.span(1) for found in LINK.finditer(prose)]
    targets = [found.span(2) for found in LINK.finditer(prose)]
    longest_first = sorted(terms, key=len, reverse=True)
    pattern = "|".join(f"(?P<t{at}>{spelled(term)})" for at, term in enumerate(longest_first))
    uses: dict[str, tuple[str, bool]] = {}
    for found in re.finditer(rf"(?<![\w`/.-])(?:{pattern})(?![\w`/-])", prose, re.IGNORECASE):
        if any(start <= found.start() < end for start, end in targets):
            continue
        term = longest_first[int(str(found.lastgroup)[1:])]
        line = text.count("\n", 0, found.start()) + 1
        uses.setdefault(term, (f"line {line}", any(start <= found.start() < end for start, end in linked)))
    return uses


def not_linked(name: str, text: str, terms: dict[str, str]) -> dict[str, str]:
    """The terms that a page uses first without a link; a page that the glossary names for a term needs none."""
    wanted = [term for term, meaning in terms.items() if name not in pages_with_more(meaning)]
    uses = first_uses(text, list(terms))
    return {term: uses[term][0] for term in wanted if term in uses and not uses[term][1] and term not in ORDINARY}


def test_terms_are_in_order_and_each_says_where_there_is_more() -> None:
    terms = entries()
    assert list(terms) == sorted(terms, key=str.lower)
    assert re.findall(r"^## (.+)$", GLOSSARY.read_text(), re.MULTILINE) == list(terms)
    for term, meaning in terms.items():
        text, see, more = " ".join(meaning.split()).rpartition(" See ")
        assert see, term
        assert LINK.match(more), term
        assert len(re.findall(r"[.:] [A-Z]", text)) <= 1, f"{term} takes more than two sentences"
    assert set(terms) >= ORDINARY


@pytest.mark.parametrize("page", [*navigated("Tutorial"), *navigated("How to")])
def test_a_how_to_page_links_each_term_where_it_uses_it_first(page: str) -> None:
    path = ROOT / page
    assert not_linked(Path(page).name, path.read_text(), entries()) == {}


def test_a_first_use_without_a_link_is_seen() -> None:
    terms = {"marker": "See [messages](log.md).", "epoch marker": "See [log](log.md).", "lease": "See [pair](pair.md)."}
    assert not_linked("a.md", "A\nmarker, a [marker](glossary.md#marker).", terms) == {"marker": "line 2"}
    assert not_linked("a.md", "An [epoch\nmarker](glossary.md#epoch-marker).", terms) == {}
    assert not_linked("a.md", "[Markers](glossary.md#marker): markers.", terms) == {}
    assert not_linked("a.md", "# The lease\n\n`lease`\n\n```text\nlease\n```\n\n    lease\n", terms) == {}
    assert not_linked("pair.md", "A lease.", terms) == {}
