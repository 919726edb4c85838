"""Reading the embedded log: seeking, small and big blocks, following a live owner, concurrent trims and compactions."""

import errno
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from file_logs import DIRECTORY, World, append, messages, numbered, rows, segment_paths
from hypothesis import given, settings
from hypothesis import strategies as st

from broker_io.batch import Batch, Message
from broker_io.errors import Closed, Damaged, DiskFailed, PositionTrimmed, TopicNotFound
from broker_io.filelog.log import FileBroker
from broker_io.filelog.log.broker import FollowingBroker
from broker_io.position import LATEST, Position
from broker_io.testing.disk import SimulatedFile

SEGMENT = f"{DIRECTORY}/topics/1/1-0.log"


@given(st.lists(st.integers(1, 40), min_size=1, max_size=12), st.integers(100, 3000), st.data())
@settings(max_examples=60)
def test_reads_from_any_position_with_any_limit(sizes: list[int], segment_bytes: int, data: st.DataObject) -> None:
    world = World()
    with world.own(segment_bytes=segment_bytes) as owner, world.follow() as follower:
        owner.create_topic("t")
        positions: list[Position] = []
        for size in sizes:
            world.clock.advance(1)
            positions += append(owner, "t", numbered(size, len(positions)))
        expected = numbered(len(positions))
        start = data.draw(st.integers(0, len(positions) - 1))
        limit = data.draw(st.integers(1, 50))
        for broker in (owner, follower):
            found = rows(broker, "t", positions[start], limit=limit)
            assert [row.position for row in found] == positions[start:]
            assert [row.message for row in found] == expected[start:]
            times = [row.publish_time for row in found]
            at = broker.position_at("t", times[0])
            assert at is not None
            assert at <= positions[start]
            assert rows(broker, "t", at)[0].publish_time == times[0]
            assert broker.position_at("t", times[-1] + 1) is None
            assert broker.last_position("t") == positions[-1]
            assert broker.first_position("t") == positions[0]


def test_batches_respect_the_limit_and_keep_blocks_whole() -> None:
    world = World()
    with world.own() as broker:
        broker.create_topic("t")
        for size in (5, 100, 20, 10, 1):
            append(broker, "t", numbered(size))
        with broker.reader("t") as reader:
            sizes = []
            while (batch := reader.read(limit=30)) is not None:
                sizes.append(len(batch))
    assert sizes == [5, 30, 30, 30, 10, 30, 1]


def test_follower_sees_appends_rolls_and_new_topics() -> None:
    world = World()
    with world.own() as owner, world.follow() as follower:
        assert follower.topics() == []
        owner.create_topic("t")
        assert follower.topics() == ["t"]
        with follower.reader("t") as reader:
            for number in range(30):
                assert reader.read() is None
                append(owner, "t", numbered(1, number))
                batch = reader.read()
                assert batch is not None
                assert [*batch.messages] == numbered(1, number)
                if number % 7 == 0:
                    owner.roll("t")
            assert follower.ledgers("t") == owner.ledgers("t")
            assert follower.last_position("t") == owner.last_position("t")
            owner.delete_topic("t")
            with pytest.raises(TopicNotFound, match="deleted"):
                reader.read()


def followed_tail(tail: bytes) -> tuple[World, FileBroker]:
    """A live log whose open segment has bytes after its two acknowledged messages."""
    world = World()
    owner = world.own()
    owner.create_topic("t")
    append(owner, "t", numbered(2))
    world.disk.open(SEGMENT, write=True).write(world.disk.files()[SEGMENT], [tail])
    return world, owner


def test_incomplete_block_is_not_read_yet() -> None:
    source = World()
    with source.own() as owner:
        owner.create_topic("t")
        append(owner, "t", numbered(2))
        first = source.disk.files()[SEGMENT]
        append(owner, "t", numbered(2, 2))
        block = source.disk.content(SEGMENT)[first:]
    for size in range(0, len(block) + 1, 7):
        world, _ = followed_tail(block[:size])
        with world.follow() as follower, follower.reader("t") as reader:
            assert len(reader.read() or ()) == 2
            before = world.clock.monotonic()
            if size < len(block):
                assert reader.read(timeout=5) is None
                assert world.clock.monotonic() >= before + 5
                world.disk.open(SEGMENT, write=True).write(first + size, [block[size:]])
            assert next(iter(reader.read() or ())).message == numbered(1, 2)[0]
            assert follower.last_position("t") == (1, 3, -1)


@pytest.mark.parametrize("tail", [bytes(200), b"rubbish" * 30])
def test_bytes_that_are_no_block_for_a_second_are_damage(tail: bytes) -> None:
    world, _ = followed_tail(tail)
    with world.follow() as follower, follower.reader("t") as reader:
        assert len(reader.read() or ()) == 2
        with pytest.raises(Damaged, match="open it for writing once"):
            reader.read(timeout=120)
        assert 1.0 <= world.clock.monotonic() < 1.1


