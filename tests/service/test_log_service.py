"""The log of a service as a broker for other processes: they read what committed, and can't change what it owns."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from commands import txnbuf
from raw_session import transactional
from service_process import ServiceProcess, kept_port
from service_setup import engine_on, eventually, session_on, visible

from broker_io import open_broker
from broker_io.batch import Batch, Message
from broker_io.errors import Fenced, MessageTooLarge, ProtectedTopic, ServiceUnavailable
from broker_io.memory import MemoryBroker
from txnbuffer.client.reading.reader import CommittedReader
from txnbuffer.coordinator.decisions import TOPIC as DECISIONS
from txnbuffer.model import Outcome
from txnbuffer.service.door.connection import Limits
from txnbuffer.service.engine.engine import Engine
from txnbuffer.service.servers.admin import ServiceAdmin
from txnbuffer.service.servers.grpc_server import GrpcServer

ROW = Batch.of([Message(b"k", b"plain")])


@asynccontextmanager
async def served(engine: Engine) -> AsyncIterator[str]:
    server = GrpcServer(engine.limits, max_clients=10)
    await server.start("127.0.0.1:0")
    await server.serve(engine, ServiceAdmin(engine))
    try:
        yield f"txnbuf://127.0.0.1:{server.port}"
    finally:
        await server.stop()


async def test_readers_of_other_processes_see_what_committed_and_nothing_else():
    async with engine_on(MemoryBroker()) as engine, served(engine) as address:
        session, ids = await session_on(engine, "a")
        assert await session.write(("a", transactional(ids[:3], size=2))) == []
        assert await session.commit(ids[0], ["a"], [2]) is Outcome.COMMIT
        await eventually(lambda: len(engine.topics.get("a").followed.buffer.ongoing) == 2)
        with await asyncio.to_thread(open_broker, address) as remote:
            assert await asyncio.to_thread(visible, remote, "a") == {b"v": 2}
            assert await session.commit(ids[1], ["a"], [2]) is Outcome.COMMIT
            await eventually(lambda: len(engine.topics.get("a").followed.buffer.ongoing) == 1)
            assert await asyncio.to_thread(visible, remote, "a") == {b"v": 4}


async def test_before_the_log_is_recovered_clients_get_a_retryable_error():
    server = GrpcServer(Limits(), max_clients=10)
    await server.start("127.0.0.1:0")
    try:
        with pytest.raises(ServiceUnavailable, match="nothing is served yet"):
            await asyncio.to_thread(open_broker, f"txnbuf://127.0.0.1:{server.port}", max_unavailable=0.5)
    finally:
        await server.stop()


async def test_a_reader_waits_while_the_service_recovers_its_log():
    broker = MemoryBroker()
    async with engine_on(broker) as engine:
        async with served(engine) as address:
            remote = await asyncio.to_thread(open_broker, address)
            reader = await asyncio.to_thread(remote.reader, DECISIONS)
        server = GrpcServer(engine.limits, max_clients=10)
        await server.start(address.removeprefix("txnbuf://"))
        try:
            reading = asyncio.ensure_future(asyncio.to_thread(reader.read, timeout=120.0))
            with pytest.raises(ServiceUnavailable, match="nothing is served yet"):
                await asyncio.to_thread(open_broker, address, max_unavailable=0.0)
            await server.serve(engine, ServiceAdmin(engine))
            assert await reading is not None
            await asyncio.to_thread(remote.close)
        finally:
            await server.stop()


async def test_what_the_service_owns_is_read_but_not_changed():
    async with engine_on(MemoryBroker(), limits=Limits(max_message_bytes=5000)) as engine, served(engine) as address:
        session, ids = await session_on(engine, "a")
        assert await session.write(("a", transactional(ids[:1]))) == []
        await asyncio.to_thread(change_and_read, address)
        assert await session.commit(ids[0], ["a"], [1]) is Outcome.COMMIT  # the service is as it was


def change_and_read(address: str) -> None:
    with open_broker(address) as remote:
        changes: list[Callable[[str], object]] = [
            remote.delete_topic,
            remote.writer,
            remote.roll,
            remote.compact,
            lambda topic: remote.trim(topic, 10),
            lambda topic: remote.writer(topic, exclusive=True),
        ]
        for topic in (DECISIONS, "a"):
            for change in changes:
                with pytest.raises(ProtectedTopic, match=topic):
                    change(topic)
            with remote.reader(topic) as reader:
                assert reader.read() is not None
        with pytest.raises(ProtectedTopic, match="is internal"):
            remote.create_topic("__txnbuffer_mine")
        remote.create_topic("free")
        with pytest.raises(ProtectedTopic, match="exclusive"):
            remote.writer("free", exclusive=True)
        with remote.writer("free") as writer:
            writer.append(ROW).result(120)
            with pytest.raises(MessageTooLarge):
                writer.append(Batch.of([Message(b"k", b"v" * 6000)]))
        with remote.reader("free") as reader:
            assert reader.read() is not None
        remote.roll("free")
        remote.delete_topic("free")


async def test_a_writer_of_another_process_yields_to_sessions():
    async with engine_on(MemoryBroker()) as engine, served(engine) as address:
        remote = await asyncio.to_thread(open_broker, address)
        await asyncio.to_thread(remote.create_topic, "a")
        writer = await asyncio.to_thread(remote.writer, "a")
        await asyncio.to_thread(writer.append(ROW).result, 10)
        session, ids = await session_on(engine, "a")
        assert isinstance(await asyncio.to_thread(writer.append(ROW).exception, 10), Fenced)
        assert await session.write(("a", transactional(ids[:1]))) == []
        assert await session.commit(ids[0], ["a"], [1]) is Outcome.COMMIT
        await asyncio.to_thread(remote.close)


def test_a_committed_reader_outlives_its_service(tmp_path: Path) -> None:
    """The service is killed while a reader reads through it; everything is seen once, in order."""
    total, killed = 3_000, 0
    seen: list[bytes | None] = []
    with open_broker(f"file:{tmp_path}") as log:
        log.create_topic("free")
        with log.writer("free") as writer:
            for start in range(0, total, 100):
                writer.append(
                    Batch.of([Message(None, b"%d" % number) for number in range(start, start + 100)])
                ).result()
    port = kept_port()
    service = ServiceProcess(tmp_path, port=port)
    try:
        service.wait_serving()
        with open_broker(f"txnbuf://127.0.0.1:{port}") as remote, CommittedReader(remote, "free") as reader:
            while len(seen) < total:
                batch = reader.read(limit=200, timeout=120)
                assert batch is not None
                seen += [record.value for record in batch]
                if len(seen) // 1000 > killed:
                    killed += 1
                    service.kill()
                    service = ServiceProcess(tmp_path, port=port)
    finally:
        service.kill()
    assert seen == [b"%d" % number for number in range(total)]
    assert killed >= 2


def test_tail_reads_through_a_service(tmp_path: Path) -> None:
    with open_broker(f"file:{tmp_path}") as log:
        log.create_topic("free")
        with log.writer("free") as writer:
            writer.append(ROW).result()
    with ServiceProcess(tmp_path) as service:
        done = txnbuf("tail", f"txnbuf://127.0.0.1:{service.port}", "free")
    assert Counter(line.split("\t")[-1] for line in done.stdout.splitlines()) == {"plain": 1}
