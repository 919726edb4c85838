"""Writing to the embedded log: rejected batches, blocks of appends, group commit, threads, failures."""

import errno
import threading
from concurrent.futures import wait
from pathlib import Path

import numpy as np
import pytest
from file_logs import DIRECTORY, World, append, messages, numbered, rows, submit
from hypothesis import given, settings
from hypothesis import strategies as st

from broker_io.batch import Batch, Blobs, Labels, Message
from broker_io.errors import (
    Closed,
    DiskFailed,
    DiskFull,
    DiskWatermark,
    Fenced,
    InvalidMessage,
    MessageTooLarge,
    TopicNotFound,
)
from broker_io.filelog.log import FileBroker, commit
from broker_io.filelog.log.log import FileLog
from broker_io.port import Writer
from broker_io.position import Positions


def topic_writer(world: World, **options: object) -> tuple[FileBroker, Writer]:
    broker = world.own(**options)
    broker.create_topic("t")
    return broker, broker.writer("t")


LIES = [
    Batch(Blobs.of([b"a"]), Blobs.of([b"1", b"2"])),
    Batch(Blobs.of([b"a"]), Blobs.of([b"1"]), {"p": Labels.of(["x", "y"])}),
    Batch(Blobs.of([b"a"]), Blobs.of([b"1"]), {}, np.zeros(2, np.int64)),
    Batch(Blobs.of([b"a"]), Blobs(b"12", np.array([0, 3], np.int32), None)),
    Batch(Blobs.of([b"a"]), Blobs(b"12", np.array([1, 0], np.int32), None)),
    Batch(Blobs.of([b"a"]), Blobs(b"12", np.array([-1, 1], np.int32), None)),
    Batch(Blobs.of([b"a"] * 2), Blobs(b"1234", np.array([0, 3, 2], np.int32), None)),
    Batch(Blobs.of([b"a"]), Blobs.of([b"1"]), {"p": Labels.of(["\ud800"])}),
    Batch(Blobs.of([b"a"]), Blobs.of([b"1"]), {"\ud800": Labels.of(["x"])}),
    Batch.of([Message(b"a", b"1", {f"p{number}": "x" for number in range(1001)})]),
]


@pytest.mark.parametrize("batch", LIES, ids=range(len(LIES)))
def test_inconsistent_batch_is_rejected_without_other_effects(batch: Batch) -> None:
    world = World()
    broker, writer = topic_writer(world)
    with pytest.raises(InvalidMessage):
        writer.append(batch)
    assert len(writer.append(Batch.of(numbered(2))).result(0)) == 2
    assert messages(broker, "t") == numbered(2)


