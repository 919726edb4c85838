import pytest
from snapshot_driver import Interfering, abort_some, entries, leave_empty, manager_on, put
from writing import TopicWriter

from broker_io.batch import Message
from broker_io.errors import TopicNotFound
from broker_io.filelog.log import FileBroker
from broker_io.memory import MemoryBroker
from broker_io.position import EARLIEST, LATEST, Position
from snapshots.errors import SnapshotDamaged, UnsupportedSnapshot
from snapshots.format import END, EPOCH_PROPERTY, SEGMENT, SNAPSHOT_TOPIC, EntryKey, gone, message
from txnbuffer.buffer.visibility import visible_counts
from txnbuffer.client.reading.reader import CommittedReader
from txnbuffer.pipeline.pinned import pin_topics
from txnbuffer.pipeline.ranges import RangePlanner
from txnbuffer.recovery.restore import SnapshotLoader, load
from txnbuffer.recovery.verify import Level, diff_states, verify

T = "t"


@pytest.fixture(params=["memory", "file"])
def broker(request, tmp_path):
    made = MemoryBroker(ledger_entries=9) if request.param == "memory" else FileBroker.open(str(tmp_path / "log"))
    with made:
        yield made


def owned(broker, txns=range(1, 12)):
    owner = manager_on(broker)
    owner.register(T)
    writer = TopicWriter(broker, T)
    writer.plain("p")
    abort_some(writer, *txns)
    owner.pump()
    owner.snapshot(T)
    return owner, writer


def followed(broker, loaded):
    """The buffer of a reader once it has read to the end of the log."""
    with broker.reader(T, loaded.resume, inclusive=False) as reader:
        while (placed := reader.read()) is not None:
            loaded.buffer.apply_batch(placed)
            loaded.buffer.segments.take_sealed()
    return loaded.buffer


def test_a_reader_reaches_the_same_state_as_the_owner(broker):
    owner, writer = owned(broker)
    abort_some(writer, 30, 31, 32, 33)
    loaded = load(broker, T)
    assert loaded.registered
    owner.pump()
    assert diff_states(followed(broker, loaded), owner.buffer(T)) in ([], [f"first_ledger: 0 != {loaded.first_ledger}"])


def test_a_reader_of_a_directory_needs_no_lock(tmp_path):
    with FileBroker.open(str(tmp_path / "log")) as broker:
        owner, _ = owned(broker)
        with FileBroker.open(str(tmp_path / "log"), read_only=True) as reader:
            assert load(reader, T).buffer.aborted.ids() == owner.buffer(T).aborted.ids()
        owner.close()


def test_a_reader_writes_nothing():
    broker = MemoryBroker()
    owned(broker)
    last = broker.last_position(SNAPSHOT_TOPIC)
    load(broker, T)
    assert broker.last_position(SNAPSHOT_TOPIC) == last


def test_a_topic_without_a_snapshot_has_no_transactions(broker):
    TopicWriter(broker, T).plain("a", "b")
    for _ in range(2):  # without any snapshot topic, and with one that does not know this topic
        loaded = load(broker, T)
        assert not loaded.registered
        assert followed(broker, loaded).max_read_position == broker.last_position(T)
        assert loaded.anchor(EARLIEST) == (1, loaded.resume)  # nothing was trimmed
        manager_on(broker).close()


def test_a_missing_topic_is_reported():
    with pytest.raises(TopicNotFound):
        load(MemoryBroker(), T)


@pytest.mark.parametrize("aborts", [0, 11])
def test_h14_a_snapshot_that_compaction_moved_after_the_end_is_found(aborts):
    """The end is taken, then a newer end entry comes and a compaction drops the one that was known."""
    broker = MemoryBroker()
    owner, writer = owned(broker, range(1, aborts + 1))
    between = Interfering(broker)
    between.limit = 1
    done = []

    def interfere(name, topic):
        if name == "read" and topic == SNAPSHOT_TOPIC and not done:
            done.append(True)
            for number in range(4):
                owner.register(f"other-{number}")
            writer.plain("q")
            owner.pump()
            owner.snapshot(T)
            broker.compact(SNAPSHOT_TOPIC)

    between.before = interfere
    loaded = load(between, T)
    assert done
    assert loaded.registered
    assert loaded.buffer.aborted.ids() == owner.buffer(T).aborted.ids()


@pytest.mark.parametrize("when", range(6))
def test_h14_at_whatever_moment_the_owner_writes_and_compacts(when):
    broker = MemoryBroker(ledger_entries=9)
    owner, writer = owned(broker)
    between = Interfering(broker)
    between.limit = 2
    calls = iter(range(1000))

    def interfere(name, topic):
        if topic == SNAPSHOT_TOPIC and next(calls) == when:
            abort_some(writer, *range(40, 60))
            owner.pump()
            owner.snapshot(T)
            owner.trim(T, broker.ledgers(T)[-1].ledger)
            broker.compact(SNAPSHOT_TOPIC)

    between.before = interfere
    loaded = load(between, T)
    assert loaded.registered
    assert set(owner.buffer(T).aborted.ids()) <= set(followed(broker, loaded).aborted.ids())


def test_real_damage_is_reported_after_a_few_attempts():
    broker = MemoryBroker()
    owner, _ = owned(broker)
    put(broker, gone(EntryKey(T, SEGMENT, 2), owner.epoch))
    between = Interfering(broker)
    with pytest.raises(SnapshotDamaged, match="t-2"):
        load(between, T)
    assert between.reads <= 30


