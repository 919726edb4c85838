"""Kill drivers of a streaming query, and the service, at random: `spark_kills.py --kills 20 --seed 1`.

The query copies a topic in small micro-batches. Whatever is killed when, each record stands in the copy once.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from service_process import ServiceProcess

from txnbuffer import connect

RECORDS = 200
SECONDS = 600.0
LONGEST = 60.0
"""Seconds that a driver lives at most before it is killed, unless it is done."""
SERVICE_TOO = 0.3
"""How often the service is killed too."""

DRIVER = """
import sys
from txnbuffer.pipeline.spark.session import open_session

address, checkpoint = sys.argv[1:]
spark = open_session("local[2,3]")
frame = spark.readStream.format("txnbuffer").options(
    broker=address, topics="source", columns="key,value", max_messages_per_trigger="20"
)
query = frame.load().repartition(2).writeStream.format("txnbuffer").options(
    broker=address, topic="copy", checkpointLocation=checkpoint
)
query.trigger(availableNow=True).start().awaitTermination()
"""


def run(kills: int, seed: int, directory: Path) -> None:
    chance = random.Random(seed)
    service = ServiceProcess(directory / "log").wait_serving()
    port, address = service.port, f"txnbuf://127.0.0.1:{service.port}"
    texts = [str(number).encode() for number in range(RECORDS)]
    with connect(address) as client:
        for start in range(0, RECORDS, 10):
            with client.transaction() as txn:
                txn.send_many("source", texts[start : start + 10])
    killed = 0
    try:
        for _ in range(3 * kills + 10):
            alive = SECONDS if killed >= kills else chance.uniform(1.0, LONGEST)
            code = drive(address, directory / "checkpoint", alive)
            killed += code is None
            print(f"{killed} of {kills} drivers killed", file=sys.stderr, flush=True)
            if code == 0 and killed >= kills:
                break
            if chance.random() < SERVICE_TOO:
                service.kill()
                service = ServiceProcess(directory / "log", port=port).wait_serving()
            with connect(address) as client, client.transaction() as txn:
                txn.send_many("source", more := [str(len(texts) + number).encode() for number in range(40)])
            texts += more
        check(address, texts)
    finally:
        service.kill()


def drive(address: str, checkpoint: Path, seconds: float) -> int | None:
    """Run a driver for so long at most; its exit code, None if it was killed."""
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, address, str(checkpoint)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        start_new_session=True,  # its JVM and the workers of that are killed with it
    )
    try:
        return driver.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(driver.pid, signal.SIGKILL)
        driver.wait()


def check(address: str, texts: list[bytes]) -> None:
    """Every record stands in the copy once."""
    found: Counter[bytes | None] = Counter()
    with connect(address) as client, client.reader("copy") as reader:
        while sum(found.values()) < len(texts) and (batch := reader.read(timeout=SECONDS)) is not None:
            found.update(record.value for record in batch)
        while (batch := reader.read(timeout=5.0)) is not None:
            found.update(record.value for record in batch)
    if found != Counter(texts):
        missing, doubled = Counter(texts) - found, found - Counter(texts)
        raise SystemExit(f"{len(missing)} records are missing, {len(doubled)} came twice: {[*missing, *doubled][:10]}")
    print(f"{len(texts)} records, each once", file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=None)
    given = parser.parse_args()
    seed = random.randrange(2**32) if given.seed is None else given.seed
    print(f"seed {seed}", file=sys.stderr)
    with tempfile.TemporaryDirectory() as directory:
        run(given.kills, seed, Path(directory))


if __name__ == "__main__":
    main()
