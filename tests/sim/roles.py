"""Roles of a simulated world: applications that belong together, and what must hold of them in the end.

A seed chooses a few roles besides its writers, so that all of them meet all faults over many seeds.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

from sim.branch_apps import BranchDriver, BranchPlan, BranchWriter
from sim.copy_apps import RELAYED, LedgerApp, RelayApp, TableApp, files_of_processes
from sim.group_apps import REJECTS, RESULTS, GroupPlan, Member, Rival
from sim.history import Shown
from sim.local_apps import LocalLog
from sim.readers import CursorFollower, Follower, Joiner, LateReader, Reader
from sim.rules_roles import branched, each_once, fenced, processed, relayed, sliced, stored, stretched
from sim.task_apps import TaskFollower, TaskReader, TaskWriter

if TYPE_CHECKING:
    from sim.scenario import Scenario


def creating(topic: str) -> bytes:
    """The value of the record with which an archive creates a topic."""
    return b"archive.%s" % topic.encode()


class Role:
    """A role. `targets`: topics that only its own rules are about, not those of transactions."""

    targets: tuple[str, ...] = ()
    damaged: tuple[str, ...] = ()
    """Topics that `verify` may find damaged."""

    def __init__(self, scenario: Scenario, choose: random.Random) -> None:
        self.scenario = scenario
        self.choose = choose
        self.begin()

    def begin(self) -> None:
        """Add the applications."""
        raise NotImplementedError

    def records(self, topic: str) -> list[Shown]:
        """The committed records that are there in the end."""
        return self.scenario.final.get(topic, [])

    def put_back(self, topic: str, left: list[Shown]) -> list[Shown]:
        """All committed records of a topic, also those that are not there any more in the end."""
        return left

    def prepare(self) -> None:
        """Do what has to be done before applications start and faults happen."""

    def finish(self) -> None:
        """Do what has to be done once all faults have ended, before everything is read."""

    def missing(self) -> Iterator[str]:
        """What it has not done yet; in the end nothing."""
        return iter(())

    def wrong(self) -> Iterator[str]:
        """What it did wrong, once nothing is missing."""
        return iter(())


class Readers(Role):
    """A reader of all topics."""

    def begin(self) -> None:
        self.scenario.add(Reader, "reader")


class LateReaders(Role):
    """A reader that starts at the end or in the middle."""

    def begin(self) -> None:
        self.app = self.scenario.add(LateReader, "late-reader")

    def wrong(self) -> Iterator[str]:
        history = self.scenario.history

        def sent(record: Shown) -> float:
            return min((attempt.first_sent for attempt in history.writers(record.value)), default=0.0)

        for part in self.app.slices:
            yield from sliced(part, self.records(part.topic), sent, partial(history.may_miss, part.topic))


class Followers(Role):
    """A follower of change streams from their beginning, and sometimes one that starts at its tokens."""

    def begin(self) -> None:
        follower = self.scenario.add(Follower, "follower")
        self.joiner = self.scenario.add(Joiner, "joiner", follower) if self.choose.random() < 0.6 else None

    def wrong(self) -> Iterator[str]:
        for stretch in [] if self.joiner is None else self.joiner.stretches:
            may_purge = partial(self.scenario.history.may_purge, stretch.topic)
            yield from stretched(stretch, self.records(stretch.topic), may_purge)


class Cursors(Role):
    """A follower with durable cursors."""

    def begin(self) -> None:
        self.scenario.add(CursorFollower, "cursor-follower")


class Group(Role):
    """The members of a consumer group, which may fail, leave and join."""

    targets = (REJECTS,)

    def begin(self) -> None:
        choose, scenario = self.choose, self.scenario
        scenario.setting.topics = (*scenario.setting.topics, RESULTS)
        on_error = choose.choice(("stop", "stop", "skip", "dead letter"))
        fails = choose.choice((0.0, 0.02)) if on_error == "stop" else 0.0  # a transaction may hold 50 records
        self.plan = GroupPlan(scenario.topics, on_error, fails, choose.random() < 0.3, choose.random() < 0.4)
        for number in range(choose.choice((1, 2, 2, 3))):
            scenario.add(Member, f"member{number}", self.plan)

    def _kind(self, value: bytes) -> str:
        if not self.plan.poisonous(value):
            return "result"
        return "reject" if self.plan.on_error == "dead letter" else "skip"

    def missing(self) -> Iterator[str]:
        kinds = [self._kind(record.value) for records in self._sources().values() for record in records]
        for kind, topic in (("result", RESULTS), ("reject", REJECTS)):
            if len(self._made(topic)) < kinds.count(kind):
                yield f"{topic} has {len(self._made(topic))} of {kinds.count(kind)} records"

    def wrong(self) -> Iterator[str]:
        results, rejects = self._made(RESULTS), self._made(REJECTS)
        yield from processed(self._sources(), results, rejects, self.scenario.history.source, self._kind)

    def _made(self, topic: str) -> list[Shown]:
        """What the group wrote to a topic: all but the record with which an archive creates it."""
        return [record for record in self.records(topic) if record.value != creating(topic)]

    def _sources(self) -> dict[str, list[Shown]]:
        """What the group has to process: all but what retention had dropped before it committed a first position."""
        history, now = self.scenario.history, self.scenario.world.now
        made = {
            history.source(record.value) or record.value for topic in (RESULTS, REJECTS) for record in self._made(topic)
        }
        found = {}
        for topic in self.scenario.logs:
            records = self.records(topic)
            begin = next((at for at, record in enumerate(records) if record.value in made), 0)
            found[topic] = [
                record for at, record in enumerate(records) if at >= begin or not history.dropped(topic, record, now)
            ]
        return found


class Relays(Role):
    """A relay of a topic, and sometimes a second one that fences it now and then."""

    targets = (RELAYED,)

    def begin(self) -> None:
        self.topic = self.choose.choice(self.scenario.logs)
        self.releases = self.scenario.on_cluster and self.choose.random() < 0.3
        options = {"cursor": self.choose.random() < 0.5, "release": self.releases}
        self.scenario.add(RelayApp, "relay", self.topic, visits=False, **options)
        if self.choose.random() < 0.4:
            self.scenario.add(RelayApp, "visitor", self.topic, visits=True, **options)

    def missing(self) -> Iterator[str]:
        found, wanted = self.records(RELAYED), self.records(self.topic)
        if found[-1:] and self.releases and found[-1].value == wanted[-1].value:
            return
        if len(found) < len(wanted):
            yield f"{RELAYED} has {len(found)} of {len(wanted)} records"

    def wrong(self) -> Iterator[str]:
        yield from relayed(self.records(self.topic), self.records(RELAYED), trimmed=self.releases)


class Sinks(Role):
    """A sink of one topic that keeps all changes, or tables of all topics in a SQLite file."""

    def begin(self) -> None:
        self.ledger: LedgerApp | None = None
        self.tables: TableApp | None = None
        scenario = self.scenario
        if self.choose.random() < 0.5:
            self.ledger = scenario.add(LedgerApp, "ledger", self.choose.choice(scenario.logs))
        else:
            directory = scenario.world.enter(files_of_processes(scenario.world))
            self.tables = scenario.add(TableApp, "tables", scenario.logs, directory / "tables.db")

    def missing(self) -> Iterator[str]:
        rows = [self.ledger.ledger.rows] if self.ledger else self.tables.tables() if self.tables else []
        topics = (self.ledger.ledger.topic,) if self.ledger else self.scenario.logs
        seqnos = {row.topic: row.seqno for row in rows if row.complete}
        for topic in topics:
            if seqnos.get(topic, 0) < len(self.records(topic)):
                yield f"the sink of {topic} has stored {seqnos.get(topic, 0)} of {len(self.records(topic))}"

    def wrong(self) -> Iterator[str]:
        if self.ledger is not None:
            ledger = self.ledger.ledger
            yield from each_once(ledger.name, ledger.changes, self.records(ledger.topic))
            yield from stored(ledger.rows, self.records(ledger.topic))
        elif self.tables is not None:
            for rows in (*self.tables.seen, *self.tables.tables()):
                yield from stored(rows, self.records(rows.topic))


class Rivals(Role):
    """Processes with the same producer name, which fence each other."""

    def begin(self) -> None:
        setting = self.scenario.writer_setting(self.scenario.topics)
        self.apps = [self.scenario.add(Rival, f"rival{number}", 8, setting=setting) for number in range(2)]

    def wrong(self) -> Iterator[str]:
        attempts = [attempt for app in self.apps for attempt in app.attempts]
        topics = {topic: self.records(topic) for topic in self.scenario.logs}
        yield from fenced(attempts, topics, self.scenario.committed_numbers[Rival.NAME])


class Branches(Role):
    """Processes that write the branches of one transaction after another, and one that commits them."""

    def begin(self) -> None:
        self.plan = BranchPlan(numbers=5)
        setting = self.scenario.writer_setting(self.scenario.topics)
        self.scenario.add(BranchDriver, "driver", self.plan, setting=setting)
        for number in range(2):
            self.scenario.add(BranchWriter, f"branch{number}", self.plan, setting=setting)

    def wrong(self) -> Iterator[str]:
        topics = {topic: self.records(topic) for topic in self.scenario.logs}
        yield from branched(self.plan.commits, self.plan.number - 1, topics)


class Tasks(Role):
    """Tasks that share what one client has."""

    def begin(self) -> None:
        self.scenario.add(TaskWriter, "tasks", 8, setting=self.scenario.writer_setting(self.scenario.topics))
        self.scenario.add(TaskReader, "shared")
        self.scenario.add(TaskFollower, "shared-stream")


class LocalLogs(Role):
    """A process with an embedded log of its own."""

    def begin(self) -> None:
        self.scenario.add(LocalLog, "local")


ROLES: dict[str, tuple[type[Role], int]] = {
    "reader": (Readers, 4),
    "late reader": (LateReaders, 2),
    "follower": (Followers, 3),
    "cursors": (Cursors, 2),
    "group": (Group, 4),
    "relay": (Relays, 2),
    "sink": (Sinks, 2),
    "rivals": (Rivals, 2),
    "branches": (Branches, 2),
    "tasks": (Tasks, 2),
    "local log": (LocalLogs, 1),
}
"""Roles, with the weights by which a seed chooses some of them."""


def choose_roles(choose: random.Random) -> list[str]:
    """The roles of a seed: two or three different ones."""
    names, count = [*ROLES], choose.choice((2, 3, 3))
    chosen: list[str] = []
    while len(chosen) < count:
        (name,) = choose.choices(names, [ROLES[name][1] for name in names])
        names.remove(name)
        chosen.append(name)
    return chosen
