"""Open transactions of clients that are gone: readers wait for them no longer than for a client that may come back."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

from raw_session import InProcess, RawSession, transactional
from service_setup import engine_on, eventually, session_on, visible

from broker_io import open_broker
from broker_io.memory import MemoryBroker
from broker_io.port import Broker
from txnbuffer import connect
from txnbuffer.client.reading.reader import CommittedReader
from txnbuffer.coordinator.messages import State
from txnbuffer.model import Outcome, TxnId
from txnbuffer.service.engine.engine import Engine


async def local_session(engine: Engine, *topics: str) -> tuple[RawSession, range]:
    session = RawSession(InProcess(engine, local=True))
    await session.hello()
    await session.register(*topics)
    return session, await session.lease(100)


def stored(broker: Broker, topic: str, isolation: str = "read_uncommitted") -> int:
    with CommittedReader(broker, topic, isolation=isolation) as reader:
        return sum(len(batch) for batch in iter(reader.read, None))


def undecided(broker: Broker, topic: str) -> int:
    with CommittedReader(broker, topic) as reader:
        while reader.read() is not None:
            pass
        return reader.lag()[topic].undecided


async def image_of_a_killed_process(directory: Path) -> str:
    """The address of a log as a process leaves it that is killed inside two transactions."""
    address = f"file:{directory / 'log'}"
    async with connect(address) as client:
        await client.send("a", b"first")
        await client.send("b", b"first")
        async with client.transaction() as one, client.transaction() as both:
            await one.send("a", b"lost")
            await both.send("a", b"lost")
            await both.send("b", b"lost")
            with open_broker(address, read_only=True) as broker:
                await eventually(lambda: stored(broker, "a") + stored(broker, "b") == 5)
            await asyncio.to_thread(shutil.copytree, directory / "log", directory / "image")
            await one.abort()
            await both.abort()
    return f"file:{directory / 'image'}"


async def test_a_new_process_sees_at_once_what_it_commits_after_a_kill(tmp_path: Path) -> None:
    address = await image_of_a_killed_process(tmp_path)
    async with connect(address) as client:
        async with client.transaction() as txn:
            await txn.send("a", b"v")
        with open_broker(address, read_only=True) as broker:
            assert visible(broker, "a") == {b"first": 1, b"v": 1}


async def test_a_service_ends_what_a_killed_client_of_the_embedded_log_left_open(tmp_path: Path) -> None:
    address = await image_of_a_killed_process(tmp_path)
    with open_broker(address) as broker:
        async with engine_on(broker, address="127.0.0.1:1"):
            await eventually(lambda: (stored(broker, "a", "read_committed"), undecided(broker, "a")) == (1, 0))


async def test_the_client_of_a_service_keeps_its_transaction_over_a_restart() -> None:
    broker = MemoryBroker()
    async with engine_on(broker) as engine:
        session, ids = await session_on(engine, "a")
        await session.write(("a", transactional(ids[:1])))
    async with engine_on(broker) as engine:
        again = RawSession(InProcess(engine))
        welcome = await again.hello(session.session, [TxnId(0, ids[0])])
        assert welcome.states == ((TxnId(0, ids[0]), State.OPEN),)
        assert await again.commit(ids[0], ["a"], [1]) is Outcome.COMMIT
    assert visible(broker, "a") == {b"v": 1}


async def test_a_stopping_owner_ends_the_transactions_of_its_own_process() -> None:
    broker = MemoryBroker()
    async with engine_on(broker) as engine:
        session, ids = await local_session(engine, "a", "b")
        other, theirs = await session_on(engine, "b")
        await session.write(("a", transactional(ids[:1])), ("b", transactional(ids[1:2])))
        await other.write(("b", transactional(theirs[:1])))
    assert undecided(broker, "a") == 0
    assert undecided(broker, "b") > 0, "the other client may come back"


async def test_a_local_client_keeps_its_transaction_when_its_connection_is_replaced() -> None:
    broker = MemoryBroker()
    async with engine_on(broker) as engine:
        session, ids = await local_session(engine, "a")
        await session.write(("a", transactional(ids[:1])))
        await session.link.cut()
        again = RawSession(InProcess(engine, local=True))
        await again.hello(session.session, [TxnId(0, ids[0])])
        assert await again.commit(ids[0], ["a"], [1]) is Outcome.COMMIT
    assert visible(broker, "a") == {b"v": 1}
