"""The embedded log after any crash, disk error, cut or flipped bit: its correct content, or a named error."""

from __future__ import annotations

import errno
import random

import pytest
from log_history import (
    DIRECTORY,
    SHARDS,
    STRIDE,
    Life,
    check_found,
    check_usable,
    content_of,
    found_disks,
    live,
    matches,
    open_log,
)

from broker_io.batch import Batch, Message
from broker_io.errors import DiskFailed, DiskFull, Error
from broker_io.testing import Crash, SimulatedDisk, Unsynced


def whole_life() -> Life:
    """A life without faults; its log is still open."""
    life = Life(SimulatedDisk())
    live(life)
    return life


OPERATIONS = whole_life().disk.history


def shard(number: int) -> range:
    """Every eighth operation, so that workers can share them."""
    return range(1 + number, len(OPERATIONS) + 1, SHARDS * STRIDE)


def stopped_at(operation: int, *, written: int) -> Life:
    life = Life(SimulatedDisk())
    life.disk.stop_at(operation, written=written)
    with pytest.raises(Crash):
        live(life)
    return life


def torn_writes(operation: int) -> list[int]:
    """The bytes of an operation to write before the crash: none, and for a write a part, and all."""
    size = OPERATIONS[operation - 1].size if OPERATIONS[operation - 1].kind == "write" else 0
    return sorted({0, size // 2, size})


def check_all(life: Life, seed: int) -> None:
    """Check the content of every possible disk, and that the log still works on the killed one and another one."""
    for number, disk in enumerate(found_disks(life.disk, seed)):
        with open_log(disk) as broker:
            found = check_found(broker, life)
            if number in (0, 1 + seed % 5):
                check_usable(disk, broker, found)


def test_life_uses_every_disk_operation() -> None:
    assert {operation.kind for operation in OPERATIONS} >= {
        "create", "write", "sync", "rename", "remove", "sync_directory", "make_directory"
    }  # fmt: skip
    life = whole_life()
    check_found(life.broker, life)
    assert max(len(life.broker.ledgers(topic)) for topic in life.state) > 1


@pytest.mark.parametrize("number", range(SHARDS))
def test_a_crash_at_any_operation(number: int) -> None:
    for operation in shard(number):
        for written in torn_writes(operation):
            check_all(stopped_at(operation, written=written), operation)


NAMES = [number for number, operation in enumerate(OPERATIONS, 1) if operation.kind == "sync_directory"]
"""The operations before which a name may exist that is not durable."""


@pytest.mark.parametrize("number", range(SHARDS))
def test_what_follows_a_kill_survives_a_loss_of_power(number: int) -> None:
    """The next owner finds what the killed one wrote, synced or not, and what it appends is durable with it."""
    tried = 0
    for operation in NAMES[number::SHARDS]:
        killed = stopped_at(operation, written=0).disk.kill()
        with open_log(killed) as broker:
            for topic in broker.topics()[:1]:
                with broker.writer(topic) as writer:
                    writer.append(Batch.of([Message(b"k", b"appended")])).result(120)
                tried += 1
            with open_log(killed.crash(Unsynced.LOST)) as found:
                assert content_of(found) == content_of(broker)
    assert tried


@pytest.mark.parametrize("number", range(SHARDS))
def test_a_crash_during_the_recovery_from_a_crash(number: int) -> None:
    for operation in shard(number)[::3]:
        life = stopped_at(operation, written=1)
        for disk in found_disks(life.disk, operation):
            for again in range(1, operations_to_open(disk.copy()) + 1):
                second = disk.copy()
                second.stop_at(again, written=again % 50)
                with pytest.raises(Crash):
                    open_log(second)
                third = second.crash([*Unsynced][again % 4], again) if again % 5 else second.kill()
                with open_log(third) as broker:
                    check_found(broker, life)


def operations_to_open(disk: SimulatedDisk) -> int:
    open_log(disk)
    return len(disk.history)


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("number", range(SHARDS))
def test_an_error_at_any_operation(number: int, error: int) -> None:
    for operation in shard(number):
        life = Life(SimulatedDisk())
        life.disk.fail_at(operation, error, written=torn_writes(operation)[-1] // 2)
        stop: Error | None = None
        try:
            live(life)
        except DiskFailed as raised:
            stop = raised
        if stop is not None:
            assert isinstance(stop, DiskFull) == (error == errno.ENOSPC), stop
            if life.is_open:
                check_stopped_or_unharmed(life, stop)
        check_all(life, operation)


def check_stopped_or_unharmed(life: Life, stop: Error) -> None:
    """A stopped log accepts no appends, and still reads all acknowledged messages."""
    if "was not compacted" in str(stop):  # the log continues unchanged
        life.append("a", "xx")
        return
    for topic in life.broker.topics():
        future = life.broker.writer(topic).append(Batch.of([Message(b"late", b"late")]))
        assert isinstance(future.exception(0), type(stop))
    assert any(matches(content_of(life.broker), state) for state in (life.state, life.underway) if state is not None)


@pytest.fixture(scope="module", params=["killed", "closed"])
def ended(request: pytest.FixtureRequest) -> tuple[Life, SimulatedDisk]:
    """A life and its final disk: with its last appends in the journal, or with an empty journal."""
    life = whole_life()
    if request.param == "closed":
        life.close()
    return life, life.disk.kill()


def check_truth_or_error(disk: SimulatedDisk, life: Life, *, usable: bool = True) -> bool:
    """Whether a damaged log has its correct content; otherwise assert that it raised a named error."""
    try:
        with open_log(disk) as broker:
            found = check_found(broker, life)
            if usable:
                check_usable(disk, broker, found)
    except Error:
        return False
    return True


def can_be_made_again(path: str) -> bool:
    return path.endswith((".index", "/lock"))


@pytest.mark.parametrize("number", range(SHARDS))
def test_a_flipped_bit_in_any_byte(ended: tuple[Life, SimulatedDisk], number: int) -> None:
    life, disk = ended
    choose = random.Random(number)
    for path, size in disk.files().items():
        for byte in range(number, size, SHARDS * STRIDE):
            flipped = disk.copy()
            flipped.flip(path, byte * 8 + choose.randrange(8))
            truth = check_truth_or_error(flipped, life, usable=byte % 7 == 0)
            assert truth or not can_be_made_again(path), path


def test_a_file_cut_off_anywhere_near_its_end(ended: tuple[Life, SimulatedDisk]) -> None:
    life, disk = ended
    for path, size in disk.files().items():
        for cut in range(max(0, size - 400), size, STRIDE):
            shorter = disk.copy()
            shorter.put(path, disk.content(path)[:cut])
            truth = check_truth_or_error(shorter, life, usable=cut % 7 == 0)
            assert truth or not can_be_made_again(path), path


def test_a_missing_file(ended: tuple[Life, SimulatedDisk]) -> None:
    life, disk = ended
    for path in disk.files():
        without = disk.copy()
        without.remove(path)
        truth = check_truth_or_error(without, life)
        assert truth or not can_be_made_again(path), path


def test_zeros_and_garbage_after_the_end(ended: tuple[Life, SimulatedDisk]) -> None:
    life, disk = ended
    choose = random.Random(6)
    for path in disk.files():
        for tail in (bytes(1), bytes(100), bytes(5000), choose.randbytes(1), choose.randbytes(700)):
            longer = disk.copy()
            longer.put(path, disk.content(path) + tail)
            check_truth_or_error(longer, life)


def test_a_block_or_a_file_of_zeros(ended: tuple[Life, SimulatedDisk]) -> None:
    life, disk = ended
    for path, size in disk.files().items():
        for start in range(0, size, 256):
            zeroed = disk.copy()
            data = bytearray(disk.content(path))
            data[start : start + 256] = bytes(len(data[start : start + 256]))
            zeroed.put(path, bytes(data))
            check_truth_or_error(zeroed, life)


def test_a_segment_in_the_place_of_another(ended: tuple[Life, SimulatedDisk]) -> None:
    life, disk = ended
    paths = [path for path in disk.files() if path.endswith(".log")]
    for path in paths:
        for other in paths:
            swapped = disk.copy()
            swapped.put(path, disk.content(other))
            assert check_truth_or_error(swapped, life) or path != other


def test_the_manifest_of_another_log_is_refused(ended: tuple[Life, SimulatedDisk]) -> None:
    _, disk = ended
    other = SimulatedDisk()
    open_log(other).close()
    disk = disk.copy()
    disk.put(f"{DIRECTORY}/manifest", other.content(f"{DIRECTORY}/manifest"))
    with pytest.raises(Error):
        open_log(disk)


def test_clean_close_leaves_nothing_to_recover() -> None:
    life = whole_life()
    life.close()
    disk = life.disk.kill()
    with open_log(disk) as broker:
        assert broker.report == []
        check_found(broker, life)
    changes = [operation for operation in disk.history if operation.kind != "sync_directory"]
    assert {operation.path for operation in changes} <= {f"{DIRECTORY}/lock"}
