"""A send to a sync transaction is part of it or rejected, also when threads share it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from client.core_setup import routes_with
from client.direct_world import DirectWorld
from client_world import values

from broker_io.partitions import partition_name
from txnbuffer import Client, Outcome, ServiceUnavailable, SyncClient, SyncTransaction, connect
from txnbuffer.client.groups import membership
from txnbuffer.client.reading.records import Record, RecordBatch
from txnbuffer.client.session.session import ShardSessions
from txnbuffer.client.session.session_core import SessionCore
from txnbuffer.client.sync import sync_transaction
from txnbuffer.client.sync.portal import LoopCall
from txnbuffer.client.transaction import Transaction
from txnbuffer.errors import InvalidRequest, TransactionAborted

NUMBERS = [str(number).encode() for number in range(30)]


@pytest.fixture
def client() -> Iterator[SyncClient]:
    with connect("memory:") as opened:
        with opened.transaction() as first:  # now the next ones can begin without waiting
            first.send("first", b"v")
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
    assert told[0] == sync_transaction.RETURNED
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


def test_commit_waits_for_the_send_of_another_thread(client: SyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    commits: list[asyncio.Task[None]] = []
    begun = threading.Event()

    async def commits_meanwhile(topic: str, keys: Any, partition: int | None) -> Sequence[Any]:
        if not commits:
            commits.append(asyncio.ensure_future(txn._commit(False)))
            begun.set()
            for _ in range(20):
                await asyncio.sleep(0)
        return ((topic, None),)

    async def committed() -> None:
        await commits[0]

    monkeypatch.setattr(client.client, "routes", routes_with(commits_meanwhile))
    blocked = threading.Event()
    client.loop.soon(lambda: blocked.wait(60))  # until both are handed over
    txn = client.transaction().begin()
    txn.send("target", b"taken")
    txn.send("target", b"as well")
    blocked.set()
    assert begun.wait(60)
    client.call(committed)
    assert found(client, 2) == [b"taken", b"as well"]


def test_transaction_aborted_while_it_begins_does_not_commit(
    client: SyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    beginning_now, begin = threading.Event(), Transaction.begin

    async def waits(beginning: Transaction) -> Transaction:
        beginning_now.set()
        await asyncio.sleep(60)
        return await begin(beginning)

    with monkeypatch.context() as patch:
        patch.setattr(Transaction, "begin", waits)
        txn = client.transaction().begin()
        txn.send("target", b"never")
        assert beginning_now.wait(60)
        aborting = threading.Thread(target=txn.abort)
        aborting.start()
        with pytest.raises(InvalidRequest, match="the transaction has ended: begin a new one"):
            txn.commit()  # whichever comes first, it never begins
        aborting.join(60)
    assert found(client, 0) == []


def test_time_of_a_transaction_starts_with_its_block(client: SyncClient) -> None:
    with pytest.raises(TransactionAborted, match="time"), client.transaction(timeout=0.2) as txn:
        while client.outcome(txn.id) is None:
            time.sleep(0.05)
        txn.send("target", b"late")
    assert found(client, 0) == []


def test_send_does_not_wait_for_the_loop_and_does_not_hold_back(client: SyncClient) -> None:
    blocked = threading.Event()
    client.send("target", b"first")
    with client.transaction() as txn:
        client.loop.soon(lambda: blocked.wait(60))
        began = time.monotonic()
        for value in (b"one", b"two"):
            txn.send("target", value)
        assert time.monotonic() - began < 30
        blocked.set()
        with client.reader("target", isolation="read_uncommitted") as reader:
            seen: list[bytes | None] = []
            while len(seen) < 3:
                batch = reader.read(timeout=60)
                assert batch is not None, "they are sent before the commit"
                seen += [record.value for record in batch]
    assert found(client, 3) == [b"first", b"one", b"two"]


def test_send_waits_for_room(client: SyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    waits, room, send = threading.Event(), asyncio.Event(), SessionCore.send

    async def no_room() -> None:
        waits.set()
        await room.wait()

    monkeypatch.setattr(SessionCore, "send", lambda *arguments: send(*arguments) and False)
    monkeypatch.setattr(SessionCore, "room", 1000)
    monkeypatch.setattr(client.client.session, "wait_for_room", no_room)
    sent = []

    def sends() -> None:
        with client.transaction() as txn:
            for _ in range(100):
                txn.send("target", bytes(100))
                sent.append(time.monotonic())

    sending = threading.Thread(target=sends)
    sending.start()
    assert waits.wait(60)
    sending.join(0.5)
    assert sending.is_alive()
    assert len(sent) < 10
    client.loop.soon(room.set)
    sending.join(60)
    assert len(sent) == 100


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


def test_error_of_a_begin_is_raised_by_each_use(client: SyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    async def away(_: Transaction) -> None:
        raise ServiceUnavailable("no service")

    with monkeypatch.context() as patch:
        patch.setattr(Transaction, "begin", away)
        txn = client.transaction().begin()
        with pytest.raises(ServiceUnavailable):
            _ = txn.id
    for use in (lambda: txn.send("target", b"never"), txn.commit):
        with pytest.raises(ServiceUnavailable):
            use()
    txn.abort()
    assert found(client, 0) == []


def test_begin_waits_for_the_service_if_it_cannot_begin_now(
    client: SyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def away(_: Transaction) -> None:
        raise ServiceUnavailable("no service")

    with monkeypatch.context() as patch:
        patch.setattr(ShardSessions, "can_begin", False)
        patch.setattr(Transaction, "begin", away)
        with pytest.raises(ServiceUnavailable), client.transaction():
            raise AssertionError("its block is not entered")


def test_send_whose_record_another_thread_commits_succeeds(client: SyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    call = client.call

    def committed_first(function: Any, *arguments: Any, **options: Any) -> Any:
        if function == txn._sent:
            call(txn._commit, False)
        return call(function, *arguments, **options)

    txn = client.transaction().begin()
    txn.send("target", b"taken")
    with monkeypatch.context() as patch:
        patch.setattr(client, "call", committed_first)
        patch.setattr(Transaction, "room", 1)
        txn.send("target", b"as well")
    assert found(client, 2) == [b"taken", b"as well"]
    with pytest.raises(InvalidRequest, match="has ended"):
        txn.commit()


def test_send_to_partitions_asks_the_cluster_once_and_keeps_the_order() -> None:
    world = DirectWorld()

    async def opened() -> Client:
        await world.__aenter__()
        world.broker.partition("wide", 2)
        made = await world.client()
        made.resources.push_async_callback(world.__aexit__)
        return made

    plain = SyncClient.open(opened)
    try:
        with plain.transaction() as txn:
            for number in range(20):
                txn.send("wide", str(number), partition=number % 2)
            with pytest.raises(InvalidRequest, match="has 2 partitions"):
                txn.send("wide", b"refused", partition=7)
            txn.send("other", b"v")
            with pytest.raises(InvalidRequest, match="has no partitions"):
                txn.send("other", b"refused", partition=0)
            txn.commit(wait_visible=True)
        assert plain.outcome(txn.id) is Outcome.COMMIT
        for number in range(2):
            sent = values(world.broker, partition_name("wide", number))
            assert sent == [str(one).encode() for one in range(number, 20, 2)]
    finally:
        plain.close()


def test_a_commit_changes_to_the_thread_of_the_loop_once_and_back_once(
    client: SyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other threads that wake the loop, such as that of the log, do not count."""
    changes: list[str] = []
    loop, me = client._portal.loop.loop, threading.current_thread()
    to_loop, ended = loop.call_soon_threadsafe, LoopCall._finish

    def counted(*arguments: Any, **named: Any) -> Any:
        if threading.current_thread() is me:
            changes.append("to the loop")
        return to_loop(*arguments, **named)

    def counted_end(call: LoopCall[Any], task: asyncio.Task[None]) -> None:
        changes.append("back")
        ended(call, task)

    with client.transaction() as txn:
        txn.send("target", b"1")
        assert txn.id
        monkeypatch.setattr(loop, "call_soon_threadsafe", counted)
        monkeypatch.setattr(LoopCall, "_finish", counted_end)
        txn.commit()
    assert changes == ["to the loop", "back"]
