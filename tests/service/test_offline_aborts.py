"""Transactions that stay open because no service runs are shown with their age, and aborted by a command."""

from __future__ import annotations

import pytest
from service_setup import visible
from shard_world import App, Shards, shards_on, topics_of

from broker_io.errors import Error, ServiceUnavailable, StillHeld
from broker_io.memory import MemoryBroker
from txnbuffer.model import Outcome, TxnId
from txnbuffer.service.offline import aborted
from txnbuffer.service.servers.admin import ServiceAdmin
from txnbuffer.service.standby import takeover
from txnbuffer.service.stored import hanging

(A,), (B,) = topics_of(2)


@pytest.fixture(autouse=True)
def _no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not wait for an owner that was just killed."""
    monkeypatch.setattr(takeover, "RELEASE_WAIT", 0.0)


async def opened(world: Shards) -> TxnId:
    """A committed transaction, and an open one of shard 0, with records of both shards."""
    app = await App.on(world, 0, A, B)
    for topic in (A, B):
        await app.write(topic, [1], b"committed")
        await app.write(topic, [2], b"open")
    assert await app.commit(1, A, B, wait_visible=True) is Outcome.COMMIT
    return TxnId(0, 2)


async def test_a_transaction_is_shown_and_aborted_on_the_topics_of_all_shards() -> None:
    async with shards_on() as world:
        txn = await opened(world)
        for number in range(2):
            await world.kill(number)
        with world.cluster.connect() as broker:
            (row,) = hanging(broker, 0.0)
            assert (row["txn"], row["state"], sorted(row["topics"]), row["records"]) == (
                str(txn),
                "open",
                sorted([A, B]),
                1,
            )
            assert row["open_seconds"] >= 0.0
            assert hanging(broker, 1000.0) == []
            answer = await aborted(broker, txn, "test", cluster_mode=True)
            assert answer == {"txn": str(txn), "outcome": "ABORT"}
            assert hanging(broker, 0.0) == []
            again = await aborted(broker, TxnId(0, 1), "test", cluster_mode=True)
            assert again["outcome"] == "COMMIT", "the outcome of another one stays"
        assert world.visible(A, B) == [{b"committed": 1}] * 2
        for number in range(2):
            await world.start(number)
        app = await App.on(world, 0, A)
        first = next(app.ids)
        await app.write(A, [first], b"later")
        assert await app.commit(first, A, wait_visible=True) is Outcome.COMMIT


async def test_a_log_that_a_service_owns_is_left_to_it() -> None:
    async with shards_on() as world:
        txn = await opened(world)
        with world.cluster.connect() as broker, pytest.raises(StillHeld, match="a service owns shard 0 of the log"):
            await aborted(broker, txn, "test", cluster_mode=True)
        assert not world.engine(0).ended.done()
        answer = await ServiceAdmin(world.engine(0)).methods()["Abort"]({"txn": str(txn)})
        assert answer["outcome"] == "ABORT"


async def test_shards_that_have_a_service_write_their_markers_themselves() -> None:
    async with shards_on() as world:
        txn = await opened(world)
        await world.kill(0)
        with world.cluster.connect() as broker:
            assert (await aborted(broker, txn, "test", cluster_mode=True))["outcome"] == "ABORT"
        await world.start(0)
        app = await App.on(world, 1, B)
        first = next(app.ids)
        await app.write(B, [first], b"later")
        assert await app.commit(first, B, wait_visible=True) is Outcome.COMMIT
        assert visible(world.cluster, B) == {b"committed": 1, b"later": 1}


@pytest.mark.parametrize("txn", [TxnId(0, 99_999), TxnId(7, 1)])
async def test_an_unknown_transaction_is_one_error(txn: TxnId) -> None:
    async with shards_on() as world:
        await opened(world)
        for number in range(2):
            await world.kill(number)
        with world.cluster.connect() as broker, pytest.raises(Error, match=r"never leased|belongs to coordinator 7"):
            await aborted(broker, txn, "test", cluster_mode=True)


async def test_a_namespace_that_never_had_a_service_gets_none() -> None:
    with MemoryBroker() as broker:
        assert hanging(broker, 0.0) == []
        with pytest.raises(ServiceUnavailable, match="no service has ever taken over"):
            await aborted(broker, TxnId(0, 1), "test", cluster_mode=True)
        assert broker.topics() == []
