"""Several shards share a namespace: transactions across them, requests between them, and refusals."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable
from dataclasses import replace
from typing import Any

import pytest
from raw_session import InProcess, RawSession
from service_setup import eventually
from shard_world import App, Shards, shards_on, topics_of

from broker_io.errors import UnsafePolicy
from broker_io.memory import MemoryBroker
from broker_io.memory.broker import MemoryWriter
from snapshots.shards import Shard, shard_of
from txnbuffer.config import Config as Settings
from txnbuffer.config import RetentionConfig, ServiceConfig
from txnbuffer.coordinator.messages import Commit, ConsumerPosition, Joined
from txnbuffer.errors import (
    Error,
    ForeignTopic,
    InvalidConfiguration,
    InvalidRequest,
    NotVisible,
    RegistrationFailed,
    ServiceUnavailable,
    UnregisteredTopic,
)
from txnbuffer.model import EARLIEST, Outcome, TxnId
from txnbuffer.recovery.decision_log import read_decisions
from txnbuffer.recovery.verify import Level, verify
from txnbuffer.rpc.frames import NamedRequest
from txnbuffer.service.cluster import remote_shards
from txnbuffer.service.cluster.cluster import CLUSTER_CONFIG
from txnbuffer.service.cluster.remote_shards import ShardMessages
from txnbuffer.service.engine import engine
from txnbuffer.service.engine.engine import Engine
from txnbuffer.service.process import check
from txnbuffer.service.topics.retention import LogRetention

(HERE,), (THERE,) = topics_of(2)
BOTH = (HERE, THERE)
QUICK = replace(CLUSTER_CONFIG, session_timeout=0.3)

ONE = Counter({b"v": 1})
NONE: Counter[bytes | None] = Counter()


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the checks of every second more often."""
    monkeypatch.setattr(engine, "TICK", 0.1)


async def written(world: Shards, *ids: int) -> App:
    """An application of shard 0 that has written a record of each transaction to the topics of both shards."""
    app = await App.on(world, 0, *BOTH)
    for topic in BOTH:
        await app.write(topic, ids)
    return app


async def test_a_transaction_across_shards_is_seen_whole() -> None:
    async with shards_on() as world:
        app = await written(world, 1, 2)
        assert await app.commit(1, *BOTH, wait_visible=True) is Outcome.COMMIT
        assert await app.abort(2, *BOTH) is Outcome.ABORT
        assert world.buffer(1, THERE).outcome(TxnId(0, 1)) is Outcome.COMMIT
        await eventually(lambda: world.visible(*BOTH) == [ONE, ONE])
        assert [[*engine.topics.by_name] for engine in map(world.engine, (0, 1))] == [[HERE], [THERE]]
        await eventually(lambda: not [*world.engine(0).coordinator.transactions()])
    assert [found for found in verify(world.cluster) if found.level is not Level.OK] == []
    assert {name for name in world.cluster.topics() if name.startswith("__")} == {
        f"__txnbuffer_{kind}-partition-{number}" for kind in ("decisions", "snapshots", "letters") for number in (0, 1)
    }


async def test_both_coordinators_end_transactions_on_one_topic() -> None:
    async with shards_on() as world:
        first, second = await written(world, 1), await App.on(world, 1, THERE)
        await second.write(THERE, [1], b"of the second")
        assert await second.commit(1, THERE) is Outcome.COMMIT
        assert await first.commit(1, *BOTH) is Outcome.COMMIT
        await eventually(lambda: world.visible(THERE) == [Counter({b"v": 1, b"of the second": 1})])
        buffer = world.buffer(1, THERE)
        await eventually(lambda: [buffer.outcome(TxnId(most, 1)) for most in (0, 1)] == [Outcome.COMMIT] * 2)