@given(st.lists(st.integers(0, 60), min_size=1, max_size=8), st.integers(1, 40))
@settings(max_examples=100)
def test_only_too_large_messages_are_rejected(sizes: list[int], limit: int) -> None:
    world = World()
    broker, writer = topic_writer(world, max_message_bytes=limit)
    batch = Batch.of([Message(b"k" * (size // 3), b"v" * (size // 3), {"p": "x" * (size // 3)}) for size in sizes])
    too_large = [index for index, size in enumerate(batch.sizes().tolist()) if size > limit]
    if too_large:
        with pytest.raises(MessageTooLarge, match=f"message {too_large[0]} .* {batch.sizes()[too_large[0]]} bytes"):
            writer.append(batch)
        assert rows(broker, "t") == []
    else:
        writer.append(batch).result(0)
        assert messages(broker, "t") == [*batch]


def test_property_texts_are_counted_in_bytes() -> None:
    _, writer = topic_writer(World(), max_message_bytes=100)
    with pytest.raises(MessageTooLarge):
        writer.append(Batch.of([Message(None, b"", {"p": "ü" * 60})]))
    writer.append(Batch.of([Message(None, b"", {"p": "u" * 60})])).result(0)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=20), st.integers(50, 2000))
@settings(max_examples=60)
def test_merged_and_split_appends_are_read_as_written(sizes: list[int], block_bytes: int) -> None:
    world = World()
    with pytest.MonkeyPatch.context() as patch, world.own() as broker:
        patch.setattr(commit, "BLOCK_BYTES", block_bytes)
        patch.setattr(commit, "MAX_BLOCK_MESSAGES", 11)
        broker.create_topic("t")
        log = broker._log
        futures, start = [], 0
        for size in sizes:
            futures.append(submit(log, log.topic("t"), Batch.of(numbered(size, start))))
            start += size
        log.flush()
        positions = [position for future in futures for position in future.result(0)]
        assert [row.position for row in rows(broker, "t")] == positions
        assert messages(broker, "t") == numbered(start)


def test_properties_of_one_append_add_no_columns_to_many_others() -> None:
    with World().own() as broker:
        broker.create_topic("t")
        log = broker._log
        wide = Message(None, b"", {f"name-{number}": "x" for number in range(900)})
        narrow = [Message(None, b"%d" % number) for number in range(4000)]
        for batch in ([wide], narrow, narrow[:9], [wide], narrow):
            submit(log, log.topic("t"), Batch.of(batch))
        log.flush()
        assert messages(broker, "t") == [wide, *narrow, *narrow[:9], wide, *narrow]
        (ledger,) = broker.ledgers("t")
        assert ledger.bytes < 1_000_000


def test_pending_appends_of_all_topics_share_one_sync() -> None:
    world = World()
    with world.own() as broker:
        log: FileLog = broker._log
        for topic in ("t", "u", "v"):
            broker.create_topic(topic)
        futures = [submit(log, log.topic("tuv"[number % 3]), Batch.of(numbered(1, number))) for number in range(90)]
        before = len(world.disk.history)
        log.flush()
        done = world.disk.history[before:]
        assert [operation.kind for operation in done] == ["write", "sync", "write", "write", "write"]
        assert [operation.path for operation in done[:2]] == [f"{DIRECTORY}/journal-1"] * 2
        assert all(future.done() for future in futures)
        for number, topic in enumerate("tuv"):
            assert messages(broker, topic) == [numbered(90)[index] for index in range(number, 90, 3)]


def test_nothing_reaches_a_segment_before_the_journal_is_synced() -> None:
    world = World()
    broker, writer = topic_writer(world)
    world.disk.fail_at(2, errno.EIO)
    with pytest.raises(DiskFailed, match=r"journal-1.*until it is opened again.*repair the disk"):
        writer.append(Batch.of(numbered(3))).result(0)
    assert rows(broker, "t") == []
    assert world.disk.files()[f"{DIRECTORY}/topics/1/1-0.log"] == 0


@pytest.mark.parametrize(
    ("error", "kind"), [(errno.ENOSPC, DiskFull), (errno.EDQUOT, DiskFull), (errno.EIO, DiskFailed)]
)
def test_first_failure_stops_the_log(error: int, kind: type[DiskFailed]) -> None:
    world = World()
    broker, writer = topic_writer(world)
    writer.append(Batch.of(numbered(3))).result(0)
    world.disk.fail_at(1, error)
    for _ in range(2):
        with pytest.raises(kind):
            writer.append(Batch.of(numbered(1, 3))).result(0)
    before = len(world.disk.history)
    for change in (lambda: broker.create_topic("u"), lambda: broker.roll("t"), lambda: broker.delete_topic("t")):
        with pytest.raises(kind):
            change()
    assert messages(broker, "t") == numbered(3), "reads still work"
    broker.close()
    assert len(world.disk.history) == before
    with world.own() as again:
        assert messages(again, "t") == numbered(3)
        assert again.report == []


@pytest.mark.parametrize("operation", [1, 2], ids=["write", "sync"])
def test_a_failed_append_leaves_nothing_in_the_journal(operation: int) -> None:
    world = World()
    _, writer = topic_writer(world)
    writer.append(Batch.of(numbered(3))).result(0)
    world.disk.fail_at(operation, errno.EIO, written=10_000)
    with pytest.raises(DiskFailed):
        writer.append(Batch.of(numbered(2, 3))).result(0)
    found = World(world.disk.kill())
    with found.own() as again:
        assert messages(again, "t") == numbered(3)
        assert again.report == []


def test_written_appends_are_no_longer_pending() -> None:
    world = World()
    with world.own() as broker:
        broker.create_topic("t")
        log = broker._log
        for count in (1, 7, 300):
            for number in range(count):
                submit(log, log.topic("t"), Batch.of(numbered(1, number)))
                assert log.pending_bytes > 1000 * (number + 1)
            log.flush()
            assert log.pending_bytes == 0


def test_below_the_watermark_appends_are_refused_until_there_is_space() -> None:
    world = World()
    broker, writer = topic_writer(world, watermark_bytes=10_000)
    writer.append(Batch.of(numbered(1))).result(0)
    world.disk.capacity = 12_000
    world.clock.advance(2)
    with pytest.raises(DiskWatermark, match="fewer than the watermark of 10000"):
        for _ in range(30):
            world.clock.advance(2)
            writer.append(Batch.of([Message(None, b"x" * 500)])).result(0)
    world.disk.capacity = 1 << 30
    writer.append(Batch.of(numbered(1))).result(0)
    broker.close()


def test_publish_times_never_go_back() -> None:
    world = World()
    with world.own() as broker:
        broker.create_topic("t")
        for jump in (5000, -9000, 1000, -1):
            world.clock.set_ms(world.clock.now_ms() + jump)
            append(broker, "t", numbered(1))
            broker.roll("t")
    with world.own() as broker:
        append(broker, "t", numbered(1))
        times = [row.publish_time for row in rows(broker, "t")]
    assert times == sorted(times)


def test_exclusive_writer_fences_until_it_closes() -> None:
    world = World()
    broker, shared = topic_writer(world)
    first = broker.writer("t", exclusive=True)
    with pytest.raises(Fenced):
        shared.append(Batch.of(numbered(1))).result(0)
    with pytest.raises(Fenced, match="held"):
        broker.writer("t")
    second = broker.writer("t", exclusive=True)
    first.close()
    with pytest.raises(Fenced):
        broker.writer("t")
    second.append(Batch.of(numbered(1))).result(0)
    second.close()
    with pytest.raises(Closed):
        second.append(Batch.of(numbered(1))).result(0)
    broker.writer("t").append(Batch.of(numbered(1, 1))).result(0)
    assert messages(broker, "t") == numbered(2)


def test_writer_of_a_deleted_topic_fails_even_if_it_was_re_created() -> None:
    world = World()
    broker, writer = topic_writer(world)
    broker.delete_topic("t")
    broker.create_topic("t")
    with pytest.raises(TopicNotFound):
        writer.append(Batch.of(numbered(1))).result(0)
    assert rows(broker, "t") == []


def test_empty_append_has_no_positions() -> None:
    _, writer = topic_writer(World())
    assert len(writer.append(Batch.of([])).result(0)) == 0


def test_threads_append_while_the_log_rolls_trims_and_compacts(tmp_path: Path) -> None:
    directory = str(tmp_path / "log")
    appended: list[list[Positions]] = [[], [], []]
    sizes = {"segment_bytes": 30_000, "journal_bytes": 50_000}
    with FileBroker.open(directory, watermark_bytes=0, compacted_prefix="", **sizes) as broker:
        broker.create_topic("t")

        def work(number: int) -> None:
            with broker.writer("t") as writer:
                futures = [
                    writer.append(Batch.of([Message(b"%d-%d" % (number, index), b"%d" % index)] * 2))
                    for index in range(400)
                ]
                appended[number] += [future.result(30) for future in futures]

        threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        for _ in range(5):
            broker.compact("t")
            broker.create_topic("other")
            append(broker, "other", numbered(1))
            broker.delete_topic("other")
        for thread in threads:
            thread.join()
        broker.compact("t")
        found = {row.message.key: row.position for row in rows(broker, "t")}
    expected = {
        b"%d-%d" % (number, index): positions[1]
        for number in range(3)
        for index, positions in enumerate(appended[number])
    }
    assert found == expected
    for positions in appended:
        firsts = [run[0] for run in positions]
        assert firsts == sorted(firsts), "appends of one writer keep their order"


def test_failure_wakes_all_waiting_threads(tmp_path: Path) -> None:
    broker = FileBroker.open(str(tmp_path / "log"), watermark_bytes=0)
    broker.create_topic("t")
    journal = broker._log.journal

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "gone")

    journal.append = fail  # type: ignore[method-assign]  # a disk that fails while the committer runs
    with broker.writer("t") as writer:
        futures = [writer.append(Batch.of(numbered(1))) for _ in range(100)]
        assert not wait(futures, 10).not_done
        assert all(isinstance(future.exception(), DiskFailed) for future in futures)
    broker.close()


def test_future_of_an_append_cannot_be_cancelled(tmp_path: Path) -> None:
    with FileBroker.open(str(tmp_path / "log"), watermark_bytes=0) as broker:
        broker.create_topic("t")
        with broker.writer("t") as writer:
            future = writer.append(Batch.of(numbered(1)))
            assert not future.cancel()
            assert len(future.result(120)) == 1
