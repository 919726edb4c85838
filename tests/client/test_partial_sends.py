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


def test_sync_transaction_whose_buffered_records_are_rejected_can_only_abort(client: SyncClient) -> None:
    told = []
    with pytest.raises(InvalidRequest, match=NO_PARTITIONS), client.transaction(timeout=600) as txn:
        txn.send("orders", b"first")
        txn.send("orders", b"refused", partition=7)
        for _ in range(1500):
            try:
                txn.send("orders", b"behind")
            except InvalidRequest as error:  # as does who takes it for the fault of this one
                told.append(str(error))
    assert set(told) == {f"{NO_PARTITIONS}: cannot send to partition 7"}
    nothing_but_a_probe(client)
    assert client.outcome(txn.id) is Outcome.ABORT


def test_sync_commit_that_cannot_send_its_records_aborts(client: SyncClient) -> None:
    with client.transaction() as txn:
        assert txn.id
        txn.send("orders", b"first")
        txn.send("orders", b"refused", partition=7)
        with pytest.raises(InvalidRequest, match=NO_PARTITIONS):
            txn.commit()
        with pytest.raises(InvalidRequest, match="has ended"):
            txn.commit()
        with pytest.raises(InvalidRequest, match=NO_PARTITIONS):
            txn.send("orders", b"behind")
    nothing_but_a_probe(client)


def test_block_whose_records_are_rejected_at_its_end_aborts(client: SyncClient) -> None:
    with pytest.raises(InvalidRequest, match=NO_PARTITIONS), client.transaction(timeout=600) as txn:
        txn.send("orders", b"first")
        txn.send("orders", b"refused", partition=7)
    nothing_but_a_probe(client)


def test_sync_transaction_aborted_before_it_began_rejects_sends(client: SyncClient) -> None:
    def ended(use: Any) -> None:
        with pytest.raises(InvalidRequest, match="the transaction has ended: begin a new one"):
            use()

    with client.transaction() as txn:
        txn.send("orders", b"before")
        txn.abort()
        txn.abort()
        ended(lambda: txn.send("orders", b"after"))
        ended(lambda: txn.send_many("orders", [b"after"]))
        ended(lambda: txn.delete("orders", "k"))
        ended(txn.commit)
        ended(lambda: txn.id)
    nothing_but_a_probe(client)


def test_sync_run_retries_after_a_short_outage_of_the_cluster(
    client: SyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts, calls = client.client.parts, []

    async def sometimes(topic: str, rows: Any, partition: int | None) -> Sequence[Any]:
        calls.append(topic)
        if len(calls) == 2:
            raise ServiceUnavailable("the cluster is away")
        return await parts(topic, rows, partition)

    def work(txn: SyncTransaction) -> None:
        for value in (b"1", b"2", b"3"):
            txn.send("orders", value)

    monkeypatch.setattr(client.client, "parts", sometimes)
    with pytest.raises(ServiceUnavailable), client.transaction() as txn:
        work(txn)
    calls.clear()

    def caught(txn: SyncTransaction) -> None:
        work(txn)
        if len(calls) < 2:
            with pytest.raises(ServiceUnavailable):
                client.call(txn.flush)

    client.run(caught)
    assert len(calls) == 2 + 3
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
