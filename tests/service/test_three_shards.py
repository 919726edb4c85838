"""Three shards: transactions across all of them, requests between them, and what continues without one."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from service_setup import eventually
from shard_world import App, Shards, shards_on, topics_of

from broker_io.errors import ServiceUnavailable
from snapshots.shards import shard_of
from txnbuffer.coordinator.messages import Commit, ConsumerPosition, Joined
from txnbuffer.errors import RegistrationFailed
from txnbuffer.model import EARLIEST, Outcome, Position, TxnId
from txnbuffer.rpc.frames import NamedRequest
from txnbuffer.service.cluster import remote_shards
from txnbuffer.service.engine import engine

(A,), (B,), (C,) = topics_of(3)
ALL = (A, B, C)
ONE = Counter({b"v": 1})


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the checks of every second more often."""
    monkeypatch.setattr(engine, "TICK", 0.1)


async def test_each_coordinator_ends_transactions_on_the_topics_of_all() -> None:
    async with shards_on(3) as world:
        apps = [await App.on(world, most, *ALL) for most in range(3)]
        for app in apps:
            for topic in ALL:
                await app.write(topic, [1, 2])
            assert await app.abort(2, *ALL) is Outcome.ABORT
        for app in apps:
            assert await app.commit(1, *ALL, wait_visible=True) is Outcome.COMMIT
        await eventually(lambda: world.visible(*ALL) == [Counter({b"v": 3})] * 3)


async def test_without_one_the_others_continue(monkeypatch: pytest.MonkeyPatch) -> None:
    async with shards_on(3) as world:
        before = await App.on(world, 0, *ALL)
        await world.kill(1)
        for topic in ALL:
            await before.write(topic, [1])
        assert await before.commit(1, *ALL) is Outcome.COMMIT  # B was registered: its owner need not be there
        await eventually(lambda: world.visible(*ALL) == [ONE] * 3)
        later = await App.on(world, 2, A, C)
        for topic in (A, C):
            await later.write(topic, [1])
        assert await later.commit(1, A, C, wait_visible=True) is Outcome.COMMIT
        with monkeypatch.context() as patch:
            patch.setattr(remote_shards, "MAX_WAIT", 1.0)  # so short that others may be late, too
            with pytest.raises(RegistrationFailed, match="the service of shard 1 does not answer"):
                await App.on(world, 2, B)
            for number in (0, 2):
                with pytest.raises(ServiceUnavailable, match=r"shard .*1.* did not report .* nothing is trimmed"):
                    await world.shard_messages(number).floor(ALL[number])
        await world.start(1)
        assert await world.shard_messages(0).floor(A) is None
        again = await App.on(world, 2, B)
        await again.write(B, [101])
        assert await again.commit(101, B, wait_visible=True) is Outcome.COMMIT


async def consumed(world: Shards, most: int, topic: str, end: Position) -> None:
    """Move a group of a shard to a position of a topic."""
    app = await App.on(world, most)
    group = next(name for name in "abcdefghijkl" if shard_of(name, 3) == most)
    joined = await app.session.ask(joins=lambda request: (NamedRequest(request, group),))
    assert isinstance(joined, Joined)
    moved = ConsumerPosition(group, topic, joined.generation, EARLIEST, end)
    plan = (TxnId(most, next(app.ids)), (), (), False, None, (), (), (moved,))
    assert await app.session.ask(commits=lambda request: (Commit(request, *plan),)) is Outcome.COMMIT


async def test_the_floor_is_that_of_the_slowest_group_of_any_shard() -> None:
    async with shards_on(3) as world:
        assert await world.shard_messages(1).floor(B) is None
        await consumed(world, 2, B, Position(7, 1))
        assert await world.shard_messages(1).floor(B) == 7
        await consumed(world, 0, B, Position(5, 1))
        assert await world.shard_messages(1).floor(B) == 5
        assert await world.shard_messages(0).floor(A) is None


async def test_only_an_owner_that_can_write_decisions_reports_a_floor(monkeypatch: pytest.MonkeyPatch) -> None:
    async with shards_on(3) as world:
        faults = world.broker(2).faults
        faults.hold(topic="__txnbuffer_decisions-partition-2", written=False)
        with monkeypatch.context() as patch, pytest.raises(ServiceUnavailable, match=r"shard (0, )?2 did not report"):
            patch.setattr(remote_shards, "MAX_WAIT", 1.0)  # so short that others may be late, too
            await world.shard_messages(1).floor(B)
        faults.release()
        assert await world.shard_messages(1).floor(B) is None


async def test_writers_for_topics_of_others_are_closed_when_they_are_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    async with shards_on(3) as world:
        app = await App.on(world, 0, *ALL)

        async def commits(txn: int) -> None:
            for topic in ALL:
                await app.write(topic, [txn])
            assert await app.commit(txn, *ALL, wait_visible=True) is Outcome.COMMIT

        def open_elsewhere() -> set[str]:
            inboxes = {topic.name for topic in world.shard_messages(0).inboxes.values()}
            return {topic.name for topic in world.engine(0).effects.remote_writers()} - inboxes

        await commits(1)
        assert open_elsewhere() == {B, C}
        monkeypatch.setattr(remote_shards, "IDLE", 0.0)
        for txn in range(2, 8):  # some of them while a writer is being closed
            await commits(txn)
            await asyncio.sleep(0.03)
        await eventually(lambda: not open_elsewhere())
        log = world.cluster.log
        await eventually(lambda: len(log.writers[log.topic(B)]) <= 1)  # that of its owner
        assert world.visible(*ALL) == [Counter({b"v": 7})] * 3


async def test_a_silent_shard_rarely_gets_repeated_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    async with shards_on(3) as world:
        found = world.shard_messages(1)
        await world.kill(0)

        def sent(*, asks: bool, wishes: bool) -> int:
            """How many messages two requests are sent in."""
            found.send()
            before = found.sent
            if asks:
                found.ask(A, [TxnId(0, 1)])
            if wishes:
                found.register(A)
            found.send()
            return found.sent - before

        assert (sent(asks=True, wishes=False), sent(asks=True, wishes=True)) == (1, 1)
        monkeypatch.setattr(remote_shards, "SILENT", -1.0)
        monkeypatch.setattr(remote_shards, "SILENT_TICKS", 1_000_000)
        assert (sent(asks=True, wishes=False), sent(asks=True, wishes=True)) == (0, 1)
        monkeypatch.setattr(remote_shards, "SILENT_TICKS", 1)
        assert (sent(asks=True, wishes=False), sent(asks=False, wishes=True)) == (1, 1)


async def test_an_idle_shard_still_sends_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    async with shards_on(3) as world:
        monkeypatch.setattr(remote_shards, "KNOWN_TICKS", 1)
        await eventually(lambda: all(world.shard_messages(number).received > 10 for number in range(3)))
