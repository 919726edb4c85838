"""A driver on a cluster, as a process: `spark_driver.py MASTER DIRECTORY WORLD…`.

Each WORLD is a JSON object of a name and of options to read and write. A batch job copies topic `source` to `copied`;
one of its executors is killed meanwhile, and one task has to be speculated. Then streaming queries copy `source` to
`streamed`, until the driver is killed.
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

JVM = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Xshare:auto"
SETTINGS = {
    "spark.driver.extraJavaOptions": JVM,
    "spark.driver.host": "127.0.0.1",
    "spark.driver.memory": "600m",
    "spark.executor.extraJavaOptions": JVM,
    "spark.executor.memory": "512m",
    "spark.executorEnv.PYTHONPATH": os.environ.get("PYTHONPATH", ""),
    "spark.network.timeout": "600s",
    "spark.python.authenticate.socketTimeout": "600s",
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.execution.arrow.maxRecordsPerBatch": "5",
}
SPECULATION = {
    "spark.speculation": "true",
    "spark.speculation.interval": "100ms",
    "spark.speculation.minTaskRuntime": "100ms",
    "spark.speculation.multiplier": "1.01",
    "spark.speculation.quantile": "0.5",
}
SECONDS = 400.0
"""Maximum seconds for which an attempt of a task waits for another one."""


def troubled(directory: str) -> Any:
    """Passes rows through. Of the tasks with rows the first one waits after some of them until another attempt of it
    has begun, and the executor of the second one is killed there, once."""

    def is_mine(role: str, partition: int) -> bool:
        """Whether this partition has the role, which the first one that asks gets; later attempts of it keep it."""
        path = Path(directory, role)
        try:
            with path.open("x") as file:
                file.write(str(partition))
        except FileExistsError:
            pass
        return path.read_text() == str(partition)

    def pass_on(batches: Iterator[Any]) -> Iterator[Any]:
        from pyspark import TaskContext

        context = TaskContext.get()
        assert context is not None
        partition, attempt = context.partitionId(), context.attemptNumber()
        killed, other = Path(directory, "killed"), Path(directory, "speculated")
        for batch in batches:
            yield batch
            if is_mine("waits", partition):
                if attempt > 0:
                    other.touch()
                deadline = time.monotonic() + SECONDS
                while not other.exists() and time.monotonic() < deadline:
                    time.sleep(0.05)
            elif is_mine("dies", partition) and not killed.exists():
                killed.touch()
                worker = Path(f"/proc/{os.getppid()}/stat").read_text()  # of Python's daemon, which an executor started
                os.kill(int(worker.rpartition(")")[2].split()[1]), signal.SIGKILL)
                time.sleep(SECONDS)

    return pass_on


def copy(spark: Any, world: Any, directory: str) -> None:
    frame = spark.read.format("txnbuffer").options(topics="source", **world["reading"]).load()
    Path(directory).mkdir()
    print(f"{world['name']} tasks: {frame.rdd.getNumPartitions()}", flush=True)
    written = frame.mapInArrow(troubled(directory), frame.schema).write.format("txnbuffer").mode("append")
    written.options(topic="copied", **world["writing"]).save()
    print(f"{world['name']} troubles: {json.dumps(sorted(os.listdir(directory)))}", flush=True)


def stream(spark: Any, world: Any, checkpoint: str) -> None:
    """Start a query and return after a few micro-batches; the query continues.

    It is restarted if a busy machine was too slow: Spark's planning processes have ten seconds to start.
    """
    frame = spark.readStream.format("txnbuffer").options(
        topics="source", max_messages_per_trigger="4", **world["reading"]
    )
    writer = frame.load().writeStream.format("txnbuffer").trigger(processingTime="0 seconds")
    writer = writer.options(topic="streamed", checkpointLocation=checkpoint, **world["writing"])
    deadline = time.monotonic() + SECONDS
    while True:
        query = writer.start()
        while query.isActive and len(query.recentProgress) < 2:
            Event().wait(0.1)
        if query.isActive or time.monotonic() > deadline or "failed to connect back" not in str(query.exception()):
            break
    print(f"{world['name']} streaming: {json.dumps(query.isActive)}", flush=True)


def main(master: str, directory: str, *worlds: str) -> None:
    from txnbuffer.pipeline.spark.session import open_session

    settings = {**SETTINGS, **SPECULATION, "spark.sql.warehouse.dir": f"{directory}/warehouse"}
    spark = open_session(master, settings=settings)
    spark.sparkContext.setLogLevel("OFF")
    for world in map(json.loads, worlds):
        copy(spark, world, f"{directory}/{world['name']}")
    for world in map(json.loads, worlds):
        stream(spark, world, f"{directory}/{world['name']}/checkpoint")
    print("streaming: true", flush=True)
    Event().wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
