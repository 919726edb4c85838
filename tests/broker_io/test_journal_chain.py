"""The chain of journal files: appends, notes, cuts and removed files against a list of records, and crashes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker_io.environment import Environment
from broker_io.errors import Damaged
from broker_io.filelog.log import journal_chain
from broker_io.filelog.log.journal import FILE_HEAD_BYTES, HEAD_BYTES
from broker_io.filelog.log.journal_chain import FoundJournal, Journal, find_journal
from broker_io.filelog.log.layout import Manifest, journal_path
from broker_io.filelog.log.records import LogRecord, Mark, make_record, shown_end
from broker_io.testing import Crash, SeededRandomness, SimulatedClock, SimulatedDisk, Unsynced

DIRECTORY = "/log"
FIRST = Mark(2, 10, 77)


def environment(disk: SimulatedDisk) -> Environment:
    return Environment(SimulatedClock(), disk, SeededRandomness(1))


def found_in(disk: SimulatedDisk, first: int = 3, last: int = 0, mark: Mark = FIRST) -> FoundJournal:
    return find_journal(disk, DIRECTORY, Manifest("", "", first, 1, (), last_journal=last, mark=mark))


class World:
    """A journal, and the records that it should have."""

    def __init__(self, disk: SimulatedDisk) -> None:
        self.disk = disk
        disk.make_directory(DIRECTORY)
        self.journal = Journal.create(environment(disk), DIRECTORY, 3, FIRST)
        disk.sync_directory(DIRECTORY)
        disk.sync_directory("/")
        self.first, self.base = 3, FIRST
        self.records: list[LogRecord] = []
        self.least = 0
        """How many records there are at least after the call under way."""
        self.commit = FIRST.lsn
        self.number = 0

    @property
    def end(self) -> Mark:
        return self.records[-1].mark if self.records else self.base

    def made(self, count: int, size: int = 5) -> list[LogRecord]:
        made, before = [], self.end
        for _ in range(count):
            self.number += 1
            content = b"%d" % self.number
            made.append(make_record(before, max(2, before.epoch), self.commit, content.ljust(size, b".")))
            before = made[-1].mark
        return made

    def write(self, count: int, size: int = 5) -> None:
        records = self.made(count, size)
        self.journal.write(records, self.end.lsn)
        self.records += records

    def note(self, back: int) -> None:
        self.commit = max(self.commit, self.end.lsn - back)
        self.journal.note_commit(self.commit)

    def roll(self, _: int) -> None:
        self.journal.roll()

    def drop(self, back: int) -> None:
        lsn, before = self.end.lsn - back, self.base.lsn
        self.journal.drop(lsn)
        self.first = self.journal.file_after(self.journal.base.lsn)
        self.base = self.journal.base
        assert self.base.lsn <= max(lsn, before)
        self.records = [record for record in self.records if record.lsn > self.base.lsn]

    def cut(self, back: int) -> None:
        lsn = max(self.base.lsn, self.end.lsn - back)
        self.journal.cut(lsn)
        self.records = [record for record in self.records if record.lsn <= lsn]
        self.commit = min(self.commit, lsn)

    def reopen(self, _: int) -> None:
        self.journal.close()
        found = found_in(self.disk, self.first, self.journal.number, self.base)
        assert found.records == self.records
        assert (found.end, found.torn) == (self.end, 0)
        assert shown_end(self.base, found.records, found.noted) <= max(self.commit, self.base.lsn)
        self.journal = Journal.open(environment(self.disk), DIRECTORY, found)

    def check(self) -> None:
        assert (self.journal.base, self.journal.end) == (self.base, self.end)
        for first in range(self.base.lsn, self.end.lsn + 1):
            for last in range(first, self.end.lsn + 1):
                assert (
                    list(self.journal.read(first, last)) == self.records[first - self.base.lsn : last - self.base.lsn]
                )


STEPS = st.tuples(st.sampled_from(["write", "write", "note", "roll", "drop", "cut", "reopen"]), st.integers(0, 4))


@given(st.lists(STEPS, max_size=25), st.sampled_from([1, 100, 1 << 20]))
def test_against_a_list_of_records(steps: list[tuple[str, int]], step_bytes: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(journal_chain, "STEP_BYTES", step_bytes)
        world = World(SimulatedDisk())
        for name, number in steps:
            getattr(world, name)(number + (name == "write"))
            world.check()
        world.reopen(0)
        world.check()


def test_notes_raise_what_is_shown_until_the_next_record_has_it() -> None:
    world = World(SimulatedDisk())
    world.write(2)
    world.note(1)
    assert found_in(world.disk).noted == 11
    world.note(0)
    assert found_in(world.disk).noted == 12
    world.write(1)
    found = found_in(world.disk)
    assert (found.noted, found.records[-1].commit) == (0, 12)


def test_a_cut_keeps_the_note_of_what_is_left() -> None:
    world = World(SimulatedDisk())
    world.write(3)
    world.note(1)
    world.cut(0)
    world.cut(1)
    assert found_in(world.disk).noted == 12
    world.cut(1)
    assert found_in(world.disk.crash(Unsynced.LOST)).noted == 11


def test_a_member_continues_after_a_torn_tail() -> None:
    """What is written over it is shorter, and nothing of it is left."""
    world = World(SimulatedDisk())
    world.write(1)
    lost = world.made(2, 400)
    world.disk.fail_at(1, 5, written=HEAD_BYTES + 300)
    with pytest.raises(OSError, match="5"):
        world.journal.write(lost, world.end.lsn)
    found = found_in(world.disk)
    assert (found.records, found.torn) == (world.records, HEAD_BYTES + 300)
    world.journal = Journal.open(environment(world.disk), DIRECTORY, found)
    assert world.disk.crash(Unsynced.LOST).files()[world.journal.path] == world.journal.size
    world.write(1)
    world.check()


def test_an_append_of_a_log_without_a_pair_is_committed() -> None:
    disk = SimulatedDisk()
    world = World(disk)
    world.journal = Journal.create(environment(disk), DIRECTORY, 3, Mark(0, 10, 77))
    world.journal.append([b"one", b"", b"two"])
    world.journal.append([b"three"])
    found = found_in(disk, mark=Mark(0, 10, 77))
    assert [(record.commit, record.content) for record in found.records] == [(11, b"onetwo"), (12, b"three")]
    assert found.end == world.journal.end


def test_an_unfinished_new_file_is_no_part_of_the_chain() -> None:
    for size in (0, 30, FILE_HEAD_BYTES):
        world = World(SimulatedDisk())
        world.roll(0)
        head = world.disk.content(world.journal.path)
        world = World(world.disk)
        world.write(1)
        world.disk.put(journal_path(DIRECTORY, 4), head[:size])
        assert [file.head.number for file in found_in(world.disk).files] == [3]


def test_missing_files_and_records_are_damage() -> None:
    world = World(SimulatedDisk())
    for _ in range(3):
        world.write(2)
        world.roll(0)
    world.write(1)
    paths = [journal_path(DIRECTORY, number) for number in (3, 4, 5, 6)]
    assert len(found_in(world.disk).files) == 4
    for path in paths:
        without = world.disk.copy()
        without.remove(path)
        with pytest.raises(Damaged, match="is missing"):
            found_in(without, last=6)
        shorter = world.disk.copy()
        shorter.put(path, world.disk.content(path)[:-1])
        if path == paths[-1]:
            assert found_in(shorter, last=6).end.lsn == world.end.lsn - 1
        else:
            with pytest.raises(Damaged, match=f"{path}, .*{path[:-1]}. does not follow"):
                found_in(shorter, last=6)
    with pytest.raises(Damaged, match="does not have"):
        found_in(world.disk, mark=FIRST._replace(chain=1))


def life(world: World) -> None:
    for name, number in LIFE:
        world.least = len(world.records) - (number if name == "cut" else 0)
        getattr(world, name)(number)


LIFE = [
    ("write", 2), ("note", 0), ("write", 3), ("roll", 0), ("write", 2), ("roll", 0), ("note", 0), ("write", 2),
    ("cut", 1), ("write", 1), ("cut", 4), ("write", 2), ("roll", 0), ("write", 1), ("cut", 2), ("write", 1),
]  # fmt: skip


def ended_at(operation: int, *, fails: bool) -> World | None:
    """The world of a life that ends at a disk operation by a crash or an error; None if it has fewer."""
    world = World(SimulatedDisk())
    already = len(world.disk.history)
    if fails:
        world.disk.fail_at(operation, 5, written=70)
    else:
        world.disk.stop_at(already + operation, written=70)
    try:
        life(world)
    except (Crash, OSError):
        return world
    return None


@pytest.mark.parametrize("fails", [False, True], ids=["crash", "error"])
def test_a_crash_or_an_error_at_any_operation(*, fails: bool) -> None:
    """Whatever was durable is found; what was being written may be; and what was found stays."""
    operation = 0
    while (world := ended_at(operation := operation + 1, fails=fails)) is not None:
        for disk in (world.disk.kill(), *[world.disk.crash(unsynced, operation) for unsynced in Unsynced]):
            disk.sync_directory(DIRECTORY)  # as the owner of a log does when it opens it
            found = found_in(disk)
            records, kept = found.records, min(len(found.records), len(world.records))
            assert records[:kept] == world.records[:kept]
            assert world.least <= len(records) <= len(world.records) + 3
            Journal.open(environment(disk), DIRECTORY, found).close()
            assert found_in(disk.crash(Unsynced.LOST)).records == records
    assert operation >= 40
