"""A log without an owner, read by others: all acknowledged messages, or an error."""

from __future__ import annotations

import errno
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from file_logs import DIRECTORY, World, append, messages, numbered
from log_history import Life, check_answers, content_of, live, open_log

from broker_io.errors import Damaged
from broker_io.filelog.log import FileBroker
from broker_io.position import LATEST, Position
from broker_io.system import SystemDisk
from broker_io.testing import SimulatedDisk, Unsynced

SEGMENT = f"{DIRECTORY}/topics/1/1-0.log"
JOURNAL = f"{DIRECTORY}/journal-1"


def offline_journal(make: Callable[[SimulatedDisk], SimulatedDisk] = SimulatedDisk.kill) -> World:
    """A log without an owner, with ten messages that are in no checkpoint."""
    world = World()
    owner = world.own()
    owner.create_topic("t")
    for number in range(5):
        append(owner, "t", numbered(2, 2 * number))
    return World(make(world.disk))


def damages(world: World) -> list[bytes]:
    """The possible contents of the segment."""
    whole = world.disk.content(SEGMENT)
    choose = random.Random(5)
    flipped = [bytearray(whole) for _ in range(40)]
    for data in flipped:
        data[choose.randrange(len(data))] ^= 1 << choose.randrange(8)
    cut = [whole[:size] for size in range(0, len(whole), 37)]
    zeros = [data + bytes(len(whole) - len(data)) for data in cut]
    return [*map(bytes, flipped), *cut, *zeros, whole]


def test_journal_is_read_for_any_state_of_the_segment() -> None:
    world = offline_journal()
    for data in damages(world):
        world.disk.put(SEGMENT, data)
        before = len(world.disk.history)
        with world.follow() as follower:
            assert messages(follower, "t") == numbered(10)
            assert follower.last_position("t") == (1, 9, -1)
            assert follower.first_position("t") == (1, 0, -1)
            assert follower.position_at("t", 0) == (1, 0, -1)
            assert [ledger.entries for ledger in follower.ledgers("t")] == [10]
            with follower.reader("t", Position(1, 7)) as reader:
                assert [row.message for row in reader.read() or ()] == numbered(3, 7)
            with follower.reader("t", LATEST) as reader:
                assert reader.read() is None
        assert len(world.disk.history) == before
        assert world.clock.monotonic() == 0.0, "no read had to wait"


@pytest.mark.parametrize("tail", [b"x", bytes(30), b"TXBK" + bytes(100), b"rubbish" * 99])
def test_unexplained_bytes_are_damage(tail: bytes) -> None:
    world = offline_journal()
    world.disk.put(SEGMENT, world.disk.content(SEGMENT) + tail)
    with world.follow() as follower, follower.reader("t") as reader:
        assert [row.message for row in reader.read() or ()] == numbered(10)
        for question in (reader.read, lambda: follower.last_position("t")):
            with pytest.raises(Damaged, match=r"1-0\.log, offset \d+: .*open it for writing once"):
                question()
    with world.own() as owner:
        assert len(owner.report) == 1
        assert messages(owner, "t") == numbered(10)


def test_a_journal_that_is_damaged_or_missing_is_named() -> None:
    for damage in (lambda disk: disk.flip(JOURNAL, 8 * 60), lambda disk: disk.remove(JOURNAL)):
        world = offline_journal()
        damage(world.disk)
        with world.follow() as follower:
            for question in (lambda f=follower: messages(f, "t"), lambda f=follower: f.last_position("t")):
                with pytest.raises(Damaged, match="journal-1"):
                    question()


@pytest.mark.parametrize("unsynced", Unsynced)
def test_reader_after_a_power_loss_sees_what_the_next_owner_sees(unsynced: Unsynced) -> None:
    life = Life(SimulatedDisk())
    live(life)
    for seed in range(5):
        disk = life.disk.copy().crash(unsynced, seed)
        with open_log(disk, read_only=True) as follower:
            found = content_of(follower)
            for topic, content in found.items():
                check_answers(follower, topic, content)
        assert not disk.history
        with open_log(disk) as owner:
            assert content_of(owner) == found


def let_go(owner: FileBroker) -> None:
    """Release the lock, as after the end of the owner."""
    owner._log.lock.close()


def test_reader_continues_from_a_dead_owner_to_the_next() -> None:
    world = World()
    first = world.own()
    first.create_topic("t")
    append(first, "t", numbered(4))
    with world.follow() as follower, follower.reader("t") as reader, follower.reader("t") as late:
        assert [row.message for row in reader.read() or ()] == numbered(4)
        append(first, "t", numbered(3, 4))
        whole = world.disk.content(SEGMENT)
        let_go(first)
        world.disk.put(SEGMENT, whole[:100])
        assert [row.message for row in reader.read() or ()] == numbered(3, 4)
        assert reader.read() is None
        with world.own() as second:
            assert world.disk.content(SEGMENT) == whole
            append(second, "t", numbered(2, 7))
            assert [row.message for row in reader.read() or ()] == numbered(2, 7)
            assert [row.message for row in late.read() or ()] == numbered(9)
            assert reader.read() is None
            assert late.read() is None
            assert follower.last_position("t") == (1, 8, -1)
        let_go(third := world.own())
        append(third, "t", numbered(1, 9))
        world.disk.put(SEGMENT, world.disk.content(SEGMENT)[:-9])
        assert [row.message for row in reader.read() or ()] == numbered(1, 9)
        assert follower.last_position("t") == (1, 9, -1)


def test_presence_of_an_owner_on_a_real_disk(tmp_path: Path) -> None:
    disk, path = SystemDisk(), str(tmp_path / "lock")
    assert not disk.locked(path)
    held = disk.lock(path)
    assert held is not None
    assert disk.locked(path)
    held.close()
    assert not disk.locked(path)
    disk.lock(path)


def test_a_lock_that_may_not_be_read_counts_as_held() -> None:
    class Guarded(SimulatedDisk):
        def locked(self, path: str) -> bool:
            raise PermissionError(errno.EACCES, "Permission denied", path)

    world = offline_journal()
    world.disk.put(SEGMENT, world.disk.content(SEGMENT) + bytes(200))
    guarded = Guarded()
    guarded._tree = world.disk._tree
    with World(guarded).follow() as follower, pytest.raises(Damaged, match="offset"):
        messages(follower, "t")
