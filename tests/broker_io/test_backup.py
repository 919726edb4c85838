"""Backups of the embedded log: round trip, golden file, damage, crashes, full disks, changes while one is written."""

from __future__ import annotations

import contextlib
import errno
import random
from collections.abc import Callable
from typing import Any

import pytest
from file_logs import DIRECTORY, World, append, messages, numbered, rows, segment_paths
from golden_files import GOLDEN, committed
from hypothesis import given
from hypothesis import strategies as st

from broker_io.batch import Message, PlacedMessage
from broker_io.environment import Environment
from broker_io.errors import (
    CallerError,
    Closed,
    Damaged,
    DiskFailed,
    DiskFull,
    DiskWatermark,
    Error,
    UnsupportedFormat,
)
from broker_io.filelog.log.backup import HEAD_BYTES, PARTIAL, check_backup, restore_backup, write_backup
from broker_io.filelog.log.broker import FileBroker
from broker_io.filelog.log.layout import Options
from broker_io.filelog.log.recovery import open_log
from broker_io.port import BackupReport
from broker_io.position import LEDGERS_OF_A_HISTORY
from broker_io.testing import Crash, Operation, SeededRandomness, SimulatedDisk, Unsynced

FILE, NEW = "/log.backup", "/new/log"


def silent(done: int, total: int) -> None:
    assert done <= total


def check(world: World, path: str = FILE) -> BackupReport:
    return check_backup(world.disk, path, silent)


def restore(world: World, directory: str = NEW, path: str = FILE) -> BackupReport:
    return restore_backup(world.environment, path, directory, silent)


def opened(world: World, directory: str = NEW, **options: Any) -> FileBroker:
    return FileBroker.open(directory, world.environment, **{"committer": False, "compacted_prefix": "", **options})


def put(world: World, path: str, data: bytes) -> None:
    world.disk.open(path, write=True, create=True).close()
    world.disk.put(path, data)


def content(broker: FileBroker) -> dict[str, tuple[str, list[PlacedMessage]]]:
    return {topic: (broker.incarnation(topic), rows(broker, topic)) for topic in broker.topics()}


def small_log(world: World) -> FileBroker:
    """Three topics: of several ledgers, trimmed and compacted; of one message; without any."""
    broker = world.own(segment_bytes=500)
    broker.create_topics(["a", "b", "c"])
    for start in range(0, 60, 6):
        append(broker, "a", numbered(6, start % 24))
    broker.compact("a")
    broker.trim("a", broker.ledgers("a")[1].ledger)
    append(broker, "a", numbered(3))
    append(broker, "b", [Message(None, b"only")])
    return broker


def saved() -> World:
    world = World()
    with small_log(world) as broker:
        broker.back_up(FILE, silent)
    return world


def test_golden() -> None:
    world = saved()
    put(world, "/golden", committed("broker_io/backup.bin", world.disk.content(FILE)))
    report = restore(world, path="/golden")
    with world.own() as log, opened(world) as restored:
        assert content(restored) == content(log)
        count = sum(ledger.entries for topic in log.topics() for ledger in log.ledgers(topic))
    assert report == BackupReport(3, 7, count, len(world.disk.content(FILE)))


def test_a_backup_with_a_manifest_of_version_1_is_refused() -> None:
    world = World()
    put(world, "/golden", (GOLDEN / "broker_io/backup-v1.bin").read_bytes())
    with pytest.raises(UnsupportedFormat, match=r"version 1;.*restore the backup with that release"):
        restore(world, path="/golden")
    assert not world.disk.exists(f"{NEW}/manifest")


STEPS = st.lists(
    st.tuples(st.sampled_from(["append", "append", "roll", "trim", "compact", "create", "delete", "reopen"]),
              st.sampled_from("xyz"), st.integers(0, 9)),
    max_size=25,
)  # fmt: skip


def apply(broker: FileBroker, step: tuple[str, str, int]) -> None:
    what, topic, number = step
    if topic not in broker.topics():
        if what in ("create", "append"):
            broker.create_topic(topic)
        else:
            return
    if what == "append":
        append(broker, topic, [Message(b"%d" % key, b"v" * number) for key in range(number)] + [Message(None, b"")])
    elif what == "roll":
        broker.roll(topic)
    elif what == "trim":
        broker.trim(topic, broker.ledgers(topic)[number % len(broker.ledgers(topic))].ledger)
    elif what == "compact":
        broker.compact(topic)
    elif what == "delete":
        broker.delete_topic(topic)


