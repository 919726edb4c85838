"""`materialize` with engines in this process: large snapshots in parts, rollbacks, several topics, errors."""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from service_setup import engine_on
from streamed import client_of, write

from bench.log_owner import LogOwner
from broker_io import open_broker
from broker_io.errors import TopicNotFound
from broker_io.memory import MemoryBroker
from txnbuffer.client.streams.streams import ShardStreams
from txnbuffer.errors import ForeignSink, InvalidRequest, SinkLocked, StreamTrimmed
from txnbuffer.sinks import runner
from txnbuffer.sinks.runner import SinkProgress, materialize
from txnbuffer.sinks.sqlite import SQLiteFile
from txnbuffer.streams.client import ClientConfig


def table(path: Path, name: str = "t") -> dict[str, str]:
    with closing(sqlite3.connect(path)) as database:
        return dict(database.execute(f'SELECT key, value FROM "{name}"').fetchall())


def standing(path: Path) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(path)) as database:
        return database.execute("SELECT topic, seqno, complete FROM txnbuffer_topics ORDER BY topic").fetchall()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tables.db"


async def test_topics_become_tables_and_continue(path):
    broker = MemoryBroker()
    async with engine_on(broker) as engine, client_of(engine, broker) as client:
        await write(client, "t", {"a": "1", "b": "2"})
        await write(client, "u", {"x": "1"})
        done = await materialize(client, ["t", "u"], path, to="now")
        assert [(one.topic, one.mutations, one.caught_up) for one in done] == [("t", 2, True), ("u", 1, True)]
        await write(client, "t", {"a": None, "c": "3"})
        (again,) = await materialize(client, "t", path, to="now")
        assert (again.mutations, table(path), table(path, "u")) == (2, {"b": "2", "c": "3"}, {"x": "1"})
        assert standing(path) == [("t", 4, 1), ("u", 1, 1)]
        (none,) = await materialize(client, "t", path, to=2)
        assert (none.mutations, standing(path)[0]) == (0, ("t", 4, 1))
        (again,) = await materialize(client, "t", path, to="now", replace=True)
        assert (again.caught_up, table(path)) == (True, {"b": "2", "c": "3"})


async def test_a_partial_snapshot_is_completed_by_the_next_owner(path, monkeypatch):
    monkeypatch.setattr(runner, "MAX_ROWS", 8)
    broker = MemoryBroker()
    truth: dict[str, str] = {}
    stop = asyncio.Event()
    async with engine_on(broker) as engine, client_of(engine, broker) as client:
        for number in range(10):
            rows = {str((number * 7 + at) % 90): f"{number}" for at in range(50)}
            await write(client, "t", rows)
            truth |= rows
        client.streams = ShardStreams(client.streams.connectors, 60.0, ClientConfig(window_items=16))
        (part,) = await materialize(client, "t", path, stop=stop, on_progress=lambda now: stop_inside(now, stop))
        assert standing(path) == [("t", part.token.seqno, 0)]
        assert 0 < len(table(path)) < len(truth)
    async with engine_on(broker) as engine, client_of(engine, broker) as client:
        await write(client, "t", {"after": "all", "1": None})
        (done,) = await materialize(client, "t", path, to="now")
        assert (done.rollbacks, standing(path)) == (0, [("t", 502, 1)])
    del truth["1"]
    assert table(path) == truth | {"after": "all"}


def stop_inside(filled: SinkProgress, stop: asyncio.Event) -> None:
    if filled.mutations and not filled.token.complete:
        stop.set()


async def test_a_recreated_topic_starts_over(path):
    broker = MemoryBroker()
    async with engine_on(broker) as engine, client_of(engine, broker) as client:
        await write(client, "t", {"old": "1", "both": "1"})
        await materialize(client, "t", path, to="now")
    broker.delete_topic("t")
    async with engine_on(broker) as engine, client_of(engine, broker) as client:
        await write(client, "t", {"both": "2"})
        (done,) = await materialize(client, "t", path, to="now")
        assert (done.rollbacks, table(path), standing(path)) == (1, {"both": "2"}, [("t", 1, 1)])


async def test_a_branched_history_is_followed_from_the_branch(path, tmp_path):
    """The log is restored from an older copy, and its state rebuilt."""
    log, copy = tmp_path / "log", tmp_path / "copy"

    async def serve(**rows: str | None) -> SinkProgress:
        with open_broker(f"file:{log}") as broker:
            async with engine_on(broker) as engine, client_of(engine, broker) as client:
                await write(client, "t", rows)
                (done,) = await materialize(client, "t", path, to="now")
                return done

    await serve(a="1", b="1")
    shutil.copytree(log, copy)
    await serve(a="2", c="2")
    shutil.rmtree(log)
    copy.rename(log)
    with open_broker(f"file:{log}") as broker, LogOwner(broker) as manager:
        manager.recover()
        manager.rebuild("t")
    done = await serve(b=None)
    assert (done.rollbacks, done.mutations, table(path), standing(path)) == (1, 1, {"a": "1"}, [("t", 3, 1)])


async def test_trimmed_mutations_are_reported_and_the_table_can_be_replaced(path):
    broker = MemoryBroker(ledger_entries=8)
    async with engine_on(broker) as engine, client_of(engine, broker) as client:
        await write(client, "t", {"first": "x"})
        await materialize(client, "t", path, to="now")
        for number in range(40):
            await write(client, "t", {str(number): "x"})
        await engine.snapshots.snapshot(["t"])
        await engine.snapshots.snapshot(["t"])
        broker.trim("t", engine.topics.get("t").followed.floor())
        with pytest.raises(
            StreamTrimmed, match=r"the next mutations of table \'t\' of .*tables\.db .*: build it again"
        ):
            await materialize(client, "t", path, to="now")
        assert table(path) == {"first": "x"}
        (done,) = await materialize(client, "t", path, to="now", replace=True)
        assert done.caught_up
        assert 0 < len(table(path)) < 40


async def test_tables_that_can_not_be_written_are_rejected_and_unchanged(path):
    broker, other = MemoryBroker(), MemoryBroker()
    async with engine_on(broker) as engine, client_of(engine, broker) as client:
        await write(client, "t", {"a": "1"})
        await materialize(client, "t", path, to="now")
        for topics, name in ((["t", "t"], None), (["t", "u"], "x")):
            with pytest.raises(InvalidRequest):
                await materialize(client, topics, path, to="now", table=name)
        with pytest.raises(TopicNotFound):
            await materialize(client, ["t", "missing"], path)
        with SQLiteFile(path), pytest.raises(SinkLocked):
            await materialize(client, "t", path)
    async with engine_on(other) as engine, client_of(engine, other) as client:
        with pytest.raises(TopicNotFound):
            await materialize(client, "t", path, replace=True)
        assert table(path) == {"a": "1"}
        await write(client, "t", {"b": "1"})
        with pytest.raises(ForeignSink, match=r"tables\.db has data of another log \(topic t belongs to cluster "):
            await materialize(client, "t", path)
        assert (table(path), standing(path)) == ({"a": "1"}, [("t", 1, 1)])
        await materialize(client, "t", path, to="now", table="other", replace=True)
    assert (table(path, "other"), standing(path)) == ({"b": "1"}, [("t", 1, 1)])
    with pytest.raises(sqlite3.OperationalError, match="no such table: t"):
        table(path)