async def test_decisions_of_a_crashed_coordinator_are_published_by_its_successor() -> None:
    async with shards_on() as world:
        app = await written(world, 1)
        world.broker(0).faults.hold(topic=THERE, written=False)
        assert await app.commit(1, *BOTH) is Outcome.COMMIT
        await eventually(lambda: world.visible(HERE) == [ONE])
        await world.kill(0)
        assert world.visible(THERE) == [NONE]
        await world.start(0)
        await eventually(lambda: world.visible(*BOTH) == [ONE, ONE])


async def test_records_of_a_client_that_died_are_ended_by_their_coordinator() -> None:
    async with shards_on(config=QUICK) as world:
        await written(world, 1)
        world.engine(0).connections[0].lost()
        last = await App.on(world, 1, THERE)
        await last.write(THERE, [1])
        assert await last.commit(1, THERE) is Outcome.COMMIT
        await eventually(lambda: world.visible(THERE) == [ONE])


async def test_nobody_decides_for_a_coordinator_that_is_away() -> None:
    async with shards_on(config=QUICK) as world:
        await written(world, 1)
        await world.kill(0)
        last = await App.on(world, 1, THERE)
        await last.write(THERE, [1])
        assert await last.commit(1, THERE) is Outcome.COMMIT
        for _ in range(3):
            world.engine(1).effects.ask_again()
            world.engine(1).wake()
            await asyncio.sleep(0.05)
        assert world.visible(THERE) == [NONE]
        await world.start(0)
        await eventually(lambda: world.visible(THERE) == [ONE])


async def test_commits_are_kept_while_the_owner_of_a_topic_is_away() -> None:
    async with shards_on() as world:
        app = await written(world, 1, 2)
        await world.kill(1)
        assert await app.commit(1, *BOTH) is Outcome.COMMIT
        await eventually(lambda: world.visible(*BOTH) == [ONE, ONE])
        waiting = asyncio.ensure_future(app.commit(2, *BOTH, wait_visible=True))
        await eventually(lambda: world.visible(*BOTH) == [Counter({b"v": 2})] * 2)
        assert not waiting.done()
        await world.start(1)
        assert await waiting is Outcome.COMMIT


async def test_a_topic_is_registered_once_its_owner_is_there() -> None:
    async with shards_on() as world:
        await world.kill(1)
        registering = asyncio.ensure_future(App.on(world, 0, THERE))
        await eventually(lambda: world.shard_messages(0).sent > 0)
        assert not registering.done()
        await world.start(1)
        app = await registering
        await app.write(THERE, [1])
        assert await app.commit(1, THERE) is Outcome.COMMIT
        await eventually(lambda: world.visible(THERE) == [ONE])


async def test_a_registration_fails_if_the_owner_stays_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_shards, "MAX_WAIT", 1.0)
    async with shards_on() as world:
        await world.kill(1)
        with pytest.raises(RegistrationFailed, match="the service of shard 1 does not answer"):
            await App.on(world, 0, THERE)
        app = await App.on(world, 0, HERE)
        await app.write(HERE, [1])
        assert await app.commit(1, HERE) is Outcome.COMMIT


@pytest.mark.parametrize("final", [False, True])
async def test_a_refusal_of_the_owner_reaches_the_client(monkeypatch: pytest.MonkeyPatch, final: bool) -> None:
    def refuse(*_: object) -> None:
        raise (UnsafePolicy if final else InvalidConfiguration)("nobody may")

    async with shards_on() as world:
        monkeypatch.setattr(world.engine(1).topics.manager, "register", refuse)
        with pytest.raises(RegistrationFailed, match=r"registered: nobody may$") as told:
            await App.on(world, 0, THERE)
        assert told.value.retryable is not final


def none(*_: object) -> None:
    """As if no group of this shard needs anything, or a message is lost."""


async def test_registrations_at_other_shards_are_known_to_the_next_coordinator() -> None:
    async with shards_on() as world:
        app = await written(world, 1)
        await world.kill(0)
        await world.kill(1)
        await world.start(0)
        session = RawSession(InProcess(world.engine(0)))
        await session.hello(app.session.session, [TxnId(0, 1)])
        app.session = session
        assert await app.commit(1, *BOTH) is Outcome.COMMIT
        await eventually(lambda: world.visible(*BOTH) == [ONE, ONE])


