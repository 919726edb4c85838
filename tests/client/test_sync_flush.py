"""A send to a sync transaction is part of it or rejected, also when threads share it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from txnbuffer import Outcome, ServiceUnavailable, SyncClient, SyncTransaction, connect
from txnbuffer.client import membership, sync_client
from txnbuffer.client.records import Record, RecordBatch
from txnbuffer.client.transaction import Transaction
from txnbuffer.errors import InvalidRequest, TransactionAborted

NUMBERS = [str(number).encode() for number in range(30)]


@pytest.fixture
def client() -> Iterator[SyncClient]:
    with connect("memory:") as opened:
        yield opened


def found(client: SyncClient, count: int) -> list[bytes | None]:
    values: list[bytes | None] = []
    client.send("target", b"last")
    with client.reader("target") as reader:
        while b"last" not in values:
            batch = reader.read(timeout=60)
            assert batch is not None
            values += [record.value for record in batch]
    assert len(values) == count + 1
    return values[:-1]


def wait_for_abort(client: SyncClient, txn: SyncTransaction) -> None:
    for _ in range(600):
        if txn._transaction.begun and client.outcome(txn._transaction.id) is Outcome.ABORT:
            return
        time.sleep(0.1)
    raise AssertionError("it did not abort")


def test_transaction_of_a_returned_handler_rejects_sends(client: SyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        membership, "COMMIT_INTERVAL", 600.0
    )  # the first transaction takes ten records, however slow the machine is
    given: list[SyncTransaction] = []
    told: list[str] = []
    taken: list[bytes | None] = []

    def keeps_the_first(txn: SyncTransaction, record: Record) -> None:
        given.append(txn)
        for send in (lambda: given[0].send("target", record.value), lambda: given[0].delete("target", "k")):
            try:
                send()
            except InvalidRequest as error:
                told.append(str(error))
            else:
                taken.append(record.value)

    client.send_many("source", NUMBERS)
    assert client.process("source", "g", keeps_the_first, batch=10, idle_timeout=0.05).records == 30
    assert taken == [b"0", b"0"]
    assert len(told) == 58
    assert told[0] == sync_client.RETURNED
    assert found(client, 2) == [b"0", None]


def test_transaction_of_a_returned_batch_handler_rejects_sends(
    client: SyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[SyncTransaction] = []
    commit = Transaction.commit

    async def late(txn: Transaction, **options: Any) -> None:
        with pytest.raises(InvalidRequest, match="the handler of this transaction has returned"):
            await asyncio.to_thread(given[-1].send_many, "target", [b"late"])
        await commit(txn, **options)

    def copies(txn: SyncTransaction, records: RecordBatch) -> None:
        given.append(txn)
        txn.send_many("target", records.messages.values.to_list())

    client.send_many("source", NUMBERS)
    monkeypatch.setattr(Transaction, "commit", late)
    assert client.process_batches("source", "g", copies, batch=10, idle_timeout=0.05).records == 30
    assert found(client, 30) == NUMBERS


def test_send_during_the_commit_is_rejected(client: SyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = Transaction.commit
    told = []

    async def late(committing: Transaction, **options: Any) -> None:
        with pytest.raises(InvalidRequest, match="the transaction has ended: begin a new one") as error:
            await asyncio.to_thread(txn.send, "target", b"late")
        told.append(error)
        await commit(committing, **options)

    monkeypatch.setattr(Transaction, "commit", late)
    with client.transaction() as txn:
        txn.send("target", b"in time")
    assert told
    assert found(client, 1) == [b"in time"]


def test_commit_waits_for_the_flush_of_another_thread(client: SyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = client.client.parts
    commits: list[asyncio.Task[None]] = []

    async def commits_meanwhile(topic: str, rows: Any, partition: int | None) -> Sequence[Any]:
        if not commits:
            commits.append(asyncio.ensure_future(txn._commit(False)))
            for _ in range(20):
                await asyncio.sleep(0)
        return await parts(topic, rows, partition)

    async def committed() -> None:
        await commits[0]

    monkeypatch.setattr(client.client, "parts", commits_meanwhile)
    txn = client.transaction()
    txn.send("target", b"taken")
    txn.send("target", b"as well")
    client.call(txn.flush)
    client.call(committed)
    assert found(client, 2) == [b"taken", b"as well"]


def test_transaction_aborted_while_it_begins_does_not_commit(
    client: SyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = Transaction.begin

    async def aborted_meanwhile(beginning: Transaction) -> Transaction:
        await txn._abort()
        return await begin(beginning)

    txn = client.transaction()
    with monkeypatch.context() as patch:
        patch.setattr(Transaction, "begin", aborted_meanwhile)
        with pytest.raises(InvalidRequest, match="the transaction has ended: begin a new one"):
            txn.send("target", b"never")  # may be refused already
            txn.commit()
    wait_for_abort(client, txn)
    assert found(client, 0) == []


def test_timeout_runs_while_records_are_buffered(client: SyncClient) -> None:
    with pytest.raises(TransactionAborted, match="time"), client.transaction(timeout=0.2) as txn:
        txn.send("target", b"late")
        time.sleep(3)
    without_block = client.transaction(timeout=0.2)
    without_block.send("target", b"late as well")
    time.sleep(3)
    with pytest.raises(TransactionAborted, match="time"):
        without_block.commit()
    assert found(client, 0) == []


def test_exception_while_the_transaction_begins_leaves_none_open(
    client: SyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = Transaction.begin
    beginning_now, left = threading.Event(), threading.Event()

    async def slow(beginning: Transaction) -> Transaction:
        beginning_now.set()
        await asyncio.to_thread(left.wait, 60)
        return await begin(beginning)

    with monkeypatch.context() as patch:
        patch.setattr(Transaction, "begin", slow)
        with pytest.raises(ZeroDivisionError), client.transaction() as txn:
            txn.send("target", b"never")
            assert beginning_now.wait(60)
            1 / 0  # noqa: B018
        left.set()
        with pytest.raises(InvalidRequest, match="has ended"):
            txn.commit()
    wait_for_abort(client, txn)
    assert found(client, 0) == []


def test_commit_during_a_failing_begin_raises_its_error_once(
    client: SyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = []

    async def away(_: Transaction) -> None:
        tries.append(None)
        await asyncio.sleep(1.0)
        raise ServiceUnavailable("no service")

    with monkeypatch.context() as patch:
        patch.setattr(Transaction, "begin", away)
        with pytest.raises(ServiceUnavailable), client.transaction() as txn:
            txn.send("target", b"never")
    assert len(tries) == 1
    assert found(client, 0) == []


def test_records_rejected_by_a_failed_begin_are_not_sent_later(
    client: SyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def away(_: Transaction) -> None:
        raise ServiceUnavailable("no service")

    monkeypatch.setattr(sync_client, "BUFFERED_RECORDS", 1)
    txn = client.transaction()
    with monkeypatch.context() as patch:
        patch.setattr(Transaction, "begin", away)
        txn.send("target", b"taken")
        with pytest.raises(ServiceUnavailable):
            txn.send("target", b"again")
    txn.send("target", b"again")
    txn.commit()
    assert found(client, 2) == [b"taken", b"again"]


def test_send_whose_record_another_thread_commits_succeeds(client: SyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    call = client.call

    def committed_first(function: Any, *arguments: Any, **options: Any) -> Any:
        if function == txn.flush:
            call(txn._commit, False)
        return call(function, *arguments, **options)

    monkeypatch.setattr(sync_client, "BUFFERED_RECORDS", 1)
    txn = client.transaction()
    txn.send("target", b"taken")
    with monkeypatch.context() as patch:
        patch.setattr(client, "call", committed_first)
        txn.send("target", b"as well")
    assert found(client, 2) == [b"taken", b"as well"]
    with pytest.raises(InvalidRequest, match="has ended"):
        txn.commit()
