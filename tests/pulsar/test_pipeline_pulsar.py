"""The data source `txnbuffer` on a real broker: record sets, transactions across ranges, a continued query."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from pipeline_world import Life, records_of, row_of, rows_of_batch
from pulsar_cluster import Cluster

from bench.log_owner import LogOwner
from broker_io.batch import Batch, Message
from broker_io.port import Broker
from broker_io.standalone import ask
from txnbuffer.errors import LogReplaced
from txnbuffer.pipeline.options import ReadOptions
from txnbuffer.pipeline.spark.source import BatchReader, StreamReader


def test_records_of_a_cluster_are_those_of_a_reader(
    cluster: Cluster, namespace: str, opening: Callable[..., Broker], tmp_path: Path
) -> None:
    broker = opening()
    config = tmp_path / "config.toml"
    config.write_text(f'[pulsar]\nadmin_url = "{cluster.admin}"\n')
    common = {"broker": f"{cluster.url}/{namespace}", "pattern": "or.*", "config": str(config)}
    with LogOwner(broker, segment_size=3) as manager:
        manager.recover()
        life = Life(broker, manager, "orders", 5)
        life.run(60)
        life.snapshot()
        expected = [row_of(record) for record in records_of(broker, "orders")]
        assert len(expected) > 20
        whole = BatchReader(ReadOptions.of(common))
        tasks = whole.partitions()
        assert [row for task in tasks for batch in whole.read(task) for row in rows_of_batch(batch)] == expected
        cut = BatchReader(ReadOptions.of({**common, "partition_bytes": "1500", "columns": "position,value"}))
        tasks = cut.partitions()
        assert len(tasks) > 3
        found = [column for task in tasks for batch in cut.read(task) for column in batch["value"].to_pylist()]
        assert found == [row[4] for row in expected]

        stream = StreamReader(ReadOptions.of(common))
        begin = stream.initialOffset()
        middle = stream.latestOffset(begin, stream.getDefaultReadLimit())
        life.run(30)
        end = stream.latestOffset(middle, stream.getDefaultReadLimit())
        rows = []
        for start, stop in ((begin, middle), (middle, end)):
            for task in stream.partitions(start, stop):
                rows += [row for batch in stream.read(task) for row in rows_of_batch(batch)]
        assert rows == [row_of(record) for record in records_of(broker, "orders")]
        stream.stop()
        with closing_stream(ReadOptions.of(common)) as again:
            assert again.latestOffset(middle, again.getDefaultReadLimit())["topics"].keys() == end["topics"].keys()
        middle["topics"]["orders"]["mark"]["published"] -= 1
        with closing_stream(ReadOptions.of(common)) as other, pytest.raises(LogReplaced):
            other.latestOffset(middle, other.getDefaultReadLimit())


def test_messages_that_retention_drops_after_a_query_are_no_loss(
    cluster: Cluster, namespace: str, opening: Callable[..., Broker]
) -> None:
    """A topic without transactions, whose ledgers are dropped one by one, in the end without new messages."""
    broker = opening()
    broker.create_topic("plain")
    options = {"broker": f"{cluster.url}/{namespace}", "topics": "plain", "pulsar.admin_url": cluster.admin}
    wanted, found = ReadOptions.of(options), []
    with closing_stream(wanted) as stream:
        offset = stream.initialOffset()
    ask(cluster.admin, f"persistent/{namespace}/plain/unload", "PUT")
    for number in range(3):
        with broker.writer("plain") as writer:
            writer.append(Batch.of([Message(None, b"%d" % number)])).result(60)
        for _ in range(2):
            with closing_stream(wanted) as stream:
                end = stream.latestOffset(offset, stream.getDefaultReadLimit())
                for task in stream.partitions(offset, end) if end != offset else ():
                    found += [value for batch in stream.read(task) for value in batch["value"].to_pylist()]
            offset = end
            broker.roll("plain")
        broker.trim("plain", broker.ledgers("plain")[-1].ledger)
    assert found == [b"0", b"1", b"2"]


@contextmanager
def closing_stream(options: ReadOptions) -> Iterator[StreamReader]:
    stream = StreamReader(options)
    try:
        yield stream
    finally:
        stream.stop()
