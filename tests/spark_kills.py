"""Kill drivers of a streaming query, and the service, at random times: `spark_kills.py --kills 20 --seed 1`.

The query copies a topic in small micro-batches, on an embedded log or with `--pulsar` on a cluster, from messages and
record sets to record sets. After any kills the copy has each record once.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from pulsar_cluster import shared
from service_process import ServiceProcess

from txnbuffer import connect

RECORDS = 200
SECONDS = 600.0
LONGEST = 60.0
"""Maximum seconds before a driver is killed, unless it has ended."""
SERVICE_TOO = 0.3
"""Probability that the service is killed too."""

DRIVER = """
import json, sys
from txnbuffer.pipeline.spark.session import open_session

address, writing, checkpoint = json.loads(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3]
spark = open_session("local[2,3]")
frame = spark.readStream.format("txnbuffer").options(
    topics="source", columns="key,value", max_messages_per_trigger="20", partition_bytes="1000", **address
)
query = frame.load().repartition(2).writeStream.format("txnbuffer").options(
    topic="copy", checkpointLocation=checkpoint, **address, **writing
)
query.trigger(availableNow=True).start().awaitTermination()
"""


class Place(NamedTuple):
    """The location of the topics: arguments of `txnbuf serve`, options of queries, of writers and of clients."""

    served: tuple[str, ...]
    broker: dict[str, str]
    writing: dict[str, str]
    client: dict[str, Any]

    def serve(self, port: int = 0) -> ServiceProcess:
        return ServiceProcess(*self.served, port=port).wait_serving()

    def write(self, records: list[bytes]) -> None:
        """Write transactions of ten records; if record sets are possible, every other one uses them."""
        with connect(self.broker["broker"], **self.client) as client:
            for start in range(0, len(records), 10):
                batching: Any = "records" if self.writing and start % 20 else "messages"
                with client.transaction() as txn:
                    txn.send_many("source", records[start : start + 10], batching=batching)


@contextlib.contextmanager
def place_on(directory: Path, *, pulsar: bool) -> Iterator[tuple[Place, ServiceProcess]]:
    """The location of the topics, and a service that may be replaced."""
    if not pulsar:
        service = ServiceProcess(directory / "log").wait_serving()
        address = {"broker": f"txnbuf://127.0.0.1:{service.port}"}
        yield Place((str(directory / "log"),), address, {}, {}), service
        return
    with shared(directory) as cluster:
        namespace = cluster.namespace()
        address = {"broker": f"{cluster.url}/{namespace}", "pulsar.admin_url": cluster.admin}
        client = {"broker_options": {"admin_url": cluster.admin}}
        place = Place((address["broker"], "--admin-url", cluster.admin), address, {"batching": "records"}, client)
        try:
            yield place, place.serve()
        finally:
            cluster.drop(namespace)


def run(kills: int, seed: int, directory: Path, *, pulsar: bool) -> None:
    with place_on(directory, pulsar=pulsar) as (place, service):
        kill(kills, random.Random(seed), directory, place, service)


def kill(kills: int, chance: random.Random, directory: Path, place: Place, service: ServiceProcess) -> None:
    port = service.port
    texts = [str(number).encode() for number in range(RECORDS)]
    killed = 0
    try:
        place.write(texts)
        for _ in range(3 * kills + 10):
            alive = SECONDS if killed >= kills else chance.uniform(1.0, LONGEST)
            code = drive(place, directory / "checkpoint", alive)
            killed += code is None
            print(f"{killed} of {kills} drivers killed", file=sys.stderr, flush=True)
            if code == 0 and killed >= kills:
                break
            if chance.random() < SERVICE_TOO:
                service.kill()
                service = place.serve(port)
            place.write(more := [str(len(texts) + number).encode() for number in range(40)])
            texts += more
        check(place, texts)
    finally:
        service.kill()


def drive(place: Place, checkpoint: Path, seconds: float) -> int | None:
    """Run a driver for at most `seconds`; its exit code, None if it was killed."""
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, json.dumps(place.broker), json.dumps(place.writing), str(checkpoint)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        start_new_session=True,  # so that its JVM and workers are killed with it
    )
    try:
        return driver.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(driver.pid, signal.SIGKILL)
        driver.wait()


def check(place: Place, texts: list[bytes]) -> None:
    """Check that the copy has every record once."""
    found: Counter[bytes | None] = Counter()
    with connect(place.broker["broker"], **place.client) as client, client.reader("copy") as reader:
        while sum(found.values()) < len(texts) and (batch := reader.read(timeout=SECONDS)) is not None:
            found.update(record.value for record in batch)
        while (batch := reader.read(timeout=5.0)) is not None:
            found.update(record.value for record in batch)
    if found != Counter(texts):
        missing, doubled = Counter(texts) - found, found - Counter(texts)
        raise SystemExit(f"{len(missing)} records are missing, {len(doubled)} are doubled: {[*missing, *doubled][:10]}")
    print(f"{len(texts)} records, each once", file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--pulsar", action="store_true")
    given = parser.parse_args()
    seed = random.randrange(2**32) if given.seed is None else given.seed
    print(f"seed {seed}", file=sys.stderr)
    with tempfile.TemporaryDirectory() as directory:
        run(given.kills, seed, Path(directory), pulsar=given.pulsar)


if __name__ == "__main__":
    main()
