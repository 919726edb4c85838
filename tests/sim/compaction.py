"""Compaction: the service compacts all data topics of an embedded log while they are written, read and followed.

What a compaction may remove is computed before each one, by definition: of the committed records up to its last ledger
those whose key has a newer one there, and the deletions that may be purged. Readers may miss these, and nothing else.
In the end they are put back among the records that are left, so that the rules of all other seeds apply to everything
that was ever committed.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING
from unittest import mock

from sim.history import Shown
from sim.readers import AwayFollower, content
from sim.roles import Role

from broker_io.compaction import (
    CompactionPolicy,
    CompactionReport,
    CompactionRequest,
    CompactionState,
    RecordRetention,
)
from broker_io.filelog.log import FileBroker
from broker_io.position import Position

if TYPE_CHECKING:
    from sim.world import World

COMPACTED = "compacted topic"
PURGED = "purged deletions"
COMPATIBLE = ("reader", "late reader", "follower", "cursors", "rivals", "branches")
"""Roles whose rules say what a reader of a compacted topic may miss."""
POLICIES = (
    CompactionPolicy(0.01, 0, 500, 0),
    CompactionPolicy(0.3, 0, 1000, 0),
    CompactionPolicy(0.1, 500, 2000, 3_600_000),
)


def compacted(names: list[str], choose: random.Random) -> list[str]:
    """The roles of a seed with compaction, at least one of which reads."""
    kept = [name for name in names if name in COMPATIBLE]
    if not {*kept} & {"reader", "follower", "cursors"}:
        kept.append(choose.choice(("reader", "follower", "cursors")))
    return [*kept, "compaction"]


class Superseded:
    """By topic, the records that a compaction may have removed, by their positions."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._removable: dict[str, dict[Position, Shown]] = defaultdict(dict)
        self._purgeable: dict[str, set[Position]] = defaultdict(set)

    def may_miss(self, topic: str, record: Shown) -> bool:
        """Whether a reader need not show a record."""
        return record.position in self._removable[topic]

    def may_purge(self, topic: str, record: Shown) -> bool:
        """Whether a record is a deletion that may have been purged as the newest one of its key."""
        return record.position in self._purgeable[topic]

    def put_back(self, topic: str, left: list[Shown]) -> list[Shown]:
        """The records that are left in the end, and those that were removed, with their seqnos."""
        there = {record.position for record in left}
        removed = [record for position, record in self._removable[topic].items() if position not in there]
        every = sorted([*left, *removed], key=lambda record: record.position or Position(0, 0))
        numbered = any(record.seqno is not None for record in left)
        return [replace_seqno(record, number if numbered else None) for number, record in enumerate(every, 1)]

    def record(self, policy: CompactionPolicy) -> None:
        """Note what each compaction may remove, from now on; all topics have the policy."""
        compact, state = FileBroker.compact_records, FileBroker.compaction

        def compact_records(broker: FileBroker, topic: str, request: CompactionRequest) -> CompactionReport:
            self._note(broker, topic, request)
            report = compact(broker, topic, request)
            if report.purged and not topic.startswith("__"):
                self._world.count(PURGED)
            if report.emptied and not topic.startswith("__"):
                self._world.count(COMPACTED)
                self._world.log("compaction", f"{topic} lost {report.emptied} of {report.records} records")
            return report

        def with_policy(broker: FileBroker, topic: str) -> CompactionState:
            return state(broker, topic)._replace(policy=policy)

        self._world.enter(mock.patch.object(FileBroker, "compact_records", compact_records))
        self._world.enter(mock.patch.object(FileBroker, "compaction", with_policy))

    def _note(self, broker: FileBroker, topic: str, request: CompactionRequest) -> None:
        newest: dict[bytes, Shown] = {}
        purgeable: set[Position] = set()
        for record, deletion in _competing(broker, topic, request):
            if deletion:
                purgeable.add(record.position or Position(0, 0))
            if record.key in newest:
                self._remove(topic, newest[record.key])
            newest[record.key or b""] = record
        for record in newest.values():
            if record.position in purgeable:
                self._remove(topic, record)
                self._purgeable[topic].add(record.position)

    def _remove(self, topic: str, record: Shown) -> None:
        self._removable[topic].setdefault(record.position or Position(0, 0), record)


def replace_seqno(record: Shown, seqno: int | None) -> Shown:
    """A removed record gets its number; one that is left keeps its own, so that a wrong one is found."""
    return record if record.seqno is not None else record._replace(seqno=seqno)


def _competing(broker: FileBroker, topic: str, request: CompactionRequest) -> Iterator[tuple[Shown, bool]]:
    """The committed records with keys up to the last ledger of a compaction, and whether each may be purged."""
    with broker.reader(topic) as reader:
        while (placed := reader.read()) is not None and placed.positions.first.ledger <= request.upto:
            kinds = request.rules.retentions(placed).tolist()
            for kind, (position, published, message) in zip(kinds, placed, strict=True):
                if kind == RecordRetention.LATEST:
                    old = position.ledger <= request.purge_upto and published < request.purge_before_ms
                    record = Shown(None, message.key or b"", content(message.value, message.properties), position)
                    yield record, old and message.value is None


class Compaction(Role):
    """Policies on all topics, a service that looks at them often, and a follower that is away meanwhile."""

    def begin(self) -> None:
        scenario, choose = self.scenario, self.choose
        for service in scenario.services:
            compaction = replace(
                service.config.compaction,
                check_seconds=choose.choice((0.5, 1.0, 3.0)),
                bytes_per_second=choose.choice((0, 0, 20_000)),
                least_dead=choose.choice((0.0, 0.2, 0.5)),
            )
            service.config = replace(service.config, compaction=compaction)
        scenario.add(AwayFollower, "away-follower")
        self.superseded = Superseded(scenario.world)
        self.superseded.record(choose.choice(POLICIES))
        scenario.history.may_miss = self.superseded.may_miss
        scenario.history.may_purge = self.superseded.may_purge

    def put_back(self, topic: str, left: list[Shown]) -> list[Shown]:
        return self.superseded.put_back(topic, left)
