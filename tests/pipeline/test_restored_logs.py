"""A log that was restored from an older copy and has grown since is detected."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from golden_files import committed
from pyspark.sql.streaming.datasource import ReadAllAvailable
from restored_logs import back_up, put_back
from writing import TopicWriter

from broker_io import open_broker
from broker_io.memory import MemoryBroker
from txnbuffer.errors import InvalidRequest, LogReplaced
from txnbuffer.model import Position
from txnbuffer.pipeline import pinned
from txnbuffer.pipeline.exports import VERSIONS, ExportDirectory
from txnbuffer.pipeline.jobs.export import Export
from txnbuffer.pipeline.offsets import Offset, OffsetMark, ReadProgress
from txnbuffer.pipeline.options import ReadOptions, reading_options
from txnbuffer.pipeline.pinned import check_mark, mark_below, pin_topics
from txnbuffer.pipeline.spark.source import StreamReader


class Log:
    """A log in files that can be saved and restored."""

    def __init__(self, path: Path) -> None:
        self.path, self.saved = path / "log", path / "saved"
        self.address = f"file:{self.path}"

    def send(self, count: int = 1) -> None:
        with open_broker(self.address) as broker:
            for _ in range(count):
                TopicWriter(broker, "orders").plain("value")

    def save(self) -> None:
        shutil.copytree(self.path, self.saved)

    def restore(self) -> None:
        shutil.rmtree(self.path)
        shutil.copytree(self.saved, self.path)


@pytest.fixture
def log(tmp_path: Path) -> Log:
    return Log(tmp_path)


class Query:
    """A streaming query without Spark, with a new reader for each trigger (as after a restart), or with one for all."""

    def __init__(self, log: Log, *, running: bool = False) -> None:
        self.log = log
        self.offset: Any = None
        self._marks = StreamReader(self._options())._marks if running else None

    def _options(self, **options: str) -> ReadOptions:
        return ReadOptions.of({"broker": self.log.address, "topics": "orders", **options})

    def trigger(self, **options: str) -> int:
        """Run a micro-batch; the number of its records."""
        reader = StreamReader(self._options(**options))
        reader._marks = self._marks or reader._marks
        begun = self.offset or reader.initialOffset()
        end = json.loads(json.dumps(reader.latestOffset(begun, ReadAllAvailable())))
        rows = [batch.num_rows for task in reader.partitions(begun, end) for batch in reader.read(task)]
        reader.stop()
        self.offset = end
        return sum(rows)


def test_a_query_rejects_a_log_that_was_restored_and_has_grown(log: Log) -> None:
    query = Query(log)
    log.send(3)
    assert query.trigger() == 3
    log.save()
    log.send(3)
    assert query.trigger() == 3
    log.restore()
    log.send(5)
    with pytest.raises(LogReplaced, match=r"another message at 1:5 .* start over"):
        query.trigger()
    assert query.trigger(fail_on_data_loss="false") == 2


@pytest.mark.parametrize("stopped", [False, True])
def test_a_running_query_rejects_a_copy_that_lacks_only_the_last_record_read(log: Log, stopped: bool) -> None:
    query = Query(log, running=True)
    for _ in range(3):
        log.send()
        assert query.trigger() == 1
    log.send()
    log.save()
    log.send()
    assert query.trigger() == 2
    log.restore()
    log.send(3)
    if stopped:
        query._marks = None
    with pytest.raises(LogReplaced, match="another message at 1:4"):
        query.trigger()


@pytest.mark.parametrize("lost", [1, 3])
@pytest.mark.parametrize("new", [1, 9])
@pytest.mark.parametrize("running", [False, True])
def test_a_query_rejects_a_log_that_was_restored_from_a_backup(log: Log, lost: int, new: int, running: bool) -> None:
    """No position comes back, so the last message that was read is missing."""
    query = Query(log, running=running)
    log.send(3)
    assert query.trigger() == 3
    back_up(log.path, log.saved)
    log.send(lost)
    assert query.trigger() == lost
    put_back(log.saved, log.path)
    log.send(new)
    with pytest.raises(LogReplaced):
        query.trigger()


@pytest.mark.parametrize("running", [False, True])
def test_a_query_continues_with_a_backup_that_is_not_older(log: Log, running: bool) -> None:
    query = Query(log, running=running)
    log.send(3)
    assert query.trigger() == 3
    back_up(log.path, log.saved)
    put_back(log.saved, log.path)
    log.send(2)
    assert query.trigger() == 2


def test_a_query_continues_with_a_copy_that_is_not_older(log: Log) -> None:
    query = Query(log)
    log.send(3)
    assert query.trigger() == 3
    log.save()
    log.restore()
    log.send(2)
    assert query.trigger() == 2


def test_a_query_continues_from_a_checkpoint_without_marks(log: Log) -> None:
    query = Query(log)
    log.send(3)
    query.trigger()
    del query.offset["topics"]["orders"]["mark"]
    log.send()
    assert query.trigger() == 1
    assert query.offset["topics"]["orders"]["mark"]["at"] == "1:3"


def test_a_planned_batch_is_checked_too(log: Log) -> None:
    query = Query(log)
    log.send(3)
    query.trigger()
    begun = query.offset
    log.save()
    log.send(3)
    query.trigger()
    begun["topics"]["orders"]["mark"]["published"] -= 1
    reader = StreamReader(ReadOptions.of({"broker": log.address, "topics": "orders"}))
    with pytest.raises(LogReplaced):
        reader.partitions(begun, query.offset)
    reader.stop()


def test_an_export_rejects_such_a_log(log: Log, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = ExportDirectory(str(tmp_path / "table"), VERSIONS)

    def write(*_: object) -> int:
        Path(directory.writing).mkdir(parents=True)
        return 1

    monkeypatch.setattr(Export, "_cores", 2)
    monkeypatch.setattr(Export, "_write", write)

    def run(**more: str) -> Any:
        options = reading_options(log.address, ("orders",)) | more
        return Export(None, options, directory, on_progress=lambda _: None).run()  # type: ignore[arg-type]  # not used

    log.send(3)
    run()
    log.save()
    log.send(3)
    run()
    log.restore()
    log.send(5)
    with pytest.raises(LogReplaced):
        run()
    assert run(fail_on_data_loss="false").number == 3


@pytest.mark.parametrize("make", [lambda log: open_broker(log.address), lambda _: MemoryBroker()])
def test_a_mark_is_the_message_before_a_position(log: Log, make: Callable[[Log], Any]) -> None:
    with make(log) as broker:
        for _ in range(3):
            TopicWriter(broker, "orders").plain("value")
        one = pin_topics(broker, ["orders"])["orders"]
        ledger = one.origin.ledger
        found = mark_below(broker, one, Position(ledger, 2), None)
        assert found is not None
        assert found.at == Position(ledger, 1)
        check_mark(broker, "orders", found)
        with pytest.raises(LogReplaced):
            check_mark(broker, "orders", found._replace(published=found.published + 1))
        assert mark_below(broker, one, Position(ledger + 1, 0), None) == mark_below(broker, one, one.stop, None)
        assert mark_below(broker, one, Position(ledger, 0), found) is found
        inside = mark_below(broker, one, Position(ledger, 1, 5), None)
        assert inside == found
        check_mark(broker, "orders", OffsetMark(Position(ledger - 1, 7), 1))  # a trimmed message proves nothing


def test_a_query_looks_for_a_mark_at_intervals_also_if_there_is_none(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if readers never get the last entries of a topic: each search waits."""
    looks: list[Position] = []
    monkeypatch.setattr(pinned, "publish_time", lambda broker, topic, at, timeout: looks.append(at))
    log.send(3)
    with open_broker(log.address) as broker:
        one = pin_topics(broker, ["orders"])["orders"]
        found, first = pinned.Marks(), Position(one.origin.ledger, 0)
        assert found.of(broker, one, None, first) is None
        assert looks == []  # nothing was read by then
        for entry in (1, 2):
            assert found.of(broker, one, None, first._replace(entry=entry)) is None
        assert looks == [first]


def test_golden_offset_with_a_mark() -> None:
    offset = Offset(
        {"orders": ReadProgress(Position(3, 17), "9f3c", 121, mark=OffsetMark(Position(3, 16), 1_790_000_000_000))}
    )
    found = committed("pipeline/offset-1-mark.json", json.dumps(offset.to_json()).encode())
    assert Offset.of_json(json.loads(found)) == offset


@pytest.mark.parametrize("mark", [{"at": "3:16"}, {"at": "x", "published": 1}, {"at": "3:16", "published": "1"}, 7])
def test_the_error_names_an_invalid_mark(mark: object) -> None:
    place = {"at": "3:17", "incarnation": "9f", "mark": mark}
    with pytest.raises(InvalidRequest, match="cannot read the offset"):
        Offset.of_json({"version": 1, "topics": {"orders": place}})
