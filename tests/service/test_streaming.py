"""Change streams of an engine: its managers, backfills and connections, with a client in the same process."""

from __future__ import annotations

import pytest
from service_setup import engine_on, eventually, on_a_loop
from streamed import Follower, client_of, write

from broker_io.errors import TopicNotFound
from broker_io.memory import MemoryBroker
from txnbuffer import ChangeBatch, FileTokens, MemoryTokens, ResumeToken, SQLiteTokens
from txnbuffer.config import StreamsConfig
from txnbuffer.errors import InvalidRequest
from txnbuffer.service.streaming import backfills, streams
from txnbuffer.streams.errors import ForeignToken, StreamTrimmed, UnreadableToken

SMALL = StreamsConfig(memory_bytes=200_000, readers=1)


def bytes_of(rows: dict[str, str]) -> dict[bytes, bytes]:
    return {key.encode(): value.encode() for key, value in rows.items()}


@on_a_loop
async def test_a_stream_gives_what_was_there_and_what_comes(broker):
    async with engine_on(broker) as engine, client_of(engine, broker) as client:
        await write(client, "t", {"a": "1", "b": "2"})
        await write(client, "t", {"a": "3"})
        follower = Follower(client.stream("t"))
        await follower.until(3)
        assert follower.table == bytes_of({"a": "3", "b": "2"})
        assert follower.stream.caught_up
        await write(client, "t", {"b": None, "c": "4"})
        await follower.until(5)
        assert follower.table == bytes_of({"a": "3", "c": "4"})
        async with client.transaction() as txn:
            await txn.send("t", b"never", key="z")
            await txn.abort()
        await write(client, "t", {"d": "5"})
        await follower.until(6)
        assert follower.seqnos == sorted(set(follower.seqnos))
        assert b"z" not in follower.table


@on_a_loop
async def test_streams_end_where_they_are_to(broker):
    async with engine_on(broker) as engine, client_of(engine, broker) as client:
        for number in range(5):
            await write(client, "t", {str(number): "x"})
        now = Follower(client.stream("t", to="now"))
        await now.to_end()
        assert len(now.table) == 5
        part = Follower(client.stream("t", to=0))
        await part.to_end()
        assert part.table == {}
        later = client.stream("t", from_="now")
        first = await later.next(timeout=30.0)
        assert isinstance(first, ChangeBatch)
        assert (len(first), first.token.seqno, first.caught_up) == (0, 5, True)
        await write(client, "t", {"new": "x"})
        batch = await later.next(timeout=30.0)
        assert isinstance(batch, ChangeBatch)
        assert [row.key for row in batch] == [b"new"]
        await later.close()
        assert await later.next() is None


@on_a_loop
async def test_a_topic_that_nobody_streams_has_no_manager(monkeypatch):
    monkeypatch.setattr(streams, "LINGER", 0.0)
    broker = MemoryBroker()
    async with engine_on(broker) as engine, client_of(engine, broker) as client:
        await write(client, "t", {"a": "1"})
        assert engine.streams.feeds == {}
        assert engine.topics.get("t").tail.numbering.told is None
        stream = client.stream("t")
        await stream.next(timeout=30.0)
        assert set(engine.streams.feeds) == {"t"}
        await stream.close()
        await eventually(lambda: not engine.streams.feeds)
        assert engine.topics.get("t").tail.numbering.told is None
        assert engine.streams.budget.account.bytes == 0
        again = Follower(client.stream("t"))
        await again.until(1)


@on_a_loop
async def test_a_topic_of_ordinary_records_is_registered_and_a_missing_one_refused(broker):
    async with engine_on(broker) as engine, client_of(engine, broker) as client:
        await client.send_many("plain", [b"1", b"2"], keys=["a", None])
        follower = Follower(client.stream("plain"))
        await follower.until(2)
        assert follower.table == {b"a": b"1", None: b"2"}
        with pytest.raises(TopicNotFound, match="missing"):
            await client.stream("missing").next(timeout=30.0)


@on_a_loop
async def test_a_token_goes_on_at_another_engine_without_a_rollback(broker, tmp_path):
    stores = [MemoryTokens(), FileTokens(tmp_path / "tokens"), SQLiteTokens(tmp_path / "tokens.db")]
    async with engine_on(broker) as engine, client_of(engine, broker) as client:
        for number in range(20):
            await write(client, "t", {str(number % 7): str(number)})
        readers = [Follower(client.stream("t", store=store)) for store in stores]
        for reader in readers:
            await reader.until(20)
            await write(client, "t", {"more": "x"})
            await reader.read()  # what was read before is done with, and its token is stored
            assert ResumeToken.parse(reader.stream._store.load("t")).seqno == 20
    async with engine_on(broker) as engine, client_of(engine, broker) as client:
        await write(client, "t", {"last": "y"})
        for store, reader in zip(stores, readers, strict=True):
            again = Follower(client.stream("t", store=store))
            again.table = dict(reader.history[20])
            await again.until(24)
            assert (again.rollbacks, again.table[b"last"], again.table[b"6"]) == ([], b"y", b"13")
            assert again.seqnos[0] > 20


