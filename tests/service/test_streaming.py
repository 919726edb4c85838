"""Change streams of an engine: its managers, backfills and connections, with a client in the same process."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace

import numpy as np
import pytest
from cluster_app import app_on, cluster_engine
from service_setup import engine_on, eventually
from source_tree import ROOT
from streamed import Follower, client_of, write

from broker_io.batch import Batch, Message, PlacedBatch
from broker_io.errors import TopicNotFound
from broker_io.memory import MemoryBroker
from broker_io.position import Positions
from txnbuffer import ChangeBatch, FileTokens, MemoryTokens, ResumeToken, ServiceUnavailable, SQLiteTokens
from txnbuffer.buffer.visibility import Sequenced
from txnbuffer.client.reading.reader import CommittedReader
from txnbuffer.client.streams.streams import ShardStreams
from txnbuffer.config import StreamsConfig
from txnbuffer.errors import ForeignToken, InvalidRequest, StreamTrimmed, UndecodableRecordSet, UnreadableToken
from txnbuffer.model import TxnId
from txnbuffer.rpc.frames import Abort
from txnbuffer.service.engine.engine import Engine
from txnbuffer.service.servers.admin import ServiceAdmin
from txnbuffer.service.servers.http_server import metrics
from txnbuffer.service.streams import streams
from txnbuffer.streams.client import ClientConfig
from txnbuffer.streams.messages import Grant, StreamHello, StreamMutations, StreamRequest

SMALL = StreamsConfig(memory_bytes=200_000, readers=1)


def bytes_of(rows: dict[str, str]) -> dict[bytes, bytes]:
    return {key.encode(): value.encode() for key, value in rows.items()}


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
        assert follower.stream.caught_up
        async with client.transaction() as txn:
            await txn.send("t", b"never", key="z")
            await txn.abort()
        await write(client, "t", {"d": "5"})
        await follower.until(6)
        assert follower.seqnos == sorted(set(follower.seqnos))
        assert b"z" not in follower.table


async def test_tasks_that_share_a_stream_are_given_each_mutation_once(broker):
    async with engine_on(broker) as engine, client_of(engine, broker) as client:
        client.streams = ShardStreams(client.streams.connectors, 60.0, ClientConfig(window_items=4))
        await write(client, "t", {str(number): "x" for number in range(50)})
        seqnos, store = [], MemoryTokens()
        stream = client.stream("t", to="now", store=store)

        async def work():
            while (batch := await stream.next(timeout=120.0)) is not None:
                seqnos.extend(row.seqno for row in batch)
                await stream.done()

        await asyncio.gather(*(work() for _ in range(3)))
        assert seqnos == [*range(1, 51)]
        assert ResumeToken.parse(store.load("t")).seqno == 50


async def test_publish_times_are_those_of_the_log_wherever_mutations_come_from(broker):
    async with engine_on(broker) as engine, client_of(engine, broker) as client:
        follower = client.stream("t")
        found: dict[int, int] = {}
        await write(client, "t", {"a": "1"})
        while len(found) < 4:
            item = await follower.next(timeout=120.0)
            found |= {row.seqno: row.publish_time for row in item}
            if len(found) == 1:
                await write(client, "t", {"b": "2", "c": "3"})
                await write(client, "t", {"d": "4"})
        with CommittedReader(broker, "t") as reader:
            logged = {row.seqno: row.publish_time for batch in iter(reader.read, None) for row in batch}
        assert found == logged
        assert min(logged.values()) > 0
        later = {row.seqno: row.publish_time async for item in client.stream("t", to="now") for row in item}
        assert later == logged


async def test_statistics_show_how_far_a_reader_is(broker):
    async with engine_on(broker) as engine, client_of(engine, broker) as client:
        await write(client, "t", {"a": "1", "b": "2", "c": "3"})
        await write(client, "t", {"b": None})
        stream = client.stream("t", store=MemoryTokens())
        assert tuple(stream.statistics()) == (0,) * 11
        follower = Follower(stream)
        await follower.until(4)
        told = stream.statistics()
        assert (told.deletions, told.rollbacks, told.interruptions) == (1, 0, 0)
        assert 3 <= told.mutations <= 4, "b may have been replaced"
        assert (told.seqno, told.snapshot_start, told.snapshot_end, told.high_seqno, told.lag) == (4, 4, 4, 4, 0)
        await write(client, "t", {"d": "5"})
        await follower.until(5)
        told = stream.statistics()
        assert (told.seqno, told.stored_seqno) == (5, 4)
        answer = await ServiceAdmin(engine).methods()["Streams"]({})
        assert answer["backfills"]["active"] == answer["backfills"]["pending"] == 0
        (shown,) = answer["connections"][0]["streams"]
        assert (shown["last_read_seqno"], shown["last_sent_seqno"], shown["items_ready"]) == (5, 5, 0)


async def test_a_page_names_the_statistics_that_there_are(broker):
    async with engine_on(broker) as engine, client_of(engine, broker) as client:
        await write(client, "t", {"a": "1"})
        stream = client.stream("t")
        await Follower(stream).until(1)
        await ServiceAdmin(engine).methods()["AddCursor"]({"topic": "t", "cursor": "c"})
        answer = await ServiceAdmin(engine).methods()["Streams"]({})
        known = {*answer["connections"][0], *answer["connections"][0]["streams"][0], *answer["cursors"][0]}
        known |= {*answer["managers"][0], *answer["managers"][0]["cursor"][0], *stream.statistics()._fields}
        text = (ROOT / "docs" / "stream-protocol.md").read_text()
        section = text.partition("## Statistics")[2].partition("Sums of them")[0]
        named = {
            name for row in section.splitlines() for name in re.findall(r"`(\w+)`", "`" + row.rpartition("| `")[2])
        }
        assert len(named) > 20
        assert named - known == set()


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
        first = await later.next(timeout=120.0)
        assert isinstance(first, ChangeBatch)
        assert (len(first), first.token.seqno, first.caught_up) == (0, 5, True)
        await write(client, "t", {"new": "x"})
        batch = await later.next(timeout=120.0)
        assert isinstance(batch, ChangeBatch)
        assert [row.key for row in batch] == [b"new"]
        await later.close()
        assert await later.next() is None


async def test_a_topic_that_nobody_streams_has_no_manager(monkeypatch):
    monkeypatch.setattr(streams, "LINGER", 0.0)
    broker = MemoryBroker()
    async with engine_on(broker) as engine, client_of(engine, broker) as client:
        await write(client, "t", {"a": "1"})
        assert engine.streams.feeds == {}
        assert engine.topics.get("t").followed.on_sequenced is None
        stream = client.stream("t")
        await stream.next(timeout=120.0)
        assert set(engine.streams.feeds) == {"t"}
        await stream.close()
        await eventually(lambda: not engine.streams.feeds)
        assert engine.topics.get("t").followed.on_sequenced is None
        assert engine.streams.budget.account.bytes == 0
        again = Follower(client.stream("t"))
        await again.until(1)


async def test_a_topic_of_ordinary_records_is_registered_and_a_missing_one_refused(broker):
    async with engine_on(broker) as engine, client_of(engine, broker) as client:
        await client.send_many("plain", [b"1", b"2"], keys=["a", None])
        follower = Follower(client.stream("plain"))
        await follower.until(2)
        assert follower.table == {b"a": b"1", None: b"2"}
        with pytest.raises(TopicNotFound, match="missing"):
            await client.stream("missing").next(timeout=120.0)


async def test_a_token_continues_at_another_engine_without_a_rollback(broker, tmp_path):
    stores = [MemoryTokens(), FileTokens(tmp_path / "tokens"), SQLiteTokens(tmp_path / "tokens.db")]
    async with engine_on(broker) as engine, client_of(engine, broker) as client:
        for number in range(20):
            await write(client, "t", {str(number % 7): str(number)})
        readers = [Follower(client.stream("t", store=store)) for store in stores]
        for reader in readers:
            await reader.until(20)
            await write(client, "t", {"more": "x"})
            await reader.read()  # the batch before is acknowledged, and its token is stored
            assert ResumeToken.parse(reader.stream._store.load("t")).seqno == 20
    async with engine_on(broker) as engine, client_of(engine, broker) as client:
        await write(client, "t", {"last": "y"})
        for store, reader in zip(stores, readers, strict=True):
            again = Follower(client.stream("t", store=store))
            again.table = dict(reader.history[20])
            await again.until(24)
            assert (again.rollbacks, again.table[b"last"], again.table[b"6"]) == ([], b"y", b"13")
            assert again.seqnos[0] > 20


async def test_readers_that_lag_get_everything_in_little_memory(monkeypatch):
    monkeypatch.setattr(streams, "READ_MESSAGES", 64)
    broker = MemoryBroker(ledger_entries=500)
    async with engine_on(broker, streams=SMALL) as engine, client_of(engine, broker) as client:
        truth = {}
        stalled = None
        for number in range(60):
            rows = {f"{at % 2 or number}-{at}": f"{number}".ljust(200, "x") for at in range(40)}
            await write(client, "t", rows)
            truth |= bytes_of(rows)
            if stalled is None:
                client.streams = ShardStreams(client.streams.connectors, 10.0, ClientConfig(window_items=16))
                stalled = Follower(client.stream("t"))
                await stalled.read()
                client.streams = ShardStreams(client.streams.connectors, 60.0)
        await eventually(lambda: engine.streams.feeds["t"].manager.high == 60 * 40)
        assert engine.streams.budget.account.bytes <= SMALL.memory_bytes
        behind = [Follower(client.stream("t")) for _ in range(3)]
        for reader in (stalled, *behind):
            await reader.until(60 * 40)
            assert reader.table == truth
            assert reader.seqnos == sorted(set(reader.seqnos))
        assert engine.streams.backfills.items > 0
        assert engine.streams.budget.account.bytes <= SMALL.memory_bytes
        points = behind[0].history
        point = sorted(points)[len(points) // 2]
        resumed = Follower(client.stream("t", from_=ResumeToken("t", *_place(behind[0], point))))
        resumed.table = dict(points[point])
        await resumed.until(60 * 40)
        assert resumed.table == truth
        await stalled.stream._session.close()


@pytest.mark.parametrize("count", [7, 30], ids=["all have a turn", "some wait"])
async def test_many_streams_that_nobody_reads_share_the_memory(broker, count):
    limit, writes = 2_000_000, 60
    async with (
        engine_on(broker, streams=replace(SMALL, memory_bytes=limit)) as engine,
        client_of(engine, broker) as client,
    ):
        for number in range(writes):
            await write(client, "t", {f"{number}-{at}": "x" * 200 for at in range(40)})
        connection = engine.streams.connect()
        requests = [StreamRequest(stream, "t", 0, 2**62, (), 0, 0) for stream in range(1, count + 1)]
        grants = [Grant(stream, 2**62, 2**62) for stream in range(1, count + 1)]
        connection.receive([StreamHello("", 10.0), *requests, *grants])
        backfills, budget = engine.streams.backfills, engine.streams.budget
        await eventually(lambda: budget.backfill_memory.active == count)
        for _ in range(2):  # the answers, then the first mutations
            await connection.next()
        await eventually(lambda: budget.backfill_memory.active == count and not backfills.active + backfills.pending)
        assert 0 < budget.account.bytes <= limit
        follower = Follower(client.stream("t"))
        await follower.until(writes * 40)
        assert len(follower.table) == writes * 40
        assert budget.account.bytes <= limit
        connection.lost()
        assert budget.backfill_memory.active <= 1


async def write_400_large(client, *topics):
    for number in range(10):
        for topic in topics:
            await write(client, topic, {f"{number}-{at}": "x" * 500 for at in range(40)})


async def test_streams_that_take_turns_do_not_wait_for_ticks(broker, monkeypatch):
    monkeypatch.setattr(streams, "TICK", 3600.0)
    async with engine_on(broker, streams=SMALL) as engine, client_of(engine, broker) as client:
        await write_400_large(client, "t", "u")
        followers = [Follower(client.stream(topic)) for topic in ("t", "u", "t", "u")]
        await asyncio.gather(*(follower.until(400) for follower in followers))
        assert engine.streams.budget.backfill_memory.most_turns == 1
        assert engine.streams.backfills.items > 400
        assert all(len(follower.table) == 400 for follower in followers)


async def test_a_stream_that_takes_nothing_loses_its_turn(broker, monkeypatch):
    monkeypatch.setattr(streams, "TICK", 0.02)
    async with engine_on(broker, streams=SMALL) as engine, client_of(engine, broker) as client:
        await write_400_large(client, "t")
        connection = engine.streams.connect()
        connection.receive([StreamHello("", 10.0), StreamRequest(1, "t", 0, 2**62, (), 0, 0), Grant(1, 1, 2**62)])
        memory = engine.streams.budget.backfill_memory
        while not any(isinstance(message, StreamMutations) for message in await connection.next()):
            pass
        assert len(memory.turns) == memory.most_turns == 1
        follower = Follower(client.stream("t"))
        await follower.until(400)
        connection.receive([Grant(1, 2**62, 2**62)])
        received = 1
        while received < 400:
            frame = await connection.next()
            received += sum(len(one.mutations) for one in frame if isinstance(one, StreamMutations))
        connection.lost()


async def test_streams_that_wait_for_a_turn_are_counted(broker, monkeypatch):
    monkeypatch.setattr(streams, "TICK", 3600.0)
    async with engine_on(broker, streams=SMALL) as engine, client_of(engine, broker) as client:
        await write_400_large(client, "t")
        connection = engine.streams.connect()
        for stream in (1, 2):
            hello = [StreamHello("", 10.0)] if stream == 1 else []
            connection.receive([*hello, StreamRequest(stream, "t", 0, 2**62, (), 0, 0), Grant(stream, 1, 2**62)])
            sending = asyncio.ensure_future(drained(connection))
            await eventually(lambda: engine.streams.budget.backfill_memory.turns)
            await eventually(lambda done=stream: pending_reads(engine) == done - 1)
            sending.cancel()
        connection.lost()
        assert pending_reads(engine) == 0


async def drained(connection):
    while await connection.next() is not None:
        pass


def pending_reads(engine):
    return next(one.value for one in metrics(engine) if one.name == "streams_reads_pending")


async def test_an_invalid_record_set_ends_only_the_streams_of_its_topic(broker):
    async with engine_on(broker) as engine, client_of(engine, broker) as client:
        await write(client, "t", {"a": "1"})
        follower = Follower(client.stream("t"))
        await follower.until(1)
        bad = Message(None, b"no block", {"tb.v": "1", "tb.records": "3"})
        numbered = PlacedBatch(Positions.consecutive(9, 0, 1), np.zeros(1, np.int64), Batch.of([bad]))
        engine.streams.feeds["t"]._on_sequenced(numbered, Sequenced(0, 1, np.array([3]), 2))
        with pytest.raises(UndecodableRecordSet):
            await follower.until(2)
        await write(client, "t", {"b": "2"})


async def test_the_index_of_snapshots_outlives_the_owner(broker):
    async with engine_on(broker) as engine, client_of(engine, broker) as client:
        await write(client, "t", {"a": "1"})
        follower = Follower(client.stream("t"))
        await follower.until(1)
        await write(client, "t", {"b": "2", "c": "3"})
        await follower.until(3)
        await engine.snapshots.snapshot(["t"])
        entries = [*engine.streams.feeds["t"].manager.index]
        assert [(entry.start, entry.end, entry.rows) for entry in entries] == [(2, 3, 2)]
    async with engine_on(broker) as engine, client_of(engine, broker) as client:
        await client.stream("t").next(timeout=120.0)
        assert [*engine.streams.feeds["t"].manager.index] == entries


async def test_streams_in_cluster_mode():
    with MemoryBroker() as cluster:
        async with cluster_engine(cluster) as (engine, broker), client_of(engine, broker) as client:
            app = await app_on(engine, cluster, "a")
            first, gone, last = next(app.ids), next(app.ids), next(app.ids)
            await app.write("a", [first, gone], size=2)
            await app.commit(first, "a", size=2)
            await app.session.ask(aborts=lambda r: (Abort(r, TxnId(0, gone), ("a",)),))
            follower = Follower(client.stream("a"))
            await follower.until(2)
            await app.write("a", [last])
            await app.commit(last, "a")
            await follower.until(3)
            assert follower.table == {b"%d" % first: b"v", b"%d" % last: b"v"}


def _place(follower: Follower, seqno: int) -> tuple:
    token = follower.stream.token
    return token.cluster, token.incarnation, token.versions, seqno, seqno, seqno


async def test_trimmed_mutations_are_an_error(quick):
    broker = MemoryBroker(ledger_entries=8)
    async with engine_on(broker) as engine, client_of(engine, broker) as client:
        for number in range(40):
            await write(client, "t", {str(number): "x"})
        reader = Follower(client.stream("t", to="now"))
        await reader.to_end()
        low = ResumeToken("t", *_place(reader, 1))
        await engine.snapshots.snapshot(["t"])
        await engine.snapshots.snapshot(["t"])
        broker.trim("t", engine.topics.get("t").followed.floor())
        with pytest.raises(StreamTrimmed):
            await client.stream("t", from_=low).next(timeout=120.0)
        oldest = Follower(client.stream("t", to="now"))
        await oldest.to_end()
        assert 1 < oldest.seqnos[0] <= 40
        assert oldest.seqnos[-1] == 40


async def test_a_topic_recreated_is_read_from_its_beginning():
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


async def test_streams_end_with_their_engine(broker):
    engine = await Engine.start(broker)
    async with client_of(engine, broker) as client:
        await write(client, "t", {"a": "1"})
        follower = Follower(client.stream("t"))
        await follower.until(1)
        client.streams.of("t")._max_unavailable = 0.0
        await engine.stop()
        assert engine.streams.connections == {}
        with pytest.raises(ServiceUnavailable, match="the service is stopping"):
            await follower.read()


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
