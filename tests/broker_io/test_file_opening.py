"""Opening an embedded log: locks, foreign and damaged directories, leftovers, and the report."""

import errno
import os
from pathlib import Path

import pytest
from file_logs import DIRECTORY, World, append, messages, numbered, rows, segment_paths

from broker_io import open_broker, restore_backup
from broker_io.environment import Environment
from broker_io.errors import (
    CallerError,
    Damaged,
    DiskFailed,
    ForeignDirectory,
    InvalidAddress,
    Locked,
    ReadOnly,
    TopicNotFound,
    UnsupportedFormat,
)
from broker_io.filelog.log import FileBroker
from broker_io.filelog.log.broker import FollowingBroker
from broker_io.memory import MemoryBroker
from broker_io.position import Position
from broker_io.system import SystemDisk
from broker_io.testing import SimulatedDisk, Unsynced
from broker_io.testing.disk import SimulatedFile
from txnbuffer import connect


def test_addresses(tmp_path: Path) -> None:
    with open_broker(f"file:{tmp_path}/log", watermark_bytes=0) as broker:
        assert isinstance(broker, FileBroker)
        with open_broker(f"file:{tmp_path}/log", read_only=True) as follower:
            assert isinstance(follower, FollowingBroker)
    assert isinstance(open_broker("memory:"), MemoryBroker)
    for address in ("", "file", "file:", "/tmp/log", "ftp:x", "pulsar"):
        with pytest.raises(InvalidAddress, match=r"file:DIR|pulsar://HOST"):
            open_broker(address)


@pytest.mark.parametrize("address", ["file:~/log", "file:~", "file:~me/log", "file://host/log", "file://log"])
def test_addresses_of_another_directory_than_they_seem_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for refused in (open_broker, connect, lambda name: restore_backup("backup", name, lambda *_: None)):
        with pytest.raises(InvalidAddress, match=f"'{address}' is not the address of a directory"):
            refused(address)
    assert not [*tmp_path.iterdir()]
    open_broker(f"file://{tmp_path}/log").close()
    assert (tmp_path / "log").is_dir()


def test_read_only_mount_names_the_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_broker(f"file:{tmp_path}").close()

    def refuse(*_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), f"{tmp_path}/lock")

    monkeypatch.setattr(SystemDisk, "lock", refuse)
    with pytest.raises(ReadOnly, match=f"^{tmp_path}/lock: the file system is read-only: open .* read_only=True"):
        open_broker(f"file:{tmp_path}")
    open_broker(f"file:{tmp_path}", read_only=True).close()


def test_error_of_a_second_owner_names_the_first(tmp_path: Path) -> None:
    directory = str(tmp_path / "log")
    with FileBroker.open(directory, Environment(process="77")):
        with pytest.raises(Locked, match=r"owned by another process \(77\): stop that process"):
            FileBroker.open(directory)
        with pytest.raises(Locked, match=r"owned by process 77, which is also the id of this one"):
            FileBroker.open(directory, Environment(process="77"))
    FileBroker.open(directory).close()


@pytest.mark.parametrize("second", [True, False], ids=["with a second owner", "alone"])
def test_an_owner_whose_lock_was_removed_writes_nothing_more(second: bool) -> None:
    world = World()
    first = world.own()
    first.create_topic("t")
    append(first, "t", numbered(2))
    world.disk.remove(f"{DIRECTORY}/lock")
    other = world.own() if second else None
    if other is not None:
        append(other, "t", numbered(2, 2))
    before = len(world.disk.history)
    for change in (lambda: append(first, "t", numbered(9)), lambda: first.create_topic("u"), lambda: first.roll("t")):
        with pytest.raises(DiskFailed, match=r"its lock file was removed.*no other process owns it, then open"):
            change()
    first.close()
    assert len(world.disk.history) == before
    if other is not None:
        other.close()
    with world.own() as third:
        assert messages(third, "t") == numbered(4 if second else 2)