@on_a_loop
async def test_readers_that_are_far_behind_get_everything_in_little_memory(monkeypatch):
    monkeypatch.setattr(backfills, "READ_MESSAGES", 64)
    broker = MemoryBroker(ledger_entries=50)
    async with engine_on(broker, streams=SMALL) as engine, client_of(engine, broker) as client:
        truth = {}
        ahead = Follower(client.stream("t")) if "t" in broker.topics() else None
        for number in range(60):
            rows = {str((number * 31 + at) % 400): f"{number}-{at}".ljust(200, "x") for at in range(40)}
            await write(client, "t", rows)
            truth |= bytes_of(rows)
            if ahead is None:
                ahead = Follower(client.stream("t"))
                await ahead.read()
        behind = [Follower(client.stream("t")) for _ in range(3)]
        high = 60 * 40
        for reader in (ahead, *behind):
            await reader.until(high)
            assert reader.table == truth
            assert reader.seqnos == sorted(set(reader.seqnos))
        feed = engine.streams.feeds["t"]
        assert engine.streams.backfills.items > 0
        assert engine.streams.budget.account.bytes <= SMALL.memory_bytes
        middle = behind[0].history
        point = sorted(middle)[len(middle) // 2]
        token = ResumeToken("t", *_place(behind[0], point))
        resumed = Follower(client.stream("t", from_=token))
        resumed.table = dict(middle[point])
        await resumed.until(high)
        assert resumed.table == truth
        assert feed.problem is None


def _place(follower: Follower, seqno: int) -> tuple:
    token = follower.stream.token
    return token.cluster, token.incarnation, token.versions, seqno, seqno, seqno


@on_a_loop
async def test_what_is_trimmed_is_told(quick):
    broker = MemoryBroker(ledger_entries=8)
    async with engine_on(broker) as engine, client_of(engine, broker) as client:
        for number in range(40):
            await write(client, "t", {str(number): "x"})
        reader = Follower(client.stream("t", to="now"))
        await reader.to_end()
        low = ResumeToken("t", *_place(reader, 1))
        await engine.keeping.snapshot(["t"])
        await engine.keeping.snapshot(["t"])
        broker.trim("t", engine.topics.get("t").tail.floor())
        with pytest.raises(StreamTrimmed):
            await client.stream("t", from_=low).next(timeout=30.0)
        oldest = Follower(client.stream("t", to="now"))
        await oldest.to_end()
        assert 1 < oldest.seqnos[0] <= 40
        assert oldest.seqnos[-1] == 40


@on_a_loop
async def test_a_topic_made_anew_is_read_from_its_beginning():
    broker = MemoryBroker()
    async with engine_on(broker) as engine, client_of(engine, broker) as client:
        await write(client, "t", {"old": "1"})
        reader = Follower(client.stream("t", to="now"))
        await reader.to_end()
        token = reader.stream.token
    broker.delete_topic("t")
    async with engine_on(broker) as engine, client_of(engine, broker) as client:
        await write(client, "t", {"new": "2"})
        again = Follower(client.stream("t", from_=token))
        again.table, again.history = dict(reader.table), dict(reader.history)
        await again.until(1)
        assert (again.rollbacks, again.table) == ([0], bytes_of({"new": "2"}))


@on_a_loop
async def test_what_can_be_no_beginning_is_refused(broker, tmp_path):
    async with engine_on(broker) as engine, client_of(engine, broker) as client:
        with pytest.raises(ForeignToken):
            client.stream("t", from_=ResumeToken("other"))
        with pytest.raises(UnreadableToken):
            client.stream("t", from_="yesterday")
        for to in (-1, "never", True):
            with pytest.raises(InvalidRequest):
                client.stream("t", to=to)
        (tmp_path / "tokens").write_text("{]")
        with pytest.raises(UnreadableToken, match="tokens"):
            await client.stream("t", store=FileTokens(tmp_path / "tokens")).next()


@on_a_loop
async def test_many_streams_share_a_connection(broker):
    async with engine_on(broker) as engine, client_of(engine, broker) as client:
        topics = [f"t{number}" for number in range(12)]
        for topic in topics:
            await write(client, topic, {"a": topic})
        readers = [Follower(client.stream(topic)) for topic in topics for _ in range(2)]
        for reader in readers:
            await reader.until(1)
            assert reader.table == {b"a": reader.stream.topic.encode()}
        (connection,) = engine.streams.connections
        assert len(connection.server.statistics(0.0).streams) == 24
