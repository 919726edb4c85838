import pytest
from snapshot_driver import Interfering, abort_some, assert_true, entries, manager_on
from writing import TopicWriter

from bench.log_owner import LogOwner
from broker_io.errors import DiskFailed, TopicNotFound
from broker_io.filelog.log import FileBroker
from broker_io.memory import MemoryBroker
from broker_io.testing.disk import SimulatedClock
from snapshots.errors import NotRegistered
from snapshots.format import SEGMENT, SNAPSHOT_TOPIC
from txnbuffer.buffer.state import TransactionEnded
from txnbuffer.model import Outcome, TxnId
from txnbuffer.recovery.followed_topic import SnapshotPolicy
from txnbuffer.recovery.restore import read_snapshot

T = "t"


@pytest.fixture(params=["memory", "file"])
def broker(request, tmp_path):
    made = MemoryBroker(ledger_entries=9) if request.param == "memory" else FileBroker.open(str(tmp_path / "log"))
    with made:
        yield made


def registered(broker, **options):
    owner = manager_on(broker, **options)
    owner.register(T)
    return owner, TopicWriter(broker, T)


def test_a_life_on_any_broker(broker):
    """Snapshots, rolls, trims, compactions and new owners leave the buffer as the log has it."""
    owner, writer = registered(broker)
    for turn in range(8):
        writer.records(1000 + turn, "open")
        abort_some(writer, *range(turn * 10 + 1, turn * 10 + 6))
        writer.plain("p")
        if turn % 2:
            writer.commit(1000 + turn)
        broker.roll(T)
        owner.pump()
        if turn % 3 == 1:
            owner.snapshot(T)
            broker.compact(SNAPSHOT_TOPIC)
        if turn % 3 == 2:
            owner.close()
            owner = manager_on(broker)
            assert owner.problems == {}
        assert_true(owner, broker, T)
    for turn in range(0, 8, 2):
        writer.abort(1000 + turn)
    owner.pump()
    mask = owner.buffer(T).aborted.ids()
    owner.snapshot(T)
    first = owner.trim(T, broker.ledgers(T)[-3].ledger)
    assert first == broker.ledgers(T)[0].ledger == broker.ledgers(T)[-3].ledger
    assert set(owner.buffer(T).aborted.ids()) < set(mask)
    kept = owner.buffer(T).snapshot_state()
    numbers = owner.followed(T).numbered.snapshot_state()
    owner.close()
    broker.compact(SNAPSHOT_TOPIC)
    again = manager_on(broker)
    assert again.buffer(T).snapshot_state().differences(kept) == []
    assert again.followed(T).numbered.next_seqno == numbers.next_seqno
    again.close()


def test_registering_makes_the_first_snapshot_durable(broker):
    owner = manager_on(broker)
    TopicWriter(broker, T).plain("before", "it")
    owner.register(T)
    assert entries(broker, T).end is not None
    assert owner.buffer(T).applied == broker.last_position(T)
    assert owner.followed(T).numbered.next_seqno == 3
    last = broker.last_position(SNAPSHOT_TOPIC)
    owner.register(T)
    assert broker.last_position(SNAPSHOT_TOPIC) == last
    owner.close()


def test_what_is_not_registered_is_refused():
    owner = LogOwner(MemoryBroker())
    for work in (lambda: owner.epoch, owner.pump, lambda: owner.buffer(T), lambda: owner.register(T)):
        with pytest.raises(NotRegistered):
            work()
    owner.recover()
    with pytest.raises(NotRegistered, match="register it first"):
        owner.buffer(T)
    owner.close()
    owner.close()


def test_pump_returns_effects_and_waits_no_longer_than_asked():
    clock = SimulatedClock()
    broker = MemoryBroker(clock=clock)
    owner, writer = registered(broker, clock=clock)
    started = clock.monotonic()
    assert owner.pump() == {}
    assert owner.pump(0.5) == {}
    assert 0.5 <= clock.monotonic() - started < 0.6
    writer.records(1, "x")
    writer.commit(1)
    ended = next(effect for effect in owner.pump(5)[T] if isinstance(effect, TransactionEnded))
    assert (ended.txn, ended.outcome) == (TxnId(0, 1), Outcome.COMMIT)


def ids(broker):
    return read_snapshot(T, entries(broker, T)).end.snapshot_id


def test_snapshots_are_written_when_they_are_due():
    clock = SimulatedClock()
    broker = MemoryBroker(clock=clock)
    owner, writer = registered(broker, clock=clock, policy=SnapshotPolicy(changes=3, interval_ms=5_000))
    abort_some(writer, 1, 2)
    owner.pump()
    assert ids(broker) == 1
    abort_some(writer, 3)
    owner.pump()
    assert ids(broker) == 2
    state = read_snapshot(T, entries(broker, T)).state
    assert state.buffer.max_read == broker.last_position(T)
    clock.sleep(6)
    owner.pump()
    assert ids(broker) == 2  # nothing new
    writer.plain("p")
    owner.pump()
    assert ids(broker) == 3


def test_closing_writes_what_has_changed():
    broker = MemoryBroker()
    owner, writer = registered(broker)
    abort_some(writer, 1)
    owner.pump()
    owner.close()
    assert ids(broker) == 2
    owner = manager_on(broker)
    owner.close()
    assert ids(broker) == 2


