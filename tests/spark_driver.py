"""A driver on a cluster, in a process of its own: `spark_driver.py MASTER ADDRESS DIRECTORY`.

It reads topic `source` and writes it with an executor killed under way (to `killed`) and with a task that has to be
speculated (to `speculated`), then runs a streaming query from `source` to `streamed` until it is killed.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Event
from typing import Any

JVM = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
SETTINGS = {
    "spark.driver.extraJavaOptions": JVM,
    "spark.driver.host": "127.0.0.1",
    "spark.driver.memory": "600m",
    "spark.executor.extraJavaOptions": JVM,
    "spark.executor.memory": "512m",
    "spark.executorEnv.PYTHONPATH": os.environ.get("PYTHONPATH", ""),
    "spark.network.timeout": "600s",
    "spark.python.authenticate.socketTimeout": "600s",
    "spark.speculation": "true",
    "spark.speculation.interval": "100ms",
    "spark.speculation.minTaskRuntime": "100ms",
    "spark.speculation.multiplier": "1.01",
    "spark.speculation.quantile": "0.5",
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.execution.arrow.maxRecordsPerBatch": "5",
}
SECONDS = 400.0
"""An attempt that waits for another one goes on by then."""


def killing(directory: str) -> Any:
    """Passes rows on; once, the executor is killed behind the first rows of a task."""

    def pass_on(batches: Iterator[Any]) -> Iterator[Any]:
        yield next(batches)
        try:
            Path(directory, "killed").touch(exist_ok=False)
        except FileExistsError:
            yield from batches
        else:
            os.kill(parent(os.getppid()), signal.SIGKILL)
            Event().wait(SECONDS)

    return pass_on


def parent(pid: int) -> int:
    """Of a worker's daemon: the executor that started it."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def lagging(directory: str) -> Any:
    """Passes rows on; the first attempt of partition 0 waits behind its first rows until another one has begun."""

    def pass_on(batches: Iterator[Any]) -> Iterator[Any]:
        from pyspark import TaskContext

        context = TaskContext.get()
        assert context is not None
        yield next(batches)
        other = Path(directory, "speculated")
        if context.partitionId() == 0 and context.attemptNumber() > 0:
            other.touch()
        deadline, pause = SECONDS, 0.05
        while context.partitionId() == 0 and not other.exists() and deadline > 0:
            Event().wait(pause)
            deadline -= pause
        yield from batches

    return pass_on


def started(writer: Any) -> Any:
    """A streaming query that has done two micro-batches.

    It is started again where a busy machine was too slow: Spark gives the processes that plan ten seconds to start.
    """
    from pyspark.errors import StreamingQueryException

    deadline = time.monotonic() + SECONDS
    while True:
        query = writer.start()
        try:
            while len(query.recentProgress) < 2 and query.isActive:
                query.awaitTermination(0.2)
        except StreamingQueryException as error:
            if time.monotonic() > deadline or "failed to connect back" not in str(error):
                raise
        else:
            return query


def main(master: str, address: str, directory: str) -> None:
    from txnbuffer.pipeline.spark.session import open_session

    spark = open_session(master, settings={**SETTINGS, "spark.sql.warehouse.dir": f"{directory}/warehouse"})
    spark.sparkContext.setLogLevel("OFF")
    reading = {"broker": address, "columns": "key,value", "partition_bytes": "400"}
    frame = spark.read.format("txnbuffer").options(topics="source", **reading).load()
    found = sorted(row.value.decode() for row in frame.collect())
    print(f"read: {json.dumps([found, frame.rdd.getNumPartitions()])}", flush=True)
    rows = spark.range(0, 40, 1, 4).selectExpr("CAST(id AS STRING) value")
    for topic, troubled in (("killed", killing(directory)), ("speculated", lagging(directory))):
        written = rows.mapInArrow(troubled, rows.schema).write.format("txnbuffer").mode("append")
        written.options(broker=address, topic=topic).save()
        print(f"{topic}: {json.dumps(Path(directory, topic).exists())}", flush=True)
    query = started(
        spark.readStream.format("txnbuffer")
        .options(topics="source", max_messages_per_trigger="4", **reading)
        .load()
        .writeStream.format("txnbuffer")
        .options(broker=address, topic="streamed", checkpointLocation=f"{directory}/checkpoint")
        .trigger(processingTime="0 seconds")
    )
    print(f"streaming: {json.dumps(query.isActive)}", flush=True)
    query.awaitTermination()


if __name__ == "__main__":
    main(*sys.argv[1:])
