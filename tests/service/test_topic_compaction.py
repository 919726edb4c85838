"""Compaction of data topics by a service: which topic, how far, and what it does when it can't."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from file_logs import World, segment_paths
from hypothesis import given
from hypothesis import strategies as st
from raw_session import RawSession, transactional
from service_setup import engine_on, eventually, session_on, visible
from streamed import Follower, client_of

from broker_io.batch import Batch, Message
from broker_io.compaction import CompactionPolicy, CompactionReport, CompactionRequest
from broker_io.environment import use
from broker_io.errors import DiskWatermark, Error, NotSupported, TopicNotFound
from broker_io.filelog.log.broker import FileBroker
from broker_io.memory import MemoryBroker
from broker_io.port import Ledger
from broker_io.position import Position
from snapshots.errors import TopicDamaged
from txnbuffer.buffer.visibility import PinnedVisibility
from txnbuffer.client.streams.streams import ShardStreams
from txnbuffer.config import CompactionConfig, RetentionConfig, StreamsConfig
from txnbuffer.coordinator.messages import Commit, ConsumerPosition
from txnbuffer.errors import CompactionFailed, CoordinatorStopped, InvalidRequest
from txnbuffer.model import Outcome, TxnId
from txnbuffer.recovery.verify import Level, verify
from txnbuffer.rpc.frames import Abort, NamedRequest
from txnbuffer.service.engine.compaction import (
    Backlog,
    CompactionProgress,
    CompactionRun,
    CompactionScheduler,
    RunState,
    check_policy,
    choose,
    last_compactable,
)
from txnbuffer.service.engine.engine import Engine
from txnbuffer.service.servers.admin import ServiceAdmin
from txnbuffer.service.topics.retention import LogRetention
from txnbuffer.streams.client import ClientConfig

SOON = CompactionPolicy(dirty_ratio=0.5, grace_ms=0)
NEVER = CompactionConfig(check_seconds=1e9)
"""The tests call `check` themselves."""


@dataclass
class Stage:
    """A service of a log on a simulated disk, with one session. Each write is a ledger of its own unless it says so."""

    world: World
    broker: FileBroker
    engine: Engine
    session: RawSession
    ids: range
    used: int = 0
    expected: dict[bytes, bytes | None] = field(default_factory=dict)

    @property
    def compaction(self) -> CompactionScheduler:
        return self.engine.compaction

    async def write(self, topic: str, key: str, value: str | None, *, roll: bool = True) -> None:
        self.world.clock.advance(1)
        record = Message(key.encode(), None if value is None else value.encode())
        assert await self.session.write((topic, Batch.of([record]))) == []
        if roll:
            self.broker.roll(topic)

    async def begin(self, topic: str) -> int:
        """A transaction with one record, whose key is its number."""
        txn = self.ids[self.used]
        self.used += 1
        assert await self.session.write((topic, transactional([txn], b"%d" % txn))) == []
        return txn

    async def commit(self, topic: str, txn: int) -> None:
        assert await self.session.commit(txn, [topic], [1]) is Outcome.COMMIT

    async def policy(self, topic: str, policy: CompactionPolicy | None = SOON) -> None:
        await self.compaction.set_policy(topic, policy)

    async def request(self, topic: str) -> CompactionRun:
        run = await self.compaction.request(topic)
        await self.compaction.check()
        return run

    def cleaned(self, topic: str) -> int:
        return self.broker.compaction(topic).cleaned

    def contents(self, topic: str) -> Counter[bytes | None]:
        return visible(self.broker, topic)


@asynccontextmanager
async def stage(*topics: str, world: World | None = None, **options: Any) -> AsyncIterator[Stage]:
    world = world or World()
    with use(world.environment), world.own(compacted_prefix="__txnbuffer") as broker:
        options = {"compaction": NEVER, **options}
        async with engine_on(broker, clock=world.clock, **options) as engine:
            session, ids = await session_on(engine, *topics)
            yield Stage(world, broker, engine, session, ids)
        assert {finding.level for finding in verify(broker)} <= {Level.OK}


# Which topic, and how far


def ledgers(*entries: int, size: int = 100) -> list[Ledger]:
    """Closed ledgers from 1 on, and an open one."""
    closed = [Ledger(number, count, size, True) for number, count in enumerate(entries, 1)]
    return [*closed, Ledger(len(entries) + 1, 0, 0, False)]


def test_only_ledgers_that_are_wholly_sequenced_are_compacted() -> None:
    log = ledgers(5, 5, 5)
    assert last_compactable(log, None, None) == 0
    assert last_compactable(log, Position(2, 3), None) == 1
    assert last_compactable(log, Position(2, 4), None) == 2
    assert last_compactable(log, Position(2, 4, 7), None) == 2
    assert last_compactable(log, Position(4, 0), None) == 3
    assert last_compactable(ledgers(5, 0, 5), Position(1, 4), None) == 2


def test_what_is_young_is_left_alone() -> None:
    log, all_of_it = ledgers(5, 5, 5), Position(4, -1)
    assert last_compactable(log, all_of_it, Position(3, 2)) == 2
    assert last_compactable(log, all_of_it, Position(1, 0)) == 0


def test_the_dirty_ratio_counts_the_closed_ledgers() -> None:
    assert Backlog.of(ledgers(1, 1, 1, 1), 3).ratio == 0.25
    assert Backlog.of(ledgers(1, 1, 1, 1), 0, upto=2) == Backlog(200, 200)
    assert Backlog.of(ledgers(), 0).ratio == 0.0


@given(st.lists(st.integers(0, 10**15), min_size=2, max_size=20))
def test_no_due_topic_waits_for_long(sizes: list[int]) -> None:
    """All topics are always due: each is chosen within a number of turns that depends on the sizes' logarithm."""
    backlogs = {str(number): size for number, size in enumerate(sizes)}
    passed: dict[str, int] = {}
    waited = Counter[str]()
    for _ in range(300):
        chosen = choose(backlogs, passed)
        passed = {name: passed.get(name, 0) + 1 for name in backlogs if name != chosen}
        waited.update(backlogs.keys() - {chosen})
        assert waited.pop(chosen, 0) <= len(sizes) + 50
    assert max(waited.values(), default=0) <= len(sizes) + 50


