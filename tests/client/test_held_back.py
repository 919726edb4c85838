"""What an open transaction holds back: readers, groups, commands and metrics say it."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path

import pytest
from commands import txnbuf
from raw_session import transactional
from service_process import ServiceProcess
from service_setup import engine_on, eventually, session_on

from broker_io import open_broker
from broker_io.batch import Batch, Message
from broker_io.errors import TopicNotFound
from broker_io.memory import MemoryBroker
from broker_io.port import Broker
from txnbuffer import CommittedReader, HeldBack, NotVisible, Outcome, SyncClient, SyncTransaction, connect
from txnbuffer.client.branches import Participant, commit_branches
from txnbuffer.coordinator.messages import Commit, CoordinatorConfig
from txnbuffer.model import TxnId
from txnbuffer.rpc.frames import ClientFrame
from txnbuffer.service.servers.admin import ServiceAdmin
from txnbuffer.service.servers.http_server import exposition, metrics


def send_beside(client: SyncClient, open_one: SyncTransaction) -> None:
    """Three records after the first one of an open transaction."""
    client.send("orders", "before")
    open_one.send("orders", "open")
    with client.reader("orders", isolation="read_uncommitted") as reader:
        list(zip(range(2), reader.records(), strict=False))  # it is in the log
    for number in range(3):
        client.send("orders", f"after {number}")


def check(held: HeldBack, txn: TxnId | None) -> None:
    assert (held.topic, held.messages, held.txn) == ("orders", 3, txn)
    assert held.since is not None
    assert f"topic 'orders': 3 messages are held back by open transaction {txn} since 20" in str(held)


def test_a_reader_says_what_an_open_transaction_holds_back(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    address = f"file:{tmp_path / 'log'}"
    with connect(address) as client:
        open_one = client.transaction().begin()
        send_beside(client, open_one)
        with connect(address, read_only=True) as other, other.reader("orders") as reader:
            for _ in range(2):
                assert [record.value for record in reader.records(timeout=0.01)] in ([b"before"], [])
            (held,) = reader.held_back()
            check(held, open_one.id)
            assert held.until is None
            assert [record.getMessage() for record in caplog.records] == [str(held)]
            open_one.commit(wait_visible=True)
            assert len([*reader.records(timeout=0.01)]) == 4
            assert reader.held_back() == []


def test_a_group_that_ends_idle_says_what_is_held_back(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with connect(f"file:{tmp_path / 'log'}") as client:
        open_one = client.transaction().begin()
        send_beside(client, open_one)
        caplog.set_level(logging.WARNING, "txnbuffer.groups")
        done = client.process("orders", "g", lambda txn, record: None, idle_timeout=0.05)
        assert done.records == 1
        check(done.held_back[0], open_one.id)
        assert [record.getMessage() for record in caplog.records] == [f"group 'g': {done.held_back[0]}"]
        with client.reader("orders") as reader:
            while True:  # the engine knows of a transaction that lasts for a second
                list(reader.records(timeout=0.05))
                if (until := reader.held_back()[0].until) is not None:
                    break
            assert until > (done.held_back[0].since or until)
        open_one.abort()
        assert client.process("orders", "g", lambda txn, record: None, idle_timeout=0.05).held_back == ()


async def test_a_commit_of_branches_does_not_wait_for_an_older_transaction() -> None:
    async with connect("memory:") as client, client.transaction() as older:
        await older.send("orders", "open")
        await client.send("orders", "beside")
        job = Participant(client, "job", 1)
        await job.begin()
        await job.send_batch("orders", Batch.of([Message(value=b"row")]))
        branch = await job.finish()
        async with asyncio.timeout(60):
            assert await commit_branches(client, "job", 1, [branch])
        assert not older.over


def test_commands_say_what_is_held_back(tmp_path: Path) -> None:
    address = f"file:{tmp_path / 'log'}"
    with connect(address) as client:
        open_one = client.transaction().begin()
        send_beside(client, open_one)
        tail = txnbuf("tail", address, "orders")
        assert "before" in tail.stdout
        assert f"3 messages are held back by open transaction {open_one.id}" in tail.stderr
        shown = json.loads(txnbuf("inspect", "buffer", address, "orders", "--output", "json").stdout)
        assert shown["held_back"]["txn"] == str(open_one.id)
        open_one.abort()
        assert "held back" not in txnbuf("tail", address, "orders").stderr


def test_commands_on_a_service_say_what_is_held_back_from_topics_and_groups(tmp_path: Path) -> None:
    with ServiceProcess(tmp_path / "log") as service, connect(f"txnbuf://127.0.0.1:{service.port}") as client:
        client.send("quiet", "record")
        client.process("quiet", "g", lambda txn, record: None, idle_timeout=0.01)
        open_one = client.transaction().begin()
        send_beside(client, open_one)
        client.process("orders", "g", lambda txn, record: None, idle_timeout=0.01)
        at = f"txnbuf://127.0.0.1:{service.port}"
        for command in (["list"], ["groups", "list"]):
            table = txnbuf(*command, at)
            assert f"topic 'orders': 3 messages are held back by open transaction {open_one.id}" in table.stderr
            assert "quiet" not in table.stderr
            assert "held_back" in table.stdout
            while True:  # the client tells the service of a transaction that lasts for a second
                rows = {row["topic"]: row for row in json.loads(txnbuf(*command, at, "--output", "json").stdout)}
                found = HeldBack.of_json(rows["orders"]["held_back"])
                check(found, open_one.id)
                if found.until is not None:
                    break
            assert found.as_json() == rows["orders"]["held_back"]
            assert rows["quiet"]["held_back"] is None
        open_one.abort()


async def test_a_service_says_what_is_held_back_and_until_when() -> None:
    broker = MemoryBroker()
    async with engine_on(broker, config=CoordinatorConfig(transaction_timeout=100.0)) as engine:
        session, ids = await session_on(engine, "orders")
        await session.write(("orders", transactional(ids[:1])))
        engine.effects.tick()
        assert b"held_back_topics 0" in exposition(metrics(engine))
        await session.write(("orders", transactional(ids[1:3])))
        engine.effects.ask()
        engine.effects.tick()
        assert b"held_back_topics 1" in exposition(metrics(engine))
        found = (await ServiceAdmin(engine).describe({"topic": "orders"}))["held_back"]
        assert (found["messages"], found["txn"]) == (2, f"0:{ids[0]}")
        assert 90_000 < found["until"] - found["since"] < 110_000


def test_a_reader_of_all_records_is_held_back_by_nothing(tmp_path: Path) -> None:
    address = f"file:{tmp_path / 'log'}"
    with connect(address) as client:
        open_one = client.transaction().begin()
        send_beside(client, open_one)
        with (
            open_broker(address, read_only=True) as broker,
            CommittedReader(broker, "orders", isolation="read_uncommitted") as reader,
        ):
            assert len([*reader.records(timeout=0.01)]) == 5
            assert reader.held_back() == []


async def test_a_commit_that_waits_returns_once_readers_get_its_records(tmp_path: Path) -> None:
    address = f"file:{tmp_path / 'log'}"
    async with connect(address) as client:
        older, newer, later = [await client.transaction().begin() for _ in range(3)]
        await older.send("a", "older")
        await newer.send("b", "newer")
        await newer.send("a", "newer")
        with open_broker(address, read_only=True) as broker:
            await eventually(lambda: count(broker, "read_uncommitted") == 2)
            await later.send("a", "later")
            await eventually(lambda: count(broker, "read_uncommitted") == 3)
            commit = asyncio.ensure_future(newer.commit(wait_visible=True))
            await asyncio.sleep(0.3)
            assert not commit.done()
            assert await client.outcome(newer.id) is Outcome.COMMIT
            await older.commit()
            await commit  # `later` is open, but began after its last record
            assert count(broker, "read_committed") == 2
            await later.abort()


def count(broker: Broker, isolation: str) -> int:
    try:
        with CommittedReader(broker, "a", isolation=isolation) as reader:
            return sum(len(batch) for batch in iter(reader.read, None))
    except TopicNotFound:
        return 0


async def test_a_commit_that_waits_too_long_names_the_transaction_in_the_way() -> None:
    broker, config = MemoryBroker(), CoordinatorConfig(visible_timeout=0.2)
    async with engine_on(broker, config=config) as engine:
        session, ids = await session_on(engine, "a")
        await session.write(("a", transactional(ids[:1])))
        await session.write(("a", transactional(ids[1:2])))
        commit = Commit(500, TxnId(0, ids[1]), ("a",), (1,), wait_visible=True)
        session.link.send(ClientFrame(commits=(commit,)))
        await session.until(lambda: 500 in session.answers)
        assert isinstance(session.answers[500], NotVisible)
        assert f"transaction 0:{ids[1]} is committed, but not visible" in str(session.answers[500])
        assert f"the older transaction 0:{ids[0]} is still open" in str(session.answers[500])
        assert engine.effects.visible.idle