@pytest.mark.parametrize("tail", [bytes(200), b"rubbish" * 30])
def test_possible_damage_is_not_reported_as_the_end(tail: bytes) -> None:
    world, _ = followed_tail(tail)
    with world.follow() as follower, follower.reader("t") as reader:
        assert len(reader.read() or ()) == 2
        questions: list[Callable[[], object]] = [
            reader.read,
            lambda: follower.last_position("t"),
            lambda: follower.ledgers("t"),
            lambda: follower.position_at("t", 0),
            lambda: follower.reader("t", LATEST),
        ]
        for question in questions:
            with pytest.raises(Damaged, match=r"1-0\.log, offset 176"):
                question()


def test_bytes_that_change_are_still_being_written(monkeypatch: pytest.MonkeyPatch) -> None:
    world, _ = followed_tail(bytes(200))
    ends = world.disk.files()[SEGMENT] - 200
    sleep, changes = world.clock.sleep, iter(range(500))

    def change(seconds: float) -> None:
        """Write to the end of the file while the reader waits."""
        sleep(seconds)
        number = next(changes)
        file = world.disk.open(SEGMENT, write=True)
        file.write(ends, [b"%d" % number]) if number < 400 else file.truncate(ends)

    monkeypatch.setattr(world.clock, "sleep", change)
    with world.follow() as follower, follower.reader("t") as reader:
        assert len(reader.read() or ()) == 2
        assert reader.read() is None
        assert world.clock.monotonic() > 3.0


def test_damage_before_the_settled_offset_is_reported_at_once() -> None:
    world, owner = followed_tail(b"")
    owner.close()
    world.disk.flip(SEGMENT, 900)
    with world.follow() as follower, follower.reader("t") as reader, pytest.raises(Damaged):
        reader.read()


@pytest.mark.parametrize("which", ["owner", "follower"])
def test_reader_survives_the_trim_of_read_messages(which: str) -> None:
    world = World()
    with world.own() as owner, world.follow() as follower:
        owner.create_topic("t")
        for number in range(4):
            append(owner, "t", numbered(2, 2 * number))
            owner.roll("t")
        broker = owner if which == "owner" else follower
        behind = broker.reader("t", Position(1, 1))
        at_end = broker.reader("t", Position(2, 1), inclusive=False)
        new = broker.reader("t")
        assert len(behind.read(limit=1) or ()) == 1
        owner.trim("t", 3)
        with pytest.raises(PositionTrimmed, match=r"1:2.*2:1"):
            behind.read()
        for reader in (at_end, new):
            batch = reader.read(limit=1)
            assert batch is not None
            assert batch.positions.first == (3, 0, -1)
        with pytest.raises(PositionTrimmed, match="2:1"):
            broker.reader("t", Position(2, 1))
        assert broker.first_position("t") == (3, 0, -1)


def test_trimming_everything_leaves_the_last_position() -> None:
    world = World()
    with world.own() as owner:
        owner.create_topic("t")
        assert owner.last_position("t") is None
        append(owner, "t", numbered(2))
        owner.roll("t")
        owner.trim("t", 99)
        assert owner.first_position("t") is None
        assert owner.last_position("t") == (1, 1, -1)
    with world.own() as owner:
        assert owner.last_position("t") == (1, 1, -1)
        assert [*append(owner, "t", numbered(1))] == [(2, 0, -1)]


def test_latest_is_after_all_messages() -> None:
    world = World()
    with world.own() as owner, world.follow() as follower:
        owner.create_topic("t")
        append(owner, "t", numbered(3))
        readers = [broker.reader("t", LATEST) for broker in (owner, follower)]
        assert [reader.read() for reader in readers] == [None, None]
        append(owner, "t", numbered(1, 3))
        assert [next(iter(reader.read() or ())).message for reader in readers] == numbered(1, 3) * 2


def test_open_readers_see_all_survivors_of_a_compaction() -> None:
    world = World()
    with world.own(segment_bytes=600) as owner, world.follow() as follower:
        owner.create_topic("t")
        for number in range(60):
            append(owner, "t", [Message(b"k%d" % (number % 7), b"%d" % number)])
        readers = [broker.reader("t") for broker in (owner, follower)]
        seen: list[dict[bytes, bytes]] = [{}, {}]
        for turn in range(200):
            for reader, latest in zip(readers, seen, strict=True):
                for row in reader.read(limit=1) or ():
                    assert row.message.key is not None
                    assert row.message.value is not None
                    latest[row.message.key] = row.message.value
            if turn in (5, 11, 30):
                owner.compact("t")
                append(owner, "t", [Message(b"k%d" % turn, b"%d" % turn)])
        expected = {message.key: message.value for message in messages(owner, "t")}
        assert seen == [expected, expected]


Question = Callable[[FollowingBroker], object]
QUESTIONS: dict[str, Question] = {
    "position_at": lambda broker: broker.position_at("t", 0),
    "last_position": lambda broker: broker.last_position("t"),
    "ledgers": lambda broker: broker.ledgers("t"),
    "reader": lambda broker: broker.reader("t", LATEST)._ledger,
}