def test_the_largest_backlog_is_first() -> None:
    assert choose({"small": 10, "large": 1000, "medium": 100}, {}) == "large"
    assert choose({"small": 10, "large": 1000}, {"small": 7}) == "small"


async def test_a_topic_is_compacted_once_enough_of_it_is_dirty() -> None:
    async with stage("a") as one:
        for value in "xyz":
            await one.write("a", "k", value)
        await one.compaction.check()
        assert one.cleaned("a") == 0, "it has no policy"
        await one.policy("a", CompactionPolicy(dirty_ratio=0.5))
        await one.compaction.check()
        assert one.cleaned("a") == one.broker.ledgers("a")[-2].ledger
        assert one.contents("a") == {b"z": 1}
        assert one.compaction.totals.runs == 1
        assert one.compaction.totals.records_in == 3
        assert one.compaction.totals.records_out == 1
        await one.write("a", "l", "1")
        await one.compaction.check()
        assert one.compaction.totals.runs == 1, "less than half is dirty"
        assert one.compaction.dirty_ratio > 0.0
        for value in "uvw":
            await one.write("a", "k", value)
        await one.compaction.check()
        assert one.compaction.totals.runs == 2
        assert one.contents("a") == {b"1": 1, b"w": 1}
        assert one.compaction.runs["a"].after.ratio == 0.0