@given(STEPS, STEPS, STEPS, st.integers(0, 999))
def test_a_restored_log_is_the_log_as_it_was(
    before: list[tuple[str, str, int]], lost: list[tuple[str, str, int]], new: list[tuple[str, str, int]], seed: int
) -> None:
    """No position of the log or of its lost history comes back with another message, also if it is restored again."""
    world = World()
    broker = world.own(segment_bytes=300)
    for step in before:
        if step[0] == "reopen":
            broker.close()
            broker = world.own(segment_bytes=300)
        apply(broker, step)
    kept = content(broker)
    reported = broker.back_up(FILE, silent)
    for step in lost:
        apply(broker, step)
    used = {topic: {row.position for row in read} for topic, (_, read) in content(broker).items()}
    assert check(world) == reported
    for number, directory in enumerate((NEW, "/again")):
        world.environment = Environment(world.clock, world.disk, SeededRandomness(2 * seed + number + 7))
        assert restore(world, directory) == reported
        with opened(world, directory, segment_bytes=300) as restored:
            assert content(restored) == kept
            for step in new:
                apply(restored, step)
            for topic in "xyz":
                apply(restored, ("append", topic, 2))
            for topic, (incarnation, read) in content(restored).items():
                if topic in kept and incarnation == kept[topic][0]:
                    fresh = {row.position for row in read} - {row.position for row in kept[topic][1]}
                else:
                    fresh = {row.position for row in read}
                assert not fresh & used.get(topic, set())
                assert min(position.ledger for position in fresh) >= LEDGERS_OF_A_HISTORY
                used.setdefault(topic, set()).update(fresh)


def test_a_restored_log_belongs_to_no_pair() -> None:
    """A second copy of a store could become live with it, in place of what the store has now."""
    world = World()
    member = open_log(world.environment, DIRECTORY, Options(), member=True).log
    member.found(b"store of a pair", b"pair")
    manifest = member.begin_backup()
    write_backup(world.disk, DIRECTORY, manifest, FILE, silent)
    member.close()
    restore(world)
    with opened(world) as restored:
        restored.create_topic("b")


def test_a_restored_log_is_opened_again_and_backed_up_again() -> None:
    world = saved()
    restore(world)
    with opened(world) as restored:
        append(restored, "c", numbered(3))
        restored.back_up("/second", silent)
    restore(world, "/third", "/second")
    with opened(world, "/third") as third:
        assert messages(third, "c") == numbered(3)
        append(third, "c", numbered(2))
        first, *_, last = rows(third, "c")
        assert last.position.ledger >= first.position.ledger + LEDGERS_OF_A_HISTORY


# --- damage ---


def assert_refused(world: World, path: str, kind: type[Error] = Damaged) -> None:
    with pytest.raises(kind, match=path):
        check(world, path)
    with pytest.raises(kind, match=path):
        restore(world, "/refused", path)
    with pytest.raises(Damaged) if world.disk.exists("/refused/topics") else pytest.raises(Error):
        FileBroker.open("/refused", world.environment, read_only=True).close()


@pytest.mark.parametrize("part", range(4))
def test_a_changed_bit_is_never_restored(part: int) -> None:
    world, choose = saved(), random.Random(part)
    size = len(world.disk.content(FILE))
    bits = [*range(part, 8 * HEAD_BYTES, 16), *(choose.randrange(8 * size) for _ in range(150))]
    for bit in bits:
        changed = World(world.disk.copy())
        changed.disk.flip(FILE, bit)
        with pytest.raises((Damaged, UnsupportedFormat), match=FILE):
            check(changed)
        with pytest.raises((Damaged, UnsupportedFormat), match=FILE):
            restore(changed)
        if changed.disk.exists(NEW):
            with pytest.raises(Damaged, match="manifest is missing"):
                opened(changed)


