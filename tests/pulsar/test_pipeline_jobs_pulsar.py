"""Jobs on a real broker: a continued export, its audit, and rebuilt snapshots."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipeline_world import Life, records_of
from pulsar_cluster import Cluster

from bench.log_owner import LogOwner
from broker_io.port import Broker
from txnbuffer.model import Position
from txnbuffer.pipeline.exports import VERSIONS, ExportDirectory
from txnbuffer.pipeline.jobs.audit import audit
from txnbuffer.pipeline.jobs.export import Export
from txnbuffer.pipeline.jobs.recover import recover
from txnbuffer.pipeline.options import reading_options


def test_jobs_on_a_cluster(
    spark: Any, cluster: Cluster, namespace: str, opening: Callable[..., Broker], tmp_path: Path
) -> None:
    broker = opening()
    cluster_options = {"pulsar.admin_url": cluster.admin}
    address = f"{cluster.url}/{namespace}"
    options = reading_options(address, ("orders",), None, cluster_options)
    table = ExportDirectory(str(tmp_path / "table"), VERSIONS)
    job = Export(spark, options, table, on_progress=lambda _: None)
    with LogOwner(broker, segment_size=3) as manager:
        manager.recover()
        life = Life(broker, manager, "orders", 5)
        for number in (1, 2):
            life.run(40)
            with table.locked():
                run = job.run()
            assert run is not None
            assert run.number == number
            records = records_of(broker, "orders")
            found = spark.read.parquet(table.table).orderBy("position").select("position", "key", "value").collect()
            plain = [(Position(*row[0]), *(None if item is None else bytes(item) for item in row[1:])) for row in found]
            assert plain == [(record.position, record.key, record.value) for record in records]
        life.snapshot()
    assert audit(spark, {"broker": address, **cluster_options}, table, on_progress=lambda _: None).same
    rows = recover(spark, options, everything=True, wanted=True, on_progress=lambda _: None)
    assert [(row["snapshot"], row["written"]) for row in rows] == [("equal", True)]
    again = opening()
    assert [record.value for record in records_of(again, "orders")] == [record.value for record in records]
    with LogOwner(again) as manager:
        manager.recover()
        assert manager.problems == {}
        assert manager.followed("orders").numbered.next_seqno == rows[0]["visible_records"] + 1
