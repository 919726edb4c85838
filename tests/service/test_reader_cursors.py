"""Durable cursors that follow the readers of streams: mutations not acknowledged are not trimmed."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from service_setup import engine_on, eventually
from streamed import client_of, write

from broker_io.memory import MemoryBroker
from txnbuffer import ChangeBatch, MemoryTokens, ResumeToken, connect
from txnbuffer.client.admin_clients import AdminClients
from txnbuffer.client.streams import cursors as following
from txnbuffer.client.streams.cursors import CursorLease, DurableCursors
from txnbuffer.config import RetentionConfig, StreamsConfig
from txnbuffer.errors import (
    ForeignToken,
    ServiceUnavailable,
    StreamBranched,
    StreamTooSlow,
    StreamTrimmed,
    UnknownCursor,
)
from txnbuffer.service.engine.engine import Engine
from txnbuffer.service.topics.retention import LogRetention


async def trim(engine: Engine) -> None:
    """Trim as much as possible."""
    keep = LogRetention(engine.topics, engine.snapshots, RetentionConfig(bytes=1), engine.clock, engine.trim_floors)
    for _ in range(3):
        await keep.check(engine.topics.get("t"))


async def fill(client: Any, broker: MemoryBroker, first: int, last: int) -> None:
    """A ledger for each record."""
    for number in range(first, last + 1):
        await write(client, "t", {str(number): "x" * 100})
        broker.roll("t")


def position_of(engine: Engine) -> int:
    (row,) = engine.cursors.rows()
    return int(row["seqno"])


async def seqnos(client: Any) -> list[int]:
    async with client.stream("t", to="now") as stream:
        return [row.seqno async for batch in stream for row in batch]


async def up_to(stream: Any, seqno: int) -> ChangeBatch:
    """The batch that reaches a seqno."""
    while True:
        batch = await stream.next(timeout=120.0)
        assert isinstance(batch, ChangeBatch)
        if batch.token.seqno >= seqno:
            return batch


async def ask_for_more(stream: Any) -> None:
    """Acknowledge the last batch, whether or not there is another one."""
    with contextlib.suppress(TimeoutError):
        await stream.next(timeout=0.0)


async def test_unacknowledged_mutations_are_kept_and_the_rest_may_be_trimmed() -> None:
    broker = MemoryBroker()
    async with engine_on(broker) as engine, client_of(engine, broker) as client:
        await fill(client, broker, 1, 4)
        stream = client.stream("t", cursor="cache")
        await up_to(stream, 4)
        assert position_of(engine) == 0
        await trim(engine)
        assert await seqnos(client) == [1, 2, 3, 4]
        await stream.done()
        assert position_of(engine) == 4
        await fill(client, broker, 5, 8)
        await trim(engine)
        assert (await seqnos(client))[-4:] == [5, 6, 7, 8]
        assert (await seqnos(client))[0] > 1
        await stream.close()


async def test_it_follows_whoever_asks_for_more_and_a_last_time_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following, "MOVE_INTERVAL", 0.0)
    broker = MemoryBroker()
    async with engine_on(broker) as engine, client_of(engine, broker) as client:
        await fill(client, broker, 1, 3)
        store = MemoryTokens()
        async with client.stream("t", store=store, cursor="cache") as stream:
            await up_to(stream, 3)
            await ask_for_more(stream)
            await eventually(lambda: position_of(engine) == 3)
            monkeypatch.setattr(following, "MOVE_INTERVAL", 3600.0)
            await write(client, "t", {"4": "x"})
            await up_to(stream, 4)
            await ask_for_more(stream)
        assert position_of(engine) == 4 == ResumeToken.parse(store.tokens["t"]).seqno
        async with client.stream("t", store=store, cursor="cache") as stream:
            await write(client, "t", {"5": "x"})
            await up_to(stream, 5)
        assert position_of(engine) == 4  # the last mutation was not acknowledged


async def test_a_cursor_that_is_gone_is_reported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following, "MOVE_INTERVAL", 0.0)
    broker = MemoryBroker()
    async with engine_on(broker) as engine, client_of(engine, broker) as client:
        await fill(client, broker, 1, 2)
        async with client.stream("t", cursor="cache") as stream:
            await up_to(stream, 2)
            await client.cursors.remove("t", "cache")
            with pytest.raises(UnknownCursor, match="no cursor 'cache'"):
                await stream.done()
            hold = stream._lease
            assert hold is not None
            await eventually(lambda: hold._gone is not None)
            await write(client, "t", {"more": "x"})
            with pytest.raises(UnknownCursor):
                await up_to(stream, 4)
            await write(client, "t", {"more": "y"})
            await up_to(stream, 4)


@pytest.mark.parametrize("cursor", ["cache", None])
async def test_a_reader_that_is_too_slow_is_reported_and_loses_nothing_with_a_cursor(cursor: str | None) -> None:
    broker = MemoryBroker()
    async with (
        engine_on(broker, streams=StreamsConfig(slow_after=0.2)) as engine,
        client_of(engine, broker) as client,
        client.stream("t", cursor=cursor) as stream,
    ):
        for number in range(12):
            await write(client, "t", {str(number): "x" * 1_000_000})
            broker.roll("t")
        await stream.next(timeout=120.0)  # and then it takes nothing more, beyond its window
        await eventually(lambda: isinstance(stream.problem, StreamTooSlow))
        await trim(engine)
        if cursor is None:
            await eventually(lambda: stream._ended is not None)  # it was opened again, after the trimmed mutations
            with pytest.raises(StreamTrimmed):
                await up_to(stream, 12)
        else:
            await up_to(stream, 12)
            assert stream.statistics().mutations == 12
        assert stream.statistics().interruptions > 0


async def test_a_token_whose_log_is_gone_begins_nothing() -> None:
    broker = MemoryBroker()
    async with engine_on(broker) as engine, client_of(engine, broker) as client:
        await fill(client, broker, 1, 1)
        async with client.stream("t") as stream:
            old = (await up_to(stream, 1)).token
        await fill(client, broker, 2, 9)
        await trim(engine)
        with pytest.raises(StreamTrimmed):
            await client.stream("t", from_=old, cursor="late").next(timeout=120.0)
        assert engine.cursors.rows() == []


class Answers(DurableCursors):
    """Records the requests; an error in `raised` is raised for the position of that name."""

    def __init__(self, **raised: Exception) -> None:
        self.asked: list[tuple[str, str]] = []
        self._raised = raised

    async def add(self, topic: str, cursor: str, at: Any = "beginning") -> int:
        return self._note("add", at)

    async def advance(self, topic: str, cursor: str, at: Any) -> int:
        return self._note("advance", at)

    def _note(self, what: str, at: Any) -> int:
        place = at if isinstance(at, str) else "token"
        self.asked.append((what, place))
        if place in self._raised:
            raise self._raised.pop(place)
        return 0


async def test_a_reader_of_another_history_holds_all_until_it_has_gone_back() -> None:
    branched = Answers(token=StreamBranched("another history"))
    hold = CursorLease(branched, "t", "cache")
    await hold.begin(ResumeToken("t"))
    hold._done = ResumeToken("t")
    await hold.moved()
    assert branched.asked == [("add", "token"), ("add", "beginning"), ("advance", "token")]


async def test_a_reader_of_another_service_leaves_no_cursor_here_unless_it_continues() -> None:
    foreign = Answers(token=ForeignToken("another topic"))
    hold = CursorLease(foreign, "t", "cache")
    await hold.begin(ResumeToken("t"))
    await hold.close()
    assert foreign.asked == [("add", "token")]
    hold._done = ResumeToken("t")
    await hold.moved()
    assert foreign.asked == [("add", "token"), ("add", "token")]


class Away:
    """A link that breaks `left` times."""

    def __init__(self, left: int) -> None:
        self.left, self.closed = left, 0

    async def ask(self, method: str, question: dict[str, Any]) -> Any:
        self.left -= 1
        if self.left >= 0:
            raise ServiceUnavailable("away")
        return {"seqno": 7}

    async def close(self) -> None:
        self.closed += 1


async def test_a_service_that_is_away_is_asked_again() -> None:
    link = Away(3)

    async def dial() -> Away:
        return link

    assert await DurableCursors(AdminClients([dial], 60.0)).advance("t", "c", 7) == 7
    assert link.closed == 3
    with pytest.raises(ServiceUnavailable):
        link.left = 2
        await DurableCursors(AdminClients([dial], -1.0)).advance("t", "c", 7)
    assert link.left == 1


def test_without_asyncio_it_is_the_same() -> None:
    with connect("memory:reader-cursors") as client:
        with client.transaction() as txn:
            txn.send_many("t", [b"1", b"2"], keys=["a", "b"])
        assert client.cursors.add("t", "by hand", "now") == 2
        with client.stream("t", cursor="cache") as stream:
            found = 0
            while found < 2:
                batch = stream.next(timeout=120.0)
                assert isinstance(batch, ChangeBatch)
                found += len(batch)
            stream.done()
        assert client.cursors.advance("t", "cache", 1) == 2
        client.cursors.remove("t", "cache")
        with pytest.raises(UnknownCursor):
            client.cursors.advance("t", "cache", 2)
