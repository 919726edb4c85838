"""The tasks of the job `recover`, without Spark."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
from pipeline_world import Life

from bench.log_owner import LogOwner
from broker_io import open_broker
from txnbuffer.pipeline.jobs.recover import SCHEMA, fold_all
from txnbuffer.pipeline.options import ReadOptions


def test_a_log_that_cannot_be_folded_does_not_affect_others(tmp_path: Path) -> None:
    with open_broker(f"file:{tmp_path}") as broker, LogOwner(broker) as manager:
        manager.recover()
        Life(broker, manager, "orders", 1).run(30)
    options = ReadOptions.of({"broker": f"file:{tmp_path}", "pattern": ".*"})
    topics = pa.RecordBatch.from_pydict({"topic": ["missing", "orders"]})
    missing, orders = [row for batch in fold_all(options, iter([topics])) for row in batch.to_pylist()]
    assert missing == {**dict.fromkeys(SCHEMA.names), "topic": "missing", "failure": missing["failure"]}
    assert "missing" in missing["failure"]
    assert (orders["topic"], orders["failure"], orders["problem"]) == ("orders", None, "")
