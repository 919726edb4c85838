"""A client of several shards: where its transactions begin, and what goes on while a service is away."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest
from service_setup import eventually
from shard_world import Shards, shards_on, topics_of

from broker_io.batch import Batch, Message
from broker_io.memory import MemoryBroker
from snapshots.shards import Shard, shard_of
from txnbuffer.client.branches import Participant, abort_branches
from txnbuffer.client.client import Client
from txnbuffer.client.reading.records import Record
from txnbuffer.client.session import session
from txnbuffer.client.session.session import Link
from txnbuffer.client.sync.sync_client import SyncClient
from txnbuffer.client.transaction import Transaction
from txnbuffer.coordinator.decisions import TOPIC
from txnbuffer.errors import AlreadyCommitted, InvalidRequest, OutcomeUnknown, ServiceUnavailable, TransactionAborted
from txnbuffer.model import Outcome, TxnId
from txnbuffer.rpc.discovery import ServiceDiscovery, log_identity_of
from txnbuffer.service.cluster.cluster import CLUSTER_CONFIG
from txnbuffer.service.standby.takeover import prepare

(HERE,), (THERE,) = topics_of(2)
QUICK = replace(CLUSTER_CONFIG, transaction_timeout=2.0, session_timeout=2.0)
NAMES = [next(name for name in "abcdef" if shard_of(name, 2) == number) for number in (0, 1)]


async def test_transactions_write_to_topics_of_all_shards() -> None:
    async with shards_on() as world:
        client = await world.client(home=1)
        async with client.transaction() as txn:
            assert txn.id.most == 1
            await txn.send(HERE, b"v")
            await txn.send(THERE, b"v")
            await txn.commit(wait_visible=True)
        assert world.visible(HERE, THERE) == [Counter({b"v": 1})] * 2
        assert await client.outcome(txn.id) is Outcome.COMMIT
        await client.close()


async def test_name_uses_the_same_coordinator_from_any_home_shard() -> None:
    async with shards_on() as world:
        for home in (0, 1):
            client = await world.client(home)
            for number, name in enumerate(NAMES):
                txn = client.transaction(name=name, number=home + 1)
                async with txn:
                    assert txn.id.most == number
                    await txn.send(THERE, b"v")
                assert await client.outcome(txn.id) is Outcome.COMMIT
                with pytest.raises(AlreadyCommitted):
                    await client.transaction(name=name, number=home + 1).begin()
            await client.close()


@pytest.mark.parametrize("group", NAMES)
async def test_group_consumes_topics_of_all_shards_once(group: str) -> None:
    async with shards_on() as world:
        client = await world.client(home=0)
        for topic in (HERE, THERE):
            async with client.transaction() as txn:
                await txn.send_many(topic, [b"1", b"2"])

        async def handle(txn: Transaction, record: Record) -> None:
            await txn.send("copy", record.value)

        await eventually(lambda: [len(one) for one in world.visible(HERE, THERE)] == [2, 2])
        for _ in range(2):
            await client.process([HERE, THERE], group, handle, idle_timeout=0.5)
        await eventually(lambda: world.visible("copy") == [Counter({b"1": 2, b"2": 2})])
        await client.close()


@pytest.fixture
def _soon_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transactions wait less for the shard that they were to begin at."""
    monkeypatch.setattr(session, "AWAY", 0.2)


async def write_elsewhere(client: Client) -> None:
    """A transaction of a client whose home, shard 0, is away."""
    async with client.transaction() as txn:
        assert txn.id.most == 1
        await txn.send(THERE, b"v")


@pytest.mark.usefixtures("_soon_away")
async def test_unavailable_shard_delays_only_its_own_requests() -> None:
    async with shards_on() as world:
        client = await world.client(home=0)
        async with client.transaction() as txn:
            await txn.send(HERE, b"v")
            await txn.send(THERE, b"v")
            await txn.commit(wait_visible=True)
        await world.kill(0)
        await eventually(lambda: client.session.away_for(0.2))
        await write_elsewhere(client)
        named = asyncio.ensure_future(client.transaction(name=NAMES[0], number=1).begin())
        await eventually(lambda: world.visible(THERE) == [Counter({b"v": 2})])
        assert not named.done()
        await world.start(0)
        await (await named).abort()
        async with client.transaction() as txn:
            await txn.send(HERE, b"v")
        await eventually(lambda: world.visible(HERE) == [Counter({b"v": 2})])
        await client.close()


@pytest.mark.usefixtures("_soon_away")
async def test_transaction_begins_at_another_shard_while_home_is_unavailable() -> None:
    async with shards_on() as world:
        await world.kill(0)
        client = await world.client(home=0, max_unavailable=30.0)
        await write_elsewhere(client)
        await client.close()
        impatient = await world.client(home=0, max_unavailable=0.1)
        with pytest.raises(ServiceUnavailable, match="no service of shard 0 for"):
            await impatient.transaction(name=NAMES[0], number=1).begin()
        await impatient.close()


