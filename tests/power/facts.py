"""What life.py knew at a power cut, and what the log must have after it.

A transaction is named by its label: `ROLE-START-NUMBER`, with which its values begin. Labels of a role come one after
another, unless it is in `CONCURRENT`.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

CONCURRENT = ("flight",)
COMPACTED = "table"
SOURCE, COPIES = "orders", "copies"

Sent = Mapping[str, list[str]]
"""The values of a transaction by topic, in order."""


class Visible(NamedTuple):
    key: str | None
    value: str


@dataclass(frozen=True)
class Found:
    """What the log has: the visible records of each topic, and the committed number of each name."""

    topics: Mapping[str, list[Visible]]
    numbers: Mapping[str, int]


@dataclass
class Facts:
    """`asked`: transactions whose commit was asked for; `answered`: those that were acknowledged.

    `deleted`: topics with the labels that a deletion has removed, or may have if the topic is in `deleting`.
    """

    asked: dict[str, Sent] = field(default_factory=dict)
    answered: set[str] = field(default_factory=set)
    named: dict[str, tuple[str, int]] = field(default_factory=dict)
    deleted: defaultdict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    deleting: set[str] = field(default_factory=set)
    copied: int = 0

    def learn(self, notes: Iterable[str]) -> None:
        for text in notes:
            fact = json.loads(text)
            getattr(self, f"_{fact.pop('fact')}")(**fact)

    def _asked(self, label: str, sent: Sent, name: str = "", number: int = 0) -> None:
        self.asked[label] = sent
        if name:
            self.named[label] = name, number

    def _answered(self, label: str) -> None:
        self.answered.add(label)

    def _deleting(self, topic: str) -> None:
        self.deleting.add(topic)
        self.deleted[topic] |= {label for label, sent in self.asked.items() if topic in sent}

    def _deleted(self, topic: str) -> None:
        self.deleting.discard(topic)

    def _copied(self, records: int) -> None:
        self.copied += records

    def after_cut(self, found: Found) -> None:
        """Learn from the log what a start did not know when its power was cut."""
        visible = {label_of(record) for records in found.topics.values() for record in records}
        self.asked = {label: sent for label, sent in self.asked.items() if label in visible | self.answered}
        self.answered = set(self.asked)
        for topic in self.deleting:
            if topic in found.topics:
                self.deleted[topic] -= {label_of(record) for record in found.topics[topic]}
        self.deleting = set()

    def violations(self, found: Found) -> Iterator[str]:
        """A sentence for each promise that what was found breaks."""
        by_label: defaultdict[str, defaultdict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
        for topic, records in found.topics.items():
            if topic != COPIES:
                for record in records:
                    by_label[label_of(record)][topic].append(record.value)
        for label, values in by_label.items():
            if label not in self.asked:
                yield f"{label} is visible in {sorted(values)}, and nobody has asked to commit it"
        for label, sent in self.asked.items():
            if label in by_label or label in self.answered:
                yield from self._of_transaction(label, sent, by_label[label], found)
        visible = {label for label in self.asked if label in by_label}
        yield from self._orders(found)
        yield from self._table(found, visible)
        yield from self._names(found, visible)
        yield from self._copies(found)

    def _of_transaction(self, label: str, sent: Sent, values: Mapping[str, list[str]], found: Found) -> Iterator[str]:
        """All records of a visible or acknowledged transaction are there, once and in order."""
        for topic, expected in sent.items():
            there = values.get(topic, [])
            if topic == COMPACTED:  # it may lack older ones
                expected = [value for value in expected if value in there]
            elif label in self.deleted[topic] and not there:
                continue
            elif label in self.deleted[topic] and topic not in self.deleting:
                yield f"{label} is visible in {topic}, which was deleted"
            if there != expected:
                state = "acknowledged" if label in self.answered else "visible elsewhere"
                yield f"{label} is {state}, and {topic} has {short(there)} of {short(expected)}"

    def _orders(self, found: Found) -> Iterator[str]:
        """The transactions of one sender have their order in each topic."""
        for topic, records in found.topics.items():
            last: dict[str, int] = {}
            places = {label: place for place, label in enumerate(self.asked)}
            for label in (label_of(record) for record in records if topic != COPIES):
                role = label.partition("-")[0]
                if role not in CONCURRENT and places.get(label, 0) < last.get(role, -1):
                    yield f"{label} is visible in {topic} after a later transaction"
                last[role] = places.get(label, 0)

    def _table(self, found: Found, visible: set[str]) -> Iterator[str]:
        """The compacted topic has the newest record of each key."""
        written = [value for label, sent in self.asked.items() if label in visible for value in sent.get(COMPACTED, [])]
        expected = {value.split("|")[1]: value for value in written}
        newest = {record.key: record.value for record in found.topics.get(COMPACTED, [])}
        if newest != expected:
            yield f"the newest of {COMPACTED} are {short(newest.values())} instead of {short(expected.values())}"

    def _names(self, found: Found, visible: set[str]) -> Iterator[str]:
        """The visible numbers of a name are all up to its committed number."""
        for name in {name for name, _ in self.named.values()} | set(found.numbers):
            numbers = sorted(number for label, (one, number) in self.named.items() if one == name and label in visible)
            if numbers != [*range(1, found.numbers.get(name, 0) + 1)]:
                yield f"the numbers {numbers} of {name} are visible, and {found.numbers.get(name, 0)} is committed"

    def _copies(self, found: Found) -> Iterator[str]:
        """The group has copied a prefix of its source, each record once."""
        source = [record.value for record in found.topics.get(SOURCE, [])]
        copies = [record.value for record in found.topics.get(COPIES, [])]
        if copies != source[: len(copies)] or len(copies) < self.copied:
            yield f"{COPIES} has {short(copies)}, not the first of {short(source)}; {self.copied} were acknowledged"


def label_of(record: Visible) -> str:
    return record.value.partition("|")[0]


def short(values: Iterable[str]) -> list[str]:
    return [value.rpartition("|")[0] for value in values]
