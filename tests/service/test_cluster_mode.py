"""The engine in cluster mode: applications write to the topics, the engine reads them and writes markers."""

from __future__ import annotations

import asyncio
from unittest.mock import patch

import pytest
from cluster_app import App, app_on, cluster_engine
from raw_session import InProcess, RawSession, transactional
from service_setup import QUICK, eventually, visible

from broker_io.batch import Batch, Message
from broker_io.errors import Damaged, Fenced, ServiceUnavailable, TopicNotFound
from broker_io.memory import MemoryBroker
from txnbuffer.coordinator.decisions import TOPIC as DECISIONS
from txnbuffer.coordinator.messages import Commit, CoordinatorConfig
from txnbuffer.errors import CoordinatorStopped, InvalidConfiguration, SeqnoGap, TransactionAborted
from txnbuffer.model import Outcome, TxnId
from txnbuffer.rpc.frames import Abort, ClientFrame
from txnbuffer.service.engine.engine import Engine
from txnbuffer.service.servers.admin import ServiceAdmin
from txnbuffer.service.topics import upkeep

CLUSTER_CONFIG = CoordinatorConfig(
    one_phase=False,
    verify_counts=False,
    session_timeout=QUICK.session_timeout,
    low_water_mark_interval=QUICK.low_water_mark_interval,
)


@pytest.fixture
def cluster():
    with MemoryBroker() as opened:
        yield opened


def followed(engine: Engine, topic: str):
    return engine.topics.get(topic).followed


async def ended(engine: Engine) -> BaseException:
    async with asyncio.timeout(120):
        return await asyncio.shield(engine.ended)


async def test_what_commits_is_seen_everywhere_and_what_aborts_nowhere(cluster):
    async with cluster_engine(cluster) as (engine, _):
        app = await app_on(engine, cluster, "a", "b")
        both, gone = next(app.ids), next(app.ids)
        await app.write("a", [both, gone], size=2)
        await app.write("b", [both, gone])
        assert await app.session.commit(both, ["a", "b"], [2, 1]) is Outcome.COMMIT
        aborted = await app.session.ask(aborts=lambda r: (Abort(r, TxnId(0, gone), ("a", "b")),))
        assert aborted is Outcome.ABORT
        await eventually(lambda: visible(cluster, "a") == {b"v": 2} and visible(cluster, "b") == {b"v": 1})
        await eventually(lambda: not followed(engine, "a").buffer.ongoing and not followed(engine, "b").buffer.ongoing)
        assert followed(engine, "a").buffer.is_aborted(TxnId(0, gone))


async def test_a_commit_is_answered_when_its_decision_is_durable_whatever_becomes_of_its_marker(cluster):
    async with cluster_engine(cluster) as (engine, broker):
        app = await app_on(engine, cluster, "a")
        txn = next(app.ids)
        await app.write("a", [txn])
        broker.faults.hold(topic="a", written=False)
        assert await app.commit(txn, "a") is Outcome.COMMIT
        assert visible(cluster, "a") == {}
        broker.faults.release()
        await eventually(lambda: visible(cluster, "a") == {b"v": 1})


async def test_waiting_for_visibility_waits_for_the_readers(cluster):
    async with cluster_engine(cluster) as (engine, broker):
        app = await app_on(engine, cluster, "a", "b")
        txn = next(app.ids)
        await app.write("a", [txn])
        await app.write("b", [txn])
        await eventually(lambda: followed(engine, "b").buffer.ongoing)
        broker.faults.hold(topic="b", written=False)
        app.session.link.send(ClientFrame(commits=(Commit(1000, TxnId(0, txn), ("a", "b"), (1, 1), True),)))
        await eventually(lambda: not followed(engine, "a").buffer.ongoing)
        await app.session.lease(1)  # all earlier frames have arrived by then
        assert 1000 not in app.session.answers
        broker.faults.release()
        await app.session.until(lambda: 1000 in app.session.answers)
        assert app.session.answers[1000] is Outcome.COMMIT
        assert not followed(engine, "b").buffer.ongoing


async def test_records_sent_to_the_service_are_refused_with_one_clear_error(cluster):
    async with cluster_engine(cluster) as (engine, _):
        app = await app_on(engine, cluster, "a")
        failures = await app.session.write(
            ("a", transactional([next(app.ids)])), ("new", Batch.of([Message(None, b"x")]))
        )
        assert [failure.send for failure in failures] == [1, 2]
        assert all("connect the client to the cluster's address" in str(failure.error) for failure in failures)
        assert cluster.last_position("a") is None
        assert "new" not in cluster.topics()


async def test_clients_get_the_message_limit_of_the_cluster():
    with MemoryBroker(max_message_bytes=5000) as cluster:
        async with cluster_engine(cluster) as (engine, _):
            app = await app_on(engine, cluster, "a")
            assert app.session.welcome.max_message_bytes == 5000


