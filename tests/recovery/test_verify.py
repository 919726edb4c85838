import dataclasses

import pytest
from snapshot_driver import abort_some, entries, manager_on, put
from writing import TopicWriter

from broker_io.batch import Message
from broker_io.errors import PositionTrimmed, TopicNotFound
from broker_io.memory import MemoryBroker
from broker_io.position import Position
from snapshots.format import END, SEGMENT, SNAPSHOT_TOPIC, EndEntry, EntryKey, gone, message
from txnbuffer.recovery.codec import decode_state, encode_state
from txnbuffer.recovery.verify import Level, diff_states, rebuild, verify

T = "t"


def stored():
    broker = MemoryBroker(ledger_entries=9)
    owner = manager_on(broker)
    owner.register(T)
    writer = TopicWriter(broker, T)
    writer.plain("p")
    abort_some(writer, *range(1, 12))
    writer.records(50, "open")
    owner.pump()
    owner.snapshot(T)
    return broker, owner, writer


def only(findings):
    (finding,) = findings
    return finding


def test_a_sound_snapshot_is_equal_to_the_log():
    broker, _owner, writer = stored()
    abort_some(writer, 12)
    finding = only(verify(broker))
    assert finding.level is Level.OK
    assert "equal to the log" in finding.what
    assert finding[1:] == (T, finding.what, "t-end", entries(broker, T).end.position)
    assert verify(broker, T) == [finding]
    broker.create_topic("u")
    assert verify(broker) == [finding]
    assert only(verify(broker, "u")).level is Level.WARNING
    with pytest.raises(TopicNotFound, match="no data topic 'v'"):
        verify(broker, "v")


def test_verifying_writes_nothing():
    broker, _, _ = stored()
    last = broker.last_position(SNAPSHOT_TOPIC)
    verify(broker)
    assert broker.last_position(SNAPSHOT_TOPIC) == last
    with pytest.raises(TopicNotFound):
        verify(MemoryBroker())


def test_a_segment_with_a_flipped_bit_is_found_with_its_place():
    broker, owner, _ = stored()
    part = entries(broker, T).numbered[SEGMENT][2]
    put(broker, message(EntryKey(T, SEGMENT, 2), owner.epoch, part.value[:30] + b"\xff" + part.value[31:]))
    errors = [finding for finding in verify(broker) if finding.level is Level.ERROR]
    assert {(finding.entry, finding.position) for finding in errors} == {
        ("t-2", entries(broker, T).numbered[SEGMENT][2].position)
    }


def test_a_missing_segment_is_found():
    broker, owner, _ = stored()
    put(broker, gone(EntryKey(T, SEGMENT, 3), owner.epoch))
    finding = only(verify(broker))
    assert (finding.level, finding.entry, finding.position) == (Level.ERROR, "t-3", None)


@pytest.mark.parametrize("what", ["counter", "seqno", "max"])
def test_a_state_that_differs_from_the_log_is_found(what):
    """Consistent, with valid digests: only the log shows the difference."""
    broker, owner, _ = stored()
    end = EndEntry.decode(entries(broker, T).end.value)
    state = decode_state(end.state)
    if what == "counter":
        state = dataclasses.replace(state, buffer=dataclasses.replace(state.buffer, counters=(1, 0, 0, 0, 0)))
        state = dataclasses.replace(
            state, buffer=dataclasses.replace(state.buffer, counters=owner.buffer(T).counters._replace(late=1))
        )
    elif what == "seqno":
        numbers = dataclasses.replace(state.sequencer, next_seqno=state.sequencer.next_seqno + 1)
        state = dataclasses.replace(state, sequencer=numbers)
    else:
        ongoing = dataclasses.replace(state.buffer.ongoing, accepted=state.buffer.ongoing.accepted + 1)
        state = dataclasses.replace(state, buffer=dataclasses.replace(state.buffer, ongoing=ongoing))
    forged = dataclasses.replace(end, state=encode_state(state))
    put(broker, message(EntryKey(T, END), owner.epoch, forged.encode()))
    finding = only(verify(broker))
    assert finding.level is Level.ERROR
    assert "differs from the log" in finding.what