async def test_error_names_the_shard_of_a_topic_that_is_not_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "TICK", 0.1)
    async with shards_on() as world:
        client = await world.client(home=0)
        await world.kill(1)
        txn = await client.transaction().begin()
        await txn.send(THERE, b"never")
        client.session.max_unavailable = 0.3
        with pytest.raises(TransactionAborted, match="check that the service of shard 1, its owner, and the cluster"):
            await txn.commit()
        await client.close()


async def test_first_attempt_to_connect_counts_as_time_without_a_service() -> None:
    failing = asyncio.Event()

    async def dial() -> Link:
        await failing.wait()
        raise ServiceUnavailable("nobody answers")

    opening = session.ClientSession(dial, max_unavailable=3600.0)
    opening.begin()
    opening._lost_at -= 3600.0
    failing.set()
    with pytest.raises(ServiceUnavailable, match="nobody answers"):
        await opening.result(opening.core.wait_to_begin)
    await opening.close()


@pytest.fixture
def plainly() -> Iterator[tuple[SyncClient, Shards]]:
    """A plain client at home in shard 0, and the shards, on the loop of its thread."""
    world = Shards(2)

    async def opened() -> Client:
        for number in range(2):
            await world.start(number)
        client = await world.client(home=0)
        client.resources.push_async_callback(world.close)
        return client

    plain = SyncClient.open(opened)
    yield plain, world
    plain.close()


def test_sync_client_opens_the_sessions_of_names_on_its_loop(
    plainly: tuple[SyncClient, Shards],
) -> None:
    plain, _ = plainly
    for number, name in enumerate(NAMES):
        with plain.transaction(name=name, number=1) as txn:
            assert txn.id.most == number
            txn.send(THERE, b"v")
        assert plain.outcome(txn.id) is Outcome.COMMIT
        assert plain.committed_number(name) == 1


@pytest.mark.usefixtures("_soon_away")
def test_sync_client_begins_at_another_shard_while_home_is_unavailable(plainly: tuple[SyncClient, Shards]) -> None:
    plain, world = plainly
    plain.call(world.kill, 0)
    plain.call(eventually, lambda: plain.client.session.away_for(0.2))
    with plain.transaction() as txn:
        txn.send(THERE, b"v")
        txn.commit(wait_visible=True)
    assert txn.id.most == 1
    assert world.visible(THERE) == [Counter({b"v": 1})]


async def test_branches_of_a_name_begin_and_abort_at_its_shard() -> None:
    async with shards_on() as world:
        client = await world.client(home=0)
        share = Participant(client, NAMES[1], 1)
        await share.begin()
        await share.send_batch(THERE, Batch.of([Message(None, b"never")]))
        branch = await share.finish()
        assert branch.txn.most == 1
        await abort_branches(client, [branch])
        assert await client.outcome(branch.txn) is Outcome.ABORT
        await client.close()


def visible_anywhere(world: Shards) -> list[bytes | None]:
    """What readers of either topic see."""
    there = [topic for topic in (HERE, THERE) if topic in world.cluster.topics()]
    return [value for found in world.visible(*there) for value in found]


@pytest.mark.parametrize("seed", [1, 2])
async def test_transactions_across_shards_stay_atomic_under_random_kills(seed: int) -> None:
    chance = random.Random(seed)
    committed: set[bytes | None] = set()
    seen: set[bytes | None] = set()
    unknown: dict[bytes, TxnId] = {}

    async def work(client: Client, lane: int) -> None:
        for number in range(20):
            token = b"%d/%d" % (lane, number)
            try:
                async with client.transaction() as txn:
                    for topic in (HERE, THERE):
                        await txn.send(topic, token)
                        await asyncio.sleep(chance.random() * 0.05)
                    if chance.random() < 0.2:
                        await txn.abort()
                        continue
            except TransactionAborted:
                continue
            except OutcomeUnknown as error:
                unknown[token] = error.txn
            else:
                committed.add(token)

    async with shards_on(config=QUICK) as world:
        clients = [await world.client(lane % 2) for lane in range(4)]
        working = asyncio.gather(*(work(client, lane) for lane, client in enumerate(clients)))
        while not working.done():
            await asyncio.sleep(chance.random() * 0.3)
            number = chance.randrange(2)
            await world.kill(number)
            await asyncio.sleep(chance.random() * 0.3)
            seen |= {*visible_anywhere(world)}
            await world.start(number)
        await working
        for token, txn in unknown.items():
            await eventually(lambda: world.engine(txn.most).coordinator.ready)  # noqa: B023  awaited here
            if await clients[0].outcome(txn) is Outcome.COMMIT:
                committed.add(token)
        await eventually(lambda: world.visible(HERE, THERE) == [Counter(committed)] * 2)
        assert seen <= committed != set()
        for client in clients:
            await client.close()


def test_client_opened_before_the_namespace_got_shards_is_rejected() -> None:
    cluster = MemoryBroker()
    discovery = ServiceDiscovery(cluster, "ns")
    with pytest.raises(ServiceUnavailable, match="no service has ever"):
        discovery.newest_address()
    log = log_identity_of(cluster, "ns", TOPIC)
    prepare(cluster, Shard(0, 2))
    with pytest.raises(InvalidRequest, match="now has 2 shards"):
        discovery.newest_address()
    with pytest.raises(InvalidRequest, match="now has 2 shards"):
        asyncio.run(log.metadata())
