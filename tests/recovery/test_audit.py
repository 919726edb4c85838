"""Audits of the latest value of each key, against a dict of all that was written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from file_logs import World, append, numbered
from hypothesis import assume, given
from hypothesis import strategies as st
from log_server import LogServer
from recovery.audited_topic import (
    STEPS,
    AuditedTopic,
    Steps,
    T,
    Written,
    alone,
    changed,
    latest,
    with_value,
    without,
    written_by,
)

from broker_io import open_broker
from broker_io.batch import Message
from broker_io.compaction import CompactionState, CompactionStateBroker, DigestingBroker
from broker_io.environment import Environment, use
from broker_io.filelog.log import rewriting
from broker_io.filelog.log.keymap import Mask
from broker_io.key_digest import KeyDigest
from broker_io.memory import MemoryBroker
from broker_io.port import Broker
from broker_io.testing import SimulatedDisk
from snapshots.errors import SnapshotMissing
from txnbuffer.errors import InvalidRequest
from txnbuffer.model import TxnId
from txnbuffer.progress import Progress, reporting
from txnbuffer.protocol import TXN
from txnbuffer.recovery.audit import CommittedLog, KeyAudit, LogDigest, StoredComparison, audit, digest_of
from txnbuffer.recovery.newest_records import ROW, SHARES

SCRATCH = "/scratch"


@pytest.fixture(autouse=True)
def scratch() -> Iterator[SimulatedDisk]:
    """A disk for temporary files, of which none is left."""
    disk = SimulatedDisk()
    disk.make_directory(SCRATCH)
    with use(Environment(disk=disk)):
        yield disk
    assert disk.files() == {}


def compare(log: Broker, copy: Broker, *, rows: int = 1000, **options: Any) -> KeyAudit:
    memory = rows * SHARES * ROW.itemsize
    return audit(CommittedLog(log, T), CommittedLog(copy, T), SCRATCH, memory_bytes=memory, **options)


rows = st.sampled_from([1, 2, 3, 5, 1000])


@given(STEPS, rows)
def test_a_compacted_log_equals_the_full_history(steps: Steps, rows: int) -> None:
    topic = written_by(steps)
    full = topic.copy()
    topic.compact()
    topic.compact()
    found = compare(topic.broker, full, rows=rows)
    visible = topic.visible()
    assert (found.different, found.unproven, found.differences) == (0, 0, ())
    assert found.up_to == len(visible)
    assert (found.log.keys, found.copy.keys) == (len(latest(visible)),) * 2
    assert found.copy.records == len(visible)
    assert found.log.records <= len(visible)
    again = compare(full, topic.broker, rows=rows)
    assert (again.different, again.up_to) == (0, found.up_to)


@given(STEPS, STEPS, STEPS, st.booleans())
def test_an_older_copy_can_be_compared_unless_compaction_has_looked_beyond_it(
    steps: Steps, more: Steps, still_more: Steps, first: bool
) -> None:
    topic = written_by(steps)
    if first:
        topic.compact()
    older = topic.copy()
    end = len(topic.visible())
    written_by(more, topic)
    assume(len(topic.visible()) >= end)
    topic.compact()
    written_by(still_more, topic)
    log = CommittedLog(topic.broker, T)
    if log.cleaned > end:
        for one, other in [(topic.broker, older), (older, topic.broker)]:
            with pytest.raises(InvalidRequest, match=f"compacted up to seqno {log.cleaned}.* at least"):
                compare(one, other)
    else:
        found = compare(topic.broker, older)
        assert (found.up_to, found.different) == (end, 0)
        assert found.copy.keys == len(latest(topic.visible()[:end]))


def differing(mine: dict[bytes, bytes], other: dict[bytes, bytes]) -> dict[bytes, str]:
    found = {}
    for key in mine.keys() | other.keys():
        if mine.get(key) != other.get(key):
            found[key] = "different" if key in mine and key in other else "in the log only"
            if key not in mine:
                found[key] = "in the copy only"
    return found


@given(STEPS, st.data(), rows, st.booleans())
def test_a_single_change_is_found_and_named(steps: Steps, data: st.DataObject, rows: int, value: bool) -> None:
    topic = written_by(steps)
    visible = topic.visible()
    choice = [number for number, one in enumerate(visible) if alone(one) and one.key is not None]
    assume(choice)
    number = data.draw(st.sampled_from(choice))
    one = visible[number]
    after = [*visible]
    if value:
        after[number] = one._replace(value=b"planted")
        log = changed(topic.broker, with_value(one.position, b"planted"))
    else:
        after[number] = one._replace(key=None)
        log = changed(topic.broker, without(one.position))
    expected = differing(latest(after), latest(visible))
    found = compare(log, topic.broker, rows=rows)
    assert {difference.key: difference.what for difference in found.differences} == expected
    assert (found.different, found.unproven) == (len(expected), 0)
    for difference in found.differences:
        check_side(difference.key, after, difference.log)
        check_side(difference.key, visible, difference.copy)


def check_side(key: bytes, visible: list[Written], side: Any) -> None:
    """The newest record of the key."""
    mine = [(number, one.position, one.value) for number, one in enumerate(visible, 1) if one.key == key]
    assert side == (mine[-1] if mine else (None, None, None))


def test_changed_lost_and_resurrected_keys_are_named_in_the_order_of_the_log() -> None:
    topic = AuditedTopic()
    topic.begin()
    for key, text in [("lost", "1"), ("changed", "2"), ("back", "3"), ("same", "4"), ("back", None)]:
        topic.write(key, text, 1)
    topic.end(0, commit=True)
    first, second, _, _, last = topic.written
    log = changed(topic.broker, without(first.position))
    log = changed(log, with_value(second.position, b"other"))
    log = changed(log, without(last.position))
    found = compare(log, topic.broker)
    assert [(one.key, one.what, one.log.value, one.copy.value) for one in found.differences] == [
        (b"lost", "in the copy only", None, b"1"),
        (b"changed", "different", b"other", b"2"),
        (b"back", "in the log only", b"3", None),
    ]
    assert [(one.log.seqno, one.copy.seqno) for one in found.differences] == [(None, 1), (2, 2), (3, 5)]
    progress: list[Progress] = []
    with reporting(progress.append):
        short = compare(log, topic.broker, first=2)
    ends = [(one.operation, one.done, one.unit) for one in progress if one.done == one.total]
    assert ends[-2:] == [("audit of the copy", 5, "records"), ("audit of the log", 5, "records")]
    assert short.different == 3
    assert [one.key for one in short.differences] == [b"lost", b"changed"]
    assert compare(log, topic.broker, first=0).differences == ()
    assert compare(log, topic.broker, up_to=0).different == 0
    assert compare(log, topic.broker, up_to=1).different == 1


@pytest.mark.parametrize("rows", [2, 1000])
def test_the_first_of_many_different_keys_are_named(rows: int) -> None:
    """The order of the hashes, with a new seed in each audit, is that of the log once in 12!."""
    topic = AuditedTopic()
    topic.begin()
    keys = [b"%d" % number for number in range(12)]
    for key in keys:
        topic.write(key.decode(), "1", 1)
    topic.end(0, commit=True)
    log: Broker = topic.broker
    for one in topic.written:
        log = changed(log, with_value(one.position, b"other"))
    found = compare(log, topic.broker, rows=rows, first=5)
    assert (found.different, [one.key for one in found.differences]) == (12, keys[:5])
    assert [one.key for one in compare(log, topic.broker, rows=rows, first=99).differences] == keys


def test_aborted_and_undecided_records_are_not_compared() -> None:
    topic = AuditedTopic()
    topic.write("k", "1")
    topic.begin()
    topic.begin()
    topic.write("k", "aborted", 1)
    topic.end(0, commit=False)
    topic.write("k", "open", 2)
    topic.write("k", "undecided")
    found = compare(topic.broker, topic.copy())
    assert (found.up_to, found.log.records, found.log.keys) == (1, 1, 1)


def test_emptied_records_are_not_counted() -> None:
    topic = AuditedTopic()
    for text in ["1", "2", "3"]:
        topic.write("k", text)
    topic.broker.roll(T)
    full = topic.copy()
    topic.compact()
    found = compare(topic.broker, full)
    assert (found.log.records, found.copy.records, found.up_to) == (1, 3, 3)


def test_more_keys_than_memory_holds_are_compared_in_ranges(
    scratch: SimulatedDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = AuditedTopic()
    for start in range(0, 5000, 500):
        topic.writer.plain(*map(str, range(500)), key=f"k{start}")
        for number in range(50):
            topic.write(f"key {start + number}", "x")
    log = changed(topic.broker, with_value(topic.written[77].position, b"y"))
    small, large = compare(log, topic.broker, rows=40), compare(log, topic.broker)
    assert large == small
    assert (small.different, small.log.keys) == (1, 510)
    names = {operation.path for operation in scratch.history}
    assert {f"{SCRATCH}/log", f"{SCRATCH}/copy"} <= names


def test_keys_that_retention_has_trimmed_are_unproven() -> None:
    topic = AuditedTopic()
    topic.write("old", "1")
    topic.write("k", "1")
    topic.write("gone", "1")
    topic.broker.roll(T)
    topic.write("k", "2")
    topic.write("gone", None)
    full = topic.copy()
    topic.manager.pump()
    topic.manager.snapshot(T)
    topic.manager.snapshot(T)
    topic.broker.trim(T, 2)
    for one, other in [(topic.broker, full), (full, topic.broker)]:
        found = compare(one, other)
        assert (found.different, found.unproven, found.up_to) == (0, 1, 5)
    lost = changed(full, without(topic.written[3].position))
    found = compare(topic.broker, lost)
    assert [(one.key, one.log.value, one.copy.value) for one in found.differences] == [(b"k", b"2", b"1")]


def test_a_seqno_that_one_of_them_does_not_have_is_refused() -> None:
    topic = AuditedTopic()
    topic.write("k", "1")
    older = topic.copy()
    topic.write("k", "2")
    with pytest.raises(InvalidRequest, match=r"the copy ends at seqno 1: .* as of 2"):
        compare(topic.broker, older, up_to=2)
    with pytest.raises(InvalidRequest, match=r"the log ends at seqno 1: "):
        compare(older, topic.broker, up_to=2)


def test_a_topic_without_transactions_is_compared_from_its_first_record() -> None:
    worlds = [World(), World()]
    brokers = [world.own(compacted_prefix="") for world in worlds]
    for broker in brokers:
        broker.create_topic(T)
        append(broker, T, numbered(5))
    append(brokers[0], T, numbered(3))
    found = compare(*brokers)
    assert (found.up_to, found.different, found.log.keys) == (5, 0, 5)
    for broker in brokers:
        broker.roll(T)
    brokers[1].trim(T, 2)
    with pytest.raises(InvalidRequest, match=r"no seqnos.* trimmed"):
        compare(*brokers)


def test_lost_transaction_state_is_reported() -> None:
    topic = AuditedTopic()
    world = World()
    broker = world.own(compacted_prefix="")
    broker.create_topic(T)
    append(broker, T, [Message(b"k", b"v", {"tb.v": "1", TXN: str(TxnId(0, 1)), "tb.seq": "1"})])
    with pytest.raises(SnapshotMissing):
        compare(broker, topic.broker)


def test_a_service_says_how_far_it_has_compacted() -> None:
    topic = AuditedTopic()
    topic.write("k", "1")
    older = topic.copy()
    topic.write("k", "2")
    topic.broker.roll(T)
    full = topic.copy()
    with LogServer(topic.broker) as server, open_broker(server.address) as remote:
        assert isinstance(remote, CompactionStateBroker)
        assert remote.compaction(T) == CompactionState()
        topic.compact()
        assert remote.compaction(T) == topic.broker.compaction(T) == CompactionState(cleaned=1)
        assert compare(remote, full).different == 0
        with pytest.raises(InvalidRequest, match=r"the copy was compacted up to seqno 2"):
            compare(older, remote)
    with MemoryBroker() as memory, LogServer(memory) as server, open_broker(server.address) as remote:
        memory.create_topic(T)
        assert isinstance(remote, CompactionStateBroker)
        assert remote.compaction(T) == CompactionState()


class Interfering:
    """A broker of whose topic something happens before it is read."""

    def __init__(self, broker: Any) -> None:
        self._broker = broker
        self.happens: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._broker, name)

    # From Python 3.12 on, what the class does not define makes it no instance of a protocol.

    def compaction(self, topic: str) -> Any:
        return self._broker.compaction(topic)

    def key_digests(self, topic: str) -> Any:
        return self._broker.key_digests(topic)

    def reader(self, topic: str, *arguments: Any, **named: Any) -> Any:
        if self.happens is not None:
            happens, self.happens = self.happens, None
            happens()
        return self._broker.reader(topic, *arguments, **named)


def test_a_compaction_beyond_the_end_during_the_audit_is_noticed() -> None:
    topic = AuditedTopic()
    topic.write("k", "1")
    topic.manager.pump()
    topic.manager.snapshot(T)
    full = topic.copy()

    def happens() -> None:
        topic.write("k", "2")
        topic.broker.roll(T)
        topic.compact()

    log: Any = Interfering(topic.broker)
    opened = CommittedLog(log, T)
    log.happens = happens
    with pytest.raises(InvalidRequest, match=r"compacted during the audit"):
        audit(opened, CommittedLog(full, T), SCRATCH)


# --- digests ---


def digest(broker: Broker, like: LogDigest | None = None, rows: int = 1000) -> LogDigest:
    memory = rows * SHARES * ROW.itemsize
    return digest_of(CommittedLog(broker, T), SCRATCH, like=like, memory_bytes=memory)[0]


@given(STEPS, STEPS, rows)
def test_a_compaction_changes_no_digest(steps: Steps, more: Steps, rows: int) -> None:
    topic = written_by(steps)
    before = digest(topic.broker, rows=rows)
    assert (before.start, before.end) == (1, len(topic.visible()))
    topic.compact()
    assert digest(topic.broker, before) == before
    written_by([one for one in more if one[0] not in ("commit", "abort")], topic)
    assert digest(topic.broker, before, rows) == before
    assert LogDigest.parse(str(before)) == before


@given(STEPS, st.data())
def test_a_digest_shows_that_a_newest_record_was_lost(steps: Steps, data: st.DataObject) -> None:
    topic = written_by(steps)
    visible = [one for one in topic.visible() if alone(one) and one.key is not None]
    assume(visible)
    one = data.draw(st.sampled_from(visible))
    before = digest(topic.broker)
    newest = {other.key: other for other in visible}
    older = latest([other for other in visible if other.key == one.key and other is not one])
    log = changed(topic.broker, without(one.position))
    same = newest[one.key] is not one or (one.value is None and not older)
    assert (digest(log, before) == before) is same


def test_a_digest_that_can_not_be_made_again_is_refused() -> None:
    topic = AuditedTopic()
    topic.write("k", "1")
    before = digest(topic.broker)
    topic.write("k", "2")
    topic.broker.roll(T)
    later = digest(topic.broker)
    with pytest.raises(InvalidRequest, match=r"ends at seqno 2"):
        digest(topic.copy(), before._replace(end=9))
    topic.compact()
    assert digest(topic.broker, later) == later
    with pytest.raises(InvalidRequest, match=r"incomplete: give a digest that has at least seqno 2"):
        digest(topic.broker, before)
    topic.manager.pump()
    topic.manager.snapshot(T)
    topic.manager.snapshot(T)
    topic.broker.trim(T, 2)
    with pytest.raises(InvalidRequest, match=r"up to seqno 2 were trimmed"):
        digest(topic.broker, later)
    with pytest.raises(InvalidRequest, match=r"'1-2-3' is not a digest"):
        LogDigest.parse("1-2-3")
    assert LogDigest.parse(f"1-2-{KeyDigest(5)}") == LogDigest(1, 2, KeyDigest(5))


# --- stored digests ---


def stored(broker: Broker, rows: int = 1000) -> StoredComparison | None:
    memory = rows * SHARES * ROW.itemsize
    return digest_of(CommittedLog(broker, T), SCRATCH, memory_bytes=memory).stored


@given(STEPS, STEPS, rows, st.data())
def test_a_log_equals_what_its_last_compaction_stored(
    steps: Steps, more: Steps, rows: int, data: st.DataObject
) -> None:
    topic = AuditedTopic()
    for part in (steps, more):
        written_by(part, topic)
        topic.compact()
        cleaned = topic.broker.compaction(T).cleaned
        ledgers = sum(one.ledger <= cleaned for one in topic.broker.ledgers(T))
        assert stored(topic.broker, rows) == (StoredComparison(ledgers, ()) if ledgers else None)
    written_by(data.draw(STEPS), topic)
    assert stored(topic.broker, rows) == (StoredComparison(ledgers, ()) if ledgers else None)
    if ledgers > 1:
        topic.manager.pump()
        topic.manager.snapshot(T)
        topic.broker.trim(T, data.draw(st.integers(2, cleaned)))
        left = sum(one.ledger <= cleaned for one in topic.broker.ledgers(T))
        assert stored(topic.copy()) == StoredComparison(left, ())


def miscompacted(wrong: list[bool]) -> AuditedTopic:
    """Its second of three ledgers was rewritten with another mask, and nobody noticed."""
    topic = AuditedTopic()
    topic.write("other", "1")
    topic.broker.roll(T)
    for key, value in [("a", "old"), ("a", "new"), ("b", "x"), ("c", "y")]:
        topic.write(key, value)
    topic.broker.roll(T)
    topic.write("b", "z")
    topic.broker.roll(T)
    run: Callable[[rewriting._Rewriting, Mask], rewriting.Rewrite] = rewriting._Rewriting.run
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rewriting, "check_kept", lambda *arguments: 0)
        patch.setattr(rewriting._Rewriting, "run", lambda self, removed: run(self, np.array(wrong)))
        topic.compact()
    return topic


def test_a_stored_digest_shows_what_a_compaction_has_lost() -> None:
    assert stored(miscompacted([True, False, True, False]).broker) == StoredComparison(3, ())
    assert stored(miscompacted([False] * 4).broker) == StoredComparison(3, ()), "older records do not matter"
    for wrong in ([True] * 4, [True, True, True, False], [False, True, True, False], [True, False, True, True]):
        topic = miscompacted(wrong)
        assert stored(topic.broker) == stored(topic.copy(), rows=1) == StoredComparison(3, (2,))
        topic.write("c", "newer")
        topic.write("a", "newer")
        assert stored(topic.broker) == StoredComparison(3, (2,)), "what is written later makes no difference"


def test_a_compaction_during_a_comparison_with_its_digests_is_noticed() -> None:
    topic = AuditedTopic()
    topic.write("k", "1")
    topic.broker.roll(T)
    topic.compact()
    topic.write("k", "2")
    topic.broker.roll(T)
    topic.write("k", "3")
    topic.manager.pump()
    topic.manager.snapshot(T)
    log: Any = Interfering(topic.broker)
    opened = CommittedLog(log, T)
    log.happens = topic.compact
    with pytest.raises(InvalidRequest, match=r"compacted during the audit"):
        digest_of(opened, SCRATCH)


def test_a_service_keeps_the_digests_secret() -> None:
    topic = AuditedTopic()
    topic.write("k", "1")
    topic.broker.roll(T)
    topic.compact()
    assert stored(topic.broker) == StoredComparison(1, ())
    with LogServer(topic.broker) as server, open_broker(server.address) as remote:
        assert not isinstance(remote, DigestingBroker)
        assert stored(remote) is None
