"""Scripted streams, and a sink in memory that checks its caller."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from broker_io.position import Position
from txnbuffer import ChangeBatch, ResumeToken, Rollback
from txnbuffer.mutations.batch import Mutation, MutationBatch
from txnbuffer.streams.failover import Version

VERSION = Version(0x10, 0)


def token(seqno: int, start: int | None = None, end: int | None = None, cluster: str = "c-1") -> ResumeToken:
    """A resume token between snapshots, or inside one."""
    start, end = seqno if start is None else start, seqno if end is None else end
    return ResumeToken("t", cluster, "i-1", (VERSION,), seqno, start, end)


def batch(where: ResumeToken, *rows: Mutation, caught_up: bool = False) -> ChangeBatch:
    mutations = MutationBatch.of(rows)
    return ChangeBatch("t", mutations, where, where.complete, caught_up, mutations.payload())


def row(seqno: int, key: str | None, value: str | None, **more: Any) -> Mutation:
    key_bytes, value_bytes = None if key is None else key.encode(), None if value is None else value.encode()
    return Mutation(seqno, Position(1, seqno), key_bytes, value_bytes, **more)


MAX_WAIT = 100
"""Reads of a stream without an item before the test fails."""

Item = ChangeBatch | Rollback | BaseException | None


class Script:
    """A client whose streams return the items of consecutive lists: an exception is raised, None is the end.

    After its items a stream returns nothing. `asked`: the start of each stream; `undone`: the reported rollbacks.
    """

    def __init__(self, *streams: Sequence[Item]) -> None:
        self.streams = deque(streams)
        self.asked: list[Any] = []
        self.undone: list[int] = []
        self.ran_dry = False

    def stream(self, topic: str, *, from_: Any, to: Any) -> Any:
        self.asked.append(from_)
        return ScriptedStream(self, self.streams.popleft())


class ScriptedStream:
    def __init__(self, script: Script, items: Sequence[Item]) -> None:
        self._script = script
        self._items = deque(items)
        self._silent = 0

    async def next(self, timeout: float | None = None) -> ChangeBatch | Rollback | None:
        if not self._items:
            self._silent += 1
            assert self._silent < MAX_WAIT, "too many reads of a stream without an item"
            self._script.ran_dry = True
            raise TimeoutError
        item = self._items.popleft()
        if isinstance(item, BaseException):
            raise item
        return item

    async def rolled_back(self, seqno: int) -> None:
        self._script.undone.append(seqno)

    def statistics(self) -> SimpleNamespace:
        return SimpleNamespace(high_seqno=100)

    async def __aenter__(self) -> ScriptedStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass


class ListSink:
    """A sink that stores mutations and the sizes of writes; it rolls back to the newest of `points`."""

    name = "the list"

    def __init__(self, start: ResumeToken | None = None, points: Sequence[int] = (0,)) -> None:
        self.token = start
        self.points = points
        self.rows: list[Mutation] = []
        self.writes: list[int] = []

    def begin(self) -> ResumeToken | None:
        return self.token

    def write(self, batches: Sequence[ChangeBatch]) -> None:
        assert batches
        assert batches[-1].complete or not any(one.complete for one in batches)
        self.rows += [row for one in batches for row in one]
        self.writes.append(len(batches))
        self.token = batches[-1].token

    def roll_back(self, rollback: Rollback) -> int:
        assert self.token is not None
        at = self.token.snapshot_start
        seqno = max(point for point in (*self.points, at) if point <= rollback.seqno)
        self.rows = [row for row in self.rows if row.seqno <= seqno]
        self.token = self.token.rolled_back(seqno)
        return seqno