def test_a_cut_or_longer_file_is_never_restored() -> None:
    world = saved()
    data = world.disk.content(FILE)
    for size in (0, 1, HEAD_BYTES - 1, HEAD_BYTES, HEAD_BYTES + 1, len(data) // 2, len(data) - 4, len(data) - 1):
        put(world, "/cut", data[:size])
        with pytest.raises(Damaged, match="/cut"):
            check(world, "/cut")
    put(world, "/cut", data + b"\0")
    with pytest.raises(Damaged, match="instead of"):
        check(world, "/cut")


def test_damaged_data_is_not_backed_up() -> None:
    world = World()
    with small_log(world) as broker:
        path = max(segment_paths(world), key=lambda one: len(world.disk.content(one)))
        world.disk.flip(path, 8 * 70)
        with pytest.raises(Damaged, match=path):
            broker.back_up(FILE, silent)
        assert not {FILE, FILE + PARTIAL} & {*world.disk.files()}
        append(broker, "b", numbered(1))


def test_a_large_block_is_backed_up() -> None:
    """Blocks above the size of a chunk, and blocks that end in another chunk."""
    world = World()
    with world.own() as broker:
        broker.create_topic("a")
        for size in (10, 5_000_000, 900_000, 900_000, 900_000, 900_000, 900_000, 5_000_000):
            append(broker, "a", [Message(b"k", random.Random(size).randbytes(size))])
        broker.back_up(FILE, silent)
        restore(world)
        with opened(world) as restored:
            assert content(restored) == content(broker)


# --- crashes and errors ---


def operations(act: Callable[[World], object]) -> list[Operation]:
    world = saved()
    before = len(world.disk.history)
    act(world)
    return world.disk.history[before:]


def back_up_again(world: World) -> None:
    with world.own() as broker:
        append(broker, "b", numbered(1))
        broker.back_up("/second", silent)


def disks(disk: SimulatedDisk, seed: int) -> list[World]:
    ends = [disk.kill(), disk.crash(Unsynced.LOST), disk.crash(Unsynced.KEPT), disk.crash(Unsynced.PREFIX, seed)]
    return [World(one) for one in (*ends, disk.crash(Unsynced.SECTORS, seed))]


def test_a_crash_while_a_backup_is_written() -> None:
    for operation in range(1, len(operations(back_up_again)) + 1):
        world = saved()
        world.disk.stop_at(operation)
        with pytest.raises(Crash):
            back_up_again(world)
        for after in disks(world.disk, operation):
            if after.disk.exists("/second"):
                restore(after, path="/second")
                with opened(after) as restored:
                    assert messages(restored, "b")[0].value == b"only"
            with after.own() as log:
                assert messages(log, "b")[0].value == b"only"
                if not after.disk.exists("/second"):
                    log.back_up("/second", silent)
            check(after, "/second")


def test_a_crash_while_a_log_is_restored() -> None:
    """A directory is empty, or nothing opens it, or it has everything."""
    whole = saved()
    with whole.own() as log:
        expected = content(log)
    complete = 0
    history = operations(restore)
    for operation in range(1, len(history) + 1):
        begun = any(kind == "write" and path.endswith(".log") for kind, path, _ in history[: operation - 1])
        world = saved()
        world.disk.stop_at(operation)
        with pytest.raises(Crash):
            restore(world)
        for after in disks(world.disk, operation):
            names = after.disk.list(NEW) if after.disk.exists(NEW) else []
            if {*names} <= {"lock"}:
                assert not begun, "no service takes it for an empty directory"
                restore(after)
            elif "manifest" not in names:
                with pytest.raises(Damaged, match="manifest is missing"):
                    opened(after)
                with pytest.raises(CallerError, match="has left it, remove it"):
                    restore(after)
                continue
            complete += 1
            with opened(after) as restored:
                assert content(restored) == expected
    assert complete > 3
    restore(whole)
    for after in disks(whole.disk, 0):
        with opened(after) as restored:
            assert content(restored) == expected


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC])
def test_a_failing_disk_is_reported(error: int) -> None:
    kind = DiskFull if error == errno.ENOSPC else DiskFailed
    for operation in range(1, len(operations(restore)) + 1):
        world = saved()
        world.disk.fail_at(operation, error)
        try:
            restore(world)
        except kind:
            if world.disk.exists(f"{NEW}/topics") and not world.disk.exists(f"{NEW}/manifest"):
                with pytest.raises(Damaged):
                    opened(world)
        else:
            with opened(world) as restored:  # an index could not be written, or the lock not be closed
                assert restored.topics() == ["a", "b", "c"]


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC])
def test_a_failing_disk_while_a_backup_is_written(error: int) -> None:
    """There is a whole backup or none; the log goes on if its own files did not fail, and loses nothing else."""
    kind = DiskFull if error == errno.ENOSPC else DiskFailed
    went_on = 0
    for operation in range(1, len(operations(back_up_again)) + 1):
        world = saved()
        world.disk.fail_at(operation, error)
        appended = False
        with contextlib.suppress(kind), world.own() as broker:
            append(broker, "b", numbered(1))
            appended = True
            with contextlib.suppress(kind):
                broker.back_up("/second", silent)
            append(broker, "b", numbered(1))
            went_on += 1
        assert "/second" + PARTIAL not in world.disk.files()
        if world.disk.exists("/second"):
            check(world, "/second")
        with world.own() as log:
            assert len(messages(log, "b")) >= 1 + appended
            if not world.disk.exists("/second"):
                log.back_up("/second", silent)
        check(world, "/second")
    assert went_on > 5


