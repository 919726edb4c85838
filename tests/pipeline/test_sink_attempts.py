"""Attempts of tasks and drivers in rare orders: late ones, zombies, killed ones."""

from __future__ import annotations

import io
import shutil
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from threading import Event
from typing import Any
from urllib.request import urlopen

import pyarrow as pa
import pytest
from pyspark.sql.types import BinaryType, StructField, StructType
from service_process import ServiceProcess, kept_port

from txnbuffer import connect
from txnbuffer.errors import InvalidRequest, LogRestored, ProducerFenced, TransactionAborted
from txnbuffer.pipeline.options import WriteOptions
from txnbuffer.pipeline.spark import sink as sink_module
from txnbuffer.pipeline.spark.sink import (
    BatchWriter,
    Stopped,
    TaskResult,
    abort_messages,
    commit_messages,
    write_branch,
)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    with ServiceProcess(tmp_path_factory.mktemp("log")) as service:
        yield service


@pytest.fixture
def address(service: ServiceProcess) -> str:
    return f"txnbuf://127.0.0.1:{service.port}"


def open_transactions(service: ServiceProcess) -> int:
    with urlopen(f"http://127.0.0.1:{service.http}/metrics", timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    return int(float(next(line for line in lines if line.startswith("txnbuffer_transactions_open ")).split()[1]))


def options(address: str, topic: str, **more: str) -> WriteOptions:
    return WriteOptions.of({"broker": address, "topic": topic, **more}, streaming=False)


def rows(*texts: str) -> Iterator[pa.RecordBatch]:
    return iter([pa.RecordBatch.from_pydict({"value": [text.encode()]}) for text in texts])


def read(address: str, topic: str) -> list[bytes | None]:
    """The values visible to readers; fails if a transaction still blocks them."""
    found: list[bytes | None] = []
    with connect(address) as client:
        with client.transaction() as txn:
            txn.send(topic, b"end")
            txn.commit(wait_visible=True)
        with client.reader(topic) as reader:
            while not found or found[-1] != b"end":
                batch = reader.read(timeout=60)
                assert batch is not None
                found += [record.value for record in batch]
    return [value for value in found if value != b"end"]


def test_a_driver_that_runs_a_batch_again_finds_it_committed(address: str) -> None:
    sink = options(address, "again")
    first = [write_branch(sink, "again", 1, rows("a", "b")), write_branch(sink, "again", 1, rows())]
    commit_messages(sink, first)
    second = [write_branch(sink, "again", 1, rows("a", "b")), write_branch(sink, "again", 1, rows())]
    assert second[0].committed
    commit_messages(sink, second)
    assert read(address, "again") == [b"a", b"b"]


def test_one_of_two_drivers_commits_and_the_other_continues(address: str) -> None:
    sink = options(address, "twice")
    zombie, other = ([write_branch(sink, "twice", 1, rows("a"))] for _ in range(2))
    commit_messages(sink, other)
    commit_messages(sink, zombie)
    assert read(address, "twice") == [b"a"]


def test_numbers_below_the_last_one_are_rejected(address: str) -> None:
    """It is unknown whether they were written, and unwritten records must not be reported as committed."""
    sink = options(address, "below")
    overtaken, lost = ([write_branch(sink, "below", number, rows(text))] for number, text in ((2, "a"), (1, "lost")))
    commit_messages(sink, overtaken)
    commit_messages(sink, [write_branch(sink, "below", 3, rows("b"))])
    for number in (1, 2):
        with pytest.raises(InvalidRequest, match=f"number {number} of 'below@below' is below 3, the last one"):
            write_branch(sink, "below", number, rows("lost"))
    for late in (lost, overtaken):
        with pytest.raises(InvalidRequest, match=r"is below 3, the last one committed"):
            commit_messages(sink, late)
    assert write_branch(sink, "below", 3, rows("b")).committed
    assert read(address, "below") == [b"a", b"b"]


def test_a_number_committed_to_one_topic_is_not_committed_to_another(address: str) -> None:
    for topic in ("mine", "yours"):
        sink = options(address, topic, name="n" * 360, number="1")
        assert sink.producer_number is not None
        for _ in range(2):
            commit_messages(sink, [write_branch(sink, *sink.producer_number, rows("a"))])
        assert read(address, topic) == [b"a"]


def test_a_late_attempt_is_never_visible(address: str) -> None:
    sink = options(address, "late")

    def slow() -> Iterator[pa.RecordBatch]:
        yield from rows("late")
        commit_messages(sink, [write_branch(sink, "late", 1, rows("on time"))])
        yield from rows("later")

    with pytest.raises(TransactionAborted, match="transaction_timeout"):
        write_branch(sink, "late", 1, slow())
    assert read(address, "late") == [b"on time"]


def failing_rows() -> Iterator[pa.RecordBatch]:
    yield from rows("never")
    raise ArithmeticError("planned")


def test_a_failed_task_is_aborted_at_once(address: str, service: ServiceProcess) -> None:
    sink = options(address, "failed")
    with pytest.raises(ArithmeticError, match="planned"):
        write_branch(sink, "failed", 1, failing_rows())
    assert open_transactions(service) == 0
    abort_messages(sink, [write_branch(sink, "failed", 1, rows("never")), None])
    assert open_transactions(service) == 0
    assert read(address, "failed") == []


def main(infile: io.BufferedReader, *arguments: Any) -> TaskResult:
    """Write a branch under a function with the name and the input of the one in which Spark runs a task."""
    return write_branch(*arguments)


def test_a_stopped_task_is_aborted_at_once(address: str, service: ServiceProcess) -> None:
    wanted = options(address, "stopped")
    with pytest.raises(Stopped, match="before it had read all its rows"):
        main(io.BufferedReader(io.BytesIO(b"")), wanted, "spark-stopped", 1, rows("a"))
    assert open_transactions(service) == 0
    complete = main(io.BufferedReader(io.BytesIO(b"\xff\xff\xff\xfc")), wanted, "spark-stopped", 1, rows("a", "b"))
    commit_messages(wanted, [complete], each=True)
    assert read(address, "stopped") == [b"a", b"b"]


def test_a_failed_task_is_aborted_before_its_client_closes(
    address: str, service: ServiceProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = options(address, "failed")
    with sink_module.client_for(sink) as client:
        monkeypatch.setattr(sink_module, "client_for", lambda _: nullcontext(client))
        with pytest.raises(ArithmeticError, match="planned"):
            write_branch(sink, "failed", 2, failing_rows())
        assert open_transactions(service) == 0


def test_the_error_of_a_slow_batch_names_the_timeout(address: str) -> None:
    sink = options(address, "long", transaction_timeout="0.05")
    with pytest.raises(TransactionAborted, match=r"transaction_timeout = 0.05 s"):
        written = write_branch(sink, "long", 1, rows("never"))
        with connect(address) as client:
            while client.outcome(written.branch.txn) is None:  # type: ignore[union-attr]  # it wrote a row
                Event().wait(0.05)
        commit_messages(sink, [written])
    assert read(address, "long") == []


def test_attempts_after_a_job_without_a_name_block_nobody(address: str, service: ServiceProcess) -> None:
    writer = BatchWriter(
        options(address, "nameless"), StructType([StructField("value", BinaryType())]), overwrite=False
    )
    written = writer.write(rows("a"))
    writer.commit([written])
    assert isinstance(written, TaskResult)
    with pytest.raises(ProducerFenced, match="has already ended"):
        writer.write(rows("late"))
    failing = BatchWriter(
        options(address, "nameless"), StructType([StructField("value", BinaryType())]), overwrite=False
    )
    failing.abort([failing.write(rows("b")), None])
    with pytest.raises(ProducerFenced, match="has already ended"):
        failing.write(rows("late"))
    assert open_transactions(service) == 0
    assert read(address, "nameless") == [b"a"]


def test_a_query_rejects_a_log_that_lacks_its_batches(tmp_path: Path) -> None:
    log, copy = tmp_path / "log", tmp_path / "copy"

    def run(batches: range) -> None:
        with ServiceProcess(log) as service:
            sink = options(f"txnbuf://127.0.0.1:{service.port}", "t")
            for batch in batches:
                empty = write_branch(sink, "query", batch + 1, rows())
                some = write_branch(sink, "query", batch + 1, rows(*(["a"] if batch % 3 else [])))
                for _ in range(2):
                    commit_messages(sink, [empty, some], each=True)

    run(range(5))
    shutil.copytree(log, copy)
    run(range(5, 8))
    shutil.rmtree(log)
    shutil.copytree(copy, log)
    for batch in (8, 9):
        with pytest.raises(LogRestored, match=f"up to number 5, but this is number {batch + 1}"):
            run(range(batch, batch + 1))
    with ServiceProcess(log) as service, connect(f"txnbuf://127.0.0.1:{service.port}") as client:
        client.delete_name("query@t")
    run(range(8, 11))
    with ServiceProcess(log) as service:
        assert read(f"txnbuf://127.0.0.1:{service.port}", "t") == [b"a"] * 5


def test_a_restarted_service_commits_what_tasks_wrote_before(tmp_path: Path) -> None:
    with ServiceProcess(tmp_path, port=kept_port()) as service:
        sink = options(f"txnbuf://127.0.0.1:{service.port}", "t")
        done = write_branch(sink, "query", 1, rows("a"))

        def interrupted() -> Iterator[pa.RecordBatch]:
            yield from rows("b")
            service.kill()
            services.append(ServiceProcess(tmp_path, port=service.port).wait_serving())
            yield from rows("c")

        services: list[ServiceProcess] = []
        try:
            messages = [done, write_branch(sink, "query", 1, interrupted())]
            commit_messages(sink, messages)
            assert read(sink.broker, "t") == [b"a", b"b", b"c"]
        finally:
            for restarted in services:
                restarted.__exit__()
