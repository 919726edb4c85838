"""Both services of a pair in this process, over brokers in memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from contextlib import ExitStack, asynccontextmanager
from typing import Any
from unittest import mock

from client_world import inside
from http_answers import get
from pair_of_brokers import Member, Pair
from service_setup import eventually

from txnbuffer.cli.admin_client import ServiceAddress, call
from txnbuffer.config import Config, PairConfig, ServiceConfig
from txnbuffer.errors import Error
from txnbuffer.service import process
from txnbuffer.service.process import _Service
from txnbuffer.service.standby import replication, takeover

PAIR = PairConfig(lock="file:lock", listen="127.0.0.1:1", peer="127.0.0.1:2", lease_seconds=1.0)


class Service:
    """The service of one member, in this process."""

    def __init__(self, member: Member) -> None:
        self.member = member
        self.events: list[tuple[str, dict[str, Any]]] = []
        config = Config(service=ServiceConfig(listen="127.0.0.1:0", http="127.0.0.1:0", drain_seconds=5.0), pair=PAIR)
        self.service = _Service(config, "test", self.log, None, cluster_mode=False)
        self.task = asyncio.ensure_future(self.service.run(lambda: member))

    def log(self, event: str, **facts: Any) -> None:
        self.events.append((event, facts))

    def count(self, event: str) -> int:
        return sum(name == event for name, _ in self.events)

    @property
    def port(self) -> int:
        return self.service._listeners.grpc.port

    def ask(self, method: str) -> Awaitable[Any]:
        return asyncio.to_thread(call, ServiceAddress(f"127.0.0.1:{self.port}"), method)

    async def get(self, path: str) -> tuple[int, str]:
        return await asyncio.to_thread(get, self.service._listeners.http.port, path)

    async def stop(self) -> Error | None:
        """As after SIGTERM."""
        self.service._signals.first.set()
        return await self.task


class RunningPair:
    """A pair and its services; the first member is live."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self.services = [Service(member) for member in pair.members]

    @property
    def address(self) -> str:
        return "txnbuf://" + ",".join(f"127.0.0.1:{service.port}" for service in self.services)

    async def serving(self, number: int, times: int = 1) -> Service:
        service = self.services[number]
        await eventually(lambda: service.count("serving") >= times or service.task.done())
        assert not service.task.done(), service.events
        return service

    async def move_to(self, number: int) -> None:
        """Make a machine live, and wait until it serves."""
        times = self.services[number].count("serving")
        if self.pair.live != number:
            self.pair.move(number)
            times += 1
        await self.serving(number, times)


FAST: dict[Any, dict[str, float]] = {
    takeover: {"PAUSE": 0.02, "SLICE": 0.2, "READ_SECONDS": 0.02},
    process: {"SWITCH_DRAIN": 0.1, "POLL": 0.02, "WATCH": 0.1},
    replication: {"POLL": 0.02},
}
"""Shorter waits."""


@asynccontextmanager
async def running() -> AsyncIterator[RunningPair]:
    with ExitStack() as patches:
        for module, values in FAST.items():
            patches.enter_context(mock.patch.multiple(module, **values))
        pair = Pair()
        pair.move(0)
        both = RunningPair(pair)
        try:
            await both.serving(0)
            await eventually(lambda: both.services[1].count("standing by"))
            yield both
        finally:
            pair.move(None)
            for service in both.services:
                if not service.task.done():
                    await service.stop()
            pair.close()


on_a_pair = inside(running)
