"""The sink `txnbuffer`: data frames and streaming queries become transactions, exactly once despite failures."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.errors import PySparkException
from service_process import ServiceProcess
from spark_frames import assert_soon_same_rows, failing, run_out, small_batches

from txnbuffer import connect
from txnbuffer.cli.admin_client import ServiceAddress, call
from txnbuffer.pipeline.options import WriteOptions
from txnbuffer.pipeline.spark.sink import abort_messages, write_branch

SCHEMA = "topic string, key binary, value binary, properties map<string,string>, time string"
COLUMNS = ("topic", "key", "value", "properties", "CAST(time AS timestamp) event_time")
ROWS = [
    ("rows", b"a", b"1", {"p": "x", "n": "7"}, "2026-01-31 12:00:00.123"),
    ("other", b"a", b"2", {}, None),
    ("rows", None, b"", {}, "1970-01-01 00:00:01"),
    ("rows", b"a", None, {"p": "y"}, None),
]


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a service for queries to write to."""
    with ServiceProcess(tmp_path_factory.mktemp("log")) as service:
        yield f"txnbuf://127.0.0.1:{service.port}"


@pytest.fixture(scope="module", autouse=True)
def batches(spark: Any) -> Iterator[None]:
    """Tasks get rows in small batches, so that they fail after some were sent."""
    with small_batches(spark):
        yield


def read(spark: Any, address: str, topics: str) -> Any:
    return spark.read.format("txnbuffer").option("broker", address).option("topics", topics).load()


def texts(frame: Any) -> Any:
    return frame.selectExpr("CAST(key AS STRING)", "CAST(value AS STRING)")


def numbered(spark: Any, count: int) -> Any:
    """Rows in two partitions, in batches of 10."""
    return spark.range(0, count, 1, 2).selectExpr("CAST(id % 7 AS STRING) key", "CAST(id AS STRING) value")


def write(frame: Any, address: str, **options: str) -> None:
    frame.write.format("txnbuffer").mode("append").option("broker", address).options(**options).save()


def test_all_fields_of_a_record_are_written_and_read(spark: Any, address: str) -> None:
    frame = spark.createDataFrame(ROWS, SCHEMA).selectExpr(*COLUMNS).coalesce(1)
    write(frame, address)
    found = read(spark, address, "rows,other")
    assert_soon_same_rows(found.select("topic", "key", "value", "properties", "event_time"), frame)
    assert found.select("txn").distinct().count() == 1


def test_a_job_with_a_name_and_a_number_is_committed_once(spark: Any, address: str) -> None:
    frame = numbered(spark, 40)
    write(frame, address, topic="many", name="import", number="1")
    write(frame, address, topic="many", name="import", number="1")
    assert_soon_same_rows(texts(read(spark, address, "many")), frame)
    assert read(spark, address, "many").select("txn").distinct().count() == 2
    write(frame, address, topic="many", name="import", number="2")
    assert read(spark, address, "many").count() == 80


def test_the_path_names_the_topic(spark: Any, address: str, tmp_path: Path) -> None:
    frame = numbered(spark, 4)
    frame.write.format("txnbuffer").mode("append").option("broker", address).save("by path")
    reading = spark.readStream.format("txnbuffer").options(broker=address, columns="key,value").load("by path")
    query = reading.writeStream.format("txnbuffer").options(broker=address, checkpointLocation=str(tmp_path))
    run_out(query.option("path", "copied"))
    found = spark.read.format("txnbuffer").option("broker", address).load(["by path", "copied"])
    assert_soon_same_rows(texts(found), frame.union(frame))


def test_a_retried_task_leaves_one_copy(spark: Any, address: str) -> None:
    frame = numbered(spark, 40)
    write(frame.mapInArrow(failing(1), frame.schema), address, topic="retried")
    assert_soon_same_rows(texts(read(spark, address, "retried")), frame)


def test_a_failed_job_leaves_nothing_and_blocks_nobody(spark: Any, address: str) -> None:
    frame = numbered(spark, 40)
    with pytest.raises(PySparkException, match="planned"):
        write(frame.mapInArrow(failing(99), frame.schema), address, topic="failed")
    with connect(address) as client:
        with client.transaction() as txn:
            txn.send("failed", b"after")
            txn.commit(wait_visible=True)
        with client.reader("failed") as reader:
            found = reader.read(timeout=60)
    assert found is not None
    assert [record.value for record in found] == [b"after"]