async def test_an_undecided_record_and_all_after_it_are_left_alone() -> None:
    async with stage("a") as one:
        await one.policy("a", CompactionPolicy(dirty_ratio=0.1))
        for value in "xy":
            await one.write("a", "k", value)
        txn = await one.begin("a")
        one.broker.roll("a")
        for value in "zw":
            await one.write("a", "k", value)
        await one.compaction.check()
        assert one.cleaned("a") == one.broker.ledgers("a")[1].ledger
        assert one.compaction.runs["a"].state is RunState.DONE
        run = await one.request("a")
        assert run.state is RunState.DONE
        assert one.cleaned("a") == one.broker.ledgers("a")[1].ledger
        await one.commit("a", txn)
        await one.compaction.check()
        assert one.cleaned("a") >= one.broker.ledgers("a")[4].ledger
        assert one.contents("a") == {b"w": 1, b"%d" % txn: 1}


async def test_records_younger_than_the_least_lag_are_left_alone() -> None:
    async with stage("a") as one:
        await one.policy("a", CompactionPolicy(dirty_ratio=0.1, least_lag_ms=60_000))
        for value in "xy":
            await one.write("a", "k", value)
        await one.compaction.check()
        assert one.cleaned("a") == 0
        assert (await one.request("a")).upto == 0, "also on request"
        one.world.clock.advance(61)
        await one.write("a", "k", "z")
        await one.compaction.check()
        assert one.contents("a") == {b"y": 1, b"z": 1}
        assert one.cleaned("a") == one.broker.ledgers("a")[1].ledger


async def test_records_older_than_the_most_lag_are_compacted_whatever_the_ratio() -> None:
    async with stage("a") as one:
        await one.policy("a", CompactionPolicy(dirty_ratio=1.0, most_lag_ms=60_000))
        await one.write("a", "l", "clean")
        await one.request("a")
        await one.write("a", "k", "x", roll=False)
        await one.write("a", "k", "y", roll=False)
        count = len(one.broker.ledgers("a"))
        await one.compaction.check()
        assert (one.compaction.totals.runs, len(one.broker.ledgers("a"))) == (1, count)
        one.world.clock.advance(60)
        await one.compaction.check()
        assert one.compaction.totals.runs == 2, "the newest ledger was closed for it"
        assert len(one.broker.ledgers("a")) == count + 1
        assert one.contents("a") == {b"clean": 1, b"y": 1}
        one.world.clock.advance(600)
        await one.compaction.check()
        assert (one.compaction.totals.runs, len(one.broker.ledgers("a"))) == (2, count + 1), "nothing is dirty"


async def test_a_small_backlog_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    async with stage("small", "large") as one:
        for topic in ("small", "large"):
            await one.policy(topic, CompactionPolicy(dirty_ratio=0.01))
        await one.compaction.check()
        done: list[str] = []
        compact = one.broker.compact_records

        def compact_records(topic: str, request: Any) -> Any:
            done.append(topic)
            return compact(topic, request)

        monkeypatch.setattr(one.broker, "compact_records", compact_records)
        async with one.compaction._one:
            await one.write("small", "k", "x")
            while "small" not in done and len(done) < 30:
                await one.write("large", "k", "x" * 1000)
                run = await one.compaction._next()
                assert run is not None
                await one.compaction._compact(run)
        assert done[0] == "large"
        assert done[-1] == "small"


# Deletions


async def purged_after(one: Stage, *, grace: float = 0.0) -> int:
    """Write a deletion and compact until nothing more happens; the last purged ledger."""
    await one.policy("a", CompactionPolicy(dirty_ratio=0.01, grace_ms=round(1000 * grace)))
    await one.write("a", "k", "x")
    await one.write("a", "k", None)
    for _ in range(4):  # the last two snapshots keep what they need
        await one.write("a", "other", "y")
        assert (await one.request("a")).state is RunState.DONE
    return one.broker.compaction("a").purged


async def test_a_deletion_is_purged_once_nothing_needs_it() -> None:
    async with stage("a") as one:
        assert await purged_after(one) == one.broker.ledgers("a")[1].ledger
        assert one.contents("a") == {b"y": 1}


