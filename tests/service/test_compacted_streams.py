"""Change streams of a topic whose log is compacted while it is streamed."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from service_setup import engine_on, eventually
from streamed import Follower, Table, client_of, write

from broker_io.compaction import CompactionRequest, CompactionState
from broker_io.filelog.log import FileBroker
from broker_io.position import Position
from txnbuffer import MemoryTokens
from txnbuffer.buffer.compaction import TransactionRules
from txnbuffer.buffer.visibility import PinnedVisibility, Sequencer
from txnbuffer.client.streams.streams import ShardStreams
from txnbuffer.config import StreamsConfig
from txnbuffer.service.engine.engine import Engine
from txnbuffer.service.streams.stream_topic import compactable
from txnbuffer.streams.client import ClientConfig

T = "t"
SMALL = StreamsConfig(memory_bytes=200_000, readers=1)


class World:
    """A topic with an engine, and all that was written to it; each write is one transaction."""

    def __init__(self, engine: Engine, broker: FileBroker, client: Any) -> None:
        self.engine, self.broker, self.client = engine, broker, client
        client.streams = ShardStreams(client.streams.connectors, 60.0, ClientConfig(window_items=4))
        self.tables: list[Table] = [{}]

    @property
    def high(self) -> int:
        return len(self.tables) - 1

    @property
    def followed(self) -> Any:
        return self.engine.topics.by_name[T].followed

    async def write(self, rows: dict[str, str | None]) -> None:
        await write(self.client, T, rows)
        for key, value in rows.items():
            table = {one: text for one, text in self.tables[-1].items() if one != key.encode()}
            self.tables.append(table if value is None else {**table, key.encode(): value.encode()})

    async def roll(self) -> None:
        """Close the ledger; a record in the next one numbers all of it."""
        self.broker.roll(T)
        await self.write({"roll": str(self.high)})

    def begin(self) -> int:
        closed = self.broker.ledgers(T)[-2].ledger
        return self.engine.streams.begin_compaction(T, closed)

    def empty(self, upto: int, *, purge: bool = True) -> None:
        """What the task of compaction does, without choosing what readers still need."""
        rules = TransactionRules(PinnedVisibility.of(self.followed.buffer))
        self.broker.compact_records(T, CompactionRequest(upto, rules, upto if purge else 0, 2**62))

    async def compact(self, *, purge: bool = True) -> int:
        upto = self.begin()
        try:
            if upto:
                self.empty(upto, purge=purge)
        finally:
            await self.engine.streams.end_compaction(T)
        return upto

    def check(self, follower: Follower) -> None:
        for seqno, table in follower.history.items():
            assert table == self.tables[seqno], seqno


@asynccontextmanager
async def world_in(directory: Path, **options: Any) -> AsyncIterator[World]:
    with FileBroker.open(str(directory / "log"), watermark_bytes=0) as broker:
        async with engine_on(broker, **options) as engine, client_of(engine, broker) as client:
            yield World(engine, broker, client)


async def test_a_stream_of_a_compacted_topic_is_complete_where_it_was_compacted(tmp_path):
    async with world_in(tmp_path) as world:
        for number in range(6):
            await world.write({"a": str(number), f"k{number}": "1"})
        await world.roll()
        assert await world.compact()
        end = world.high - 1
        await world.write({"a": None, "b": "2"})
        follower = Follower(world.client.stream(T))
        await follower.until(world.high)
        world.check(follower)
        assert min(seqno for seqno in follower.history if seqno) >= end
        assert len(follower.seqnos) < world.high
        assert follower.rollbacks == []


async def test_compaction_stops_at_the_end_of_a_snapshot_that_a_stream_is_reading_from_the_log(tmp_path):
    async with world_in(tmp_path, streams=SMALL) as world:
        for _ in range(3):
            await world.write({f"k{number}": "x" * 3_000 for number in range(30)})
            await world.roll()
        ledgers = [one.ledger for one in world.broker.ledgers(T)]
        follower = Follower(world.client.stream(T))
        while not follower.seqnos:
            await follower.read()
        manager = world.engine.streams.feeds[T].manager
        bound = manager.compaction_bound()
        assert bound is not None
        assert bound < world.high
        upto = await world.compact()
        assert upto < ledgers[-2]
        assert world.followed.numbered.last_in(upto) <= bound
        assert manager.compacted_to == world.followed.numbered.last_in(upto)
        await follower.until(world.high)
        world.check(follower)
        assert manager.compaction_bound() is None
        assert await world.compact() == ledgers[-2]
        again = Follower(world.client.stream(T))
        await again.until(world.high)
        world.check(again)


@pytest.mark.parametrize("during", [True, False])
async def test_a_stream_that_may_have_missed_a_purged_deletion_begins_again(tmp_path, during):
    """The compaction purges deletions while a read of the log is under way, before the service learns of it."""
    async with world_in(tmp_path) as world:
        tokens = MemoryTokens()
        for number in range(6):
            await world.write({f"k{number}": "1"})
        ahead = Follower(world.client.stream(T))
        await ahead.until(world.high)
        follower = Follower(world.client.stream(T, store=tokens))
        await follower.until(world.high)
        await follower.stream.close()
        await world.write({f"k{number}": None for number in range(6)})
        await ahead.until(world.high)
        await world.roll()
        await ahead.until(world.high)
        if during:
            upto = world.begin()
            world.empty(upto)
        else:
            await world.compact()
        follower.stream = world.client.stream(T, store=tokens)
        await follower.until(world.high)
        if during:
            await world.engine.streams.end_compaction(T)
        assert follower.rollbacks == [0]
        assert follower.table == world.tables[-1]
        assert ahead.rollbacks == []
        feed = world.engine.streams.feeds[T]
        assert 0 < feed.purge_seqno < world.high
        await world.write({"z": "9"})
        for one in (follower, ahead):
            await one.until(world.high)
            assert one.table == world.tables[-1]
        assert (follower.rollbacks, ahead.rollbacks) == ([0], [])


async def test_a_read_that_is_under_way_learns_what_was_purged(tmp_path, monkeypatch):
    """The stream has some keys, and their deletions are purged before the rest is read."""
    async with world_in(tmp_path, streams=SMALL) as world:
        await world.write({f"k{number}": "x" * 3_000 for number in range(60)})
        await world.write({f"k{number}": None for number in range(60)})
        await world.roll()
        follower = Follower(world.client.stream(T))
        while len(follower.seqnos) < 2:
            await follower.read()
        closed = world.broker.ledgers(T)[-2].ledger
        world.engine.streams._compacting[T] = closed
        world.engine.streams.feeds[T].manager.compacted(world.followed.numbered.last_in(closed))
        world.empty(closed)
        await follower.until(world.high)
        assert follower.rollbacks == [0]
        world.check(follower)
        await world.engine.streams.end_compaction(T)
        assert world.engine.streams._compacting == {}


async def test_a_stream_that_is_opened_during_a_compaction_ends_its_snapshots_after_it(tmp_path):
    async with world_in(tmp_path, streams=SMALL) as world:
        for _ in range(2):
            await world.write({f"k{number}": "x" * 3_000 for number in range(60)})
        await world.roll()
        upto = world.begin()
        assert T not in world.engine.streams.feeds
        follower = Follower(world.client.stream(T))
        while not follower.seqnos:
            await follower.read()
        assert world.engine.streams.feeds[T].manager.compacted_to == world.followed.numbered.last_in(upto)
        world.empty(upto, purge=False)
        await follower.until(world.high)
        await world.engine.streams.end_compaction(T)
        world.check(follower)
        assert follower.rollbacks == []


async def test_what_was_read_before_a_purge_and_is_not_taken_is_read_again(tmp_path):
    async with world_in(tmp_path) as world:
        await world.write({f"k{number}": "1" for number in range(9)})
        await world.roll()
        closed = world.broker.ledgers(T)[-2].ledger
        await Follower(world.client.stream(T)).until(world.high)
        feed = world.engine.streams.feeds[T]
        feed.persist()
        cursor = feed.manager.register("probe", 0)
        cursor.take(1)
        world.engine.streams.settle(feed)
        await eventually(lambda: cursor.backfill is not None and cursor.backfill.ready)
        assert feed.manager.backfills.bytes > 0
        feed.compacted(CompactionState(purged=closed))
        assert feed.manager.backfills.bytes == 0
        cursor.close()


def test_what_may_be_compacted() -> None:
    """Ledgers 2, 4 and 6 begin with the seqnos 1, 11 and 21; the ledger 6 is numbered up to seqno 25."""
    numbered = Sequencer(Position(6, 3), 26, {2: 1, 4: 11, 6: 21})
    followed: Any = SimpleNamespace(numbered=numbered)
    for bound, last, allowed in [
        (None, 6, 6),
        (None, 4, 4),
        (25, 5, 5),
        (24, 5, 5),
        (20, 5, 5),
        (19, 5, 3),
        (10, 5, 3),
        (10, 2, 2),
        (9, 5, 0),
        (0, 5, 0),
    ]:
        assert compactable(followed, last, bound) == allowed, bound
    assert [followed.numbered.last_in(ledger) for ledger in (0, 2, 3, 4, 5, 6)] == [0, 10, 10, 20, 20, 25]


async def test_many_emptied_records_are_read_in_several_answers(tmp_path, monkeypatch):
    async with world_in(tmp_path, streams=SMALL) as world:
        for _ in range(4):
            await world.write({f"k{number}": "1" for number in range(2_500)})
        await world.roll()
        assert await world.compact()
        sizes = []
        engine = world.engine
        read = engine.streams.backfills._read

        async def counted(feed, request):
            rows = await read(feed, request)
            sizes.append((len(rows), 0 if rows.removed is None else int(rows.removed.sum()), request.max_bytes))
            return rows

        monkeypatch.setattr(engine.streams.backfills, "_read", counted)
        follower = Follower(world.client.stream(T))
        await follower.until(world.high)
        world.check(follower)
        assert sum(size for size, _, _ in sizes) == world.high
        assert all(emptied <= 64 + wanted // 32 for _, emptied, wanted in sizes)


@pytest.mark.parametrize("seed", range(6))
async def test_streams_of_a_topic_that_is_compacted_again_and_again(tmp_path, seed):
    chance = random.Random(seed)
    async with world_in(tmp_path, streams=SMALL) as world:
        await world.write({"a": "0"})
        followers = [Follower(world.client.stream(T, store=MemoryTokens())) for _ in range(3)]
        for _ in range(60):
            match chance.choice(["write", "write", "write", "roll", "compact", "read", "read", "forget", "new"]):
                case "write":
                    keys = chance.sample("abcdef", chance.randint(1, 3))
                    values = [None, "1", "x" * 3_000, "y" * 30_000]
                    await world.write({key: chance.choice(values) for key in keys})
                case "roll":
                    await world.roll()
                case "compact" if len(world.broker.ledgers(T)) > 1:
                    upto = world.begin()
                    if upto:
                        world.empty(upto, purge=chance.random() < 0.5)
                    if chance.random() < 0.5:
                        await read_some(chance.choice(followers), world)
                    await world.engine.streams.end_compaction(T)
                case "read":
                    await read_some(chance.choice(followers), world)
                case "forget":
                    manager = world.engine.streams.feeds[T].manager if T in world.engine.streams.feeds else None
                    if manager is not None:
                        manager.persist()
                        manager.evict(2**30)
                        manager.drop_cursors(2**30)
                        world.engine.streams.settle(world.engine.streams.feeds[T])
                case "new":
                    one = chance.choice(followers)
                    await one.stream.close()
                    followers[followers.index(one)] = Follower(world.client.stream(T, store=MemoryTokens()))
        await world.write({"end": "1"})
        for follower in followers:
            await follower.until(world.high)
            world.check(follower)


async def read_some(follower: Follower, world: World) -> None:
    for _ in range(3):
        if max(follower.history) >= world.high:
            return
        await follower.read()
        world.check(follower)
