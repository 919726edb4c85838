"""One-way partitions: what is sent in one direction is held back or lost, and the other direction goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from sim.cluster import ADDRESS, HOST, NAMESPACE, SimCluster, in_place_of_pulsar
from sim.network import CLIENT_END, KEEPALIVE, SERVER_END, Connection
from sim.service import embedded
from sim.world import World

from broker_io import open_broker
from broker_io.batch import Batch, Message
from broker_io.environment import current
from txnbuffer import connect

SERVER, CLIENT = "alpha", "beta"


async def _sleep() -> None:
    await asyncio.Event().wait()


class Pair:
    """A connection of two processes, and what arrives at its ends, by name of the host."""

    def __init__(self, world: World) -> None:
        self._world = world
        server, client = (world.host(name).start(name, _sleep) for name in (SERVER, CLIENT))
        self.connection = Connection(world.network, client, server)
        world.network.connections[self.connection] = None
        self.arrived: dict[str, list[int]] = {SERVER: [], CLIENT: []}

    def send(self, *numbers: int) -> None:
        """Send numbers in both directions, and wait for some time."""
        for end, name in ((SERVER_END, SERVER), (CLIENT_END, CLIENT)):
            for number in numbers:
                self.connection.send(
                    end, "a number", lambda name=name, number=number: self.arrived[name].append(number)
                )
        self._world.run(0.1)


@pytest.mark.parametrize(("cut", "other"), [(SERVER, CLIENT), (CLIENT, SERVER)])
def test_one_direction_is_held_back_and_the_other_goes_on(cut: str, other: str) -> None:
    with World(1) as world:
        pair = Pair(world)
        pair.send(1)
        world.network.partition(other, cut, both_ways=False)
        pair.send(2, 3)
        assert pair.arrived == {cut: [1], other: [1, 2, 3]}
        world.network.heal()
        pair.send(4)
        assert pair.arrived == {cut: [1, 2, 3, 4], other: [1, 2, 3, 4]}


def test_a_connection_without_answers_is_lost_at_both_ends() -> None:
    with World(1) as world:
        pair = Pair(world)
        world.network.partition(CLIENT, SERVER, both_ways=False)
        pair.send(1)
        world.run(2 * KEEPALIVE)
        assert pair.connection.lost == [True, True]
        world.network.heal()
        pair.send(2)
        assert pair.arrived == {SERVER: [], CLIENT: [1]}


def test_no_connection_is_made_through_a_one_way_partition() -> None:
    with World(1) as world:
        world.network.partition(CLIENT, SERVER, both_ways=False)
        assert not world.network.reachable(SERVER, CLIENT)
        assert world.network.carries(SERVER, CLIENT)


@pytest.mark.parametrize(("source", "target"), [(SERVER, CLIENT), (CLIENT, SERVER)])
@pytest.mark.parametrize("seconds", [2.0, 3 * KEEPALIVE])
def test_a_client_continues_after_a_one_way_partition(source: str, target: str, seconds: float) -> None:
    async def main() -> None:
        async with connect(f"txnbuf://{service.address}", max_unavailable=200.0) as client:
            for value in (b"1", b"2"):
                async with client.transaction() as transaction:
                    await transaction.send("topic", value)
                world.network.partition(source, target, both_ways=False)
                world.scheduler.after(seconds, world.network.heal)
            async with await client.reader("topic") as reader:
                while len(values) < 2 and (batch := await reader.read(timeout=200.0)) is not None:
                    values.extend(record.value for record in batch)

    values: list[bytes | None] = []
    with World(1) as world:
        service = embedded(world.host(SERVER))
        service.start()
        world.host(CLIENT).start("client", main)
        world.run(300.0, lambda: len(values) == 2)
    assert values == [b"1", b"2"]


@contextmanager
def writing(source: str, target: str) -> Iterator[tuple[World, SimCluster, list[float]]]:
    """A world in which a process writes to a topic of a cluster while a direction is cut; when it was acknowledged."""
    acknowledged: list[float] = []

    async def main() -> None:
        def write() -> None:
            with open_broker(ADDRESS) as broker:
                broker.create_topic("topic")
                writer = broker.writer("topic")
                writer.append(Batch.of([Message(None, b"first")])).result()
                world.network.partition(source, target, both_ways=False)
                writer.append(Batch.of([Message(None, b"second")])).result()
                acknowledged.append(current().clock.monotonic())

        await asyncio.to_thread(write)

    with World(1) as world:
        cluster = SimCluster(world)
        world.enter(in_place_of_pulsar(cluster))
        world.host(CLIENT).start("writer", main)
        world.run(10.0)
        yield world, cluster, acknowledged


def stored(cluster: SimCluster) -> list[bytes]:
    ledgers = cluster.topics[f"{NAMESPACE}/topic"].ledgers
    return [message.data() for ledger in ledgers for entry in ledger.entries for message in entry.messages]


def test_a_cluster_stores_what_it_cannot_acknowledge() -> None:
    with writing(HOST, CLIENT) as (world, cluster, acknowledged):
        assert stored(cluster)[:2] == [b"first", b"second"]
        assert not acknowledged
        world.network.heal()
        assert world.run(60.0, lambda: bool(acknowledged))
        assert world.counts["lost acknowledgement"] == 1
        assert world.counts["duplicate append"] == 1


def test_a_cluster_stores_nothing_that_does_not_arrive() -> None:
    with writing(CLIENT, HOST) as (world, cluster, acknowledged):
        assert stored(cluster) == [b"first"]
        assert not acknowledged
        world.network.heal()
        assert world.run(60.0, lambda: bool(acknowledged))
        assert stored(cluster) == [b"first", b"second"]
