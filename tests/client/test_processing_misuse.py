"""Handlers that misuse their transaction or are too slow: nothing is lost or duplicated."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from client_world import World, in_world, read_all, until, values
from reading import read_values

from txnbuffer import HandlerTooSlow, Processed, TransactionAborted, connect, dead_letter
from txnbuffer.client.client import Client
from txnbuffer.client.groups import handling, membership
from txnbuffer.client.reading.records import Record, RecordBatch
from txnbuffer.client.sync.sync_transaction import SyncTransaction
from txnbuffer.client.transaction import Transaction
from txnbuffer.coordinator.messages import CoordinatorConfig
from txnbuffer.errors import TIME_UP, InvalidRequest, OutcomeUnknown
from txnbuffer.service.topics.topics import EmbeddedTopics

NUMBERS = [str(number).encode() for number in range(30)]


@pytest.mark.parametrize("ending", [Transaction.commit, Transaction.abort])
@in_world
async def test_handler_cannot_end_its_transaction_and_loses_nothing(world: World, ending: Callable[..., Any]) -> None:
    async def ends(txn: Transaction, record: Record) -> None:
        await txn.send("target", record.value or b"")
        if record.value == b"19":
            await ending(txn)

    async def copies(txn: Transaction, record: Record) -> None:
        await txn.send("target", record.value or b"")

    client = await world.client()
    await client.send_many("source", NUMBERS)
    with pytest.raises(InvalidRequest, match="cannot end its transaction"):
        await client.process("source", "g", ends, batch=10, idle_timeout=0.05)
    assert (await client.process("source", "g", copies, batch=10, idle_timeout=0.05)).records == 20
    await until(lambda: values(world.broker, "target") == NUMBERS)


@in_world
async def test_finished_records_commit_after_the_commit_interval(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    async def copies(txn: Transaction, record: Record) -> None:
        await txn.send("target", record.value or b"")

    monkeypatch.setattr(membership, "COMMIT_INTERVAL", 0.0)
    client = await world.client()
    await client.send_many("source", NUMBERS)
    done = await client.process("source", "g", copies, idle_timeout=0.05)
    assert (done.records, done.transactions) == (30, 30)
    await until(lambda: values(world.broker, "target") == NUMBERS)


@in_world
async def test_batches_that_exceed_the_timeout_get_smaller(world: World) -> None:
    async def copies(txn: Transaction, records: RecordBatch) -> None:
        if len(records) > 4:
            raise TransactionAborted(txn.id, "its time was up")
        await txn.send_many("target", records.messages.values.to_list())

    client = await world.client()
    await client.send_many("source", NUMBERS)
    assert (await client.process_batches("source", "g", copies, idle_timeout=0.05)).records == 30
    await until(lambda: values(world.broker, "target") == NUMBERS)


@pytest.mark.parametrize(("error", "attempts"), [(OutcomeUnknown, 1), (TransactionAborted, 2)])
@in_world
async def test_errors_of_other_transactions_are_handler_failures(
    world: World, error: type[OutcomeUnknown] | type[TransactionAborted], attempts: int
) -> None:
    calls = 0
    client = await world.client()
    await client.send_many("source", NUMBERS)
    async with client.transaction() as other:
        await other.send("target", b"other")

    async def raises(txn: Transaction, record: Record) -> None:
        nonlocal calls
        calls += 1
        raise error(other.id, "somebody said so")

    with pytest.raises(error, match="somebody said so"):
        await client.process("source", "g", raises, idle_timeout=0.05, retries=1)
    assert calls == attempts


def within(txn: SyncTransaction) -> None:
    with txn:
        raise KeyError("which aborts")


@pytest.mark.parametrize("ending", [SyncTransaction.commit, SyncTransaction.abort, within])
def test_sync_handler_may_catch_the_rejection_and_continue(ending: Callable[[SyncTransaction], None]) -> None:
    def ends(txn: SyncTransaction, record: Record) -> None:
        txn.send("target", record.value)
        if record.value in (b"9", b"15"):
            with pytest.raises(InvalidRequest, match=r"cannot end its transaction|has already begun"):
                ending(txn)

    with connect("memory:") as client:
        client.send_many("source", NUMBERS)
        assert client.process("source", "g", ends, batch=10, idle_timeout=0.05).records == 30
        found: list[bytes | None] = []
        with client.reader("target") as reader:
            while len(found) < len(NUMBERS) and (batch := reader.read(timeout=60)) is not None:
                found += [record.value for record in batch]
        assert found == NUMBERS


async def nothing(txn: Transaction, record: Record) -> None:
    pass


async def until_aborted(world: World, client: Client, txn: Transaction) -> None:
    """Let the time of a transaction be up."""
    core = world.engine.coordinator._core  # nobody else's time is to be up, however slow the machine is
    while await client.outcome(txn.id) is None:
        if (live := core.live.get(txn.id.least)) is not None:
            core.watch(live, 0.0)  # again if it was announced since
        await asyncio.sleep(0.01)


@pytest.fixture
def _hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Client and service look at what time it is more often."""
    monkeypatch.setattr("txnbuffer.client.session.session.TICK", 0.02)
    monkeypatch.setattr("txnbuffer.service.engine.engine.TICK", 0.02)


