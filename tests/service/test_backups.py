"""Backups of the log of a running service."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from commands import txnbuf
from compacted_topic import T, Topic
from file_logs import World
from service_process import ServiceProcess
from service_setup import engine_on, eventually

from broker_io import open_broker, restore_backup
from broker_io.compaction import CompactionRequest
from broker_io.errors import NotSupported
from broker_io.memory import MemoryBroker
from broker_io.port import BackupProgress, BackupReport
from txnbuffer import connect
from txnbuffer.buffer.compaction import TransactionRules
from txnbuffer.buffer.visibility import PinnedVisibility
from txnbuffer.cli.admin_client import ServiceAddress, call
from txnbuffer.errors import InvalidRequest
from txnbuffer.service.servers.admin import ServiceAdmin

TOPICS = ("a", "b")


def silent(done: int, total: int) -> None:
    assert done <= total


def backed_up(service: ServiceAddress, path: Path) -> dict[str, Any]:
    """Let a service write a backup; what it says of it at the end."""
    number = call(service, "BackUp", path=str(path))["run"]
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        (run,) = call(service, "Backups")
        assert run["run"] == number
        if run["state"] != "running":
            return dict(run)
        time.sleep(0.02)
    raise AssertionError("the backup has not ended")


class Writer(threading.Thread):
    """Writes transactions of one record to each topic, with ascending numbers; aborts every third."""

    def __init__(self, address: str, name: str) -> None:
        super().__init__(daemon=True)
        self.address, self.writer = address, name
        self.begun = self.acknowledged = 0
        self.ending = threading.Event()
        self.start()

    def run(self) -> None:
        with connect(self.address) as client:
            while not self.ending.is_set():
                self.begun += 1
                if self.begun % 3 == 0:
                    with client.transaction() as txn:
                        self.send(txn, "aborted")
                        txn.abort()
                    continue
                with client.transaction() as txn:
                    self.send(txn, "committed")
                self.acknowledged = self.begun

    def send(self, txn: Any, outcome: str) -> None:
        for topic in TOPICS:
            txn.send(topic, f"{self.writer} {self.begun} {outcome} {'x' * 300}", key=f"{self.writer}-{self.begun}")

    def join(self, timeout: float | None = None) -> None:
        self.ending.set()
        super().join(timeout)


def found(log: Path) -> dict[str, list[tuple[str, int]]]:
    """The committed records of each topic: writer and number, in order."""
    records: dict[str, list[tuple[str, int]]] = {}
    for topic in TOPICS:
        texts = [line.split("\t")[-1].split() for line in txnbuf("tail", f"file:{log}", topic).stdout.splitlines()]
        assert {text[2] for text in texts} <= {"committed"}
        records[topic] = [(text[0], int(text[1])) for text in texts]
    return records


async def test_a_backup_has_whole_transactions_of_one_moment(tmp_path: Path) -> None:
    """While two clients write, topics are compacted, and ledgers are closed often."""
    flags = ("--set", "log.segment_bytes=100000", "--set", "retention.check_seconds=0.2")
    service = ServiceProcess(tmp_path / "log", *flags).wait_serving()
    address = f"txnbuf://127.0.0.1:{service.port}"
    writers = [Writer(address, name) for name in ("one", "two")]
    try:
        await asyncio.to_thread(work, ServiceAddress(address), writers, tmp_path)
    finally:
        for writer in writers:
            await asyncio.to_thread(writer.join, 60)
        service.kill()
    with open_broker(f"file:{tmp_path / 'log'}") as broker:
        assert len(broker.ledgers("a")) > 2


def work(service: ServiceAddress, writers: list[Writer], directory: Path) -> None:
    for number in range(4):
        time.sleep(0.5)
        call(service, "Compact", topic="a")
        before = {writer.writer: writer.acknowledged for writer in writers}
        run = backed_up(service, directory / f"file-{number}")
        assert run["problem"] is None
        assert run["report"]["bytes"] == run["bytes_done"] == run["bytes_expected"] or run["bytes_done"] > 0
        after = {writer.writer: writer.begun for writer in writers}
        restore_backup(str(directory / f"file-{number}"), f"file:{directory / str(number)}", silent)
        records = found(directory / str(number))
        assert sorted(records["a"]) == sorted(records["b"]), "transactions are whole"
        for writer in writers:
            numbers = [found for name, found in records["a"] if name == writer.writer]
            last = numbers[-1] if numbers else 0
            assert before[writer.writer] <= last <= after[writer.writer]
            assert numbers == [one for one in range(1, last + 1) if one % 3], "a prefix of what was written"


def request_of(topic: Topic, *, ending: Exception | None = None) -> CompactionRequest:
    def progress(moved: int) -> None:
        if ending is not None:
            raise ending

    rules = TransactionRules(PinnedVisibility.of(topic.replayed()))
    return CompactionRequest(topic.broker.ledgers(T)[-2].ledger, rules, progress=progress)


def written_topic() -> Topic:
    topic = Topic()
    for number in range(20):
        topic.write("k", f"v{number}")
    topic.broker.roll(T)
    return topic


def test_compaction_of_a_data_topic_waits_for_the_end_of_a_backup() -> None:
    topic = written_topic()
    request = request_of(topic)
    compacting = threading.Thread(target=lambda: topic.broker.compact_records(T, request))
    seen: list[int] = []

    def progress(done: int, total: int) -> None:
        if not seen:
            compacting.start()
            compacting.join(0.5)
        seen.append(done)
        assert compacting.is_alive(), "it waits"

    topic.broker.back_up("/backup", progress)
    compacting.join(60)
    assert not compacting.is_alive()
    assert [record.value for record in topic.read()] == [b"v19"]


def test_a_compaction_that_waits_can_be_ended() -> None:
    topic = written_topic()
    request = request_of(topic, ending=InvalidRequest("the service is stopping"))
    ended: list[str] = []

    def compact() -> None:
        try:
            topic.broker.compact_records(T, request)
        except InvalidRequest as error:
            ended.append(str(error))

    def progress(done: int, total: int) -> None:
        if not ended:
            compacting = threading.Thread(target=compact)
            compacting.start()
            compacting.join(20)

    topic.broker.back_up("/backup", progress)
    assert ended == ["the service is stopping"]


class Slow:
    """Stands for `back_up` of a broker: it works until `go_on`, 20 seconds at most, and then fails or not."""

    def __init__(self, error: Exception | None = None) -> None:
        self.go_on = threading.Event()
        self.error = error

    def __call__(self, path: str, progress: BackupProgress) -> BackupReport:
        deadline = time.monotonic() + 20
        while not self.go_on.wait(0.01):
            assert time.monotonic() < deadline, "nothing ends it"
            progress(5, 10)
        if self.error is not None:
            raise self.error
        return BackupReport(1, 2, 3, 10)


async def test_one_backup_at_a_time_and_its_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    broker = world.own(compacted_prefix="__txnbuffer")
    async with engine_on(broker) as engine:
        admin, slow = ServiceAdmin(engine), Slow()
        assert await admin.backups({}) == []
        monkeypatch.setattr(broker, "back_up", slow)
        assert await admin.back_up({"path": "/one"}) == {"path": "/one", "run": 1}
        await eventually(lambda: engine.backups.run is not None and engine.backups.run.bytes_done)
        (row,) = await admin.backups({})
        assert (row["state"], row["bytes_done"], row["bytes_expected"], row["report"]) == ("running", 5, 10, None)
        with pytest.raises(InvalidRequest, match="the backup to /one is being written"):
            await admin.back_up({"path": "/two"})
        slow.go_on.set()
        await eventually(lambda: engine.backups.run is not None and engine.backups.run.report)
        (row,) = await admin.backups({})
        assert (row["state"], row["report"]["messages"], row["problem"]) == ("done", 3, None)
        monkeypatch.setattr(broker, "back_up", failing := Slow(ValueError("odd")))
        failing.go_on.set()
        assert (await admin.back_up({"path": "/two"}))["run"] == 2
        await eventually(lambda: engine.backups.run is not None and engine.backups.run.problem)
        (row,) = await admin.backups({})
        assert (row["state"], row["problem"]) == ("failed", "unexpected: ValueError('odd')")
        monkeypatch.setattr(broker, "back_up", Slow())
        await admin.back_up({"path": "/three"})
        last = engine.backups.run
    assert last is not None
    assert "the service is stopping" in str(last.problem), "the end of the service ends the backup"
    broker.close()


async def test_a_service_refuses_what_it_can_not_back_up(tmp_path: Path) -> None:
    world = World()
    broker = world.own(compacted_prefix="__txnbuffer")
    async with engine_on(broker) as engine:
        admin = ServiceAdmin(engine)
        for path, why in ((None, "not a path"), ("file", "not an absolute path"), (str(tmp_path), "exists on the")):
            with pytest.raises(InvalidRequest, match=why):
                await admin.back_up({} if path is None else {"path": path})
    broker.close()
    async with engine_on(MemoryBroker().connect()) as engine:
        with pytest.raises(NotSupported, match="does not store the log itself"):
            await ServiceAdmin(engine).back_up({"path": "/file"})
