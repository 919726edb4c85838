"""A cluster in which a broker lacks the plug-in: the lock keeps the topics from it, and services say so."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pulsar
import pytest
from commands import txnbuf
from plain_world import SETTINGS, Plain, World, closing, stored, until, values
from pulsar_cluster import choose, make_standalone
from several_brokers import Brokers, MemberBroker

from broker_io.port import PLUG_IN_LOCK
from broker_io.standalone import NoPulsar, ask

DENIED = 5.0
"""Seconds for which a topic that nobody may serve is tried."""


BROKER = [*SETTINGS, PLUG_IN_LOCK]


@pytest.fixture
def world(brokers: Brokers) -> Iterator[World]:
    yield from closing(World(brokers))


def restart(broker: MemberBroker, *, plug_in: bool) -> None:
    broker.kill()
    broker.with_plug_in(plug_in)
    broker.start()


def locked(world: World, *flags: str) -> None:
    address = (world.address, "--set", f"pulsar.admin_url={world.broker.admin}")
    done = txnbuf("plugin", "lock", *address, *flags)
    assert done.returncode == 0, done.stderr


async def test_locked_namespace_is_refused_by_a_broker_without_the_plug_in(brokers: Brokers, world: World) -> None:
    _, second = brokers.members
    locked(world)
    topic = f"{world.namespace}/orders"
    async with world.client() as client:
        async with client.transaction() as txn:
            await txn.send("orders", b"committed")
        hanging = await client.transaction(timeout=600).begin()
        await hanging.send("orders", b"open")
        await client.send("orders", b"after")
        plain = Plain(world, "orders", "Exclusive")
        assert values(await asyncio.to_thread(plain.read, 1)) == [b"committed"]
        await asyncio.to_thread(restart, second, plug_in=False)
        lacks = f"{second.admin.removeprefix('http://')} lacks topicFactoryClassName"
        await until(lambda: any(lacks in event.get("error", "") for event in world.service.events))
        await asyncio.to_thread(brokers.move, topic, second)
        assert values(await asyncio.to_thread(plain.read, 1, DENIED)) == [b"committed"]
        with pytest.raises(pulsar.PulsarException):
            await asyncio.to_thread(world.pulsar.create_reader, world.topic("orders"), pulsar.MessageId.earliest)
        assert "txnbuffer" in second.log()
        await asyncio.to_thread(restart, second, plug_in=True)
        await hanging.commit()
        assert values(await asyncio.to_thread(plain.read, 3)) == [b"committed", b"open", b"after"]


async def test_namespace_is_locked_only_if_all_brokers_can_serve_it(brokers: Brokers, world: World) -> None:
    _, second = brokers.members
    policy = f"namespaces/{world.namespace}/persistence"
    locked(world)
    assert ask(brokers.admin, policy)["managedLedgerStorageClassName"] == "txnbuffer"
    await asyncio.to_thread(restart, second, plug_in=False)
    locked(world, "--release")
    assert "managedLedgerStorageClassName" not in ask(brokers.admin, policy)
    async with world.client() as client:
        hanging = await client.transaction(timeout=600).begin()
        await hanging.send("orders", b"open")
        await until(lambda: len(stored(world, "orders")) == 1)
        await asyncio.to_thread(brokers.move, f"{world.namespace}/orders", second)
        reader = Plain(world, "orders", "reader")
        assert b"open" in values(await asyncio.to_thread(reader.read, 1)), "what the lock prevents"
    refused = txnbuf("plugin", "lock", world.address, "--set", f"pulsar.admin_url={brokers.admin}")
    assert refused.returncode == 2
    assert PLUG_IN_LOCK in refused.stderr


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ([PLUG_IN_LOCK], "set topicFactoryClassName=txnbuffer.broker.TxnTopicFactory"),
        ([*SETTINGS, PLUG_IN_LOCK, "transactionCoordinatorEnabled=true"], "transactionCoordinatorEnabled=true"),
    ],
)
def test_broker_with_the_lock_that_cannot_filter_does_not_start(
    tmp_path: Path, plug_in: Path, settings: list[str], told: str
) -> None:
    broker = make_standalone(choose(), tmp_path, settings, None, plug_in)
    try:
        with pytest.raises(NoPulsar):
            broker.start()
        assert f"txnbuffer: the broker does not start: {told}" in broker.log()
    finally:
        broker.remove()