async def test_a_deletion_stays_for_its_grace_period() -> None:
    async with stage("a") as one:
        assert await purged_after(one, grace=100.0) == 0
        assert one.contents("a")[None] == 1
        one.world.clock.advance(100)
        await one.request("a")
        assert one.broker.compaction("a").purged > 0


async def test_a_cursor_keeps_the_deletions_that_its_reader_has_not_seen() -> None:
    async with stage("a") as one:
        await one.engine.cursors.add("a", "reader", "beginning")
        assert await purged_after(one) == 0
        assert one.contents("a")[None] == 1
        await one.engine.cursors.advance("a", "reader", 3)
        await one.request("a")
        assert one.broker.compaction("a").purged > 0


async def test_a_group_keeps_the_deletions_that_it_has_not_consumed() -> None:
    async with stage("a", "b") as one:
        await one.write("a", "first", "1")
        joined = await one.session.ask(joins=lambda r: (NamedRequest(r, "readers"),))
        txn = await one.begin("b")
        at = one.broker.first_position("a")
        moved = ConsumerPosition("readers", "a", joined.generation, None, at)
        commit = lambda r: (Commit(r, TxnId(0, txn), ("b",), (1,), positions=(moved,)),)  # noqa: E731
        assert await one.session.ask(commits=commit) is Outcome.COMMIT
        assert await purged_after(one) == 0
        assert one.contents("a")[None] == 1