def test_a_backup_that_does_not_fit_is_refused_at_once() -> None:
    world = World(SimulatedDisk(capacity=11_000))
    with world.own(watermark_bytes=0, journal_bytes=1) as broker:
        broker.create_topic("a")
        append(broker, "a", [Message(None, bytes(3_000))])
        append(broker, "a", [Message(None, bytes(3_000))])
        with pytest.raises(DiskFull, match="and the backup has"):
            broker.back_up(FILE, silent)
        assert FILE + PARTIAL not in world.disk.files()


def test_a_backup_leaves_the_space_that_appends_need() -> None:
    world = World(SimulatedDisk(capacity=100_000))
    with world.own(watermark_bytes=60_000) as broker:
        broker.create_topic("a")
        append(broker, "a", [Message(None, bytes(15_000))])
        with pytest.raises(DiskWatermark, match="a backup leaves 75000"):
            broker.back_up(FILE, silent)
        assert FILE + PARTIAL not in world.disk.files()
        append(broker, "a", numbered(1))


# --- changes while a backup is written ---


def test_changes_while_a_backup_is_written() -> None:
    """The backup has the moment of its start; what it needs is removed after its end."""
    world = World()
    broker = small_log(world)
    expected = content(broker)
    changes: list[Callable[[], object]] = [
        lambda: append(broker, "b", numbered(5)),
        lambda: broker.compact("a"),
        lambda: broker.trim("a", broker.ledgers("a")[-1].ledger),
        lambda: broker.delete_topic("b"),
        lambda: broker.create_topic("b"),
        lambda: append(broker, "b", numbered(5)),
        lambda: broker._log.checkpoint(),
    ]

    def change(done: int, total: int) -> None:
        for _ in range(2):
            if changes:
                changes.pop(0)()

    broker.back_up(FILE, change)
    assert not changes
    restore(world)
    with opened(world) as restored:
        assert content(restored) == expected
    left = {path for path in segment_paths(world) if path.startswith(f"{DIRECTORY}/")}
    topics = [broker.named(topic) for topic in broker.topics()]
    named = {
        f"{DIRECTORY}/topics/{topic.number}/{ledger.ledger}-{ledger.generation}.log"
        for topic in topics
        for ledger in topic.ledgers
    }
    assert left == named, "files that only the backup needed are removed at its end"
    broker.close()


def test_one_backup_at_a_time() -> None:
    world = World()
    with small_log(world) as broker:

        def another(done: int, total: int) -> None:
            with pytest.raises(CallerError, match="a backup of /log is being written"):
                broker.back_up("/other", silent)

        broker.back_up(FILE, another)
        broker.back_up("/other", silent)


def test_a_backup_ends_when_the_log_is_closed() -> None:
    world = World()
    broker = small_log(world)

    def close(done: int, total: int) -> None:
        broker._closing = True

    with pytest.raises(Closed):
        broker.back_up(FILE, close)
    assert not {FILE, FILE + PARTIAL} & {*world.disk.files()}
    broker._closing = False
    broker.close()


# --- requests ---


def test_a_wrong_request_gets_one_clear_error() -> None:
    world = saved()
    with world.own() as broker:
        with pytest.raises(CallerError, match=r"log\.backup exists"):
            broker.back_up(FILE, silent)
        with pytest.raises(CallerError, match="there is no directory /missing"):
            broker.back_up("/missing/file", silent)
        with pytest.raises(CallerError, match="/log contains"):
            restore(world, DIRECTORY)
    with pytest.raises(CallerError, match="there is no file /none"):
        restore(world, path="/none")
    put(world, "/text", b"some other file, which is long enough for a head")
    assert_refused(world, "/text")
    data = world.disk.content(FILE)
    put(world, "/newer", newer(data))
    assert_refused(world, "/newer", UnsupportedFormat)


def newer(data: bytes) -> bytes:
    """A backup of the next version."""
    import google_crc32c

    head = data[:7] + b"\2" + data[8 : HEAD_BYTES - 4]
    return head + int(google_crc32c.value(head)).to_bytes(4, "little") + data[HEAD_BYTES:]


def test_a_directory_is_locked_while_a_log_is_restored() -> None:
    world = saved()
    tried = []

    def open_it(done: int, total: int) -> None:
        if not tried:
            tried.append(done)
            other = Environment(world.clock, world.disk, SeededRandomness(3), process="4712")
            with pytest.raises(Error, match="manifest is missing"):
                FileBroker.open(NEW, other)

    restore_backup(world.environment, FILE, NEW, open_it)
    assert tried
