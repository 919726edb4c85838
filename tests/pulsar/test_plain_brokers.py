"""Plain consumers of a cluster of two brokers with the plug-in, between which topics move."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator

import pytest
from plain_world import KINDS, SETTINGS, Plain, World, by_key, closing, committed, compare, until, write
from several_brokers import Brokers

from broker_io import open_broker
from txnbuffer import Client

PARTITIONS = [f"parts-partition-{number}" for number in range(3)]
SNAPSHOTS = "__txnbuffer_snapshots"


BROKER = SETTINGS


@pytest.fixture
def world(brokers: Brokers) -> Iterator[World]:
    yield from closing(World(brokers))


async def test_consumers_get_the_same_while_topics_move_and_their_owner_is_killed(
    brokers: Brokers, world: World
) -> None:
    first, second = brokers.members
    moved = [f"{world.namespace}/{name}" for name in ("moved", SNAPSHOTS)]
    async with world.client() as client:
        await write(client, "moved", 1, 1)
        plains = [Plain(world, "moved", kind) for kind in KINDS]
        ended = asyncio.Event()
        writing = asyncio.create_task(write_until(ended, client, "moved"))
        for to in (second, first, second):
            for topic in moved:
                await asyncio.to_thread(brokers.move, topic, to)
                await asyncio.sleep(0.5)
        await asyncio.to_thread(second.kill)
        await until(lambda: brokers.owner(moved[0]) is first)
        await asyncio.to_thread(second.start)
        await asyncio.to_thread(brokers.move, moved[0], second)
        ended.set()
        await writing
        wanted = await committed(client, "moved")
        for plain in [*plains, Plain(world, "moved", "reader")]:
            await asyncio.to_thread(compare, plain, wanted)


async def test_partitions_and_sharded_snapshots_of_two_brokers(brokers: Brokers) -> None:
    world = World(brokers, shards=2)
    try:
        async with world.client() as client:
            with open_broker(world.address, admin_url=brokers.admin) as opened:
                await asyncio.to_thread(opened.partition, "parts", 3)
            plain = Plain(world, "parts", "Exclusive")
            for seed in range(2):
                await asyncio.gather(write(client, "parts", 5, seed), write(client, "whole", 5, seed))
                for to, name in zip(brokers.members * 2, (*PARTITIONS, "whole"), strict=True):
                    await asyncio.to_thread(brokers.move, f"{world.namespace}/{name}", to)
                wanted = await committed(client, "parts")
                assert by_key(await asyncio.to_thread(plain.read, len(wanted))) == by_key(wanted)
                whole = Plain(world, "whole", "reader")
                await asyncio.to_thread(compare, whole, await committed(client, "whole"))
    finally:
        world.close()


async def write_until(ended: asyncio.Event, client: Client, topic: str) -> None:
    for seed in itertools.count(2):
        await write(client, topic, 3, seed)
        if ended.is_set():
            return
