"""Appends to several topics of the embedded log in one operation: all of it, or nothing, whatever happens."""

from __future__ import annotations

import errno
import sys
from collections import Counter
from concurrent.futures import Future
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
from file_logs import submit
from log_history import STRIDE, check_answers, content_of, open_log

from broker_io.batch import Batch, Labels, Message
from broker_io.errors import DiskFailed, DiskFull, DiskWatermark, Error
from broker_io.filelog.log import log as log_module
from broker_io.filelog.log.broker import FileBroker, FileWriter
from broker_io.filelog.log.commit import PendingBatch, PendingUnit
from broker_io.filelog.log.layout import journal_path
from broker_io.filelog.log.operations import decode_operations
from broker_io.position import Positions
from broker_io.testing import Crash, SimulatedClock, SimulatedDisk, Unsynced
from broker_io.testing.contract.together import append_together

TOPICS = ["a", "b", "c"]
Contents = dict[str, list[bytes | None]]


def batch(*texts: str) -> Batch:
    return Batch.of([Message(b"k", text.encode(), {"n": text}) for text in texts])


def begun(disk: SimulatedDisk, clock: SimulatedClock | None = None, **options: Any) -> FileBroker:
    broker = open_log(disk, clock=clock, **options)
    for topic in TOPICS:
        broker.create_topic(topic)
    return broker


def writers(broker: FileBroker) -> list[FileWriter]:
    return [broker.writer(topic, exclusive=True) for topic in TOPICS]


def together(broker: FileBroker, text: str) -> Future[list[Positions | Error]]:
    """Append to all topics."""
    return append_together(broker, [(writer, batch(text, text)) for writer in writers(broker)])


def values(broker: FileBroker) -> Contents:
    found = content_of(broker)
    for topic, content in found.items():
        check_answers(broker, topic, content)
    return {topic: [message.value for _, message in content.rows] for topic, content in found.items()}


def all_with(*texts: str) -> Contents:
    return {topic: [text.encode() for text in texts for _ in range(2)] for topic in TOPICS}


def test_appends_together_are_one_record_and_one_sync() -> None:
    disk = SimulatedDisk()
    broker = begun(disk, committer=False)
    together(broker, "x").result(0)
    before, end = len(disk.history), broker._log.journal.end.lsn
    together(broker, "y").result(0)
    assert [operation.path for operation in disk.history[before:] if operation.kind == "sync"] == ["/log/journal-1"]
    (record,) = broker._log.journal.read(end, end + 1)
    assert [operation.topic for operation in decode_operations(record.content)] == [1, 2, 3]


def test_a_journal_cut_at_every_byte_has_all_of_a_unit_or_nothing() -> None:
    disk = SimulatedDisk()
    broker = begun(disk)
    together(broker, "x").result(0)
    path = journal_path("/log", broker._log.journal.number)
    start = disk.files()[path]
    together(broker, "y").result(0)
    end = disk.files()[path]
    content, ended = disk.content(path), disk.crash(Unsynced.LOST)  # no segment is synced
    for size in range(start, end + 1):
        cut, found = ended.copy(), all_with("x", "y") if size == end else all_with("x")
        cut.put(path, content[:size])
        if size % 10 == 0 or size == end:
            with open_log(cut, read_only=True) as reader:
                assert values(reader) == found
        with open_log(cut) as again:
            assert len(content_of(again)["a"].rows) == len(content_of(again)["c"].rows) == len(found["a"])
            if size % 50 == 0 or size == end:
                assert values(again) == found, size
                together(again, "z").result(0)
                assert values(again) == {topic: [*found[topic], b"z", b"z"] for topic in TOPICS}


