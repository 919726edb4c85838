"""`txnbuf pipeline compact`: the same result as the compaction in one process, whatever happens to its tasks."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from click.testing import CliRunner
from export_world import TOPICS, address_of, living, run_job
from pipeline_world import Life, records_of

from broker_io import open_broker
from broker_io.batch import Batch, Message
from broker_io.compaction import CompactingBroker, CompactionPolicy, CompactionTasks, LedgerPart, NewestRows, Survivors
from broker_io.errors import Locked, NotSupported
from broker_io.filelog.log.broker import FileBroker
from broker_io.port import Broker
from broker_io.position import EARLIEST
from txnbuffer.cli.app import app
from txnbuffer.config import CompactionConfig
from txnbuffer.pipeline.jobs import compact as job
from txnbuffer.pipeline.jobs import running
from txnbuffer.pipeline.jobs.compact import SparkCompaction, bitmaps, compact, rewrite
from txnbuffer.recovery.verify import Level, verify
from txnbuffer.service.offline import compact_all, owning

POLICY = CompactionPolicy(grace_ms=0)
SAME = (
    "topic",
    "upto",
    "records_in",
    "records_out",
    "purged",
    "bytes_in",
    "bytes_out",
    "ledgers",
    "rewritten",
    "passes",
)


def write(path: Path, steps: int = 80, *, sets: bool = True) -> None:
    """Two topics with a policy, whose deletions may be purged at once; without `sets` of records some are."""
    weights = Life.WEIGHTS if sets else Life.WEIGHTS | {"plain": 0, "whole": 0, "again": 0}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Life, "WEIGHTS", weights)
        with living(path, steps) as lives:
            for life in lives:
                while life.sent:
                    life.end()
                for value in (b"1", None):
                    life._append(Batch.of([Message(b"deleted", value)]))
                    life.roll()
                assert isinstance(life.broker, CompactingBroker)
                life.broker.set_compaction_policy(life.topic, POLICY)
    written = CliRunner().invoke(app, ["recover", address_of(path), "--decisions", "--write"])
    assert written.exit_code == 0, written.output  # there was no service that writes decisions


def stored(path: Path) -> Any:
    """All messages in the closed ledgers, with those that were emptied, and what the log says of compaction."""
    with open_broker(address_of(path)) as broker:
        assert isinstance(broker, FileBroker)
        assert {one.level for one in verify(broker)} <= {Level.OK}
        return {topic: ([*messages(broker, topic)], broker.compaction(topic)) for topic in TOPICS}


def messages(broker: FileBroker, topic: str) -> Iterator[Any]:
    entry = broker.named(topic)
    with broker.reader(topic, EARLIEST) as reader:
        while (placed := reader.read(timeout=0)) is not None:
            for position, message in zip(placed.positions, placed.messages, strict=True):
                ledger = entry.find(position.ledger)
                if position.ledger < entry.ledgers[-1].ledger:
                    yield position, message, ledger is not None and ledger.generation


def shown(path: Path) -> dict[str, list[Any]]:
    with open_broker(address_of(path), read_only=True) as broker:
        return {topic: records_of(broker, topic) for topic in TOPICS}


def copied(path: Path, name: str) -> Path:
    return Path(shutil.copytree(path, path.parent / name))


def in_one_process(path: Path) -> list[dict[str, Any]]:
    async def work(broker: Broker) -> list[dict[str, Any]]:
        async with owning(broker, "test", CompactionConfig()) as ask:
            rows, failures = await compact_all(ask, TOPICS)
        assert not failures
        return rows

    with open_broker(address_of(path)) as broker:
        return asyncio.run(work(broker))


@pytest.mark.parametrize("sets", [False, True])
def test_spark_compacts_as_one_process_does(spark: Any, tmp_path: Path, sets: bool) -> None:
    write(tmp_path / "spark", sets=sets)
    before = shown(tmp_path / "spark")
    other = copied(tmp_path / "spark", "process")
    code, rows, said = run_job(spark, "compact", address_of(tmp_path / "spark"))
    assert code == 0, said
    assert "orders: rewriting the ledgers that lose records" in said
    expected = in_one_process(other)
    assert [{name: row[name] for name in SAME} for row in rows] == [
        {name: row[name] for name in SAME} for row in expected
    ]
    assert stored(tmp_path / "spark") == stored(other)
    assert all(row["records_in"] > row["records_out"] and row["rewritten"] > 3 for row in rows)
    assert all((row["purged"] > 0) is not sets for row in rows)
    after = shown(tmp_path / "spark")
    for topic, records in before.items():
        assert {one.position for one in after[topic]} < {one.position for one in records}
        assert newest(after[topic]) == newest(records)


def newest(records: list[Any]) -> dict[bytes, bytes]:
    """The newest value of each key that was not deleted."""
    values = {one.key: one.value for one in records if one.key is not None}
    return {key: value for key, value in values.items() if value is not None}


class FailingTasks:
    """Tasks of which the first attempts fail: in phase 1 before, in phase 2 after they have written a file."""

    def __init__(self, tasks: CompactionTasks) -> None:
        self.tasks, self.topic, self.count = tasks, tasks.topic, tasks.count

    def newest(self, ledger: int) -> NewestRows:
        _fail(ledger)
        return self.tasks.newest(ledger)

    def rewrite(self, ledger: int, survivors: Survivors, attempt: str) -> LedgerPart:
        part = self.tasks.rewrite(ledger, survivors, attempt)
        _fail(ledger)
        return part


def _fail(ledger: int) -> None:
    from pyspark.taskcontext import TaskContext

    context = TaskContext.get()
    if ledger == 1 and context is not None and context.attemptNumber() == 0:
        os._exit(3)


class FailingCompaction(SparkCompaction):
    def __call__(self, tasks: CompactionTasks) -> list[LedgerPart]:
        return super().__call__(FailingTasks(tasks))


def run_with(spark: Any, path: Path, **patches: Any) -> Any:
    """Compact in this process, with names of the job replaced."""
    with pytest.MonkeyPatch.context() as patch, open_broker(address_of(path)) as broker:
        for name, value in patches.items():
            patch.setattr(job, name, value)
        return compact(spark, broker, CompactionConfig(), TOPICS, on_progress=lambda _: None)


def test_a_worker_that_is_killed_is_replaced(spark: Any, tmp_path: Path) -> None:
    write(tmp_path / "spark")
    other = copied(tmp_path / "spark", "process")
    rows, failures = run_with(spark, tmp_path / "spark", SparkCompaction=FailingCompaction)
    assert ([row["topic"] for row in rows], failures) == (["orders", "stock"], [])
    in_one_process(other)
    assert stored(tmp_path / "spark") == stored(other)
    assert not [*(tmp_path / "spark").rglob("*-*-*")]


def test_each_attempt_writes_a_file_of_its_own(spark: Any) -> None:
    found = spark.sparkContext.parallelize([(0, Survivors()), (1, Survivors())], 2).map(partial(rewrite, Attempts()))
    attempts = [*found.collect(), *found.collect()]
    assert len({*attempts}) == 4
    assert "" not in attempts


class Attempts:
    """Tasks that return the name of their attempt."""

    topic, count = "orders", 2

    def newest(self, ledger: int) -> NewestRows:
        raise NotImplementedError

    def rewrite(self, ledger: int, survivors: Survivors, attempt: str) -> Any:
        return attempt


def test_an_error_of_a_task_names_the_file_and_changes_nothing(spark: Any, tmp_path: Path) -> None:
    write(tmp_path)
    before = stored(tmp_path)
    segment = _segment(tmp_path, "orders")
    content = bytearray(segment.read_bytes())
    content[-10] ^= 1
    segment.write_bytes(content)
    rows, failures = run_with(spark, tmp_path)
    assert [row["topic"] for row in rows] == ["stock"]
    assert len(failures) == 1
    assert segment.name in str(failures[0])
    content[-10] ^= 1
    segment.write_bytes(content)
    assert stored(tmp_path)["orders"][1] == before["orders"][1]
    assert not [*(tmp_path / "log").rglob("*-*-*")]


def _segment(path: Path, topic: str) -> Path:
    """The first segment of a topic with a block."""
    with open_broker(address_of(path)) as broker:
        assert isinstance(broker, FileBroker)
        entry = broker.named(topic)
        ledger = next(one for one in entry.ledgers if one.bytes)
        return path / "log" / "topics" / str(entry.number) / f"{ledger.ledger}-{ledger.generation}.log"


@pytest.mark.parametrize("before", [True, False])
def test_a_driver_that_dies_leaves_the_old_log_or_the_new_one(spark: Any, tmp_path: Path, before: bool) -> None:
    write(tmp_path / "spark", 60)
    copied(tmp_path / "spark", "old")
    swap = FileBroker._swap
    dead: list[Path] = []

    def swapped(broker: FileBroker, *arguments: Any) -> None:
        if before:
            dead.append(copied(tmp_path / "spark", f"dead{len(dead)}"))
        swap(broker, *arguments)
        if not before:
            dead.append(copied(tmp_path / "spark", f"dead{len(dead)}"))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FileBroker, "_swap", swapped)
        rows, _ = run_with(spark, tmp_path / "spark")
    assert len(rows) == 2
    (found, state), (old, _), new = (stored(tmp_path / name)["orders"] for name in (dead[0].name, "old", "spark"))
    assert old != new[0][: len(old)]
    assert found[: len(old)] == (old if before else new[0][: len(old)])
    assert (state.cleaned > 0) is not before
    assert not [*dead[0].rglob("*-*-*")]


def test_keys_are_aggregated_in_place(spark: Any, tmp_path: Path) -> None:
    """A sort of all records, or a shuffle of keys and values, would take several times as long."""
    plans: list[str] = []

    class Explained(SparkCompaction):
        def __call__(self, tasks: CompactionTasks) -> list[LedgerPart]:
            plans.append(self.survivors(tasks)._jdf.queryExecution().toString())
            return super().__call__(tasks)

    write(tmp_path, 20)
    run_with(spark, tmp_path, SparkCompaction=Explained)
    assert "HashAggregate" in plans[0]
    assert "SortAggregate" not in plans[0]


def test_bitmaps_of_ledgers_do_not_depend_on_batches() -> None:
    first, third = np.array([0, 3, 4], np.int64) << 1, (np.int64(2) << 41) + (np.array([1, 9]) << 1) + 1
    ordinals = np.concatenate([[-3], first, third])
    found = []
    for size in (1, 2, 6):
        batches = [
            pa.RecordBatch.from_pydict({"ordinal": ordinals[start : start + size]})
            for start in range(0, len(ordinals), size)
        ]
        found.append([row for batch in bitmaps(batches) for row in batch.to_pylist()])
    assert found[0] == found[1] == found[2]
    assert [row["ledger"] for row in found[0]] == [-3, 0, 2]
    assert [np.unpackbits(np.frombuffer(row["newest"], np.uint8)).nonzero()[0].tolist() for row in found[0]] == [
        [], [0, 3, 4], [1, 9],
    ]  # fmt: skip
    assert [row["purged"] == row["newest"] for row in found[0]] == [True, False, True]
    assert [*bitmaps([])] == []


def test_a_log_with_an_owner_is_refused_before_spark_starts(tmp_path: Path) -> None:
    def start(*_: object) -> None:
        raise AssertionError("Spark was started")

    with pytest.MonkeyPatch.context() as patch, living(tmp_path, 5):
        patch.setattr(running, "session", start)
        done = CliRunner().invoke(app, ["pipeline", "compact", address_of(tmp_path), "--topic", "orders"])
    assert isinstance(done.exception, Locked)


def test_only_topics_with_a_policy_are_compacted_without_a_name(tmp_path: Path) -> None:
    with living(tmp_path, 5):
        pass
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(running, "session", lambda *_: nullcontext(None))
        done = CliRunner().invoke(app, ["pipeline", "compact", address_of(tmp_path)])
    assert (done.exit_code, "no topic has a policy" in done.output) == (0, True)


def test_a_worker_without_the_directory_says_so(tmp_path: Path) -> None:
    write(tmp_path / "here", 60)

    def run(tasks: CompactionTasks) -> list[LedgerPart]:
        shutil.move(tmp_path / "here", tmp_path / "there")
        try:
            with pytest.raises(NotSupported, match=r"there is no directory .* need its directory at one path"):
                tasks.newest(0)
        finally:
            shutil.move(tmp_path / "there", tmp_path / "here")
        raise NotSupported("as expected")

    rows, failures = run_with(None, tmp_path / "here", SparkCompaction=lambda *_: partial(run))
    assert rows == []
    assert all("as expected" in str(error) for error in failures)
