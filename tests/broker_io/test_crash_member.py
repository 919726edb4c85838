"""A member of a pair after any crash or disk error: changes of structure are in its journal as well as appends."""

from __future__ import annotations

import contextlib
import errno

import pytest
from log_history import DIRECTORY, SHARDS, STRIDE, check_found, content_of, found_disks, live, matches, open_log
from member_logs import MemberLife, open_member

from broker_io.batch import Batch, Message
from broker_io.errors import DiskFailed, NotAMember
from broker_io.testing import Crash, SimulatedDisk, Unsynced


def whole_life() -> MemberLife:
    """A life without faults; its log is still open."""
    life = MemberLife(SimulatedDisk())
    live(life)
    return life


OPERATIONS = whole_life().disk.history


def shard(number: int) -> range:
    return range(1 + number, len(OPERATIONS) + 1, SHARDS * STRIDE)


def stopped_at(operation: int, *, written: int) -> MemberLife:
    life = MemberLife(SimulatedDisk())
    life.disk.stop_at(operation, written=written)
    with pytest.raises(Crash):
        live(life)
    return life


def check_readers(disk: SimulatedDisk, life: MemberLife) -> None:
    """A reader of the directory sees a state that is known to be committed."""
    if not disk.exists(f"{DIRECTORY}/manifest"):
        return
    with open_log(disk, read_only=True) as follower:
        found = content_of(follower)
        allowed = [state for state in (life.earlier, life.state, life.underway) if state is not None]
        assert any(matches(found, state) for state in allowed), (found, allowed)
        assert follower.damages() == {}


def check_usable(disk: SimulatedDisk, life: MemberLife) -> None:
    """A member still works, and what it does is durable."""
    with open_member(disk, seed=900) as broker:
        found = check_found(broker, life)
        for topic in found:
            with broker.writer(topic) as writer:
                writer.append(Batch.of([Message(b"k", b"v")])).result(0)
            broker.roll(topic)
        broker.create_topic("new")
        expected = content_of(broker)
        with open_member(disk.crash(Unsynced.LOST), seed=901) as again:
            assert content_of(again) == expected


def check_all(life: MemberLife, seed: int) -> None:
    for number, disk in enumerate(found_disks(life.disk, seed)):
        check_readers(disk.copy(), life)
        with open_member(disk.copy(), seed=800) as broker:
            check_found(broker, life)
        if number in (0, 1 + seed % 5):
            check_usable(disk, life)


def test_structure_is_in_the_journal() -> None:
    life = whole_life()
    check_found(life.broker, life)
    check_readers(life.disk.kill(), life)
    assert life.broker._log.manifest.pair.structures > 10


@pytest.mark.parametrize("number", range(SHARDS))
def test_a_crash_at_any_operation(number: int) -> None:
    for operation in shard(number):
        size = OPERATIONS[operation - 1].size if OPERATIONS[operation - 1].kind == "write" else 0
        for written in sorted({0, size // 2, size}):
            check_all(stopped_at(operation, written=written), operation)


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("number", range(SHARDS))
def test_an_error_at_any_operation(number: int, error: int) -> None:
    """A member stops at any of them, as what is committed can't be refused any more."""
    for operation in shard(number):
        life = MemberLife(SimulatedDisk())
        life.disk.fail_at(operation, error, written=20)
        with contextlib.suppress(DiskFailed):
            live(life)
        check_all(life, operation)


@pytest.mark.parametrize("number", range(SHARDS))
def test_a_crash_while_a_member_opens(number: int) -> None:
    for operation in shard(number)[::3]:
        life = stopped_at(operation, written=1)
        for disk in found_disks(life.disk, operation):
            whole = disk.copy()
            open_member(whole)
            for again in range(1, len(whole.history) + 1, 3):
                second = disk.copy()
                second.stop_at(again, written=again % 50)
                with pytest.raises(Crash):
                    open_member(second)
                third = second.crash([*Unsynced][again % 4], again) if again % 5 else second.kill()
                with open_member(third, seed=700) as broker:
                    check_found(broker, life)


def test_without_its_pair_it_is_refused_for_writing() -> None:
    life = whole_life()
    life.close()
    disk = life.disk.kill()
    with pytest.raises(NotAMember, match="member of a pair"):
        open_log(disk)
    assert not disk.history or {operation.path for operation in disk.history} == {f"{DIRECTORY}/lock"}
    check_readers(disk, life)
