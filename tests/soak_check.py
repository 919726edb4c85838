"""Diaries of the writers of soak tests, and their comparison with the visible records.

A line of a diary: `B token id topic…` a transaction began, `R token records` its number of records on each topic,
`O token outcome` its outcome: COMMIT, ABORT, or `?` with the error if its writer doesn't know.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from broker_io.port import Broker
from txnbuffer.client.reading.reader import CommittedReader

TOPICS = ("soak-a", "soak-b")


@dataclass
class Comparison:
    begun: int = 0
    committed: int = 0
    aborted: int = 0
    unknown: int = 0
    records: int = 0
    lost: int = 0
    doubled: int = 0
    half: int = 0
    uncommitted_seen: int = 0
    live_differs: int = 0

    @property
    def good(self) -> bool:
        return not (self.lost or self.doubled or self.half or self.uncommitted_seen or self.live_differs)


class DiaryEntry(NamedTuple):
    """A transaction in a diary: `records` on each topic, None if not all were sent; `outcome` is `?` if unknown."""

    token: str
    txn: str
    topics: list[str]
    records: int | None
    outcome: str


def read_diaries(diaries: Iterable[Path]) -> Iterator[DiaryEntry]:
    for diary in diaries:
        begun: dict[str, tuple[str, list[str]]] = {}
        records: dict[str, int] = {}
        outcomes: dict[str, str] = {}
        for line in diary.read_text().splitlines():
            kind, token, *rest = line.split()
            if kind == "B":
                begun[token] = rest[0], rest[1:]
            elif kind == "R":
                records[token] = int(rest[0])
            else:
                outcomes[token] = rest[0]
        for token, (txn, topics) in begun.items():
            yield DiaryEntry(token, txn, topics, records.get(token), outcomes.get(token, "?"))


def compare(report: Comparison, transactions: Iterable[DiaryEntry], final: dict[str, Counter[bytes]]) -> None:
    """Compare diaries with the visible values, which are `token/part`."""
    visible: dict[str, dict[str, Counter[bytes]]] = {topic: defaultdict(Counter) for topic in TOPICS}
    for topic, found in final.items():
        report.records += sum(found.values())
        for value, count in found.items():
            report.doubled += count - 1
            visible[topic][value.decode().partition("/")[0]][value] = count
    for token, _, topics, records, outcome in transactions:
        report.begun += 1
        wanted = {b"%s/%d" % (token.encode(), part) for part in range(records or 0)}
        there = {topic: set(visible[topic].pop(token, ())) for topic in TOPICS}
        if outcome == "COMMIT":
            report.committed += 1
            report.lost += sum(len(wanted - there[topic]) for topic in topics)
        elif outcome == "ABORT":
            report.aborted += 1
            report.uncommitted_seen += sum(bool(found) for found in there.values())
        else:
            report.unknown += 1
            whole = all(there[topic] == wanted for topic in topics)
            report.half += any(there.values()) and not whole
    report.uncommitted_seen += sum(len(left) for left in visible.values())


def values(broker: Broker, topic: str, isolation: str = "read_committed") -> Iterator[bytes]:
    """The visible values of a topic."""
    with CommittedReader(broker, topic, isolation=isolation) as reader:
        while (batch := reader.read()) is not None:
            for record in batch:
                yield record.value or b""