def test_a_crash_at_any_operation_leaves_all_of_a_unit_or_nothing() -> None:
    disk = SimulatedDisk()
    broker = begun(disk)
    together(broker, "x").result(0)
    start, texts = len(disk.history), "yzu"
    for text in texts:  # with rolls and checkpoints
        together(broker, text * 200).result(0)
    operations = disk.history[start:]
    assert {operation.kind for operation in operations} >= {"write", "sync", "create", "rename"}
    for number, operation in enumerate(operations, 1):
        if "journal" not in operation.path and number % STRIDE:
            continue
        for written in {0, operation.size // 2, operation.size} if operation.kind == "write" else {0}:
            disk = SimulatedDisk()
            broker = begun(disk)
            together(broker, "x").result(0)
            disk.stop_at(number, written=written)
            acknowledged = 0
            with pytest.raises(Crash):
                for text in texts:
                    together(broker, text * 200).result(0)
                    acknowledged += 1
            for found in (disk.kill(), disk.crash(Unsynced.LOST), disk.crash(Unsynced.SECTORS, number)):
                with open_log(found) as again:
                    known = [all_with("x", *[text * 200 for text in texts[:n]]) for n in range(4)]
                    assert values(again) in known[acknowledged : acknowledged + 2]


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO])
def test_a_failed_write_or_sync_fails_the_unit_and_leaves_all_or_nothing(error: int) -> None:
    for operation in (1, 2, 3, 5):  # the write and the sync of the journal, and segments
        disk = SimulatedDisk()
        broker = begun(disk)
        together(broker, "x").result(0)
        opened = writers(broker)
        disk.fail_at(operation, error, written=100)
        future = append_together(broker, [(writer, batch("y", "y")) for writer in opened])
        assert type(future.exception(0)) is (DiskFull if error == errno.ENOSPC else DiskFailed)
        assert isinstance(together(broker, "z").exception(0), DiskFailed)
        with open_log(disk.kill()) as again:
            assert values(again) in (all_with("x"), all_with("x", "y"))


def test_a_flush_never_takes_a_part_of_a_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_module, "FLUSH_BYTES", 1)
    broker = begun(SimulatedDisk(), journal_bytes=1_000_000, segment_bytes=1_000_000)
    log, opened = broker._log, writers(broker)
    results: list[object] = []
    for number in range(5):
        unit = [broker._pending((writer, batch(str(number)))) for writer in opened]
        log.submit_unit(PendingUnit(unit, results.append))
        submit(log, opened[0].topic, batch("alone")).add_done_callback(results.append)
    taken = [[len(unit.appends) for unit in log.take()] for _ in range(4)]
    assert taken == [[3], [1], [3], [1]]
    assert log.pending_bytes > 0
    end = log.journal.end.lsn
    log.flush()
    assert log.pending_bytes == 0
    records = [decode_operations(record.content) for record in log.journal.read(end, log.journal.end.lsn)]
    assert [len(operations) for operations in records] == [3, 1] * 3
    assert len(results) == 6


def test_units_up_to_the_limit_share_a_flush() -> None:
    broker = begun(SimulatedDisk())
    log, opened = broker._log, writers(broker)
    for number in range(5):
        unit = [broker._pending((each, batch(str(number)))) for each in opened]
        log.submit_unit(PendingUnit(unit, lambda _: None))
    end = log.journal.end.lsn
    log.flush()
    assert log.journal.end.lsn == end + 1
    assert values(broker) == {topic: [b"%d" % number for number in range(5)] for topic in TOPICS}


def test_a_unit_may_use_the_reserve_below_the_watermark() -> None:
    disk, clock = SimulatedDisk(capacity=1_000_000), SimulatedClock()
    broker = begun(disk, clock, watermark_bytes=50_000)
    opened = writers(broker)

    def append() -> tuple[DiskWatermark | None, BaseException | None, BaseException | None]:
        alone = opened[0].append(batch("row"))
        unit = append_together(broker, [(writer, batch("x", "x")) for writer in opened])
        return broker.space_refusal(), alone.exception(0), unit.exception(0)

    assert append() == (None, None, None)
    disk.capacity = 1_000_000 - disk.free_bytes("/") + 40_000
    clock.advance(2.0)
    refusal, alone, unit = append()
    assert (type(refusal), type(alone), unit) == (DiskWatermark, DiskWatermark, None)
    assert values(broker) == {"a": [b"row", b"x", b"x", b"x", b"x"], "b": [b"x"] * 4, "c": [b"x"] * 4}
    disk.capacity -= 20_000
    clock.advance(2.0)
    assert [*map(type, append())] == [DiskWatermark] * 3
    assert values(broker) == {"a": [b"row", b"x", b"x", b"x", b"x"], "b": [b"x"] * 4, "c": [b"x"] * 4}
    disk.capacity += 900_000
    clock.advance(2.0)
    assert append() == (None, None, None)