def test_readers_that_look_for_an_owner_keep_nobody_from_being_it(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    lock, glances = world.disk.lock, iter(range(5))
    monkeypatch.setattr(world.disk, "lock", lambda path: lock(path) if next(glances, None) is None else None)
    world.own().close()


def test_lock_file_names_the_present_owner_only() -> None:
    world = World()
    world.disk.make_directory(DIRECTORY)
    world.disk.open(f"{DIRECTORY}/lock", write=True, create=True).write(0, [b"1234567890"])
    with world.own(), pytest.raises(Locked, match="process 4711,"):
        world.own()


def test_failed_open_releases_the_lock() -> None:
    world = World()
    world.own().close()
    manifest = world.disk.content(f"{DIRECTORY}/manifest")
    world.disk.put(f"{DIRECTORY}/manifest", manifest.replace(b"txnbuffer-log 2 ", b"txnbuffer-log 3 "))
    with pytest.raises(UnsupportedFormat, match="version 3"):
        world.own()
    world.disk.put(f"{DIRECTORY}/manifest", manifest)
    world.own().close()


def test_foreign_directory_is_not_changed(tmp_path: Path) -> None:
    (tmp_path / "holiday.jpg").write_bytes(b"x")
    with pytest.raises(ForeignDirectory, match=r"holiday\.jpg"):
        FileBroker.open(str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["holiday.jpg"]


def test_follower_creates_nothing(tmp_path: Path) -> None:
    for directory in (tmp_path, tmp_path / "missing"):
        with pytest.raises(ForeignDirectory, match="contains no log"):
            FileBroker.open(str(directory), read_only=True)
    assert not [*tmp_path.iterdir()]


def test_a_follower_changes_nothing() -> None:
    world = World()
    with world.own() as owner, world.follow() as follower:
        owner.create_topic("t")
        append(owner, "t", numbered(3))
        before = len(world.disk.history)
        assert messages(follower, "t") == numbered(3)
        changes = [
            lambda: follower.create_topic("u"),
            lambda: follower.delete_topic("t"),
            lambda: follower.writer("t"),
            lambda: follower.roll("t"),
            lambda: follower.trim("t", 9),
            lambda: follower.compact("t"),
        ]
        for change in changes:
            with pytest.raises(ReadOnly, match="through its owner"):
                change()
        assert len(world.disk.history) == before


def test_an_unknown_compression_is_refused() -> None:
    with pytest.raises(CallerError, match="zstd"):
        World().own(compression="lz4")


@pytest.mark.parametrize("name", ["segment_bytes", "journal_bytes", "watermark_bytes", "max_message_bytes"])
@pytest.mark.parametrize("value", [-1, float("inf"), float("nan"), 2.5, "7", True, None, 2**70])
def test_error_names_the_invalid_option_and_nothing_is_created(name: str, value: object) -> None:
    world = World()
    with pytest.raises(CallerError, match=f"^{name} .* bytes from [01] to"):
        world.own(**{name: value})
    assert not world.disk.history


@pytest.mark.parametrize("name", ["segment_bytes", "journal_bytes", "max_message_bytes"])
def test_size_of_zero_is_rejected(name: str) -> None:
    with pytest.raises(CallerError, match=f"^{name} 0"):
        World().own(**{name: 0})
    World().own(**{name: 1}).close()


def test_log_works_without_a_usable_index(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("broker_io.filelog.log.segment.STEP_BYTES", 100)
    world = World()
    opened = world.disk.open

    def refuse(path: str, **options: bool) -> SimulatedFile:
        if path.endswith(".index"):
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return opened(path, **options)

    monkeypatch.setattr(world.disk, "open", refuse)
    for start in (0, 50):
        with world.own() as broker, world.follow() as follower:
            broker.create_topic("t")
            for number in range(start, start + 50):
                append(broker, "t", numbered(1, number))
            for one in (broker, follower):
                assert [row.message for row in rows(one, "t", Position(1, start + 30))] == numbered(20, start + 30)
                assert one.position_at("t", 0) == (1, 0, -1)


def test_opening_a_log_that_was_closed_writes_nothing_but_the_lock_and_syncs_the_names() -> None:
    world = World()
    with world.own() as broker:
        broker.create_topic("t")
        append(broker, "t", numbered(3))
    before = len(world.disk.history)
    with world.own() as broker:
        assert broker.report == []
    operations = [(operation.kind, operation.path) for operation in world.disk.history[before:]]
    assert operations == [("write", f"{DIRECTORY}/lock"), ("sync_directory", DIRECTORY)]


def test_leftovers_are_removed_and_nothing_else() -> None:
    world = World()
    with world.own() as broker:
        broker.create_topic("t")
        append(broker, "t", numbered(3))
        broker.roll("t")
        named = set(world.disk.files())
    named = set(world.disk.files())
    strays = [
        "manifest.new",
        "journal-99",
        "topics/1/1-5.log",
        "topics/1/1-5.index",
        "topics/1/junk",
        "topics/1/9-0.log",
    ]
    world.disk.make_directory(f"{DIRECTORY}/topics/77")
    for stray in [*strays, "topics/77/1-0.log"]:
        world.disk.open(f"{DIRECTORY}/{stray}", write=True, create=True)
    with world.own() as broker:
        assert set(world.disk.files()) == named
        assert messages(broker, "t") == numbered(3)


def test_a_follower_leaves_leftovers() -> None:
    world = World()
    world.own().close()
    world.disk.open(f"{DIRECTORY}/journal-99", write=True, create=True)
    before = set(world.disk.files())
    world.follow().close()
    assert set(world.disk.files()) == before


def test_a_torn_tail_is_cut_and_reported() -> None:
    world = World()
    with world.own() as broker:
        broker.create_topic("t")
        append(broker, "t", numbered(3))
    (path,) = segment_paths(world)
    world.disk.put(path, world.disk.content(path) + b"TXBK" + bytes(20))
    with world.own() as broker:
        assert broker.report == [f"{path}: cut off 24 bytes of an incomplete block at offset 192"]
        assert messages(broker, "t") == numbered(3)
        append(broker, "t", numbered(2, 3))
    with world.own() as broker:
        assert broker.report == []
        assert messages(broker, "t") == numbered(5)


def test_an_unfinished_journal_record_is_dropped_and_reported() -> None:
    world = World()
    broker = world.own()
    broker.create_topic("t")
    append(broker, "t", numbered(3))
    found = World(world.disk.crash(Unsynced.LOST))
    journal = f"{DIRECTORY}/journal-1"
    found.disk.put(journal, found.disk.content(journal) + b"half a record")
    with found.own() as broker:
        assert broker.report == [f"{journal}: dropped 13 bytes of an append that was never completed or acknowledged"]
        assert messages(broker, "t") == numbered(3)


def test_messages_that_only_a_segment_has_are_kept_and_reported() -> None:
    world = World()
    broker = world.own()
    broker.create_topic("t")
    append(broker, "t", numbered(3))
    append(broker, "t", numbered(2, 3))
    found = World(world.disk.kill())
    journal = f"{DIRECTORY}/journal-1"
    found.disk.flip(journal, found.disk.files()[journal] * 8 - 100)
    with found.own() as broker:
        assert len(broker.report) == 2
        assert broker.report[1].endswith("1-0.log: kept 2 messages that the journal had lost")
        assert messages(broker, "t") == numbered(5)


def test_replay_restores_lost_bytes_of_the_segment() -> None:
    world = World()
    broker = world.own()
    for topic in ("t", "u"):
        broker.create_topic(topic)
    for number in range(10):
        append(broker, "tu"[number % 2], numbered(1, number))
    found = World(world.disk.crash(Unsynced.LOST))
    assert all(not found.disk.content(path) for path in segment_paths(found))
    with found.own() as broker:
        assert messages(broker, "t") == [numbered(10)[number] for number in range(0, 10, 2)]
        assert messages(broker, "u") == [numbered(10)[number] for number in range(1, 10, 2)]
        assert broker.report == []


@pytest.mark.parametrize("lost", ["journal-2", "topics/1/1-0.log", "topics/1/2-0.log"])
def test_a_missing_file_is_named(lost: str) -> None:
    world = World()
    with world.own() as broker:
        broker.create_topic("t")
        append(broker, "t", numbered(3))
        broker.roll("t")
    assert f"{DIRECTORY}/{lost}" in world.disk.files()
    world.disk.remove(f"{DIRECTORY}/{lost}")
    with pytest.raises(Damaged, match=lost):
        world.own()


@pytest.mark.parametrize("segment", ["1-0.log", "2-0.log"])
def test_a_segment_that_is_too_short_is_named_with_the_offset(segment: str) -> None:
    world = World()
    with world.own() as broker:
        broker.create_topic("t")
        append(broker, "t", numbered(3))
        broker.roll("t")
        append(broker, "t", numbered(3))
    path = f"{DIRECTORY}/topics/1/{segment}"
    world.disk.put(path, world.disk.content(path)[:-5])
    with pytest.raises(Damaged, match=f"{segment}, offset {len(world.disk.content(path))}"):
        world.own()


def test_an_old_block_is_verified_when_it_is_read() -> None:
    world = World()
    with world.own() as broker:
        broker.create_topic("t")
        append(broker, "t", numbered(3))
        append(broker, "t", numbered(3, 3))
    (path,) = segment_paths(world)
    world.disk.flip(path, world.disk.files()[path] * 8 - 24 * 8)
    with world.own() as broker, broker.reader("t") as reader:
        assert len(reader.read(limit=10) or ()) == 3, "the blocks before it are valid"
        with pytest.raises(Damaged, match="offset 192"):
            reader.read(limit=10)
        assert broker.last_position("t") == (1, 5, -1)


def test_journal_blocks_of_a_deleted_topic_are_ignored() -> None:
    world = World()
    broker = world.own()
    for topic in ("t", "u"):
        broker.create_topic(topic)
        append(broker, topic, numbered(3))
    broker.delete_topic("t")
    broker.create_topic("t")
    append(broker, "t", numbered(1, 9))
    for disk in (world.disk.crash(Unsynced.LOST), world.disk.kill()):
        with World(disk).own() as again:
            assert messages(again, "t") == numbered(1, 9)
            assert messages(again, "u") == numbered(3)
            assert again.report == []


def test_a_journal_of_another_log_is_damage() -> None:
    one, other = World(), World(SimulatedDisk())
    broker = one.own()
    broker.create_topic("t")
    append(broker, "t", numbered(3))
    other.environment.randomness.token(99)
    with other.own() as empty:
        empty.create_topic("t")
    found = World(other.disk.kill())
    found.disk.put(f"{DIRECTORY}/journal-1", one.disk.content(f"{DIRECTORY}/journal-1"))
    with pytest.raises(Damaged, match=r"journal-1.*does not have Mark"):
        found.own()


def test_names_of_any_kind_are_kept(tmp_path: Path) -> None:
    names = ["a/b", "..", "größe ✓", "con", "x" * 400, 'quo"te', "*"]
    with FileBroker.open(str(tmp_path / "log"), watermark_bytes=0) as broker:
        for name in names:
            broker.create_topic(name)
            append(broker, name, numbered(1))
    with FileBroker.open(str(tmp_path / "log"), watermark_bytes=0) as broker:
        assert broker.topics() == sorted(names)
        assert all(len(rows(broker, name)) == 1 for name in names)


def test_follower_of_a_missing_topic_raises() -> None:
    world = World()
    with world.own(), world.follow() as follower, pytest.raises(TopicNotFound, match="owner"):
        follower.reader("t")
