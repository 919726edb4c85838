"""The product's own service and clients over the simulated network: what breaks, and what both sides notice."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from sim.network import KEEPALIVE
from sim.service import Service, embedded
from sim.world import World

from txnbuffer import connect
from txnbuffer.client.client import Client
from txnbuffer.errors import ServiceUnavailable

Work = Callable[[Client], Awaitable[Any]]


class Rig:
    """A service on one host, and clients on another."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.service: Service = embedded(world.host("alpha"))
        self.service.start()

    def client(self, work: Work, **options: Any) -> list[Any]:
        """Start a client; return the list that gets the result of `work`."""
        results: list[Any] = []

        async def main() -> None:
            async with connect(f"txnbuf://{self.service.address}", **options) as client:
                results.append(await work(client))

        self.world.host("beta").start("client", main)
        return results

    def wait(self, results: list[Any], seconds: float = 100.0) -> Any:
        assert self.world.run(seconds, lambda: bool(results)), "the client did not end in time"
        return results[0]


async def commit(client: Client, *values: bytes) -> None:
    for value in values:
        async with client.transaction() as txn:
            await txn.send("topic", value)


async def read(client: Client, count: int) -> list[bytes]:
    found: list[bytes] = []
    async with await client.reader("topic") as reader:
        while len(found) < count:
            batch = await reader.read(timeout=10.0)
            assert batch is not None, f"only {found}"
            found += [record.value for record in batch]
    return found


def test_a_client_writes_and_reads_over_the_network() -> None:
    async def work(client: Client) -> list[bytes]:
        await commit(client, b"1", b"2")
        return await read(client, 2)

    with World(1) as world:
        rig = Rig(world)
        assert rig.wait(rig.client(work)) == [b"1", b"2"]


def test_a_stream_delivers_changes() -> None:
    async def work(client: Client) -> list[Any]:
        await commit(client, b"1", b"2")
        async with client.stream("topic", to="now") as stream:
            return [change.value async for batch in stream for change in batch]

    with World(1) as world:
        rig = Rig(world)
        assert rig.wait(rig.client(work)) == [b"1", b"2"]


def test_a_service_restarts_and_its_client_continues() -> None:
    async def work(client: Client) -> list[bytes]:
        await commit(client, b"1")
        kill.append(True)
        await asyncio.sleep(1.0)
        await commit(client, b"2")
        return await read(client, 2)

    kill: list[bool] = []
    with World(1) as world:
        rig = Rig(world)
        results = rig.client(work)
        assert world.run(100.0, lambda: bool(kill))
        process = rig.service.running
        assert process is not None
        process.kill()
        world.run(0.5)
        rig.service.start()
        assert rig.wait(results) == [b"1", b"2"]


def test_a_service_ends_after_a_signal() -> None:
    with World(1) as world:
        rig = Rig(world)
        world.run(1.0)
        process = rig.service.running
        assert process is not None
        process.signal(signal.SIGTERM)
        assert world.run(30.0, lambda: process.ended)


def test_without_a_service_a_client_gives_up() -> None:
    async def work(_: Client) -> None: ...

    async def main() -> None:
        with pytest.raises(ServiceUnavailable):
            async with connect("txnbuf://nowhere:1", max_unavailable=5.0):
                raise AssertionError("connected to nothing")
        ended.append(world.now)

    ended: list[float] = []
    with World(1) as world:
        world.host("beta").start("client", main)
        assert world.run(60.0, lambda: bool(ended))
    assert 4.5 < ended[0] < 15.0


@pytest.mark.parametrize("seconds", [2.0, 3 * KEEPALIVE])
def test_a_partition_ends(seconds: float) -> None:
    async def work(client: Client) -> list[bytes]:
        await commit(client, b"1")
        world.network.partition("alpha", "beta")
        world.scheduler.after(seconds, world.network.heal)
        await commit(client, b"2")
        return await read(client, 2)

    with World(1) as world:
        rig = Rig(world)
        assert rig.wait(rig.client(work, max_unavailable=200.0), 200.0) == [b"1", b"2"]


@pytest.mark.parametrize("seed", range(3))
def test_connections_break_at_any_message(seed: int) -> None:
    async def work(client: Client) -> set[bytes]:
        world.network.loss = 0.05
        await commit(client, *(b"%d" % number for number in range(50)))
        world.network.loss = 0.0
        return {*await read(client, 50)}

    with World(seed) as world:
        rig = Rig(world)
        assert len(rig.wait(rig.client(work, max_unavailable=200.0), 600.0)) == 50
        assert world.counts["connection lost"] > 0


def test_a_paused_service_loses_its_clients() -> None:
    async def work(client: Client) -> list[bytes]:
        await commit(client, b"1")
        process = rig.service.running
        assert process is not None
        process.pause()
        world.scheduler.after(2 * KEEPALIVE, process.resume)
        await commit(client, b"2")
        return await read(client, 2)

    with World(1) as world:
        rig = Rig(world)
        assert rig.wait(rig.client(work, max_unavailable=200.0), 300.0) == [b"1", b"2"]