def test_a_batch_that_cannot_be_encoded_fails_its_unit_alone() -> None:
    broker = begun(SimulatedDisk())
    log, opened = broker._log, writers(broker)
    column = Labels(np.array([0], np.int32), ("\ud800",))
    broken = Batch(batch("y").keys, batch("y").values, {"n": column})
    whole = [broker._pending((writer, batch("x"))) for writer in opened]
    results: list[Any] = []
    log.submit_unit(PendingUnit(whole[:1], results.append))
    unit = [*whole[1:2], PendingBatch(opened[2].topic, broken, 1, 1, None)]
    log.submit_unit(PendingUnit(unit, results.append))
    third = submit(log, opened[1].topic, batch("z"))
    log.flush()
    failure, (positions,) = results  # the broken one fails when its blocks are made
    assert isinstance(failure, UnicodeEncodeError)
    assert len(positions) == len(third.result(0)) == 1
    assert values(broker) == {"a": [b"x"], "b": [b"z"], "c": []}
    broker.close()


def test_units_of_many_threads_stay_whole() -> None:
    with begun(SimulatedDisk(), committer=True) as broker:
        opened = writers(broker)
        futures = [
            append_together(broker, [(writer, batch(f"{number:03}")) for writer in opened]) for number in range(200)
        ]
        for future in futures:
            assert all(isinstance(outcome, Positions) for outcome in future.result(60))
        wanted: list[bytes | None] = [b"%03d" % number for number in range(200)]
        assert values(broker) == dict.fromkeys(TOPICS, wanted)


@pytest.mark.parametrize("committer", [False, True])
def test_a_result_that_its_caller_does_not_take_stops_nothing(
    committer: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(_: object) -> None:
        raise RuntimeError("the loop is closed")

    with begun(SimulatedDisk(), committer=committer) as broker:
        opened = writers(broker)
        broker.append_together([(opened[0], batch("x"))], refuse)
        append_together(broker, [(opened[0], batch("y"))]).result(60)
        assert values(broker)["a"] == [b"x", b"y"]
    assert "the loop is closed" in caplog.text


@pytest.mark.parametrize("rows", [1, 3, 64])
def test_a_unit_of_one_topic_costs_few_calls(tmp_path: Path, rows: int) -> None:
    """From a checked batch, with the properties of transactions, to its positions."""
    broker = FileBroker.open(str(tmp_path / "log"), committer=False, watermark_bytes=0)
    broker.create_topic("a")
    writer, log = broker.writer("a"), broker._log
    records = [Message(b"k", b"v", {"tb.v": "1", "tb.txn": "0:1", "tb.seq": str(n)}) for n in range(rows)]
    marked = Batch.of([*records, Message(None, b"marker", {"tb.v": "1", "tb.marker": "1"})])
    calls: Counter[str] = Counter()
    results: list[Any] = []

    def count(frame: FrameType, event: str, _: object) -> None:
        name = f"{Path(frame.f_code.co_filename).name} {frame.f_code.co_qualname}"
        calls[name] += event == "call" and not name.endswith("comp>")  # later versions of Python make no call for these

    for _ in range(3):  # the first ones open files
        unit = PendingUnit([broker._pending((writer, marked))], results.append)
        calls.clear()
        sys.setprofile(count)
        try:
            log.submit_unit(unit)
            log.commit(log.take())
        finally:
            sys.setprofile(None)
    assert [len(positions) for positions in results[-1]] == [rows + 1]
    broker.close()
    assert calls.total() <= 60, sorted(calls.items())