@pytest.mark.parametrize("question", QUESTIONS.values(), ids=QUESTIONS)
@pytest.mark.parametrize("change", ["compact", "trim"])
def test_files_removed_during_a_query_are_not_missing(
    question: Question, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World()
    with world.own() as owner, world.follow() as follower:
        owner.create_topic("t")
        append(owner, "t", [Message(b"k", b"1"), Message(b"k", b"2")])
        opened = world.disk.open

        def open_later(path: str, **options: bool) -> SimulatedFile:
            if path == SEGMENT:
                monkeypatch.setattr(world.disk, "open", opened)
                owner.roll("t")
                owner.compact("t") if change == "compact" else owner.trim("t", 2)
                assert SEGMENT not in world.disk.files()
            return opened(path, **options)

        monkeypatch.setattr(world.disk, "open", open_later)
        assert question(follower) == question(owner)
        assert world.disk.open == opened, "the file was opened"


@pytest.mark.parametrize("question", QUESTIONS.values(), ids=QUESTIONS)
def test_every_query_names_a_missing_file(question: Question) -> None:
    world = World()
    with world.own() as owner, world.follow() as follower:
        owner.create_topic("t")
        append(owner, "t", numbered(2))
        world.disk.remove(SEGMENT)
        with pytest.raises(Damaged, match=r"1-0\.log.*missing"):
            question(follower)


@pytest.mark.parametrize("question", QUESTIONS.values(), ids=QUESTIONS)
def test_every_query_names_an_unreadable_file(question: Question, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    with world.own() as owner, world.follow() as follower:
        owner.create_topic("t")
        append(owner, "t", numbered(2))
        opened = world.disk.open

        def refuse(path: str, **options: bool) -> SimulatedFile:
            if path == SEGMENT:
                raise PermissionError(errno.EACCES, "Permission denied", path)
            return opened(path, **options)

        monkeypatch.setattr(world.disk, "open", refuse)
        with pytest.raises(DiskFailed, match=r"1-0\.log: Permission denied"):
            question(follower)


def test_error_names_the_missing_segment() -> None:
    world = World()
    with world.own() as broker:
        broker.create_topic("t")
        append(broker, "t", numbered(2))
        world.disk.remove(SEGMENT)
        with broker.reader("t") as reader, pytest.raises(Damaged, match=r"1-0.log.*missing"):
            reader.read()


def test_readers_end_when_they_or_their_broker_are_closed() -> None:
    world = World()
    for open_broker in (world.own, world.follow):
        with world.own() if open_broker == world.follow else open_broker() as owner:
            owner.create_topic("t")
            broker = world.follow() if open_broker == world.follow else owner
            reader, other = broker.reader("t"), broker.reader("t")
            reader.close()
            with pytest.raises(Closed, match="reader"):
                reader.read()
            broker.close()
            with pytest.raises(Closed, match="log"):
                other.read()


def test_a_waiting_reader_wakes_up_when_its_broker_is_closed(tmp_path: Path) -> None:
    broker = FileBroker.open(str(tmp_path / "log"), watermark_bytes=0)
    broker.create_topic("t")
    ends: list[BaseException] = []

    def wait() -> None:
        try:
            broker.reader("t").read(timeout=60)
        except Closed as error:
            ends.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    broker.close()
    thread.join(60)
    assert len(ends) == 1


FOLLOW = """
import sys
from broker_io.filelog.log import FileBroker
count = 0
with FileBroker.open(sys.argv[1], read_only=True) as broker, broker.reader("t") as reader:
    print("ready", flush=True)
    while count < int(sys.argv[2]):
        batch = reader.read(timeout=120)
        assert batch is not None
        for row in batch:
            assert row.message.value == b"v%d" % count, (row, count)
            count += 1
"""


def test_another_process_follows_through_rolls_and_checkpoints(tmp_path: Path) -> None:
    directory = str(tmp_path / "log")
    with FileBroker.open(directory, watermark_bytes=0, segment_bytes=20_000, journal_bytes=50_000) as broker:
        broker.create_topic("t")
        command = [sys.executable, "-c", FOLLOW, directory, "5000"]
        environment = {**os.environ, "PYTHONPATH": os.getcwd()}
        with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as follower:
            assert follower.stdout is not None
            assert follower.stdout.readline() == b"ready\n"
            for start in range(0, 5000, 20):
                append(broker, "t", numbered(20, start))
            assert follower.wait(60) == 0
        assert len(broker.ledgers("t")) > 3


def test_many_topics_need_few_open_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("broker_io.filelog.log.log.OPEN_SEGMENTS", 4)
    with FileBroker.open(str(tmp_path / "log"), watermark_bytes=0) as broker:
        for number in range(20):
            broker.create_topic(f"t{number}")
        before = len(os.listdir("/dev/fd"))
        writers = [broker.writer(f"t{number}") for number in range(20)]
        for future in [writer.append(Batch.of(numbered(1))) for writer in writers]:
            future.result(30)
        assert len(os.listdir("/dev/fd")) - before <= 5
    with FileBroker.open(str(tmp_path / "log"), watermark_bytes=0) as broker:
        assert all(messages(broker, f"t{number}") == numbered(1) for number in range(20))


def test_segment_paths_are_those_of_the_helper() -> None:
    world, _ = followed_tail(b"")
    assert segment_paths(world) == [SEGMENT]
