"""Compaction of the embedded log, against Kafka's log cleaner: the same shape of records, each in a process of its own.

Values are random and begin with the number of their record, so that both sides can check what is left: the newest
record of each key, and nothing else. Both write segments of 64 MiB and sync what they write.
"""

from __future__ import annotations

import functools
import json
import os
import resource
import subprocess
import tempfile
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bench.fresh import fresh
from bench.harness import Pair, figure
from broker_io.batch import Batch, Blobs
from broker_io.filelog.log.broker import FileBroker

TOPIC = "bench"
RECORDS, KEYS = 5_000_000, 1_000_000
BATCH = 8_000
KEY_BYTES, VALUE_BYTES = 12, 100
ENOUGH_BYTES = 128 << 20
"""Room for all keys, on both sides."""
FEW_BYTES, KAFKA_FEW_BYTES = 5_400_000, 3_340_000
"""Room for an eighth of the keys: 43 bytes for each, of which 12 are the key, and 24 at a load of 0.9."""
KAFKA = "4.4.0"
PEER = f"Kafka's log cleaner {KAFKA}"
DRIVER = Path(__file__).parent / "native" / "KafkaCleaner.java"
POM = f"""<project xmlns="http://maven.apache.org/POM/4.0.0"><modelVersion>4.0.0</modelVersion>
<groupId>bench</groupId><artifactId>bench</artifactId><version>1</version><dependencies><dependency>
<groupId>org.apache.kafka</groupId><artifactId>kafka-storage</artifactId><version>{KAFKA}</version>
</dependency></dependencies></project>
"""


def fill(broker: FileBroker, records: int, keys: int) -> NDArray[np.int64]:
    """Append records with random keys; the number of the newest record of each key, or -1."""
    choose = np.random.default_rng(1)
    newest = np.full(keys, -1, np.int64)
    with broker.writer(TOPIC) as writer:
        for first in range(0, records, BATCH):
            count = min(BATCH, records - first)
            numbers = np.arange(first, first + count)
            chosen = choose.integers(0, keys, count)
            newest[chosen] = numbers
            names = b"".join([b"key-%08d" % key for key in chosen.tolist()])
            values = choose.integers(0, 256, (count, VALUE_BYTES), np.uint8)
            values[:, :8] = numbers.astype(">i8").view(np.uint8).reshape(count, 8)
            columns = _column(names, KEY_BYTES, count), _column(values.tobytes(), VALUE_BYTES, count)
            writer.append(Batch(*columns)).result()
    broker.roll(TOPIC)
    return newest


def _column(data: bytes, width: int, count: int) -> Blobs:
    return Blobs(data, np.arange(0, (count + 1) * width, width, dtype=np.int32), None)


def check(broker: FileBroker, newest: NDArray[np.int64]) -> None:
    """Raises AssertionError unless the topic has exactly the newest record of each key."""
    found: list[NDArray[np.int64]] = []
    with broker.reader(TOPIC) as reader:
        while (batch := reader.read()) is not None:
            values = np.frombuffer(bytes(batch.messages.values.packed().data), np.uint8).reshape(-1, VALUE_BYTES)
            found.append(np.ascontiguousarray(values[:, :8]).view(">i8").ravel().astype(np.int64))
    if not np.array_equal(np.concatenate(found), np.sort(newest[newest >= 0])):
        raise AssertionError("other records are left than the newest of each key")


def compact(records: int, keys: int, map_bytes: int) -> dict[str, float]:
    """Compact a new log; seconds, rounds, bytes read, its bytes before and after, and the peak of resident memory."""
    with tempfile.TemporaryDirectory() as directory:
        path = f"{directory}/log"
        with FileBroker.open(path, committer=False, compacted_prefix=TOPIC, compaction_bytes=map_bytes) as broker:
            broker.create_topic(TOPIC)
            newest = fill(broker, records, keys)
            before = sum(ledger.bytes for ledger in broker.ledgers(TOPIC))
            began = time.perf_counter()
            broker.compact(TOPIC)
            seconds = time.perf_counter() - began
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            check(broker, newest)
            after = sum(ledger.bytes for ledger in broker.ledgers(TOPIC))
            done = broker.last_compaction
    return {
        "seconds": seconds,
        "rounds": done.passes,
        "bytes_read": done.bytes_read,
        "bytes_before": before,
        "bytes_after": after,
        "peak_bytes": peak,
    }


@functools.cache
def kafka() -> Path:
    """The directory of Kafka's libraries, downloaded by Maven if it is missing."""
    cache = Path(os.environ.get("TXNBUFFER_CACHE") or Path.home() / ".cache" / "txnbuffer")
    libraries = cache / f"kafka-{KAFKA}"
    if not libraries.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as directory:
            Path(directory, "pom.xml").write_text(POM)
            command = ["mvn", "-q", "-B", "dependency:copy-dependencies", f"-DoutputDirectory={directory}/lib"]
            subprocess.run(command, cwd=directory, check=True)
            Path(directory, "lib").rename(libraries)
    return libraries


def kafka_compact(records: int, keys: int, map_bytes: int) -> dict[str, float]:
    """As `compact`, by Kafka's cleaner, after it has cleaned three smaller logs; without the peak of memory."""
    with tempfile.TemporaryDirectory() as directory:
        command = [
            "java",
            "-Xmx2g",
            "-cp",
            f"{kafka()}/*",
            str(DRIVER),
            directory,
            *map(str, (records, keys, map_bytes)),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"Kafka's cleaner failed:\n{done.stderr}")
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


@figure("compaction.records_per_s", unit="records/s", goal=">= 2 times the peer", peer=PEER)
def records_per_s() -> Pair:
    ours = fresh("bench.figures_compaction", "compact", RECORDS, KEYS, ENOUGH_BYTES)
    theirs = kafka_compact(RECORDS, KEYS, ENOUGH_BYTES)
    return Pair(RECORDS / ours["seconds"], RECORDS / theirs["seconds"])


@figure("compaction.read_amplification", unit="bytes read per byte of the log", goal="<= 3", peer=PEER)
def read_amplification() -> Pair:
    ours = fresh("bench.figures_compaction", "compact", RECORDS, KEYS, FEW_BYTES)
    theirs = kafka_compact(RECORDS, KEYS, KAFKA_FEW_BYTES)
    return Pair(*(result["bytes_read"] / result["bytes_before"] for result in (ours, theirs)))


@figure("compaction.rss_bytes", unit="bytes", goal="<= 200e6")
def rss_bytes() -> float:
    """The peak of resident memory beyond the map, on a log four times the size of the map."""
    found = fresh("bench.figures_compaction", "compact", RECORDS, KEYS, ENOUGH_BYTES)
    return float(found["peak_bytes"] - ENOUGH_BYTES)
