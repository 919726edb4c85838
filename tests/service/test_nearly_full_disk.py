"""A nearly full disk: records are refused, their transactions still end, and nothing has to be restarted.

A failed disk ends the engine.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from raw_session import transactional
from reading import read_values
from service_setup import engine_on, eventually, session_on

from broker_io.errors import DiskFailed, DiskWatermark, TooManyFiles
from broker_io.filelog.log.layout import MIB
from broker_io.memory import MemoryBroker
from broker_io.system import SystemDisk
from txnbuffer import Outcome, SyncClient, SyncTransaction, TxnId, connect
from txnbuffer.coordinator.messages import Commit
from txnbuffer.errors import TransactionAborted
from txnbuffer.rpc.frames import ClientFrame
from txnbuffer.service.engine.engine import Engine

WATERMARK = 256 * MIB
LOW, LOWER = WATERMARK - 1, WATERMARK // 2 - 1
RECORD = b"x" * 1_000_000


class Disk:
    free = 1024 * MIB


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    disk = Disk()
    monkeypatch.setattr(SystemDisk, "free_bytes", lambda *_: disk.free)
    monkeypatch.setattr("broker_io.filelog.log.commit.SECONDS_BETWEEN", 0.0)
    return disk


@pytest.fixture
def client(tmp_path: Path, disk: Disk) -> Iterator[SyncClient]:
    with connect(f"file:{tmp_path / 'log'}") as opened:
        opened.send("t", b"first")
        yield opened
        disk.free = 1024 * MIB


def written(client: SyncClient, txn: SyncTransaction) -> None:
    """Wait until the records of a transaction are in the log."""
    with client.reader("t", isolation="read_uncommitted") as reader:
        values: list[bytes | None] = []
        while b"second" not in values:
            batch = reader.read(timeout=60)
            assert batch is not None
            values += [record.value for record in batch]


def test_a_transaction_whose_records_are_refused_aborts(client: SyncClient, disk: Disk) -> None:
    disk.free = LOW
    for _ in range(3):
        txn = client.transaction(timeout=60).begin()
        txn.send("t", RECORD)
        with pytest.raises((TransactionAborted, DiskWatermark), match="fewer than the watermark"):
            txn.commit()
        for _ in range(2000):
            if client.outcome(txn._transaction.id) is Outcome.ABORT:
                break
            time.sleep(0.01)
        assert client.outcome(txn._transaction.id) is Outcome.ABORT
    with pytest.raises(DiskWatermark):
        client.send("t", b"refused")
    disk.free = 2 * WATERMARK
    with client.transaction() as txn:
        txn.send("t", b"second")
    assert read_values(client, "t", 2) == [b"first", b"second"]


def test_one_whose_records_are_written_commits(client: SyncClient, disk: Disk) -> None:
    with client.transaction() as txn:
        txn.send("t", b"second")
        written(client, txn)
        disk.free = LOW
    assert client.outcome(txn.id) is Outcome.COMMIT
    disk.free = 2 * WATERMARK
    assert read_values(client, "t", 2) == [b"first", b"second"]


def test_below_half_of_the_watermark_a_commit_waits_for_space(client: SyncClient, disk: Disk) -> None:
    timer = threading.Timer(2.0, lambda: setattr(disk, "free", 2 * WATERMARK))
    with client.transaction() as txn:
        txn.send("t", b"second")
        written(client, txn)
        disk.free = LOWER
        timer.start()
    assert disk.free > WATERMARK
    assert read_values(client, "t", 2) == [b"first", b"second"]


def test_a_service_starts_then_and_takes_new_topics_once_there_is_space(tmp_path: Path, disk: Disk) -> None:
    log = f"file:{tmp_path / 'log'}"
    with connect(log) as client:
        client.send("t", b"first")
    disk.free = LOWER
    with connect(log) as client:
        timer = threading.Timer(2.0, lambda: setattr(disk, "free", 2 * WATERMARK))
        timer.start()
        client.run(lambda txn: txn.send("new", b"taken"), attempts=10)  # what can't wait for space aborts
        assert read_values(client, "new", 1) == [b"taken"]


@pytest.mark.parametrize("topics", [["t"], ["t", "u"]], ids=["a marker", "a decision"])
async def test_an_engine_whose_disk_failed_ends_with_the_error_of_the_disk(topics: list[str]) -> None:
    with MemoryBroker() as broker:
        engine = await Engine.start(broker)
        session, ids = await session_on(engine, "t", "u")
        await session.write(*((topic, transactional(ids[:1])) for topic in topics))
        broker.faults.fail_append(DiskFailed("journal-1: Read-only file system"))
        session.link.send(ClientFrame(commits=(Commit(1000, TxnId(0, ids[0]), tuple(topics), (1,) * len(topics)),)))
        assert isinstance(await asyncio.wait_for(asyncio.shield(engine.ended), 60), DiskFailed)
        await engine.stop()


@pytest.mark.parametrize("topics", [["t"], ["t", "u"]], ids=["a marker", "a decision"])
async def test_a_commit_waits_until_there_is_a_file_descriptor(topics: list[str]) -> None:
    with MemoryBroker() as broker:
        async with engine_on(broker) as engine:
            session, ids = await session_on(engine, "t", "u")
            await session.write(*((topic, transactional(ids[:1])) for topic in topics))
            broker.faults.fail_append(TooManyFiles("7-0.log: Too many open files"))
            assert await session.commit(ids[0], topics, [1] * len(topics)) is Outcome.COMMIT
            assert not broker.faults.appends


async def test_an_engine_starts_once_there_is_a_file_descriptor_for_an_epoch_marker() -> None:
    with MemoryBroker() as broker:
        async with engine_on(broker) as engine:
            await session_on(engine, "t")
        broker.faults.fail_append(TooManyFiles("7-0.log: Too many open files"), topic="t")
        async with engine_on(broker) as engine:
            await eventually(lambda: engine.coordinator.ready)
        assert not broker.faults.appends
