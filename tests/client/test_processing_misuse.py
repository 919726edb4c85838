"""Handlers that do what they can't: all is refused, nothing is lost or doubled by it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from client_world import World, in_world, until, values

from txnbuffer import TransactionAborted, connect
from txnbuffer.client import handling
from txnbuffer.client.plain import PlainTransaction
from txnbuffer.client.records import Record, RecordBatch
from txnbuffer.client.transaction import Transaction
from txnbuffer.errors import InvalidRequest, OutcomeUnknown

NUMBERS = [str(number).encode() for number in range(30)]


@pytest.mark.parametrize("ending", [Transaction.commit, Transaction.abort])
def test_a_handler_that_ends_its_transaction_is_refused_and_loses_nothing(ending: Callable[..., Any]) -> None:
    async def ends(txn: Transaction, record: Record) -> None:
        await txn.send("target", record.value or b"")
        if record.value == b"19":
            await ending(txn)

    async def copies(txn: Transaction, record: Record) -> None:
        await txn.send("target", record.value or b"")

    async def test(world: World) -> None:
        client = await world.client()
        await client.send_many("source", NUMBERS)
        with pytest.raises(InvalidRequest, match="can't end its transaction"):
            await client.process("source", "g", ends, batch=10, idle_timeout=0.05)
        assert (await client.process("source", "g", copies, batch=10, idle_timeout=0.05)).records == 20
        await until(lambda: values(world.broker, "target") == NUMBERS)

    in_world(test)


def test_what_is_done_commits_once_its_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    async def copies(txn: Transaction, record: Record) -> None:
        await txn.send("target", record.value or b"")

    async def test(world: World) -> None:
        client = await world.client()
        await client.send_many("source", NUMBERS)
        done = await client.process("source", "g", copies, idle_timeout=0.05)
        assert (done.records, done.transactions) == (30, 30)
        await until(lambda: values(world.broker, "target") == NUMBERS)

    monkeypatch.setattr(handling, "LONGEST", 0.0)
    in_world(test)


def test_batches_that_take_longer_than_a_transaction_may_get_smaller() -> None:
    async def copies(txn: Transaction, records: RecordBatch) -> None:
        if len(records) > 4:
            raise TransactionAborted(txn.id, "its time was up")
        await txn.send_many("target", records.messages.values.to_list())

    async def test(world: World) -> None:
        client = await world.client()
        await client.send_many("source", NUMBERS)
        assert (await client.process_batches("source", "g", copies, idle_timeout=0.05)).records == 30
        await until(lambda: values(world.broker, "target") == NUMBERS)

    in_world(test)


def test_what_is_unknown_of_another_transaction_is_the_handlers_error() -> None:
    async def test(world: World) -> None:
        client = await world.client()
        await client.send_many("source", NUMBERS)
        async with client.transaction() as other:
            await other.send("target", b"other")

        async def raises(txn: Transaction, record: Record) -> None:
            raise OutcomeUnknown(other.id, "its answer was lost")

        with pytest.raises(OutcomeUnknown):
            await client.process("source", "g", raises, idle_timeout=0.05)

    in_world(test)


def within(txn: PlainTransaction) -> None:
    with txn:
        raise KeyError("which aborts")


@pytest.mark.parametrize("ending", [PlainTransaction.commit, PlainTransaction.abort, within])
def test_a_plain_handler_may_catch_that_and_go_on(ending: Callable[[PlainTransaction], None]) -> None:
    def ends(txn: PlainTransaction, record: Record) -> None:
        txn.send("target", record.value)
        if record.value in (b"9", b"15"):
            with pytest.raises(InvalidRequest, match="can't end its transaction"):
                ending(txn)

    with connect("memory:") as client:
        client.send_many("source", NUMBERS)
        assert client.process("source", "g", ends, batch=10, idle_timeout=0.05).records == 30
        found: list[bytes | None] = []
        with client.reader("target") as reader:
            while len(found) < len(NUMBERS) and (batch := reader.read(timeout=60)) is not None:
                found += [record.value for record in batch]
        assert found == NUMBERS


@pytest.mark.parametrize("hidden", [False, True])
def test_a_plain_client_refuses_what_is_to_be_awaited(hidden: bool) -> None:
    async def work(txn: PlainTransaction, *_: object) -> None:
        txn.send("target", b"never")

    given: Any = (lambda *arguments: work(*arguments)) if hidden else work
    with connect("memory:") as client:
        client.send_many("source", NUMBERS)
        for process in (client.process, client.process_batches):
            with pytest.raises(InvalidRequest, match="can't await"):
                process("source", "g", given, idle_timeout=0.05)
        with pytest.raises(InvalidRequest, match="can't await"):
            client.run(given)
        with pytest.raises(InvalidRequest, match="can't await"):
            client.run(partial(given))
        assert client.process("source", "g", lambda txn, record: None, idle_timeout=0.05).records == 30