async def test_one_phase_is_refused_in_cluster_mode(cluster):
    with pytest.raises(InvalidConfiguration, match="one_phase"):
        await Engine.start(cluster, cluster_mode=True, config=CoordinatorConfig())
    assert cluster.topics() == []


async def test_a_marker_writer_that_dies_is_opened_again(cluster, quick):
    async with cluster_engine(cluster, config=CLUSTER_CONFIG) as (engine, broker):
        app = await app_on(engine, cluster, "a", "b")
        for fault in (broker.faults.fail_append, broker.faults.lose_acknowledgement, broker.faults.fence_append):
            txn = next(app.ids)
            await app.write("a", [txn], b"%d" % txn)
            await app.write("b", [txn])
            fault(topic="a")
            assert await app.commit(txn, "a", "b") is Outcome.COMMIT
            await eventually(lambda txn=txn: visible(cluster, "a")[b"%d" % txn] == 1)
        assert not engine.ended.done()
        assert engine.topics.get("a").obstacle is None
        assert visible(cluster, "b") == {b"v": 3}


async def test_a_topic_with_a_foreign_exclusive_writer_is_named_and_awaited(cluster, quick):
    async with cluster_engine(cluster, config=CLUSTER_CONFIG) as (engine, _):
        app = await app_on(engine, cluster, "a")
        txn = next(app.ids)
        await app.write("a", [txn])
        with cluster.writer("a", exclusive=True):
            assert await app.commit(txn, "a") is Outcome.COMMIT
            await eventually(lambda: isinstance(engine.topics.get("a").write_problem, Fenced))
            (told,) = await ServiceAdmin(engine).list_topics({})
            assert "exclusive" in told["problem"]
        await eventually(lambda: visible(cluster, "a") == {b"v": 1})
        assert engine.topics.get("a").obstacle is None


async def test_a_reader_that_fails_for_a_while_is_reported_and_continues(cluster):
    async with cluster_engine(cluster) as (engine, broker):
        app = await app_on(engine, cluster, "a")
        for _ in range(3):
            broker.faults.fail_read(ServiceUnavailable("the broker is away"), topic="a")
        await eventually(lambda: "away" in str(engine.topics.get("a").obstacle))
        txn = next(app.ids)
        await app.write("a", [txn])
        app.session.link.send(ClientFrame(commits=(Commit(1000, TxnId(0, txn), ("a",), (1,), True),)))
        await app.session.until(lambda: 1000 in app.session.answers)
        assert engine.topics.get("a").obstacle is None


async def test_a_reader_that_can_not_continue_stops_only_its_topic(cluster):
    async with cluster_engine(cluster) as (engine, broker):
        app = await app_on(engine, cluster, "a", "b")
        broker.faults.fail_read(Damaged("a", 5, "it is torn"), topic="a")
        await eventually(lambda: isinstance(engine.topics.get("a").problem, Damaged))
        assert engine.topics.get("a").followed is None
        txn = next(app.ids)
        await app.write("b", [txn])
        assert await app.commit(txn, "b") is Outcome.COMMIT
        await eventually(lambda: visible(cluster, "b") == {b"v": 1})
        session = RawSession(InProcess(engine))
        await session.hello()
        with pytest.raises(Damaged):
            await session.register("a")


async def test_a_client_that_dies_holds_readers_back_no_longer_than_its_time(cluster, quick):
    async with cluster_engine(cluster, config=CLUSTER_CONFIG) as (engine, _):
        app = await app_on(engine, cluster, "a", "b")
        txn = next(app.ids)
        await app.write("a", [txn])
        await app.write("b", [txn])
        await app.session.link.cut()
        await eventually(lambda: followed(engine, "a").buffer.is_aborted(TxnId(0, txn)))
        await eventually(lambda: followed(engine, "b").buffer.is_aborted(TxnId(0, txn)))
        late = await app.write("a", [txn], b"late", seq=2)
        await eventually(lambda: followed(engine, "a").buffer.applied >= late.last)
        assert visible(cluster, "a") == visible(cluster, "b") == {}


async def test_a_deleted_topic_stops_and_nothing_waits_for_it(cluster, quick):
    async with cluster_engine(cluster, config=CLUSTER_CONFIG) as (engine, broker):
        app = await app_on(engine, cluster, "a", "b")
        txn = next(app.ids)
        await app.write("a", [txn])
        await app.write("b", [txn])
        with cluster.writer("b", exclusive=True):  # no marker can be written
            app.session.link.send(ClientFrame(commits=(Commit(1000, TxnId(0, txn), ("a", "b"), (1, 1), True),)))
            await eventually(lambda: engine.topics.get("b").write_problem is not None)
            cluster.delete_topic("b")
            await app.session.until(lambda: 1000 in app.session.answers)
        assert app.session.answers[1000] is Outcome.COMMIT
        assert isinstance(engine.topics.get("b").problem, TopicNotFound)
        await eventually(lambda: engine.coordinator.transaction(TxnId(0, txn)) is None)
        assert visible(cluster, "a") == {b"v": 1}
        assert "b" not in broker.topics()


