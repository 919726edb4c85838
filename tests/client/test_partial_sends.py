"""If accepted records cannot be sent, the transaction can only abort."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from client.core_setup import routes_with

from txnbuffer import Outcome, SyncClient, SyncTransaction, TransactionAborted, connect
from txnbuffer.client.client import Client
from txnbuffer.client.transaction import CHUNK, Transaction
from txnbuffer.errors import InvalidRequest, ServiceUnavailable

NO_PARTITIONS = "topic 'orders' has no partitions"


@pytest.fixture
def client(tmp_path: Path) -> Iterator[SyncClient]:
    with connect(f"file:{tmp_path / 'log'}") as opened:
        yield opened


def nothing_but_a_probe(client: SyncClient) -> None:
    """Nothing is visible, and nothing that is open hides what comes behind it."""
    client.send("orders", b"probe")
    with client.reader("orders") as reader:
        batch = reader.read(timeout=60)
        assert batch is not None
        assert [record.value for record in batch] == [b"probe"]


def test_sync_transaction_can_commit_after_a_rejected_send(client: SyncClient) -> None:
    with client.transaction() as txn:
        with pytest.raises(InvalidRequest, match=NO_PARTITIONS):
            txn.send("orders", b"refused", partition=7)
        with pytest.raises(InvalidRequest, match=NO_PARTITIONS):
            txn.send_many("orders", [b"refused"], partition=7)
        txn.send("orders", b"probe")
    assert client.outcome(txn.id) is Outcome.COMMIT
    with client.reader("orders") as reader:
        batch = reader.read(timeout=60)
        assert batch is not None
        assert [record.value for record in batch] == [b"probe"]


def test_ended_sync_transaction_rejects_sends(client: SyncClient) -> None:
    def ended(use: Any) -> None:
        with pytest.raises(InvalidRequest, match="has ended: begin a new one"):
            use()

    with client.transaction() as txn:
        txn.send("orders", b"before")
        txn.abort()
        txn.abort()
        ended(lambda: txn.send("orders", b"after"))
        ended(lambda: txn.send_many("orders", [b"after"]))
        ended(lambda: txn.delete("orders", "k"))
        ended(txn.commit)
    nothing_but_a_probe(client)


def test_sync_run_retries_after_a_short_outage_of_the_cluster(
    client: SyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    away, works = [None], []

    async def sometimes(topic: str, keys: Any, partition: int | None) -> Sequence[Any]:
        if away:
            away.clear()
            raise ServiceUnavailable("the cluster is away")
        return ((topic, None),)

    def work(txn: SyncTransaction) -> None:
        works.append(txn)
        for value in (b"1", b"2", b"3"):
            txn.send("orders", value)

    monkeypatch.setattr(client.client, "routes", routes_with(sometimes))
    with pytest.raises(TransactionAborted, match="the cluster is away"), client.transaction() as txn:
        work(txn)
    away.append(None)
    works.clear()
    client.run(work)
    assert len(works) == 2
    with client.reader("orders") as reader:
        batch = reader.read(timeout=60)
        assert batch is not None
        assert [record.value for record in batch] == [b"1", b"2", b"3"]


async def test_transaction_can_only_abort_after_a_partial_send_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with connect(f"file:{tmp_path / 'log'}") as client:
        calls: list[str] = []

        async def second_is_cancelled(topic: str, keys: Any, partition: int | None) -> Sequence[Any]:
            calls.append(topic)
            if len(calls) == 2:
                raise asyncio.CancelledError
            return ((topic, None),)

        monkeypatch.setattr(client, "routes", routes_with(second_is_cancelled))
        txn = await client.transaction().begin()
        with pytest.raises(asyncio.CancelledError):
            await txn.send_many("orders", [b"x"] * (CHUNK + 1))
        for use in (lambda: txn.send("orders", b"behind"), txn.commit):
            with pytest.raises(TransactionAborted, match="only some of the records of a send were sent"):
                await use()
        async with client.transaction() as whole:
            await whole.send_many("orders", [b"y"] * (CHUNK + 1))
        found = 0
        async with await client.reader("orders") as reader:
            while found < CHUNK + 1:
                batch = await reader.read(timeout=60)
                assert batch is not None
                assert {record.value for record in batch} == {b"y"}
                found += len(batch)


class HeldSend:
    """A `send_many` that has sent its first records and waits for `go` before it sends the others."""

    def __init__(self, client: Client, monkeypatch: pytest.MonkeyPatch, error: Exception | None = None) -> None:
        self.begun, self.go = asyncio.Event(), asyncio.Event()
        calls: list[str] = []

        async def second_waits(topic: str, keys: Any, partition: int | None) -> Sequence[Any]:
            calls.append(topic)
            if len(calls) == 2:
                self.begun.set()
                await self.go.wait()
                if error is not None:
                    raise error
            return ((topic, None),)

        monkeypatch.setattr(client, "routes", routes_with(second_waits))

    async def in_task(self, txn: Transaction) -> asyncio.Task[None]:
        sending = asyncio.create_task(txn.send_many("orders", [b"x"] * (CHUNK + 1)))
        await self.begun.wait()
        return sending


async def test_commit_waits_until_a_send_many_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with connect(f"file:{tmp_path / 'log'}") as client:
        held = HeldSend(client, monkeypatch)
        txn = await client.transaction().begin()
        sending = await held.in_task(txn)
        committing = asyncio.create_task(txn.commit())
        await asyncio.sleep(0.05)
        assert not committing.done()
        assert txn.over
        for use in (lambda: txn.send("orders", b"late"), txn.commit):
            with pytest.raises(InvalidRequest, match="has ended: begin a new one"):
                await use()
        held.go.set()
        await asyncio.gather(sending, committing)
        found = 0
        async with await client.reader("orders") as reader:
            while found < CHUNK + 1:
                batch = await reader.read(timeout=60)
                assert batch is not None
                found += len(batch)
            assert await reader.read() is None


async def test_commit_fails_if_the_rest_of_a_send_many_cannot_be_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with connect(f"file:{tmp_path / 'log'}") as client:
        held = HeldSend(client, monkeypatch, InvalidRequest("planned"))
        txn = await client.transaction().begin()
        sending = await held.in_task(txn)
        committing = asyncio.create_task(txn.commit())
        await asyncio.sleep(0)
        held.go.set()
        for waited in (sending, committing):
            with pytest.raises(InvalidRequest, match="planned"):
                await waited
        while await client.outcome(txn.id) is None:
            await asyncio.sleep(0.01)
        assert await client.outcome(txn.id) is Outcome.ABORT


async def test_commit_that_is_cancelled_while_it_waits_for_a_send_aborts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with connect(f"file:{tmp_path / 'log'}") as client:
        held = HeldSend(client, monkeypatch)
        txn = await client.transaction().begin()
        sending = await held.in_task(txn)
        committing = asyncio.create_task(txn.commit())
        await asyncio.sleep(0)
        committing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await committing
        held.go.set()
        with pytest.raises(InvalidRequest, match="has ended"):
            await sending
        while await client.outcome(txn.id) is None:
            await asyncio.sleep(0.01)
        assert await client.outcome(txn.id) is Outcome.ABORT