def test_exiting_with_an_error_writes_nothing_more():
    broker = MemoryBroker()
    with pytest.raises(ZeroDivisionError), LogOwner(broker) as owner:
        owner.recover()
        owner.register(T)
        abort_some(TopicWriter(broker, T), 1)
        owner.pump()
        raise ZeroDivisionError
    assert ids(broker) == 1


def test_nothing_that_is_needed_is_trimmed():
    broker = MemoryBroker(ledger_entries=4)
    owner, writer = registered(broker)
    writer.plain(*"abcdefgh")
    writer.records(1, "open")
    writer.plain(*"ijklmnopqrst")
    owner.pump()
    owner.snapshot(T)
    (oldest,) = owner.buffer(T).ongoing.values()
    assert owner.trim(T, 10**6) == oldest.before.ledger
    writer.commit(1)
    owner.pump()
    end = owner.buffer(T).applied.ledger
    owner.snapshot(T)
    assert owner.trim(T, 10**6) == end  # both kept snapshots resume from there
    assert manager_on(broker).problems == {}


def test_the_older_snapshot_can_still_be_resumed_from_after_a_trim():
    broker = MemoryBroker(ledger_entries=4)
    owner, writer = registered(broker)
    writer.plain(*"abcdef")
    owner.pump()
    owner.snapshot(T)
    older = owner.buffer(T).applied.ledger
    writer.plain(*"ghijklmnopqrst")
    owner.pump()
    owner._write([owner._followed[T]])
    needed = min(owner._followed[T].generations)
    assert needed == older
    owner._broker.trim(T, min(10**6, owner._followed[T].floor()))
    assert broker.ledgers(T)[0].ledger == older


def test_ledgers_that_others_trimmed_leave_the_snapshot():
    broker = MemoryBroker(ledger_entries=6)
    owner, writer = registered(broker)
    abort_some(writer, *range(1, 20))
    owner.pump()
    owner.snapshot(T)
    broker.trim(T, broker.ledgers(T)[-1].ledger)
    writer.plain("p")
    owner.pump()
    owner.snapshot(T)
    owner.snapshot(T)
    assert len(entries(broker, T).numbered[SEGMENT]) < 6
    assert manager_on(broker).buffer(T).aborted.ids() == owner.buffer(T).aborted.ids()


def test_a_segment_that_cannot_be_read_again_stays():
    broker = MemoryBroker(ledger_entries=6)
    owner, writer = registered(broker)
    abort_some(writer, *range(1, 20))
    owner.pump()
    owner.snapshot(T)
    aborted = owner.buffer(T).aborted.ids()
    owner._followed[T].writer.chains[SEGMENT].live.pop(2)
    with pytest.raises(Exception, match="entry t-2"):
        owner.trim(T, 10**6)
    assert owner.buffer(T).aborted.ids() == aborted
    state = owner._followed[T].state()
    assert state.buffer.segments.first == owner._followed[T].writer.chains[SEGMENT].first == 1


def test_row_u8_a_deletion_finishes_after_a_failure():
    broker = MemoryBroker()
    owner, writer = registered(broker)
    abort_some(writer, *range(1, 9))
    owner.pump()
    owner.snapshot(T)
    broker.faults.fail_append(DiskFailed("the disk is gone"), written=1, topic=SNAPSHOT_TOPIC)
    with pytest.raises(DiskFailed):
        owner.delete(T)
    owner.delete(T)
    assert not entries(broker, T).numbered[SEGMENT]
    assert owner.topics == []
    owner.register(T)
    assert_true(owner, broker, T)


def test_messages_held_for_their_seqnos_are_bounded(monkeypatch):
    """After a long transaction the log is read again instead of being held in memory."""
    from txnbuffer import follow

    monkeypatch.setattr(follow, "HELD_BYTES", 1000)
    broker = MemoryBroker(ledger_entries=50)
    between = Interfering(broker)
    owner, writer = registered(between)
    writer.plain("a")
    writer.records(500, "open")
    for turn in range(30):
        abort_some(writer, *range(turn * 5 + 1, turn * 5 + 5))
        writer.plain("b", "c")
        owner.pump()
        assert owner._followed[T]._held_bytes <= 1000
    assert owner.followed(T).numbered.next_seqno == 2
    writer.commit(500)
    owner.pump()
    assert_true(owner, broker, T)
    assert not owner._followed[T].lagging
    writer.plain("d")
    owner.pump()
    assert_true(owner, broker, T)


def test_a_snapshot_while_seqnos_trail_loses_none():
    broker = MemoryBroker(ledger_entries=50)
    owner, writer = registered(broker)
    writer.records(500, "open")
    for _turn in range(5):
        writer.plain("b", "c")
        owner.pump()
        owner.snapshot(T)
        owner = manager_on(broker)
    writer.commit(500)
    owner.pump()
    assert_true(owner, broker, T)


def test_a_topic_that_vanishes_stops_alone():
    broker = MemoryBroker()
    owner, _writer = registered(broker)
    owner.register("u")
    broker.delete_topic(T)
    TopicWriter(broker, "u").plain("p")
    owner.pump()
    assert isinstance(owner.problems[T], TopicNotFound)
    assert owner.topics == ["u"]
    assert_true(owner, broker, "u")
