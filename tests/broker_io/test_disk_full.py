"""A full or failing disk: appends are rejected early, else the log stops; nothing acknowledged is lost."""

from __future__ import annotations

import errno

import pytest
from log_history import Life, check_found, check_usable, matches, open_log
from log_history import content_of as content

from broker_io.batch import Batch, Message
from broker_io.environment import Environment
from broker_io.errors import DiskFailed, DiskFull, DiskWatermark
from broker_io.filelog.log.broker import FileBroker
from broker_io.testing import SeededRandomness, SimulatedClock, SimulatedDisk, Unsynced


def written(life: Life, topic: str = "a", size: int = 50) -> BaseException | None:
    """Append one message; its error, or None."""
    try:
        life.append(topic, "x", size)
    except DiskWatermark as error:
        life.underway = None  # rejected: nothing of it may be in the log
        return error
    except DiskFailed as error:
        return error
    return None


def begun(capacity: int = 1 << 40, watermark: int = 0) -> Life:
    life = Life(SimulatedDisk(capacity=capacity))
    life.broker = open_log(life.disk, clock=life.clock, watermark_bytes=watermark)
    life.create("a")
    return life


@pytest.mark.parametrize("capacity", range(2_000, 5_000, 130))
def test_a_disk_that_runs_full_stops_the_log_and_loses_nothing(capacity: int) -> None:
    life = begun(capacity)
    while (error := written(life)) is None:
        pass
    assert isinstance(error, DiskFull)
    stopped = life.broker.writer("a").append(Batch.of([Message()])).exception(0)
    assert isinstance(stopped, DiskFull)
    found = content(life.broker)
    assert matches(found, life.state) or (life.underway is not None and matches(found, life.underway))
    for disk in (life.disk.kill(), life.disk.crash(Unsynced.LOST), life.disk.crash(Unsynced.SECTORS, capacity)):
        disk.capacity = 1 << 40
        with open_log(disk) as broker:
            check_usable(disk, broker, check_found(broker, life))


def test_a_full_disk_can_still_be_read() -> None:
    life = begun(3_000)
    while written(life) is None:
        pass
    disk = life.disk.kill()
    with open_log(disk, read_only=True) as broker:
        rows = content(broker)["a"].rows
    assert rows[: len(life.state["a"].rows)] == life.state["a"].rows


def test_watermark_rejects_appends_until_there_is_space() -> None:
    life = begun(capacity=100_000, watermark=50_000)
    assert written(life) is None
    life.disk.capacity = 20_000
    life.clock.advance(2.0)
    for _ in range(3):
        assert isinstance(written(life), DiskWatermark)
    check_found(life.broker, life)
    life.disk.capacity = 100_000
    assert written(life) is None
    check_found(life.broker, life)
    with open_log(life.disk.kill()) as again:
        check_found(again, life)


def test_failed_sync_is_never_retried() -> None:
    life = begun()
    assert written(life) is None
    syncs = [number for number, operation in enumerate(life.disk.history) if operation.kind == "sync"]
    life.disk.fail_at(2, errno.EIO)  # the journal's write comes first, its sync second
    assert type(written(life)) is DiskFailed
    before = [operation for operation in life.disk.history if operation.kind == "sync"]
    assert len(before) == len(syncs) + 1
    assert isinstance(written(life), DiskFailed)
    life.broker.close()
    assert [operation for operation in life.disk.history if operation.kind == "sync"] == before


def test_failed_append_is_written_whole_or_not_at_all() -> None:
    life = begun()
    for written_bytes in range(0, 400, 7):
        one = Life(life.disk.kill().copy(), state=dict(life.state))
        one.open()
        one.disk.fail_at(1, errno.EIO, written=written_bytes)
        with pytest.raises(DiskFailed):
            one.append("a", "xyz")
        with open_log(one.disk.kill()) as broker:
            check_found(broker, one)


class GuardedDisk(SimulatedDisk):
    """A disk on which the user may enter the root and `/home`, but not read them."""

    def sync_directory(self, path: str) -> None:
        if path in ("/", "/home"):
            raise PermissionError(errno.EACCES, "Permission denied", path)
        super().sync_directory(path)


@pytest.mark.parametrize("directory", ["/home/me/log", "/home/me/deep/log/"])
def test_log_is_created_below_unreadable_directories(directory: str) -> None:
    disk = GuardedDisk()
    disk.make_directory("/home/me")
    environment = Environment(SimulatedClock(), disk, SeededRandomness())
    FileBroker.open(directory, environment, committer=False).close()
    synced = {operation.path for operation in disk.history if operation.kind == "sync_directory"}
    assert synced >= {"/home/me", directory.rstrip("/")}