async def test_records_of_an_id_that_nobody_leased_are_aborted(cluster, quick):
    async with cluster_engine(cluster, config=CLUSTER_CONFIG) as (engine, _):
        app = await app_on(engine, cluster, "a")
        await app.write("a", [999_999])
        await eventually(lambda: followed(engine, "a").buffer.is_aborted(TxnId(0, 999_999)))


@pytest.mark.parametrize(("counted", "outcome"), [(2, Outcome.COMMIT), (3, TransactionAborted)])
async def test_record_counts_are_verified_on_request(cluster, counted, outcome):
    async with cluster_engine(cluster, config=CoordinatorConfig(one_phase=False, verify_counts=True)) as (engine, _):
        app = await app_on(engine, cluster, "a", "b")
        txn = next(app.ids)
        await app.write("a", [txn], size=2)
        await app.write("b", [txn])
        answer = await app.session.commit(txn, ["a", "b"], [counted, 1])
        assert answer is outcome if outcome is Outcome.COMMIT else isinstance(answer, outcome)


async def test_a_count_waits_until_the_reader_has_read_the_records(cluster):
    async with cluster_engine(cluster, config=CoordinatorConfig(one_phase=False, verify_counts=True)) as (engine, _):
        app = await app_on(engine, cluster, "a")
        txn = next(app.ids)
        reader = engine.topics.get("a").reader
        reader.paused += 1
        await app.write("a", [txn], size=3)
        app.session.link.send(ClientFrame(commits=(Commit(1000, TxnId(0, txn), ("a",), (3,)),)))
        await eventually(lambda: engine.topics.get("a").reports and reader._received)
        await app.session.lease(1)
        assert not followed(engine, "a").buffer.ongoing
        assert 1000 not in app.session.answers
        reader.paused -= 1
        engine.topics.readers.wake()
        await app.session.until(lambda: 1000 in app.session.answers)
        assert app.session.answers[1000] is Outcome.COMMIT


async def test_the_next_owner_continues_where_the_last_one_crashed(cluster):
    async with cluster_engine(cluster) as (engine, broker):
        app = await app_on(engine, cluster, "a", "b")
        done, decided, opened = next(app.ids), next(app.ids), next(app.ids)
        for topic in ("a", "b"):
            await app.write(topic, [done, decided, opened])
        assert await app.commit(done, "a", "b") is Outcome.COMMIT
        await eventually(lambda: visible(cluster, "b") == {b"v": 1})
        broker.faults.hold(topic="a", written=False)
        broker.faults.hold(topic="b", written=False)
        assert await app.commit(decided, "a", "b") is Outcome.COMMIT
        engine.fail(CoordinatorStopped("as if it had crashed"))
        session = app.session.session
    assert visible(cluster, "b") == {b"v": 1}
    async with cluster_engine(cluster) as (engine, _):
        assert engine.coordinator.epoch == 2
        again = RawSession(InProcess(engine))
        await again.hello(session, [TxnId(0, opened)])
        assert await again.commit(opened, ["a", "b"], [1, 1]) is Outcome.COMMIT
        await eventually(lambda: visible(cluster, "a") == visible(cluster, "b") == {b"v": 3})


async def test_a_zombie_changes_nothing_that_readers_see(cluster):
    async with cluster_engine(cluster) as (zombie, its):
        app = await app_on(zombie, cluster, "a")
        acked, decided, undecided = next(app.ids), next(app.ids), next(app.ids)
        await app.write("a", [acked, decided, undecided])
        its.faults.hold(topic="a", written=False)
        assert await app.commit(acked, "a") is Outcome.COMMIT  # its marker is delayed
        its.faults.hold(topic=DECISIONS)
        app.session.link.send(ClientFrame(commits=(Commit(1000, TxnId(0, decided), ("a",), (1,)),)))
        await eventually(lambda: any(held.topic == DECISIONS for held in its.faults.held))
        async with cluster_engine(cluster) as (engine, _):
            again = RawSession(InProcess(engine))
            await again.hello(app.session.session, [TxnId(0, decided), TxnId(0, undecided)])
            assert again.welcome.states[0][1].name == "COMMITTED"
            assert await again.ask(aborts=lambda r: (Abort(r, TxnId(0, undecided), ("a",)),)) is Outcome.ABORT
            await eventually(lambda: visible(cluster, "a") == {b"v": 2})
            its.faults.release()
            error = await ended(zombie)
            assert isinstance(error, Fenced) or "epoch 2" in str(error)
            with pytest.raises(EOFError):
                await app.session.until(lambda: 1000 in app.session.answers)
            await eventually(lambda: followed(engine, "a").buffer.applied == cluster.last_position("a"))
            assert visible(cluster, "a") == {b"v": 2}