@pytest.mark.parametrize("told", [True, False])
async def test_a_topic_that_its_owner_misses_takes_no_commits_until_it_is_registered_again(
    monkeypatch: pytest.MonkeyPatch, told: bool
) -> None:
    if not told:
        monkeypatch.setattr(ShardMessages, "missing", none)
    async with shards_on() as world:
        monkeypatch.setattr(remote_shards, "KNOWN_TICKS", 1_000_000 if told else 1)  # never, or at each tick
        app = await written(world, 1)
        world.cluster.delete_topic(THERE)
        await eventually(lambda: THERE not in world.engine(0).coordinator.topics())
        assert isinstance(await app.commit(1, *BOTH), UnregisteredTopic)
        await app.session.register(THERE)
        await app.write(THERE, [2])
        assert await app.commit(2, THERE, wait_visible=True) is Outcome.COMMIT
        assert world.visible(THERE) == [ONE]


async def test_a_topic_that_is_gone_needs_no_markers() -> None:
    async with shards_on() as world:
        app = await written(world, 1)
        world.cluster.delete_topic(THERE)
        assert await app.commit(1, *BOTH) is Outcome.COMMIT
        await eventually(lambda: not [*world.engine(0).coordinator.transactions()])
        assert world.visible(HERE) == [ONE]


async def test_a_remote_topic_that_takes_no_markers_is_reported_and_delays_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with shards_on() as world:
        app = await written(world, 1)
        broker = world.broker(0)
        usual = broker.writer

        def guarded(topic: str, **options: Any) -> MemoryWriter:
            if topic == THERE:
                raise UnsafePolicy(f"{topic} is not written to")
            return usual(topic, **options)

        monkeypatch.setattr(broker, "writer", guarded)
        told = await app.commit(1, *BOTH, wait_visible=True)
        assert isinstance(told, NotVisible)
        assert isinstance(world.engine(0).effects.remote_problems()[f"writing to {THERE}"], UnsafePolicy)
        await eventually(lambda: world.visible(*BOTH) == [ONE, NONE])
        monkeypatch.setattr(broker, "writer", usual)
        await eventually(lambda: world.visible(THERE) == [ONE])
        await eventually(lambda: world.engine(0).effects.remote_problems()[f"writing to {THERE}"] is None)


async def test_what_a_group_of_another_shard_needs_stays() -> None:
    async with shards_on() as world:
        app = await App.on(world, 0, THERE)
        await app.write(THERE, [1])
        world.cluster.roll(THERE)
        assert await app.commit(1, THERE, wait_visible=True) is Outcome.COMMIT
        group = next(name for name in "abcdef" if shard_of(name, 2) == 0)
        joined = await app.session.ask(joins=lambda request: (NamedRequest(request, group),))
        assert isinstance(joined, Joined)
        end = world.cluster.last_position(THERE)
        assert end is not None
        moved = ConsumerPosition(group, THERE, joined.generation, end, end)
        plan = (TxnId(0, 2), (), (), False, None, (), (), (moved,))
        assert await app.session.ask(commits=lambda request: (Commit(request, *plan),)) is Outcome.COMMIT
        owner = world.engine(1)
        for _ in range(2):
            world.cluster.roll(THERE)
            await app.write(THERE, [3])
        floors = owner.trim_floors
        retention = LogRetention(owner.topics, owner.snapshots, RetentionConfig(bytes=1), owner.clock, floors)
        assert await app.abort(3, THERE) is Outcome.ABORT
        await eventually(lambda: not len(world.buffer(1, THERE).ongoing))
        for txn in (4, 5):  # neither of the snapshots that are kept needs what the group does
            await app.write(THERE, [txn])
            assert await app.commit(txn, THERE, wait_visible=True) is Outcome.COMMIT
            await owner.snapshots.snapshot([THERE])
        followed = owner.topics.by_name[THERE].followed
        assert followed is not None
        assert followed.floor() > end.ledger
        await retention.check(owner.topics.by_name[THERE])
        assert retention.trimmed == 1
        assert world.cluster.ledgers(THERE)[0].ledger == end.ledger
        await world.kill(0)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(remote_shards, "MAX_WAIT", 1.0)
            asked: list[str] = []

            def far(topic: str) -> Awaitable[int | None]:
                asked.append(topic)
                return world.shard_messages(1).floor(topic)

            retention = LogRetention(
                owner.topics, owner.snapshots, RetentionConfig(bytes=1), owner.clock, floors._replace(shards=far)
            )
            for _ in range(3):
                with pytest.raises(ServiceUnavailable, match="nothing is trimmed"):
                    await retention.check(owner.topics.by_name[THERE])
            assert asked == [THERE]  # a shard that does not answer is waited for once


