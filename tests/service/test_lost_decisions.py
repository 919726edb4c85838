"""A decision log that lost entries: no owner serves it until `recover --decisions` resets it; then nothing is lost."""

from __future__ import annotations

import asyncio
import json

import pytest
from cluster_app import app_on, cluster_engine
from commands import txnbuf
from pyroaring import BitMap64
from raw_session import transactional
from service_setup import engine_on, eventually, session_on, visible

from broker_io.errors import StillHeld
from broker_io.filelog.log import FileBroker
from broker_io.memory import MemoryBroker
from snapshots.shards import ONLY
from txnbuffer.buffer.buffer import TransactionBuffer
from txnbuffer.buffer.state import CoordinatorState
from txnbuffer.coordinator.decisions import (
    TOPIC,
    DecisionRows,
    EndedIds,
    Group,
    Lease,
    LowWaterMark,
    Owner,
    Retired,
    Row,
    encode,
)
from txnbuffer.coordinator.history import History
from txnbuffer.coordinator.messages import CoordinatorConfig
from txnbuffer.coordinator.takeover import ID_MARGIN, data_loss_evidence, recovery_entries
from txnbuffer.errors import CoordinatorStopped, DecisionsLost
from txnbuffer.model import Outcome, TxnId
from txnbuffer.recovery.decision_log import exclusive_writer, read_decisions, reset_decisions
from txnbuffer.recovery.verify import Level, verify
from txnbuffer.service.engine.engine import Engine


def told(
    mark: int = 0, epoch: int = 1, committed: tuple[int, ...] = (), aborted: tuple[int, ...] = (), shard: int = 0
) -> dict[str, TransactionBuffer]:
    buffer = TransactionBuffer()
    buffer.coordinators[shard] = CoordinatorState(mark, epoch, BitMap64(committed), BitMap64(aborted))
    return {"t": buffer}


WHOLE = [
    encode(Owner(3, "a")),
    encode(Lease(11, 10, "s", 0)),
    encode(Group(7, 3, 0, DecisionRows.of([Row(40, Outcome.ABORT, (), ())]), (Retired(50, 2),))),
    encode(EndedIds(BitMap64([60]))),
    encode(LowWaterMark(1, 10, 0, BitMap64(), BitMap64())),
]


@pytest.mark.parametrize(
    ("topics", "what"),
    [
        ({}, None),
        (told(10, 3, (11, 20, 60), (40, 50, 51)), None),
        (told(0, 3, (1, 10)), None),
        (told(99, 99, (99,), shard=1), None),
        (told(epoch=4), "epoch 4, but the log's next epoch is 4"),
        (told(11), "low-water mark 0:11, but the log 0:10"),
        (told(0, 3, (21,)), "0:21 ended"),
        (told(0, 3, (), (20, 52)), "0:52 ended"),
    ],
)
def test_what_shows_that_something_is_lost(topics, what):
    found = data_loss_evidence(History.read(WHOLE), 4, 0, topics)
    assert found is None if what is None else what in found


@pytest.mark.parametrize("topics", [told(5, 2, (9,)), told(70, 9), told(0, 0, (80,), (90,)), {}])
def test_a_reset_log_continues_above_all_known_ids_and_epochs(topics):
    entries = recovery_entries(History.read(WHOLE), 0, topics, "o")
    history = History.read([*WHOLE, *entries])
    assert data_loss_evidence(history, history.epoch + 1, 0, topics) is None
    highest = max([20, *(buffer.coordinators[0].low_water_mark for buffer in topics.values())])
    assert history.low_water_mark >= highest + ID_MARGIN
    assert history.epoch > 3
    assert history.next_mark == 3
    mended = History.read(entries)
    assert data_loss_evidence(mended, mended.epoch + 1, 0, topics) is None


async def marked(engine: Engine, topic: str, least: int) -> None:
    """Wait until the marker of a commit is applied."""
    states = engine.topics.get(topic).followed.buffer.coordinators
    await eventually(lambda: 0 in states and least in states[0].committed)


async def half_done(cluster: MemoryBroker) -> None:
    """One transaction committed, one open, one whose marker is in only one of its two topics; then a crash."""
    async with cluster_engine(cluster) as (engine, broker):
        app = await app_on(engine, cluster, "a", "b")
        await app.write("a", [1, 2, 3], b"old")
        await app.write("b", [3], b"old")
        assert await app.commit(1, "a") is Outcome.COMMIT
        await marked(engine, "a", 1)
        broker.faults.hold(topic="a", written=False)
        assert await app.commit(3, "a", "b") is Outcome.COMMIT
        await marked(engine, "b", 3)
        engine.fail(CoordinatorStopped("as if it had crashed"))


