"""Invalid and failing handlers; topics and clients that disappear while a group processes."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import CancelledError
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from client_world import World, in_world

from broker_io import open_broker
from broker_io.errors import PositionTrimmed
from txnbuffer import InvalidTopicName, Processed, TransactionAborted, connect, dead_letter
from txnbuffer.client.groups import handling
from txnbuffer.client.reading.async_reader import AsyncReader
from txnbuffer.client.reading.records import Record
from txnbuffer.client.sync.sync_transaction import SyncTransaction
from txnbuffer.client.transaction import Transaction
from txnbuffer.errors import InvalidHandler, InvalidRequest

NUMBERS = [str(number).encode() for number in range(30)]


@pytest.mark.parametrize("hidden", [False, True])
def test_sync_client_rejects_awaitables(hidden: bool) -> None:
    async def work(txn: SyncTransaction, *_: object) -> None:
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


async def nothing(txn: Transaction, record: Record) -> None:
    pass


def yields(txn: SyncTransaction, record: Record) -> Any:
    txn.send("target", b"never")
    yield


@pytest.mark.parametrize("given", [yields, lambda *given: yields(*given), None, 5])
def test_sync_client_rejects_generator_handlers(given: Any) -> None:
    with connect("memory:") as client:
        client.send_many("source", NUMBERS)
        for process in (client.process, client.process_batches):
            with pytest.raises(InvalidHandler):
                process("source", "g", given, on_error="skip", idle_timeout=0.05)
        assert client.process("source", "g", lambda txn, record: None, idle_timeout=0.05).records == 30


async def yields_later(txn: Transaction, record: Record) -> Any:
    yield


@pytest.mark.parametrize("given", [lambda txn, record: None, yields, yields_later, None, "nothing"])
@in_world
async def test_handler_without_awaitable_result_is_rejected_and_skips_nothing(world: World, given: Any) -> None:
    client = await world.client()
    await client.send_many("source", NUMBERS)
    with pytest.raises(InvalidHandler):
        await client.process("source", "g", given, on_error="skip", idle_timeout=0.05)
    assert (await client.process("source", "g", nothing, idle_timeout=0.05)).records == 30


@pytest.mark.parametrize(
    "raised", [StopIteration("no more"), CancelledError("of a future"), TimeoutError("of its own")]
)
def test_any_exception_of_a_sync_handler_is_its_failure(raised: Exception) -> None:
    def fails(txn: SyncTransaction, record: Record) -> None:
        if record.value == b"13":
            raise raised

    with connect("memory:") as client:
        client.send_many("source", NUMBERS)
        done = client.process("source", "g", fails, on_error="skip", idle_timeout=0.05)
        assert (done.records, done.skipped) == (29, 1)


@pytest.mark.parametrize("topics", ["__txnbuffer_decisions", ["source", "__txnbuffer_decisions"], 5, [], ["source", 5]])
@in_world
async def test_internal_topics_cannot_be_processed(world: World, topics: Any) -> None:
    client = await world.client()
    await client.send_many("source", NUMBERS)
    with pytest.raises((InvalidRequest, InvalidTopicName)):
        await client.process(topics, "g", nothing, idle_timeout=0.05)


@pytest.mark.parametrize("start", [{"source": "end"}, None, 5])
@in_world
async def test_start_must_be_valid_for_a_group(world: World, start: Any) -> None:
    client = await world.client()
    await client.send_many("source", NUMBERS)
    with pytest.raises(InvalidRequest, match="start must be"):
        await client.process("source", "g", nothing, start=start, idle_timeout=0.05)


@in_world
async def test_cancellation_of_a_call_inside_the_handler_is_its_failure(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def cancelled(txn: Transaction, record: Record) -> None:
        if record.value == b"13":
            await asyncio.sleep(0.01)
            other = asyncio.ensure_future(asyncio.sleep(60))
            other.cancel()
            await other

    monkeypatch.setattr(handling, "SLOW_CALL", 0.0)
    client = await world.client()
    await client.send_many("source", NUMBERS)
    done = await client.process("source", "g", cancelled, on_error="skip", idle_timeout=0.05)
    assert (done.records, done.skipped) == (29, 1)
    assert "the handler has been running for 0 s on records from" in caplog.text


@in_world
async def test_processing_stops_after_many_consecutive_aborts(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    async def aborted(txn: Transaction, record: Record) -> None:
        raise TransactionAborted(txn.id, "there is no such topic")

    monkeypatch.setattr(handling, "PAUSE", 0.0)
    client = await world.client()
    await client.send_many("source", NUMBERS)
    with pytest.raises(TransactionAborted, match="no such topic"):
        await client.process("source", "g", aborted, on_error="skip", idle_timeout=0.05)
    assert (await client.process("source", "g", nothing, idle_timeout=0.05)).records == 30


@in_world
async def test_error_is_raised_although_closing_the_reader_is_slow(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    close = AsyncReader.close

    async def slowly(reader: AsyncReader) -> None:
        await asyncio.sleep(0.2)
        await close(reader)

    async def fails(txn: Transaction, record: Record) -> None:
        raise KeyError

    client = await world.client()
    await client.send_many("source", NUMBERS)
    monkeypatch.setattr(AsyncReader, "close", slowly)
    with pytest.raises(KeyError):
        await client.process("source", "g", fails, idle_timeout=0.05)


@in_world
async def test_existing_records_are_handled_despite_a_short_idle_timeout(world: World) -> None:
    """A process that stands still for longer than that between two steps has not been idle."""
    client = await world.client()
    await client.send_many("source", NUMBERS)
    assert (await client.process("source", "g", nothing, idle_timeout=1e-9)).records == 30


def test_recreated_topic_is_rejected_until_its_group_is_forgotten(tmp_path: Path) -> None:
    address = f"file:{tmp_path / 'log'}"

    def process() -> Processed:
        with connect(address) as client:
            return client.process("source", "g", lambda txn, record: None, idle_timeout=0.05)

    with connect(address) as client:
        client.send_many("source", NUMBERS[:10])
    assert process().records == 10
    with open_broker(address) as broker:
        broker.delete_topic("source")
    with connect(address) as client:
        client.send_many("source", NUMBERS)
    with pytest.raises(PositionTrimmed, match=r"group 'g' has reached 1:9 of 'source', which was .*forget_group"):
        process()
    with connect(address) as client:
        client.forget_group("g", "source")
        with pytest.raises(InvalidRequest, match="has no position"):
            client.forget_group("g")
    assert process().records == 30


def test_error_without_text_becomes_a_dead_letter() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise KeyError

    def fails(txn: SyncTransaction, record: Record) -> None:
        raise Mute

    with connect("memory:") as client:
        client.send("source", b"1")
        assert client.process("source", "g", fails, on_error=dead_letter("d"), idle_timeout=0.05).dead_letters == 1


def test_closing_a_sync_client_ends_its_processing() -> None:
    called = threading.Event()
    with connect("memory:") as client:
        client.send_many("source", NUMBERS)

        def closes(txn: SyncTransaction, record: Record) -> None:
            client.close()

        with pytest.raises(InvalidRequest, match="was closed"):
            client.process("source", "g", closes, idle_timeout=60)
        with pytest.raises(InvalidRequest, match="was closed"):
            client.process("source", "g", closes, idle_timeout=60)
    with connect("memory:") as client:
        client.send_many("source", NUMBERS)

        def close_once_called() -> None:
            called.wait(60)
            client.close()

        closing = threading.Thread(target=close_once_called)
        closing.start()
        with pytest.raises(InvalidRequest, match="was closed"):
            client.process("source", "g", lambda txn, record: called.set(), idle_timeout=60)
        closing.join(60)


def test_a_process_that_is_cancelled_while_it_stops_leaves_its_group() -> None:
    @in_world
    async def _(world: World) -> None:
        client = await world.client()
        await client.send("source", b"one")
        handling, stopping = asyncio.Event(), asyncio.Event()

        async def slow_to_stop(txn: Transaction, record: Record) -> None:
            handling.set()
            try:
                await asyncio.sleep(100.0)
            finally:
                stopping.set()
                await asyncio.sleep(0.3)

        processing = asyncio.create_task(client.process("source", "g", slow_to_stop))
        await handling.wait()
        processing.cancel()
        await stopping.wait()
        processing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await processing
        assert [task for task in asyncio.all_tasks() if "_heartbeat_loop" in repr(task)] == []
