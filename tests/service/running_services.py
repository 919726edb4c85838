"""Services in this process for a cluster in memory, and the owners that its decision log lists."""

from __future__ import annotations

import asyncio

from service_setup import eventually

from broker_io.memory import MemoryBroker
from txnbuffer.config import Config, ServiceConfig
from txnbuffer.coordinator.decisions import TOPIC, Owner, decode
from txnbuffer.service.process import serve


def owners(cluster: MemoryBroker) -> list[Owner]:
    with cluster.reader(TOPIC) as reader:
        placed = reader.read()
        assert placed is not None
        entries = [decode(message) for message in placed.messages]
        return [entry for entry in entries if isinstance(entry, Owner)]


def service(**changes) -> Config:
    return Config(service=ServiceConfig(listen="127.0.0.1:0", http="127.0.0.1:0", drain_seconds=0.1, **changes))


class Running:
    """`serve` in this process, on a separate connection to the cluster."""

    def __init__(self, cluster: MemoryBroker, **changes) -> None:
        self.broker = cluster.connect()
        self.events: list[tuple[str, dict]] = []
        self.task = asyncio.ensure_future(
            serve(lambda: self.broker, service(**changes), "test", self.log, cluster_mode=True)
        )

    def log(self, event: str, **facts) -> None:
        self.events.append((event, facts))

    async def event(self, name: str) -> dict:
        await eventually(lambda: any(event == name for event, _ in self.events) or self.task.done())
        return next(facts for event, facts in self.events if event == name)

    async def end(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
