"""Build 5: each page of the documentation is of one kind, and the snippet that copies a topic of Kafka works."""

from __future__ import annotations

import re
import sys
import types
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from reading import read_values
from site_pages import navigated
from source_tree import ROOT

from txnbuffer import connect

DOCS = ROOT / "docs"
KINDS = ("Tutorial", "How to", "Reference", "Explanation")


def listed(kind: str) -> list[str]:
    """The pages that docs/index.md lists under a kind, as paths in the repository."""
    section = (DOCS / "index.md").read_text().partition(f"\n## {kind}\n")[2].partition("\n## ")[0]
    links = re.findall(r"\]\(([^)#]+)\)", section)
    return [(DOCS / link).resolve().relative_to(ROOT).as_posix() for link in links]


@pytest.mark.parametrize("kind", KINDS)
def test_build_5_navigation_and_index_agree_on_the_kind_of_each_page(kind: str) -> None:
    assert len(navigated(kind)) > 0
    assert [page for page in navigated(kind) if page not in listed(kind)] == []
    other = {page for each in KINDS if each != kind for page in navigated(each)}
    assert [page for page in listed(kind) if page in other] == []


def test_build_5_each_page_is_of_one_kind() -> None:
    pages = {path.relative_to(ROOT).as_posix() for path in DOCS.rglob("*.md")} - {"docs/index.md"}
    kinds = Counter(page for kind in KINDS for page in navigated(kind))
    assert {page: kinds[page] for page in pages} == dict.fromkeys(pages, 1)


@dataclass(frozen=True)
class TopicPartition:
    topic: str
    partition: int
    offset: int


@dataclass(frozen=True)
class KafkaMessage:
    at: int
    text: bytes | None

    def error(self) -> None:
        return None

    def offset(self) -> int:
        return self.at

    def key(self) -> bytes:
        return b"key%d" % self.at

    def value(self) -> bytes | None:
        return self.text

    def timestamp(self) -> tuple[int, int]:
        return 1, 1000 + self.at


class Consumer:
    """A partition of Kafka: messages with gaps between their offsets, as markers leave them."""

    def __init__(self, *offsets: int) -> None:
        self.offsets = offsets
        self.position = 0

    def assign(self, partitions: list[TopicPartition]) -> None:
        self.position = partitions[0].offset

    def consume(self, count: int, timeout: float) -> list[KafkaMessage]:
        found = [offset for offset in self.offsets if offset >= self.position][: min(count, 2)]
        if found:
            self.position = found[-1] + 1
        return [KafkaMessage(offset, None if offset == 4 else b"%d" % offset) for offset in found]


def test_build_5_the_snippet_that_copies_a_topic_of_kafka(monkeypatch: pytest.MonkeyPatch) -> None:
    kafka: Any = types.ModuleType("confluent_kafka")
    kafka.Consumer, kafka.TopicPartition = Consumer, TopicPartition
    monkeypatch.setitem(sys.modules, "confluent_kafka", kafka)
    page = (DOCS / "migrate-from-kafka.md").read_text()
    (source,) = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(source, "migrate-from-kafka.md", "exec"), names)
    with connect("memory:") as client:
        names["copy"](Consumer(0, 1, 3, 4, 7), client, "orders", 0)
        names["copy"](Consumer(0, 1, 3, 4, 7, 8), client, "orders", 0)
        expected = [b"0", b"1", b"3", None, b"7", b"8"]
        assert read_values(client, "orders", len(expected)) == expected


def test_build_5_a_vulnerability_can_be_reported() -> None:
    text = Path(ROOT, "SECURITY.md").read_text()
    assert "## Supported releases" in text
    assert "Report a vulnerability" in text