async def test_a_deleted_decision_log_is_not_served_until_it_is_reset():
    with MemoryBroker() as cluster:
        await half_done(cluster)
        cluster.delete_topic(TOPIC)
        for _ in range(4):  # each of them writes an epoch
            with cluster.connect() as broker, pytest.raises(DecisionsLost, match="recover ADDRESS --decisions --write"):
                await Engine.start(broker, cluster_mode=True)
        (wrong,) = [found for found in verify(cluster) if found.level is Level.ERROR]
        assert wrong.topic == TOPIC
        assert "has lost entries" in wrong.what
        with cluster.connect() as broker:
            found = reset_decisions(broker, ONLY, "test")
        assert found.lost is not None
        assert found.open_transactions(ONLY) == {2: {"a"}, 3: {"a"}}
        assert found.partly_committed(ONLY) == [3]
        assert read_decisions(cluster, ONLY).lost is None
        async with cluster_engine(cluster) as (engine, _):
            app = await app_on(engine, cluster, "a", "b", ids=10)
            first = next(app.ids)
            assert first > ID_MARGIN
            await app.write("a", [first], b"new")
            assert await app.commit(first, "a") is Outcome.COMMIT
            await marked(engine, "a", first)
            await eventually(lambda: not engine.topics.get("a").followed.buffer.ongoing)
        assert visible(cluster, "a") == {b"old": 1, b"new": 1}
        assert visible(cluster, "b") == {b"old": 1}
        assert [found for found in verify(cluster) if found.level is Level.ERROR] == []


async def test_a_deleted_log_is_missed_though_nothing_was_marked():
    with MemoryBroker() as cluster:
        async with cluster_engine(cluster) as (engine, broker):
            app = await app_on(engine, cluster, "a")
            broker.faults.hold(topic="a", written=False)
            await app.write("a", [1])
            assert await app.commit(1, "a") is Outcome.COMMIT
            engine.fail(CoordinatorStopped("as if it had crashed"))
        cluster.delete_topic(TOPIC)
        for _ in range(3):
            with cluster.connect() as broker, pytest.raises(DecisionsLost):
                await Engine.start(broker, cluster_mode=True)
        reset_decisions(cluster, ONLY, "test")
        assert read_decisions(cluster, ONLY).lost is None


async def test_an_older_copy_of_the_decision_log_is_not_served():
    with MemoryBroker() as cluster:
        async with cluster_engine(cluster) as (engine, _):
            app = await app_on(engine, cluster, "a", ids=10)
            with cluster.reader(TOPIC) as reader:
                copy = reader.read()
            session, ids = await session_on(engine, "a", ids=10)
            await app.write("a", ids[:1])
            assert await session.commit(ids[0], ["a"], [1]) is Outcome.COMMIT
            await marked(engine, "a", ids[0])
        cluster.delete_topic(TOPIC)
        cluster.create_topic(TOPIC)
        with cluster.writer(TOPIC) as writer:
            writer.append(copy.messages).result()
        with cluster.connect() as broker, pytest.raises(DecisionsLost, match=f"0:{ids[0]} ended on topic a"):
            await Engine.start(broker, cluster_mode=True)


async def test_ids_that_were_never_leased_are_no_evidence_of_a_loss():
    with MemoryBroker() as cluster:
        for turn in (1, 2):
            async with cluster_engine(cluster) as (engine, _):
                await app_on(engine, cluster, "a")
                with cluster.writer("a") as writer:
                    writer.append(transactional([1000 * turn])).result()
                await eventually(lambda: TxnId(0, 1000 * turn) in set(ended(engine)))  # noqa: B023  awaited here
        assert read_decisions(cluster, ONLY).lost is None


def ended(engine: Engine) -> list[TxnId]:
    state = engine.topics.get("a").followed.buffer.coordinators.get(0)
    return [] if state is None else [TxnId(0, least) for least in state.aborted]


async def test_a_served_log_is_not_reset():
    with MemoryBroker() as cluster:
        async with cluster_engine(cluster) as (engine, _):
            with pytest.raises(StillHeld, match="stop the service and its standbys"):
                reset_decisions(cluster, ONLY, "test")
            with pytest.raises(StillHeld, match="stop the service"), exclusive_writer(cluster, ONLY):
                raise AssertionError
            await app_on(engine, cluster, "a")  # it still serves
            assert read_decisions(cluster, ONLY).lost is None


async def test_what_is_whole_stays_as_it_is():
    with MemoryBroker() as cluster:
        async with cluster_engine(cluster) as (engine, _):
            await app_on(engine, cluster, "a")
        end = cluster.last_position(TOPIC)
        assert reset_decisions(cluster, ONLY, "test").lost is None
        assert cluster.last_position(TOPIC) == end


def test_the_command_reports_a_loss_and_repairs_it(tmp_path):
    address = f"file:{tmp_path / 'log'}"

    def recover(*options: str) -> tuple[int, list[dict[str, object]]]:
        done = txnbuf("recover", address, "--decisions", "--output", "json", *options)
        return done.returncode, json.loads(done.stdout)

    async def use():
        with FileBroker.open(str(tmp_path / "log")) as broker:
            async with engine_on(broker, config=CoordinatorConfig(low_water_mark_interval=0.05)) as engine:
                session, ids = await session_on(engine, "a", ids=5)
                assert await session.write(("a", transactional(ids[:1]))) == []
                assert await session.commit(ids[0], ["a"], [1]) is Outcome.COMMIT

    asyncio.run(use())
    assert recover()[0] == 0
    with FileBroker.open(str(tmp_path / "log")) as broker:
        broker.delete_topic(TOPIC)
    code, (row,) = recover()
    assert code == 1
    assert "epoch 1" in str(row["lost"])
    code, (row,) = recover("--write")
    assert code == 0
    assert recover()[0] == 0
    asyncio.run(use())
    with FileBroker.open(str(tmp_path / "log")) as broker:
        assert visible(broker, "a") == {b"v": 2}
