"""Stores of a pair after a crash or an error at any operation of their disk."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest
from hypothesis import settings
from pair.pair_stores import DIRECTORY, Live, Member, pair

from broker_io.environment import read_file
from broker_io.errors import DiskFailed, DiskFull
from broker_io.filelog.log.layout import MANIFEST, Manifest, decode_manifest, join, segment_path
from broker_io.filelog.log.records import Kind, LogRecord, make_record
from broker_io.filelog.pair.copying import name_of
from broker_io.testing import Crash, SimulatedDisk, Unsynced

STRIDE = {"soak": 1, "mutants": 3}.get(settings.get_current_profile_name(), 7)


def live_a_life(live: Live) -> None:
    live.make("a", "b", "c")
    for number in range(12):
        live.append("abc"[number % 3], b"%d" % number * 400)
    live.roll("a")
    number = live.prepare("a")
    live.append("b", b"between")
    live.swap("a", number)
    live.roll("b")
    live.trim("b", 2)
    live.delete("c")
    live.append("a", b"x" * 9000)
    live.append("b", b"y" * 9000)


class Follow:
    """A backup takes records, applies them, makes checkpoints, drops its journal, and cuts a record of another
    primary."""

    def __init__(self) -> None:
        self.live, self.backup = pair(lanes=1)
        live_a_life(self.live)
        self.written = 0

    def run(self) -> None:
        backup, records = self.backup, self.live.records
        for start in range(0, len(records), 4):
            backup.follow(records[start : start + 4], apply=start % 8 == 0)
            self.written = backup.end.lsn
            backup.store.note_commit(self.written)
        backup.store.apply(self.written)
        backup.store.write([self.other()], self.written)
        backup.store.cut(self.written)
        backup.store.log.checkpoint()
        backup.store.drop_journal(backup.store.log.applied.lsn)
        backup.store.remove_files([name for name, _ in backup.events.replaced])

    def other(self) -> LogRecord:
        return make_record(self.backup.end, 9, self.written, b"of another primary", Kind.DATA)

    def check(self, found: Member) -> None:
        """What was written is there, and the rest can be taken."""
        assert not found.opened.partial
        assert found.opened.index.end.lsn >= self.written
        found.store.apply(found.opened.commit)
        found.store.cut(max(found.opened.commit, min(self.written, found.opened.index.end.lsn)))
        found.follow(self.live.records)
        assert found.state() == self.live.state()


class Receive:
    """A backup with a log of its own takes a copy."""

    def __init__(self) -> None:
        self.live, self.backup = pair(lanes=1)
        live_a_life(self.live)
        self.backup.follow(self.live.records[:9])
        self.before = self.backup.state()
        self.begun = self.done = False

    def run(self) -> None:
        self.begun = True
        self.backup.receive(self.live.store.begin_copy())
        self.done = True

    def check(self, found: Member) -> None:
        """It is what it was, or what its primary is, or partial; then another copy can be taken."""
        found.store.apply(found.opened.commit)
        assert found.opened.store == self.backup.opened.store
        if self.done:
            assert not found.opened.partial
        if not found.opened.partial:
            assert found.state() in (self.before, self.live.state())
        found.receive(self.live.store.begin_copy())
        assert found.state() == self.live.state()


class Replace:
    """A store is set aside; another one takes its place."""

    def __init__(self) -> None:
        self.live, self.backup = pair(lanes=1)
        live_a_life(self.live)
        self.backup.follow(self.live.records)
        self.backup.store.mark_partial(True)
        self.backup.store.log.checkpoint()
        self.before = files(self.backup.disk, DIRECTORY)
        self.new = b""

    def run(self) -> None:
        self.new = self.backup.store.replace()

    def check(self, found: Member) -> None:
        """It is what it was, or another one that is empty and partial; then all files of the former one are aside."""
        store = self.backup.opened.store
        if self.new:
            assert found.opened.store == self.new
        if found.opened.store == store:
            found.store.apply(found.opened.commit)
            assert found.state() == self.live.state()
        else:
            assert found.opened.partial
            assert found.state() == {}
            (aside,) = [name for name in found.disk.list(DIRECTORY) if name.startswith("aside-")]
            kept = files(found.disk, join(DIRECTORY, aside))
            assert kept[MANIFEST] == self.before[MANIFEST]
            manifest = decode_manifest(kept[MANIFEST], aside)
            assert manifest.pair.store == store
            for name in [f"journal-{manifest.journal}", *segments(manifest)]:
                assert kept[name] == self.before[name]
        found.receive(self.live.store.begin_copy())
        assert found.state() == self.live.state()


class Promote:
    """A backup becomes live by force, and then a backup again that takes records."""

    def __init__(self) -> None:
        self.live, backup = pair(lanes=1)
        live_a_life(self.live)
        backup.follow(self.live.records)
        disk = backup.disk.kill()
        backup.abandon()
        self.backup: Member = Live(disk, founder=False, lanes=1, seed=2)
        self.promoted: list[LogRecord] = []

    def run(self) -> None:
        new = self.backup
        assert isinstance(new, Live)
        new.open()
        new.epoch = 5
        new.begin(forced=True)
        self.promoted = [*new.records]
        new.append("a", b"after it")
        new.store.log.checkpoint()
        new.store.drop_journal(new.store.log.applied.lsn)

    def check(self, found: Member) -> None:
        """Once the epoch has begun it is known, and all topics continue in another history."""
        found.store.apply(found.opened.index.end.lsn)
        if self.promoted:
            assert [fork.epoch for fork in found.opened.forks] == [6]
            for entry, _ in found.state().values():
                assert entry.ledgers[-1].ledger >= 2**20


def segments(manifest: Manifest) -> list[str]:
    return [name_of(".", segment_path(".", topic, ledger)) for topic in manifest.topics for ledger in topic.ledgers]


def files(disk: SimulatedDisk, directory: str) -> dict[str, bytes]:
    """All files below a directory that a process sees, by name."""
    prefix = directory + "/"
    return {path.removeprefix(prefix): disk.content(path) for path in disk.files() if path.startswith(prefix)}


SCENARIOS: list[Callable[[], Follow | Receive | Replace | Promote]] = [Follow, Receive, Replace, Promote]


def operations(make: Callable[[], Follow | Receive | Replace | Promote]) -> int:
    """How many operations of the disk a scenario has."""
    scenario = make()
    before = len(scenario.backup.disk.history)
    scenario.run()
    count = len(scenario.backup.disk.history) - before
    scenario.backup.abandon()
    return count


def found_disks(disk: SimulatedDisk, seed: int) -> Iterator[SimulatedDisk]:
    yield disk.kill()
    yield disk.crash(Unsynced.LOST)
    yield disk.crash(Unsynced.KEPT)
    yield disk.crash(Unsynced.PREFIX, seed)
    yield disk.crash(Unsynced.SECTORS, seed)


def opened(scenario: Follow | Receive | Replace | Promote, disk: SimulatedDisk) -> Member:
    member = Member(disk, seed=77, lanes=2).open()
    member.events.peer = scenario.live.store.read_prepared
    return member


@pytest.mark.parametrize("make", SCENARIOS)
@pytest.mark.parametrize("shard", range(4))
def test_crash_at_any_operation(make: Callable[[], Follow | Receive | Replace | Promote], shard: int) -> None:
    for operation in range(1 + shard, operations(make) + 1, 4 * STRIDE):
        scenario = make()
        scenario.backup.disk.stop_at(operation)
        with pytest.raises(Crash):
            scenario.run()
        scenario.backup.abandon()
        for disk in found_disks(scenario.backup.disk, operation):
            found = opened(scenario, disk)
            scenario.check(found)
            found.abandon()
        scenario.live.abandon()


@pytest.mark.parametrize("make", SCENARIOS[:3])
@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_error_of_the_disk_at_any_operation(make: Callable[[], Follow | Receive | Replace], number: int) -> None:
    """It is one of the errors that stop the node, and what was durable is there at the next start."""
    for operation in range(1, operations(make) + 1, 4 * STRIDE):
        scenario = make()
        scenario.backup.disk.fail_at(operation, number)
        with suppress(DiskFailed, DiskFull):
            scenario.run()
        scenario.backup.abandon()
        found = opened(scenario, scenario.backup.disk.kill())
        scenario.check(found)
        found.abandon()
        scenario.live.abandon()


def test_files_can_be_read_where_they_were_set_aside() -> None:
    scenario = Replace()
    scenario.run()
    (aside,) = [name for name in scenario.backup.disk.list(DIRECTORY) if name.startswith("aside-")]
    with_manifest = scenario.backup.disk.open(join(DIRECTORY, aside, MANIFEST))
    assert decode_manifest(read_file(with_manifest), aside).topics


def test_error_while_files_are_replaced_leaves_a_store_that_can_be_opened() -> None:
    """A store that has failed writes nothing more, above all not the manifest of what is gone."""
    live, backup = pair(lanes=1)
    live.make("a")
    live.append("a", b"x")
    backup.follow(live.records)
    before = backup.disk.copy()
    count = len(backup.disk.history)
    backup.store.receive().close()
    for operation in range(1, len(backup.disk.history) - count + 1):
        failing = Member(before.copy(), seed=2).open()
        failing.store.apply(failing.opened.commit)
        failing.disk.fail_at(operation, errno.EIO)
        with pytest.raises(DiskFailed):
            failing.store.receive()
        failing.store.close()
        found = Member(failing.disk.copy(), seed=3).open()
        assert found.opened.store == backup.opened.store
        found.receive(live.store.begin_copy())
        assert found.state() == live.state()
        found.abandon()