def wait_for_transactions(service: ServiceAddress, count: int) -> None:
    """Wait until so many transactions are open."""
    deadline = time.monotonic() + 120
    while len(found := list(call(service, "FindHanging", seconds=0))) != count:
        assert time.monotonic() < deadline, found
        time.sleep(0.2)


def row_each_second(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        for _ in range(60):
            yield batch.slice(0, 1)
            time.sleep(1)


def test_a_stopped_query_leaves_nothing_and_blocks_nobody(spark: Any, address: str, tmp_path: Path) -> None:
    with connect(address) as client:
        with client.transaction() as txn:
            txn.send_many("endless", [b"x" * 200_000])
        reading = spark.readStream.format("txnbuffer").options(broker=address, columns="key,value").load("endless")
        query = (
            reading.mapInArrow(row_each_second, reading.schema)
            .writeStream.format("txnbuffer")
            .options(broker=address, checkpointLocation=str(tmp_path))
            .start("half")
        )
        service = ServiceAddress(address.removeprefix("txnbuf://"))
        wait_for_transactions(service, 1)
        time.sleep(2)  # a stopped task ends in the middle of its rows
        query.stop()
        wait_for_transactions(service, 0)
        with client.transaction() as txn:
            txn.send("half", b"after")
            txn.commit(wait_visible=True)
        with client.reader("half") as reader:
            found = reader.read(timeout=60)
    assert found is not None
    assert [record.value for record in found] == [b"after"]


def test_a_restarted_streaming_query_writes_each_micro_batch_once(spark: Any, address: str, tmp_path: Path) -> None:
    def run() -> None:
        source = spark.readStream.format("txnbuffer").options(
            broker=address, topics="source", columns="key,value", max_messages_per_trigger="10"
        )
        run_out(
            source.load()
            .mapInArrow(failing(1), "key binary, value binary")
            .writeStream.format("txnbuffer")
            .options(broker=address, topic="target", checkpointLocation=str(tmp_path))
        )

    expected = numbered(spark, 25)
    write(expected, address, topic="source")
    run()
    assert_soon_same_rows(texts(read(spark, address, "target")), expected)
    commits = sorted((int(found.name), found) for found in (tmp_path / "commits").iterdir() if found.name.isdigit())
    assert len(commits) == 3
    for _, found in commits[1:]:  # as if the driver had been killed between the commits of the sink and these
        for file in (found, found.with_name(f".{found.name}.crc")):
            file.unlink(missing_ok=True)
    sink = WriteOptions.of({"broker": address, "topic": "source"}, streaming=False)
    never = iter([pa.RecordBatch.from_pydict({"value": [b"never"]})])
    abort_messages(sink, [write_branch(sink, "never", 1, never)])
    run()
    assert (tmp_path / "commits" / "3").exists(), "a micro-batch without rows"
    write(numbered(spark, 3), address, topic="source")
    run()
    assert_soon_same_rows(texts(read(spark, address, "target")), expected.union(numbered(spark, 3)))
    query = json.loads((tmp_path / "metadata").read_text())["id"]
    with connect(address) as client:
        assert client.committed_number(f"spark-{query}@target") == 5


@pytest.mark.parametrize(
    ("columns", "options", "message"),
    [
        ("value", {}, "one of the option topic and the column topic"),
        ("value", {"topic": "t", "broker": "file:log"}, "txnbuf serve file:log"),
        ("CAST(NULL AS STRING) value", {"topic": "t"}, "key and value of a row are null"),
    ],
)
def test_the_error_names_what_can_not_be_written(
    spark: Any, address: str, columns: str, options: dict[str, str], message: str
) -> None:
    frame = numbered(spark, 4).selectExpr(*columns.split(", "))
    with pytest.raises(PySparkException, match=message):
        write(frame, **{"address": address, **options})  # type: ignore[arg-type]  # broker among the options wins


def test_a_topic_can_not_be_overwritten(spark: Any, address: str) -> None:
    frame = numbered(spark, 4).write.format("txnbuffer").options(broker=address, topic="t")
    with pytest.raises(PySparkException, match="mode append"):
        frame.mode("overwrite").save()