async def test_an_idle_zombie_learns_of_its_successor(cluster):
    async with cluster_engine(cluster) as (zombie, _), cluster_engine(cluster) as (engine, _):
        error = await ended(zombie)
        assert isinstance(error, CoordinatorStopped)
        assert "epoch 2 was seen on the decision log" in str(error)
        assert error.exit_code == 3
        assert not engine.ended.done()


async def test_a_zombie_can_not_write_snapshots(cluster):
    async with cluster_engine(cluster) as (zombie, its):
        app = await app_on(zombie, cluster, "a")
        zombie.topics.readers.stop()  # as if it were stopped
        await app.write("a", [next(app.ids)])
        async with cluster_engine(cluster) as (engine, _):
            before = cluster.last_position("__txnbuffer_snapshots")
            with pytest.raises(Exception, match="owner"):
                await zombie.snapshots.snapshot(["a"])
            assert cluster.last_position("__txnbuffer_snapshots") == before
            assert its.faults.held == []
            assert not engine.ended.done()


async def test_a_run_that_the_broker_wrote_twice_is_visible_once(cluster):
    async with cluster_engine(cluster) as (engine, _):
        app = await app_on(engine, cluster, "a")
        txn, other = next(app.ids), next(app.ids)
        first = await app.write("a", [txn], size=3)
        await app.write("a", [other])
        assert await app.commit(txn, "a", size=3) is Outcome.COMMIT
        cluster.repeat("a", first.first, cluster.last_position("a"))
        assert await app.commit(other, "a") is Outcome.COMMIT
        await eventually(lambda: visible(cluster, "a") == {b"v": 4})
        await eventually(lambda: followed(engine, "a").buffer.applied == cluster.last_position("a"))
        assert followed(engine, "a").buffer.counters.damaged == 0


async def test_snapshots_are_written_and_seqnos_continue_over_owners(cluster):
    async with cluster_engine(cluster) as (engine, _):
        app = await app_on(engine, cluster, "a")
        for _ in range(5):
            txn = next(app.ids)
            await app.write("a", [txn], size=2)
            assert await app.commit(txn, "a", size=2) is Outcome.COMMIT
        await eventually(lambda: followed(engine, "a").numbered.next_seqno == 11)
        await engine.snapshots.snapshot(["a"])
        assert engine.snapshots.problem is None
    async with cluster_engine(cluster) as (engine, _):
        assert followed(engine, "a").numbered.next_seqno == 11
        app = App(cluster, RawSession(InProcess(engine)), range(0))
        await app.session.hello()
        (txn,) = await app.session.lease(1)
        await app.write("a", [txn])
        assert await app.commit(txn, "a") is Outcome.COMMIT
        await eventually(lambda: followed(engine, "a").numbered.next_seqno == 12)


async def test_an_error_in_sequencing_stops_one_topic_only(cluster):
    async with cluster_engine(cluster) as (engine, _):
        app = await app_on(engine, cluster, "a", "b")
        gap = SeqnoGap("2 records were read, 1 was expected")
        with patch.object(followed(engine, "a"), "sequence_held", side_effect=gap):
            await app.write("a", [next(app.ids)])
            await eventually(lambda: engine.topics.get("a").problem is not None)
        assert (engine.topics.get("a").problem, engine.topics.get("a").stopped) == (gap, True)
        txn = next(app.ids)
        await app.write("b", [txn])
        assert await app.commit(txn, "b") is Outcome.COMMIT
        assert not engine.ended.done()


@pytest.mark.parametrize("backlog", [False, True], ids=["held", "read again"])
async def test_sequencing_that_waits_for_a_slow_cluster_is_repeated(cluster, backlog, monkeypatch):
    monkeypatch.setattr(upkeep, "AFTER_FAILURE", 0.01)
    async with cluster_engine(cluster) as (engine, _):
        app = await app_on(engine, cluster, "a")
        slow = ServiceUnavailable("no answer")
        with (
            patch.object(type(followed(engine, "a")), "has_backlog", backlog),
            patch.object(followed(engine, "a"), "sequence_held", side_effect=slow),
        ):
            txn = next(app.ids)
            await app.write("a", [txn])
            assert await app.commit(txn, "a") is Outcome.COMMIT
            await eventually(lambda: engine.snapshots.problem is slow)
        assert (engine.topics.get("a").problem, engine.ended.done()) == (None, False)
        await eventually(lambda: followed(engine, "a").numbered.position is not None)
        await eventually(lambda: engine.snapshots.problem is None)
