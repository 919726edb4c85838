"""With topics that branch, lost connections and killed sinks, the table equals the current branch.

The service is the naive one of `stream_world`; client, wire, loop and SQLite are the real ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import sqlite3
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from service_setup import eventually
from stream_world import Branch, Node, Row, Table

from txnbuffer.client.streams.streams import ChangeStream, StreamSession
from txnbuffer.rpc.streams_encoding import (
    decode_stream_client_frame,
    decode_stream_server_frame,
    encode_stream_client_frame,
    encode_stream_server_frame,
)
from txnbuffer.sinks import runner, sqlite
from txnbuffer.sinks.runner import SinkProgress, run_sink
from txnbuffer.sinks.sqlite import SQLiteFile
from txnbuffer.streams.client import ClientConfig
from txnbuffer.streams.failover import FailoverLog
from txnbuffer.streams.messages import ClientMessage, ServerMessage

KEYS = (b"k", b"l", b"m", b"n", None)
VALUES = (b"1", b"22", b"333", None)


class Owners:
    """Topic `t` with its current owner; `branches` by their newest version."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.uuids = 0
        self.connection = 0
        self.branches: dict[int, Branch] = {}
        self.topics = {"t": self.named(Branch(FailoverLog.initial(self.uuid())))}
        self.older = [self.branch.copy()]
        self.news = asyncio.Event()

    @property
    def branch(self) -> Branch:
        return self.topics["t"]

    def write(self, rows: Sequence[Row]) -> None:
        self.branch.rows += rows
        self.news.set()

    def keep(self) -> None:
        """A node keeps its present state; it may become the owner later."""
        self.older = [*self.older[-4:], self.branch.copy()]

    def fail_over(self, old: Branch, lost: int = 0) -> None:
        """A node takes over with its state, without its last mutations."""
        seqno = old.high - min(lost, old.high)
        log = old.log.created(self.uuid(), seqno)
        self.topics["t"] = self.named(Branch(log, old.rows[:seqno], 0, old.incarnation))
        self.cut()

    def recreate(self) -> None:
        branch = Branch(FailoverLog.initial(self.uuid()), [], 0, f"i-{self.uuids}")
        self.topics["t"] = self.named(branch)
        self.older = [branch.copy()]
        self.cut()

    def cut(self) -> None:
        """All connections are lost."""
        self.connection += 1
        self.news.set()

    def uuid(self) -> int:
        self.uuids += 1
        return self.uuids

    def named(self, branch: Branch) -> Branch:
        self.branches[branch.log.current.uuid] = branch
        return branch

    # As a client

    async def dial(self) -> OwnerLink:
        return OwnerLink(self)


class OwnerLink:
    """A connection until it is lost."""

    def __init__(self, owners: Owners) -> None:
        self._owners = owners
        self._node = Node(owners.topics)
        self._number = owners.connection
        self._turn = 0

    async def send(self, messages: Sequence[ClientMessage]) -> None:
        self._node.server.receive(decode_stream_client_frame(encode_stream_client_frame(messages)), 0.0)
        self._node.settle()
        self._owners.news.set()

    async def receive(self) -> Sequence[ServerMessage] | None:
        while self._number == self._owners.connection:
            self._node.server.advanced("t", self._owners.branch.high, 0.0)
            self._turn += 1
            busy = self._node.pump(self._turn, self._owners.chance.randint)
            if frame := self._node.server.take_frame(30, 0.0):
                return decode_stream_server_frame(encode_stream_server_frame(frame))
            if not busy:
                self._owners.news.clear()
                await self._owners.news.wait()
        return None

    async def close(self) -> None:
        pass


def stored(path: Path) -> Table:
    with contextlib.closing(sqlite3.connect(path)) as database:
        table: Table = dict(database.execute("SELECT CAST(key AS BLOB), CAST(value AS BLOB) FROM t").fetchall())
        for seqno, value in database.execute("SELECT seqno, CAST(value AS BLOB) FROM t_keyless").fetchall():
            table[seqno] = value or b""
    return table