@pytest.mark.usefixtures("_hurried")
@pytest.mark.parametrize("retries", [0, 4])
@in_world
async def test_record_that_exceeds_the_timeout_is_logged_and_skipped(
    world: World, retries: int, caplog: pytest.LogCaptureFixture
) -> None:
    calls, most = 0, max(retries + 1, membership.MIN_CALLS)
    client = await world.client()

    async def waits(txn: Transaction, record: Record) -> None:
        nonlocal calls
        await txn.send("target", record.value or b"")
        if record.value == b"13":
            calls += 1
            await until_aborted(world, client, txn)

    await client.send_many("source", NUMBERS)
    options: Any = {"on_error": dead_letter("slow"), "retries": retries, "idle_timeout": 0.05}
    done = await client.process("source", "g", waits, **options)
    assert (done.records, done.dead_letters) == (29, 1)
    assert calls > most  # before it was alone, too
    await until(lambda: values(world.broker, "target") == [*NUMBERS[:13], *NUMBERS[14:]])
    (letter,) = read_all(world.broker, "slow")
    assert letter.value == b"13"
    assert letter.properties["dead_letter_error"].startswith("HandlerTooSlow: ")
    assert letter.properties["dead_letter_attempts"] == str(most)
    assert f"the record at {letter.properties['dead_letter_position']} of 'source'" in caplog.text
    assert "transactions.timeout" in caplog.text


@pytest.mark.usefixtures("_hurried")
@in_world
async def test_record_that_exceeds_the_timeout_stops_processing_by_default(world: World) -> None:
    client = await world.client()

    async def waits(txn: Transaction, records: RecordBatch) -> None:
        await txn.send_many("target", records.messages.values.to_list())
        if b"2" in records.messages.values.to_list():
            await until_aborted(world, client, txn)

    await client.send_many("source", NUMBERS[:4])
    with pytest.raises(HandlerTooSlow, match=r"took too long 3 times for the record at .* of 'source'"):
        await client.process_batches("source", "g", waits, idle_timeout=0.05)
    assert await client.process("source", "g", nothing, idle_timeout=0.05) == Processed(records=2, transactions=1)


@pytest.mark.usefixtures("_hurried")
@in_world
async def test_batches_of_a_handler_that_exceed_the_timeout_are_halved_until_the_record_is_found(world: World) -> None:
    sizes = []
    client = await world.client()

    async def waits(txn: Transaction, records: RecordBatch) -> None:
        values = records.messages.values.to_list()
        await txn.send_many("target", values)
        if b"0" in values:
            sizes.append(len(records))
            await until_aborted(world, client, txn)

    await client.send_many("source", NUMBERS)
    done = await client.process_batches("source", "g", waits, on_error="skip", idle_timeout=0.05)
    assert (done.records, done.skipped) == (29, 1)
    assert sizes == [30, 15, 8, 4, 2, *[1] * membership.MIN_CALLS]
    await until(lambda: values(world.broker, "target") == NUMBERS[1:])