async def test_a_decision_log_that_lost_what_topics_of_another_shard_know_is_found_out() -> None:
    async with shards_on() as world:
        app = await App.on(world, 0, THERE)
        await app.write(THERE, [1])
        assert await app.commit(1, THERE, wait_visible=True) is Outcome.COMMIT
        assert read_decisions(world.cluster, Shard(0, 2)).lost is None
        await world.kill(0)
        world.cluster.delete_topic("__txnbuffer_decisions-partition-0")
        world.cluster.create_topic("__txnbuffer_decisions-partition-0")
        assert read_decisions(world.cluster, Shard(0, 2)).lost is not None
        told = [found.topic for found in verify(world.cluster) if found.level is Level.ERROR]
        assert told == ["__txnbuffer_decisions-partition-0"]


async def test_names_groups_and_streams_belong_to_a_shard() -> None:
    async with shards_on() as world:
        app = await App.on(world, 0)
        name = next(name for name in "abcdef" if shard_of(name, 2) == 1)
        for field in ("open_names", "delete_names", "joins"):
            refused = await app.session.ask(**{field: lambda request: (NamedRequest(request, name),)})
            assert isinstance(refused, ForeignTopic), field
        moved = ConsumerPosition(name, HERE, 1, EARLIEST, EARLIEST)
        plan = (TxnId(0, 1), (), (), False, None, (), (), (moved,))
        refused = await app.session.ask(commits=lambda request: (Commit(request, *plan),))
        assert isinstance(refused, InvalidRequest)
        with pytest.raises(ForeignTopic, match=f"topic '{THERE}' belongs to shard 1 of 2, this is shard 0"):
            world.engine(0).topics.make(THERE)


@pytest.mark.parametrize(
    ("settings", "cluster_mode", "why"),
    [
        (ServiceConfig(shards=2), False, "only a cluster has several"),
        (ServiceConfig(shards=2), True, "--shard is missing: give the shard to serve, 0 to 1"),
        (ServiceConfig(shard=2, shards=2), True, "there is no shard 2 of 2"),
        (ServiceConfig(shards=1000), True, "use 1 to 256"),
    ],
)
def test_shards_that_cannot_be_are_refused(settings: ServiceConfig, cluster_mode: bool, why: str) -> None:
    with pytest.raises(InvalidConfiguration, match=why):
        check(replace(Settings(), service=settings), cluster_mode=cluster_mode)


async def test_counts_of_others_topics_are_not_promised() -> None:
    config = replace(CLUSTER_CONFIG, verify_counts=True)
    with pytest.raises(InvalidConfiguration, match="only a cluster has several"):
        await Engine.start(MemoryBroker(), shard=Shard(0, 2))
    with pytest.raises(InvalidConfiguration, match="verify_counts"):
        await Engine.start(MemoryBroker(), shard=Shard(0, 2), cluster_mode=True, config=config)


def test_errors_of_shards_are_the_callers() -> None:
    assert issubclass(ForeignTopic, Error)
    assert not ForeignTopic("x").retryable