class Follower:
    """A materializer that is killed and restarted; each table that is reported as complete is compared."""

    def __init__(self, owners: Owners, path: Path) -> None:
        self.owners = owners
        self.path = path
        self.filled = SinkProgress("t")
        self.points: Counter[str] = Counter()
        self._rollbacks = 0
        self.task = asyncio.ensure_future(self.follow())

    async def follow(self) -> None:
        self._rollbacks = 0
        streaming = StreamSession(self.owners.dial, 60.0, ClientConfig("reader", 5, 40, 1e4, 0.001, 0.001))
        with SQLiteFile(self.path) as file:
            file._database.execute("PRAGMA synchronous = OFF")
            try:
                await run_sink(Streams(streaming), "t", file.table("t"), on_progress=self.check)  # type: ignore[arg-type]  # a part of one
            finally:
                await streaming.close()

    def check(self, filled: SinkProgress) -> None:
        assert filled.token is not None
        self.filled = filled
        if filled.rollbacks > self._rollbacks:
            self._rollbacks = filled.rollbacks
            self.points["all" if filled.token.seqno == 0 else "some"] += 1
        self.points["complete" if filled.token.complete else "partial"] += 1
        if filled.token.complete and filled.token.seqno:
            branch = self.owners.branches[filled.token.uuid]
            assert stored(self.path) == branch.table(filled.token.seqno), filled.token

    async def restart(self) -> None:
        await self.stop()
        self.task = asyncio.ensure_future(self.follow())

    async def stop(self) -> None:
        self.task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self.task

    def caught_up(self) -> bool:
        if self.task.done():
            self.task.result()
        token, branch = self.filled.token, self.owners.branch
        if token is None or (token.seqno, token.incarnation) != (branch.high, branch.incarnation):
            return False
        return token.complete and token.uuid == branch.log.current.uuid


class Streams:
    """The part of a client that opens streams."""

    def __init__(self, streaming: StreamSession) -> None:
        self._streaming = streaming

    def stream(self, topic: str, *, from_: Any, to: Any) -> Any:
        return ChangeStream(self._streaming, topic, from_, to, None)


async def history(seed: int, path: Path) -> Counter[str]:
    """Random events, then rest; returns the kinds of writes and rollbacks that occurred."""
    chance = random.Random(seed)
    owners = Owners(chance)
    follower = Follower(owners, path)
    try:
        for _ in range(30):
            for _ in range(chance.randint(0, 3)):
                owners.write([(chance.choice(KEYS), chance.choice(VALUES)) for _ in range(chance.randint(1, 8))])
            step = chance.random()
            if step < 0.3:
                await eventually(follower.caught_up)
            elif step < 0.5:
                owners.keep()
            elif step < 0.7:
                owners.fail_over(chance.choice(owners.older), chance.randint(0, 3))
            elif step < 0.74:
                owners.recreate()
            elif step < 0.85:
                owners.cut()
            elif step < 0.95:
                await follower.restart()
            await asyncio.sleep(chance.choice((0.0, 0.002, 0.01)))
        owners.write([(b"last", b"1")])
        await eventually(follower.caught_up)
        assert stored(path) == owners.branch.table(owners.branch.high)
    finally:
        await follower.stop()
    return follower.points


async def test_the_table_always_equals_the_branch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "MAX_ROWS", 4)
    monkeypatch.setattr(runner, "MAX_WAIT", 0.005)
    monkeypatch.setattr(runner, "POLL", 0.005)
    points: Counter[str] = Counter()
    for seed in range(8):
        monkeypatch.setattr(sqlite, "UNDO_ROWS", 6 if seed % 4 == 0 else 1000)
        points += await history(seed, tmp_path / f"{seed}.db")
    assert points["complete"]


async def test_a_table_rolls_back_only_as_far_as_necessary(tmp_path: Path) -> None:
    owners = Owners(random.Random(1))
    follower = Follower(owners, tmp_path / "t.db")
    try:
        for rows in ([(b"k", b"1"), (b"l", b"1")], [(b"k", b"2"), (None, b"2")]):
            owners.write(rows)
            await eventually(follower.caught_up)
        owners.keep()
        owners.write([(b"k", b"3"), (b"l", None), (None, b"3"), (b"m", b"3")])
        await eventually(follower.caught_up)
        owners.fail_over(owners.older[-1])
        owners.write([(b"n", b"4")])
        await eventually(follower.caught_up)
        assert stored(follower.path) == {b"k": b"2", b"l": b"1", 4: b"2", b"n": b"4"}
        assert (follower.points["some"], follower.points["all"], follower.filled.mutations) == (1, 0, 9)
    finally:
        await follower.stop()