def test_transactions_without_a_snapshot_are_found():
    broker, owner, _ = stored()
    TopicWriter(broker, "u").plain("only plain")
    put(
        broker,
        gone(EntryKey(T, END), owner.epoch),
        *[gone(EntryKey(T, SEGMENT, number), owner.epoch) for number in range(1, 9)],
    )
    for finding in (only(verify(broker)), only(verify(broker, T))):
        assert (finding.level, finding.topic) == (Level.ERROR, T)
        assert f"txnbuf recover ADDRESS {T} --write" in finding.what
    broker.delete_topic(SNAPSHOT_TOPIC)
    assert only(verify(broker)) == finding


def test_a_snapshot_deleted_on_purpose_is_no_error():
    broker, owner, _ = stored()
    owner.delete(T)
    assert only(verify(broker)).level is Level.WARNING
    assert "on purpose" in only(verify(broker)).what


def test_a_rebuilt_snapshot_leaves_no_old_entries():
    broker, owner, writer = stored()
    writer.commit(50)
    writer.plain(*["p"] * 20)
    broker.trim(T, broker.ledgers(T)[-1].ledger)
    owner.rebuild(T)
    assert entries(broker, T).numbered[SEGMENT] == {}
    assert [finding.level for finding in verify(broker)] == [Level.OK]
    assert manager_on(broker).notes == []


def test_leftovers_zombies_and_foreign_keys_are_warnings():
    broker, owner, _ = stored()
    put(
        broker,
        message(EntryKey(T, SEGMENT, 9), owner.epoch, b"junk"),
        Message(b"whose key is this", b"junk", gone(EntryKey(T, END), owner.epoch).properties),
        message(EntryKey(T, SEGMENT, 1), 0, b"junk"),
    )
    findings = verify(broker)
    assert [finding.level for finding in findings].count(Level.ERROR) == 0
    warned = " ".join(finding.what for finding in findings if finding.level is Level.WARNING)
    for text in ("does not name it", "not those of an entry", "fenced owners, which are ignored"):
        assert text in warned


@pytest.mark.parametrize("before", [True, False])
def test_a_log_that_is_trimmed_while_it_is_verified_is_not_compared(monkeypatch, before):
    broker, _, _ = stored()

    def trim_meanwhile(broker, topic, **options):
        broker.trim(T, broker.ledgers(T)[1].ledger)
        if before:
            return rebuild(broker, topic, **options)
        raise PositionTrimmed("messages were trimmed")

    monkeypatch.setattr("txnbuffer.recovery.verify.rebuild", trim_meanwhile)
    finding = only(verify(broker))
    assert finding.level is Level.OK
    assert "first ledgers were trimmed" in finding.what


def test_where_the_log_is_trimmed_the_snapshot_is_checked_in_itself():
    broker, _owner, writer = stored()
    broker.trim(T, broker.ledgers(T)[1].ledger)
    finding = only(verify(broker))
    assert finding.level is Level.OK
    assert "consistent; not compared" in finding.what
    writer.plain(*["p"] * 30)
    broker.trim(T, 10**6)
    finding = only(verify(broker))
    assert finding.level is Level.ERROR
    assert "messages between may be missing" in finding.what


def test_deleted_and_recreated_topics_are_reported():
    broker, _owner, _ = stored()
    broker.delete_topic(T)
    assert "was deleted" in only(verify(broker)).what
    broker.create_topic(T)
    assert "re-created" in only(verify(broker)).what


def test_states_are_compared_to_the_last_id():
    broker, owner, _ = stored()
    one, numbers = rebuild(broker, T, segment_size=3, until=broker.last_position(T))
    two, _ = rebuild(broker, T, segment_size=3, until=broker.last_position(T))
    assert diff_states(one, two) == []
    two.aborted.discard(
        *(column[:1] for column in (two.snapshot_state().unsealed.most, two.snapshot_state().unsealed.least))
    )
    assert "aborted, only in the first: 1" in diff_states(one, two)[0]
    one.suppressed.add(Position(10**6, 0), Position(10**6, 1))
    assert "suppressed, only in the first" in diff_states(one, two)[1]
    assert numbers.next_seqno == owner.followed(T).numbered.next_seqno


@pytest.mark.parametrize("snapshotted", [True, False])
def test_a_commit_with_another_number_of_records_is_shown(snapshotted):
    broker, owner, writer = stored()
    writer.records(60, "a", "b")
    writer._written[60] = 3
    position = writer.commit(60)
    owner.pump()
    if snapshotted:
        owner.snapshot(T)
    fine, damage = verify(broker)
    assert (fine.level, damage.level) == (Level.OK, Level.ERROR)
    assert damage.what == f"transaction 0:60 committed at {position} with 3 records, but the topic has 2"