def test_topics_that_are_loaded_together_are_what_each_is_alone(broker):
    owner, _ = owned(broker)
    owner.register("u")
    abort_some(TopicWriter(broker, "u"), 3, 4)
    owner.pump()
    owner.snapshot("u")
    TopicWriter(broker, "plain").plain("a")
    topics = ["u", T, "plain", "u"]  # one of them twice, as a trim may require
    with SnapshotLoader(broker, topics) as snapshots:
        for topic in topics:
            alone, together = load(broker, topic), snapshots.load(topic)
            assert diff_states(alone.buffer, together.buffer) == []
            assert (alone.resume, alone.registered) == (together.resume, together.registered)
        with pytest.raises(TopicNotFound):
            snapshots.load("missing")
    owner.close()


def test_damage_of_one_topic_keeps_no_other_from_being_loaded_together():
    broker = MemoryBroker()
    owner, _ = owned(broker)
    owner.register("u")
    put(broker, gone(EntryKey(T, SEGMENT, 2), owner.epoch))
    with SnapshotLoader(broker, ["u", T]) as snapshots:
        with pytest.raises(SnapshotDamaged, match="t-2"):
            snapshots.load(T)
        assert snapshots.load("u").registered


def test_a_newer_format_is_reported_at_once():
    broker = MemoryBroker()
    owned(broker)
    newer = message(EntryKey(T, END), 1, entries(broker, T).end.value)
    put(broker, newer._replace(properties={**newer.properties, "tb.v": "4"}))
    with pytest.raises(UnsupportedSnapshot, match="version 4"):
        load(broker, T)


def test_seqnos_counted_from_an_anchor_are_the_true_ones(broker):
    owner = manager_on(broker)
    owner.register(T)
    writer = TopicWriter(broker, T)
    for turn in range(12):
        writer.plain("a", "b")
        writer.records(turn + 1, "x", "y")
        (writer.abort if turn % 3 == 0 else writer.commit)(turn + 1)
        if turn % 4 == 3:
            broker.roll(T)
        owner.pump()
    owner.snapshot(T)
    writer.plain("tail")
    loaded = load(broker, T)
    buffer = followed(broker, loaded)
    true, places = {}, []
    with broker.reader(T) as reader:
        while (placed := reader.read()) is not None:
            for position, count in zip(placed.positions, visible_counts(placed, buffer).tolist(), strict=True):
                places.append(position)
                if count:
                    true[position] = len(true) + 1
    assert len(true) == 12 * 2 + 8 * 2 + 1
    for start in [EARLIEST, LATEST, *places, Position(places[-1].ledger, 10**6)]:
        seqno, at = loaded.anchor(start)
        wanted = [place for place in true if place > at]
        assert at < max(start, places[0])
        assert seqno == (true[wanted[0]] if wanted else len(true) + 1)
    owner.close()


def test_anchors_are_near_and_never_below_the_first_ledger():
    broker = MemoryBroker(ledger_entries=5)
    owner, writer = owned(broker)
    writer.plain(*"abcdefgh")
    owner.pump()
    owner.trim(T, broker.ledgers(T)[2].ledger)
    loaded = load(broker, T)
    first = broker.ledgers(T)[0].ledger
    assert loaded.anchor(EARLIEST)[1] == Position(first, -1)
    for ledger in broker.ledgers(T):
        seqno, at = loaded.anchor(Position(ledger.ledger, 3))
        assert at.ledger == ledger.ledger
        assert seqno is not None


@pytest.mark.parametrize(("written", "snapshots"), [(0, 0), (0, 2), (5, 2)])
def test_a_log_whose_first_ledger_is_empty_has_seqnos(written, snapshots):
    broker = MemoryBroker()
    owner = manager_on(broker)
    owner.register(T)
    writer = TopicWriter(broker, T)
    if written:
        writer.plain(*"abcde"[:written])
        broker.roll(T)
    empty = broker.ledgers(T)[-1].ledger
    leave_empty(broker, T)
    writer.plain("x", "y")
    for _ in range(snapshots):
        owner.pump()
        owner.snapshot(T)
    owner.trim(T, empty)
    assert [one.entries for one in broker.ledgers(T)] == [0, 2]
    first, second = (one.ledger for one in broker.ledgers(T))
    loaded = load(broker, T)
    for start in (EARLIEST, Position(first, 0), Position(first, 7), Position(second, 0)):
        assert loaded.anchor(start)[0] == written + 1, start
    assert loaded.anchor(LATEST)[0] == written + (3 if snapshots else 1)
    with CommittedReader(broker, T) as reader:
        batch = reader.read()
        assert batch is not None
        assert [(record.seqno, record.value) for record in batch] == [(written + 1, b"x"), (written + 2, b"y")]
    for numbered in (True, False):
        pinned = pin_topics(broker, [T])[T]
        planner = RangePlanner(numbered=numbered, target_bytes=10**9)
        (found,) = planner.ranges(T, pinned.ledgers, pinned.anchors, pinned.origin, pinned.stop, pinned.last)
        assert found.seqno == (written + 1 if numbered else None)
    assert {finding.level for finding in verify(broker, T)} == {Level.OK}
    owner.close()


@pytest.mark.parametrize("epoch", ["²", "1" * 5000, "1" * 30, "-1", "x"])
def test_an_invalid_epoch_is_ignored(epoch):
    broker = MemoryBroker()
    owner = manager_on(broker)
    owner.register("t")
    odd = {EPOCH_PROPERTY: epoch}
    put(broker, Message(b"t-7", b"junk", odd), Message(b"__owner", b"junk", odd))
    again = manager_on(broker)
    assert again.problems == {}
    assert again.epoch < 100
