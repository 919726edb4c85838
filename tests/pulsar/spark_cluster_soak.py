"""Kills of executors and drivers of a small Spark cluster, on an embedded log and on Pulsar; run by `make soak`."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from pulsar_cluster import Cluster
from service_process import ServiceProcess
from spark_cluster import Driver, SparkCluster
from spark_frames import run_out

from txnbuffer import connect

SECONDS = 300.0
TRANSACTIONS = 8


class World(NamedTuple):
    """The address of a service, and the options to read and write."""

    name: str
    address: str
    reading: Mapping[str, str]
    writing: Mapping[str, str]
    client: Mapping[str, Any]

    def told(self) -> str:
        return json.dumps({"name": self.name, "reading": self.reading, "writing": self.writing})

    async def fill(self, topic: str) -> Counter[str]:
        """Write overlapping transactions, half of them aborted and half as record sets; the committed values."""
        texts: list[str] = []
        async with connect(self.address, **self.client) as client:
            for number in range(TRANSACTIONS):
                batching: Any = "records" if self.client and number % 2 else "messages"
                aborted = client.transaction()
                await aborted.begin()
                async with client.transaction() as txn:
                    for text in (some := [f"{number}-{index}" for index in range(8)]):
                        await txn.send(topic, text, key=text, batching=batching)
                        await aborted.send(topic, f"never-{text}", key=text, batching=batching)
                await aborted.abort()
                texts += some
        return Counter(texts)

    def values(self, topic: str) -> Counter[str]:
        """All visible values, up to a record that is written now."""
        found: Counter[str] = Counter()
        with connect(self.address, **self.client) as client:
            with client.transaction() as txn:
                txn.send(topic, b"end")
            with client.reader(topic) as reader:
                while "end" not in found:
                    batch = reader.read(timeout=SECONDS)
                    assert batch is not None, found
                    found.update((record.value or b"").decode() for record in batch)
        return found - Counter(["end"])


@pytest.fixture(scope="module")
def worlds(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[World]]:
    namespace = cluster.namespace()
    beside = f"{cluster.url}/{namespace}"
    with ExitStack() as stack:
        stack.callback(cluster.drop, namespace)
        files = stack.enter_context(ServiceProcess(tmp_path_factory.mktemp("log")))
        stack.enter_context(ServiceProcess(beside, "--admin-url", cluster.admin))
        service = {"broker": f"txnbuf://127.0.0.1:{files.port}"}
        broker = {"broker": beside, "pulsar.admin_url": cluster.admin}
        client = {"broker_options": {"admin_url": cluster.admin}}
        cut = {"columns": "key,value", "partition_bytes": "400"}
        yield [
            World("files", service["broker"], {**service, **cut}, service, {}),
            World("cluster", beside, {**broker, **cut}, {**broker, "batching": "records"}, client),
        ]


@pytest.fixture(scope="module")
def miniature(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkCluster]:
    with SparkCluster(tmp_path_factory.mktemp("workers")) as started:
        yield started


def test_each_record_is_copied_once_despite_kills_of_executors_and_drivers(
    spark: Any, miniature: SparkCluster, worlds: list[World], tmp_path: Path
) -> None:
    texts = {world.name: asyncio.run(world.fill("source")) for world in worlds}
    driver = Driver(miniature.url, str(tmp_path), *(world.told() for world in worlds))
    try:
        for world in worlds:
            assert driver.said(f"{world.name} tasks") > 4
            assert driver.said(f"{world.name} troubles") == ["dies", "killed", "speculated", "waits"]
        for world in worlds:
            assert driver.said(f"{world.name} streaming") is True
    finally:
        driver.end(gently=False)
    for world in worlds:
        assert world.values("copied") == texts[world.name]
        source = spark.readStream.format("txnbuffer").options(topics="source", **world.reading)
        sink = source.load().writeStream.format("txnbuffer").options(topic="streamed", **world.writing)
        run_out(sink.option("checkpointLocation", f"{tmp_path}/{world.name}/checkpoint"))
        assert world.values("streamed") == texts[world.name]
