"""If accepted records cannot be sent, the transaction can only abort."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from service_setup import on_a_loop_for

from txnbuffer import Outcome, SyncClient, SyncTransaction, TransactionAborted, connect
from txnbuffer.client.transaction import CHUNK
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
    parts, away, works = client.client.parts, [None], []

    async def sometimes(topic: str, rows: Any, partition: int | None) -> Sequence[Any]:
        if away:
            away.clear()
            raise ServiceUnavailable("the cluster is away")
        return await parts(topic, rows, partition)

    def work(txn: SyncTransaction) -> None:
        works.append(txn)
        for value in (b"1", b"2", b"3"):
            txn.send("orders", value)

    monkeypatch.setattr(client.client, "parts", sometimes)
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


@on_a_loop_for(120.0)
async def test_transaction_can_only_abort_after_a_partial_send_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with connect(f"file:{tmp_path / 'log'}") as client:
        parts, calls = client.parts, []

        async def second_is_cancelled(topic: str, rows: Any, partition: int | None) -> Sequence[Any]:
            calls.append(topic)
            if len(calls) == 2:
                raise asyncio.CancelledError
            return await parts(topic, rows, partition)

        monkeypatch.setattr(client, "parts", second_is_cancelled)
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
