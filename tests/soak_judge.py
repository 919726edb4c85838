"""What soak tests share: diaries of what writers were told, and the comparison with what is visible.

A line of a diary: `B token id topic…` a transaction began, `R token records` it has so many on each topic,
`O token outcome` how it ended: COMMIT, ABORT, or `?` with the error where its writer doesn't know.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from broker_io.port import Broker
from txnbuffer.client.reader import CommittedReader

TOPICS = ("soak-a", "soak-b")


@dataclass
class Verdict:
    begun: int = 0
    committed: int = 0
    aborted: int = 0
    untold: int = 0
    records: int = 0
    lost: int = 0
    doubled: int = 0
    half: int = 0
    uncommitted_seen: int = 0
    live_differs: int = 0

    @property
    def good(self) -> bool:
        return not (self.lost or self.doubled or self.half or self.uncommitted_seen or self.live_differs)


class Told(NamedTuple):
    """`records` on each topic, None if they were not all sent; `outcome` is `?` if nobody was told."""

    token: str
    txn: str
    topics: list[str]
    records: int | None
    outcome: str


def told(diaries: Iterable[Path]) -> Iterator[Told]:
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
            yield Told(token, txn, topics, records.get(token), outcomes.get(token, "?"))


def judge(report: Verdict, transactions: Iterable[Told], final: dict[str, Counter[bytes]]) -> None:
    """Compare what writers were told with what is visible: a value is `token/part`."""
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
            report.untold += 1
            whole = all(there[topic] == wanted for topic in topics)
            report.half += any(there.values()) and not whole
    report.uncommitted_seen += sum(len(left) for left in visible.values())


def values(broker: Broker, topic: str) -> Iterator[bytes]:
    """What is visible."""
    with CommittedReader(broker, topic) as reader:
        while (batch := reader.read()) is not None:
            for record in batch:
                yield record.value or b""
