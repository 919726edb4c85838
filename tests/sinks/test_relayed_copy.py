"""A topic and the target of its relay have the same latest values, also after the target's broker compacted it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from relayed_topic import CLEAN, Relayed, T, append
from snapshot_driver import forget_origins

from broker_io import open_broker
from broker_io.batch import Message
from broker_io.environment import Environment, use
from broker_io.testing import SimulatedDisk
from txnbuffer import connect
from txnbuffer.errors import InvalidRequest, RelayTargetTaken
from txnbuffer.recovery.audit import CommittedLog, KeyAudit, audit
from txnbuffer.sinks.relay import Relay
from txnbuffer.sinks.relay_targets import ServiceTarget
from txnbuffer.sinks.relayed_copy import RelayedCopy


@pytest.fixture
def world() -> Relayed:
    return Relayed()


def named(found: KeyAudit) -> list[tuple[bytes, str]]:
    return [(one.key, one.what) for one in found.differences]


ROWS = st.lists(
    st.tuples(st.sampled_from(["a", "b", "c", None]), st.sampled_from(["1", "2", None]), st.booleans()), max_size=15
)


@given(ROWS, ROWS, ROWS, st.booleans(), st.booleans())
def test_a_copy_equals_its_source(some: Any, more: Any, newest: Any, compact: bool, compacted: bool) -> None:
    world = Relayed()
    for key, value, commit in some:
        world.write(key, value, commit=commit)
    world.relay()
    if compact:
        world.far.compact(CLEAN)
    for key, value, commit in more:
        world.write(key, value, commit=commit)
    world.relay()
    relayed = [row for row in [*some, *more] if row[2]]
    for key, value, commit in newest:
        world.write(key, value, commit=commit)
    found = world.audit(compacted=compacted)
    state = {key: value for key, value, _ in relayed if key is not None}
    kept = sum(value is not None for value in state.values())
    assert (found.up_to, found.different, found.unproven) == (len(relayed), 0, 0)
    assert (found.log.keys, found.copy.keys) == (kept, kept)


@pytest.mark.parametrize("compacted", [True, False])
def test_a_changed_a_lost_and_a_resurrected_key_are_named(world: Relayed, compacted: bool) -> None:
    for key, value in [("a", "1"), ("b", "1"), ("c", "1"), ("c", None), ("d", "1"), ("e", "1")]:
        world.write(key, value)
    world.relay()
    world.change(0, b"other")
    world.change(1, None)
    world.change(3, b"back")
    world.far.compact(CLEAN)
    found = world.audit(compacted=compacted)
    assert named(found) == [(b"a", "different"), (b"b", "in the log only"), (b"c", "in the copy only")]
    first = found.differences[0]
    assert (first.log.seqno, first.copy.seqno, first.log.value, first.copy.value) == (1, 1, b"1", b"other")
    assert first.copy.position != first.log.position
    assert named(world.audit(compacted=compacted, up_to=2)) == named(found)[:2] if not compacted else True


def test_what_retention_removed_from_the_raw_copy_is_unproven(world: Relayed) -> None:
    for key in "abcdef":
        world.write(key, "1")
    world.relay()
    world.far.compact(CLEAN)
    world.far.trim(CLEAN, world.far.ledgers(CLEAN)[1].ledger)
    assert (world.audit(compacted=False).unproven, world.audit(compacted=False).different) == (3, 0)
    assert (world.audit().unproven, world.audit().copy.keys) == (0, 6)


def test_records_that_a_branch_made_void_are_left_out(world: Relayed) -> None:
    world.write("a", "1")
    world.write("b", "1")
    world.relay()
    with world.far.connect() as broker, broker.reader(CLEAN) as reader:
        first, second = (row.message for placed in iter(reader.read, None) for row in placed)
        own = dict(second.properties)
        append(broker, second._replace(key=b"a", value=b"void", properties={**own, "relay.seqno": "3"}))
        append(broker, second._replace(key=b"a", value=b"void", properties={**own, "relay.seqno": "4"}))
        append(broker, second._replace(key=b"c", properties={**own, "relay.seqno": "3", "relay.rollback": "2"}))
    world.write("c", "1")
    found = world.audit()
    assert (found.up_to, found.different) == (3, 0)
    assert (found.copy.records, found.copy.keys) == (3, 3)
    assert first.key == b"a"


def test_a_compacted_copy_that_is_ahead_is_refused(world: Relayed) -> None:
    world.write("a", "1")
    with world.cluster.connect() as mine:
        log = CommittedLog(mine, T)
        world.write("a", "2")
        world.relay()
        disk = SimulatedDisk()
        disk.make_directory("/")
        with world.far.connect() as other, use(Environment(disk=disk)):
            source = T, mine.incarnation(T)
            assert audit(log, RelayedCopy(other, CLEAN, *source, compacted=False), "").different == 0
            with pytest.raises(InvalidRequest, match=r"ends at seqno 2, beyond 1"):
                audit(log, RelayedCopy(other, CLEAN, *source, compacted=True), "")


def test_messages_of_others_are_refused(world: Relayed) -> None:
    world.write("a", "1")
    world.relay()
    with world.far.connect() as broker, broker.reader(CLEAN) as reader:
        (row,) = (row.message for placed in iter(reader.read, None) for row in placed)
        append(broker, Message(b"a", b"x"))
        with pytest.raises(RelayTargetTaken, match=r"the last message of topic 'clean' was not written by a relay"):
            world.audit()
        append(broker, row)
    for compacted in (True, False):
        with pytest.raises(RelayTargetTaken, match=r"the message at .* of topic 'clean' was not written by a relay"):
            world.audit(compacted=compacted)
    other = Relayed()
    other.write("a", "1")
    other.far = world.far
    with world.far.connect() as broker:
        broker.delete_topic(CLEAN)
        broker.create_topic(CLEAN)
    world.relay()
    with pytest.raises(RelayTargetTaken, match=r"'clean' is the copy of 'orders' \(.*, not of 'orders'"):
        other.audit()


def test_a_source_without_transactions_has_no_seqnos_to_compare_by(monkeypatch: pytest.MonkeyPatch) -> None:
    forget_origins(monkeypatch)
    world = Relayed(registered=False)
    world.log.plain("1", key="a")
    world.relay()
    with pytest.raises(InvalidRequest, match=r"had had no transactions"):
        world.audit()


def test_a_copy_whose_newest_message_was_compacted_away(world: Relayed) -> None:
    for key, value in [("a", "1"), ("b", "1"), ("a", None)]:
        world.write(key, value)
    world.relay()
    world.far.compact(CLEAN)
    world.write("c", "1")
    found = world.audit()
    assert (found.up_to, found.different, found.copy.records) == (3, 0, 1)


def test_a_copy_in_a_log_whose_newest_records_were_emptied_is_refused(world: Relayed) -> None:
    world.write("a", "1")
    world.write("a", None)
    world.relay()
    with world.far.connect() as broker:
        with broker.reader(CLEAN) as reader:
            rows = [row.message for placed in iter(reader.read, None) for row in placed]
        broker.delete_topic(CLEAN)
        broker.create_topic(CLEAN)
        append(broker, rows[0], Message(None, None, {"tb.v": "1", "tb.removed": "1"}))
    with pytest.raises(InvalidRequest, match=r"unknown where the relay was"):
        world.audit(compacted=False)


def test_an_empty_copy_has_nothing_to_compare(world: Relayed) -> None:
    world.write("a", "1")
    world.far.create_topic(CLEAN)
    found = world.audit()
    assert (found.up_to, found.different, found.log.keys) == (0, 0, 0)


def test_a_copy_in_a_service_is_read_as_committed(world: Relayed, tmp_path: Path) -> None:
    world.write("a", "1")
    world.write("b", "1")
    address = f"file:{tmp_path / 'log'}"
    target = ServiceTarget(connect(address).open_sync, CLEAN)
    Relay(world.cluster.connect, T, target, max_unavailable=20.0).run(follow=False)
    with open_broker(address, read_only=True) as other, world.cluster.connect() as mine:
        copy = RelayedCopy(other, CLEAN, T, mine.incarnation(T), compacted=False)
        found = audit(CommittedLog(mine, T), copy, str(tmp_path))
    assert (found.up_to, found.different, found.copy.keys) == (2, 0, 2)