@pytest.mark.parametrize("who", ["cursor", "group"])
async def test_what_a_compaction_is_about_to_purge_is_kept_for_readers_that_come_meanwhile(
    who: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with stage("a", "b") as one:
        joined = await one.session.ask(joins=lambda r: (NamedRequest(r, "readers"),))
        txn = await one.begin("b")
        loop, compact = asyncio.get_running_loop(), one.broker.compact_records
        attempts: list[bool] = []

        async def come() -> None:
            if who == "cursor":
                await one.engine.cursors.add("a", "reader", "beginning")
                return
            moved = ConsumerPosition("readers", "a", joined.generation, None, one.broker.first_position("a"))
            commit = lambda r: (Commit(r, TxnId(0, txn), ("b",), (1,), positions=(moved,)),)  # noqa: E731
            assert await one.session.ask(commits=commit) is Outcome.COMMIT

        def watched(name: str, request: CompactionRequest) -> CompactionReport:
            def before_swap(purged: int) -> None:
                if purged and not any(attempts):
                    asyncio.run_coroutine_threadsafe(come(), loop).result(60)
                attempts.append(purged > 0)
                request.before_swap(purged)

            return compact(name, replace(request, before_swap=before_swap))

        monkeypatch.setattr(one.broker, "compact_records", watched)
        assert await purged_after(one) == 0
        assert one.contents("a")[None] == 1
        assert attempts.count(True) == 1
        directory = one.broker._log.topic("a").entry.number
        files = [path for path in segment_paths(one.world) if f"/topics/{directory}/" in path]
        assert len(files) == len(one.broker.ledgers("a")), "what was refused left no files"


# What stays as it is


async def test_transactions_seqnos_and_a_restart() -> None:
    world = World()
    async with stage("a", world=world) as one:
        for value in "xyz":
            await one.write("a", "k", value)
        txn, _ = await one.begin("a"), await one.begin("a")
        await one.commit("a", txn)
        one.broker.roll("a")
        before = one.engine.topics.get("a")
        assert before is not None
        assert before.followed is not None
        seqno = before.followed.numbered.next_seqno
        await one.request("a")
        assert before.followed.numbered.next_seqno == seqno
    async with stage(world=world) as one:
        topic = one.engine.topics.get("a")
        assert topic is not None
        assert topic.followed is not None
        assert (topic.followed.numbered.next_seqno, len(topic.followed.buffer.ongoing)) == (seqno, 1)
        assert one.contents("a") == {b"z": 1, b"%d" % txn: 1}


async def test_a_topic_without_transactions_is_registered_for_its_compaction() -> None:
    world = World()
    async with stage(world=world) as one:
        for value in "xyz":
            await one.write("plain", "k", value)
        await one.policy("plain")
        await one.compaction.check()
        assert one.contents("plain") == {b"z": 1}
    async with stage(world=world) as one:
        assert one.broker.compaction("plain").policy == SOON
        for value in "uvw":
            await one.write("plain", "k", value)
        await one.compaction.check()
        assert one.contents("plain") == {b"w": 1}
        await one.policy("plain", None)
        assert one.broker.compaction("plain").policy is None


async def test_a_topic_is_not_trimmed_while_it_is_compacted(monkeypatch: pytest.MonkeyPatch) -> None:
    async with stage("a") as one:
        for value in "uvwxyz":
            await one.write("a", "k", value)
        config = RetentionConfig(bytes=1)
        keep = LogRetention(one.engine.topics, one.engine.snapshots, config, one.engine.clock, one.engine.trim_floors)
        topic = one.engine.topics.get("a")
        assert topic is not None
        compact = one.broker.compact_records
        seen: list[int] = []

        def compact_records(name: str, request: Any) -> Any:
            assert topic.compacting
            waiting = asyncio.run_coroutine_threadsafe(keep.check(topic), loop)
            waiting.result(60)
            seen.append(keep.trimmed)
            return compact(name, request)

        loop = asyncio.get_running_loop()
        monkeypatch.setattr(one.broker, "compact_records", compact_records)
        assert (await one.request("a")).state is RunState.DONE
        assert seen == [0]
        assert not topic.compacting
        for _ in range(3):
            await keep.check(topic)
        assert keep.trimmed > 0


async def test_the_visibility_of_a_compaction_does_not_change_meanwhile() -> None:
    async with stage("a") as one:
        kept, gone = await one.begin("a"), await one.begin("a")
        await one.commit("a", kept)
        topic = one.engine.topics.get("a")
        assert topic is not None
        assert topic.followed is not None
        pinned = PinnedVisibility.copy_of(topic.followed.buffer)
        at = pinned.max_read_position
        await one.session.ask(aborts=lambda r: (Abort(r, TxnId(0, gone), ("a",)),))
        await eventually(lambda: len(topic.followed.buffer.aborted) == 1)
        assert (len(pinned.aborted), pinned.max_read_position) == (0, at)
        topic.followed.buffer.suppressed.add(Position(99, 0), Position(99, 1))
        assert len(pinned.suppressed) == 0


async def test_a_snapshot_that_a_stream_reads_from_the_log_is_left_alone() -> None:
    small = StreamsConfig(memory_bytes=200_000, readers=1)
    async with stage("a", streams=small) as one, client_of(one.engine, one.broker) as client:
        client.streams = ShardStreams(client.streams.connectors, 60.0, ClientConfig(window_items=4))
        for number in range(3):
            records = [Message(b"k%d" % row, b"%d" % number * 3000) for row in range(30)]
            assert await one.session.write(("a", Batch.of(records))) == []
            one.broker.roll("a")
            await one.write("a", "end", str(number), roll=False)
        follower = Follower(client.stream("a"))
        while not follower.seqnos:
            await follower.read()
        last = one.broker.ledgers("a")[-2].ledger
        await one.policy("a", CompactionPolicy(dirty_ratio=0.01))
        await one.compaction.check()
        blocked = one.cleaned("a")
        assert blocked < last
        runs = one.compaction.totals.runs
        await one.compaction.check()
        assert one.compaction.totals.runs == runs, "it waits"
        await follower.until(93)
        one.world.clock.advance(2e9)
        await one.compaction.check()
        assert one.cleaned("a") == last
        again = Follower(client.stream("a"))
        await again.until(93)
        assert again.table == follower.table
        assert len(again.seqnos) < 93


# When it can't


async def test_a_damaged_segment_quarantines_its_topic() -> None:
    async with stage("a", "b") as one:
        for topic in ("a", "b"):
            await one.policy(topic)
        await one.write("a", "k", "x" * 100)
        before = {path: one.world.disk.content(path) for path in segment_paths(one.world)}
        await one.write("a", "k", "y")
        damaged = [path for path in before if b"x" * 100 in before[path]]
        assert len(damaged) == 1
        one.world.disk.flip(damaged[0], 8 * before[damaged[0]].index(b"x" * 100) + 80)
        for value in "xyz":
            await one.write("b", "k", value)
        await one.compaction.check()
        assert [*one.compaction.quarantined] == ["a"]
        assert damaged[0] in str(one.compaction.quarantined["a"])
        assert one.contents("b") == {b"z": 1}, "other topics continue"
        runs = one.compaction.runs["a"].number
        one.world.clock.advance(3600)
        await one.compaction.check()
        assert one.compaction.runs["a"].number == runs, "it is not tried again"
        admin = ServiceAdmin(one.engine)
        status = await admin.status({})
        assert damaged[0] in status["compaction_problems"]["a"]
        (row,) = [row for row in await admin.compactions({}) if row["topic"] == "a"]
        assert (row["state"], row["run"]["problem"] is None) == ("quarantined", False)
        one.world.disk.flip(damaged[0], 8 * before[damaged[0]].index(b"x" * 100) + 80)
        with pytest.raises(TopicDamaged, match="restore the whole directory"):
            await one.request("a")


async def test_another_error_is_tried_again_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    async with stage("a") as one:
        await one.policy("a")
        for value in "xyz":
            await one.write("a", "k", value)
        compact = one.broker.compact_records

        def fail(name: str, request: Any) -> Any:
            raise Error("not now")

        monkeypatch.setattr(one.broker, "compact_records", fail)
        await one.compaction.check()
        assert str(one.compaction.problems["a"]) == "not now"
        monkeypatch.setattr(one.broker, "compact_records", compact)
        await one.compaction.check()
        assert one.cleaned("a") == 0
        one.world.clock.advance(301)
        await one.compaction.check()
        assert one.compaction.problems == {}
        assert one.contents("a") == {b"z": 1}


async def test_a_compaction_ends_with_its_service(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    async with stage("a", world=world) as one:
        for value in "xyz":
            await one.write("a", "k", value)
        started = asyncio.Event()
        loop, compact = asyncio.get_running_loop(), one.broker.compact_records

        def slow(name: str, request: Any) -> Any:
            loop.call_soon_threadsafe(started.set)
            while one.compaction._ending is None:
                pass
            return compact(name, request)

        monkeypatch.setattr(one.broker, "compact_records", slow)
        await one.compaction.request("a")
        one.engine.run(one.compaction.check())
        await started.wait()
        run = one.compaction.runs["a"]
    assert run.bytes_done > 0
    async with stage(world=world) as one:
        assert one.cleaned("a") == 0
        assert one.contents("a") == {b"x": 1, b"y": 1, b"z": 1}


async def test_a_request_joins_one_that_waits_or_runs_and_follows_a_run_of_the_service(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with stage("a") as one:
        for value in "xyz":
            await one.write("a", "k", value)
        started, go_on = asyncio.Event(), threading.Event()
        loop, compact = asyncio.get_running_loop(), one.broker.compact_records

        def slow(name: str, request: Any) -> Any:
            loop.call_soon_threadsafe(started.set)
            assert go_on.wait(60)
            return compact(name, request)

        monkeypatch.setattr(one.broker, "compact_records", slow)
        await one.compaction.set_policy("a", SOON)
        checking = asyncio.ensure_future(one.compaction.check())
        await started.wait()
        background = one.compaction.runs["a"]
        assert not background.requested
        first = await one.compaction.request("a")
        assert one.compaction.runs["a"] is background, "the run that goes on is shown"
        assert await one.compaction.request("a") is first
        started.clear()
        go_on.set()
        await started.wait()
        await checking
        go_on.clear()
        assert one.compaction.runs["a"] is first
        assert first.state is RunState.DONE
        assert first.number > background.number
        again = await one.compaction.request("a")
        assert again is not first
        checking = asyncio.ensure_future(one.compaction.check())
        await eventually(lambda: again.state is RunState.RUNNING)
        assert await one.compaction.request("a") is again
        go_on.set()
        await checking


async def test_a_compaction_leaves_the_room_that_appends_need() -> None:
    async with stage("a") as one:
        for value in "xyz":
            await one.write("a", "k", value)
        world, watermark = one.world, one.broker._options.watermark_bytes
        used = sum(world.disk.files().values())
        world.disk.capacity = used + watermark * 5 // 4 - 1
        files = set(world.disk.files())
        run = await one.compaction.request("a")
        await one.compaction.check()
        assert isinstance(run.problem, DiskWatermark)
        said = str(CompactionFailed("a", str(run.problem)))
        assert "(the watermark and 25 %): free some space" in said
        assert said.count("was not compacted") == 1
        assert {path for path in world.disk.files() if path.endswith(".log")} >= {
            path for path in files if path.endswith(".log")
        }
        assert one.cleaned("a") == 0
        await one.write("a", "k", "w")
        world.disk.capacity = 1 << 40
        await one.compaction.request("a")
        await one.compaction.check()
        assert one.contents("a") == {b"w": 1}


def test_the_io_limit_waits_and_notices_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, ending = World().clock, list[Error]()
    run = CompactionRun("a", 1)
    progress = CompactionProgress(run, 1000, clock, lambda: ending[-1] if ending else None)
    before = clock.monotonic()
    for _ in range(10):
        progress(500)
    assert run.bytes_done == 5000
    assert clock.monotonic() - before == pytest.approx(5.0, abs=0.2)
    clock.advance(60)
    before = clock.monotonic()
    progress(1000)
    assert clock.monotonic() - before >= 0.8, "a pause gives no right to a burst"
    sleep = clock.sleep

    def stopping(seconds: float) -> None:
        sleep(seconds)
        ending.append(CoordinatorStopped("stopping"))

    monkeypatch.setattr(clock, "sleep", stopping)
    before = clock.monotonic()
    with pytest.raises(CoordinatorStopped):
        progress(1_000_000)
    assert clock.monotonic() - before < 1.0


async def test_requests_for_what_is_no_data_topic_are_refused() -> None:
    async with stage("a") as one:
        with pytest.raises(TopicNotFound, match="no topic 'missing' to compact"):
            await one.compaction.request("missing")
        with pytest.raises(Error, match="reserved"):
            await one.compaction.request("__txnbuffer_decisions")
        assert "missing" not in one.broker.topics()
    async with engine_on(MemoryBroker()) as engine:
        with pytest.raises(NotSupported, match="its log is in memory"):
            await engine.compaction.request("a")
        with pytest.raises(NotSupported, match="its log is in memory"):
            await engine.compaction.set_policy("a", SOON)
        assert await ServiceAdmin(engine).compactions({}) == []


def test_policies_are_checked() -> None:
    assert check_policy() is None
    assert check_policy(dirty_ratio=0.25) == CompactionPolicy(dirty_ratio=0.25)
    assert check_policy(1, 2.5, 60, 0) == CompactionPolicy(1.0, 2500, 60_000, 0)
    wrong: list[dict[str, Any]] = [
        {"dirty_ratio": 0}, {"dirty_ratio": 1.5}, {"dirty_ratio": "x"}, {"dirty_ratio": True}, {"least_lag": -1},
        {"grace": float("nan")}, {"grace": float("inf")}, {"least_lag": 10, "most_lag": 5}, {"dirty_ratio": -0.1},
        {"dirty_ratio": float("nan")}, {"most_lag": 0.0004}, {"grace": 1e9 + 1}, {"most_lag": "x"}, {"grace": False},
    ]  # fmt: skip
    for values in wrong:
        with pytest.raises(InvalidRequest, match=r"dirty_ratio|lag|grace"):
            check_policy(**values)