@in_world
async def test_handler_that_blocks_the_event_loop_is_logged_and_limited(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each time its member is given up, as if that had taken long."""
    monkeypatch.setattr(handling, "BLOCKED", 0.0)
    client, other = await world.client(), await world.client()

    async def blocks(txn: Transaction, record: Record) -> None:
        await txn.send("target", record.value or b"")
        if record.value == b"13":
            await other.join("g")

    await client.send_many("source", NUMBERS)
    done = await client.process("source", "g", blocks, on_error="skip", idle_timeout=0.05)
    assert (done.records, done.skipped) == (29, 1)
    await until(lambda: values(world.broker, "target") == [*NUMBERS[:13], *NUMBERS[14:]])
    assert "the event loop was blocked" in caplog.text


@in_world
async def test_repeated_aborts_are_logged(world: World, caplog: pytest.LogCaptureFixture) -> None:
    calls = 0

    async def aborted(txn: Transaction, record: Record) -> None:
        nonlocal calls
        calls += 1
        if calls <= handling.ABORTS_LOGGED:
            raise TransactionAborted(txn.id, "somebody said so")

    client = await world.client()
    await client.send_many("source", NUMBERS)
    assert (await client.process("source", "g", aborted, idle_timeout=0.05)).records == 30
    (told,) = caplog.messages
    assert "group 'g' retries a transaction on 'source'" in told
    assert "somebody said so" in told


def test_sync_client_limits_slow_handlers_as_well(caplog: pytest.LogCaptureFixture) -> None:
    calls = 0

    def slow(txn: SyncTransaction, record: Record) -> None:
        nonlocal calls
        if record.value == b"13":
            calls += 1
            raise TransactionAborted(txn.id, TIME_UP)

    with connect("memory:") as client:
        client.send_many("source", NUMBERS)
        done = client.process("source", "g", slow, on_error="skip", idle_timeout=0.05)
    assert (done.records, done.skipped) == (29, 1)
    assert calls > membership.MIN_CALLS
    assert "transactions.timeout" in caplog.text


@pytest.mark.usefixtures("_hurried")
@pytest.mark.parametrize("on_error", ["stop", "skip", dead_letter("slow")])
def test_record_that_exceeds_the_timeout_on_an_embedded_log(
    on_error: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The handler of a sync client blocks until the service has aborted its transaction, as its time is really up."""
    monkeypatch.setattr(EmbeddedTopics, "config", CoordinatorConfig(transaction_timeout=0.3))
    calls = 0
    with connect(f"file:{tmp_path / 'log'}") as client:

        def slow(txn: SyncTransaction, record: Record) -> None:
            nonlocal calls
            txn.send("target", record.value)
            if record.value == b"1":
                calls += 1
                while client.outcome(txn.id) is None:
                    time.sleep(0.01)

        client.send_many("source", NUMBERS[:3])
        if on_error == "stop":
            with pytest.raises(HandlerTooSlow, match=r"took too long 3 times for the record at .* of 'source'"):
                client.process("source", "g", slow, on_error=on_error, idle_timeout=0.05)
            assert read_values(client, "target", 1) == [b"0"]
        else:
            done = client.process("source", "g", slow, on_error=on_error, idle_timeout=0.05)
            assert (done.records, done.skipped + done.dead_letters) == (2, 1)
            assert read_values(client, "target", 2) == [b"0", b"2"]
        assert on_error in ("stop", "skip") or read_values(client, "slow", 1) == [b"1"]
    assert calls > membership.MIN_CALLS
