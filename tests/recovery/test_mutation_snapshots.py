"""The bounds of mutation snapshots as keyed entries: stored once, recovered, trimmed, damaged, rebuilt."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from snapshot_driver import (
    Interfering,
    abort_some,
    add_bounds,
    assert_true,
    bounds_of,
    entries,
    flipped,
    manager_on,
    put,
    visible_positions,
    with_entries,
    written,
)
from writing import TopicWriter

from broker_io.errors import DiskFailed, TopicNotFound
from broker_io.memory import MemoryBroker
from broker_io.position import Position
from snapshots.format import (
    END,
    MUTATIONS,
    SEGMENT,
    SNAPSHOT_TOPIC,
    EntryKey,
    decode_end,
    gone,
    message,
    record,
    sealed,
)
from snapshots.scan import scan
from snapshots.writer import acquire
from txnbuffer.mutations.index import SnapshotIndex, SnapshotIndexEntry
from txnbuffer.recovery.codec import MutationsPayload, decode_mutations
from txnbuffer.recovery.rebuild import compare, fold_log, write
from txnbuffer.recovery.restore import read_index, read_snapshot, restore
from txnbuffer.recovery.verify import Level, verify

T = "t"


def streamed(*ends: int, records: int = 12, ledger_entries: int = 100) -> tuple[Any, Any, TopicWriter]:
    """A broker with a topic of plain records, and its owner, which knows and has stored mutation snapshots."""
    broker = MemoryBroker(ledger_entries=ledger_entries)
    owner = manager_on(broker)
    owner.register(T)
    writer = TopicWriter(broker, T)
    for _ in range(records):
        writer.plain("p")
    owner.pump()
    add_bounds(broker, owner, T, *ends)
    owner.snapshot(T)
    return broker, owner, writer


class Life:
    """An owner that stores mutation snapshots, crashes, trims and restarts, beside a list of what is to be known."""

    def __init__(self) -> None:
        self.broker = MemoryBroker(ledger_entries=5)
        self.between = Interfering(self.broker)
        self.writer = TopicWriter(self.broker, T)
        self.owner = manager_on(self.between)
        self.owner.register(T)
        self.positions: list[Position] = []
        self.known: list[tuple[int, int]] = []
        self.durable: list[tuple[int, int]] = []

    def records(self, count: int) -> None:
        for _ in range(count):
            self.writer.plain("p")
        self.owner.pump()

    def bounds(self, length: int) -> None:
        high = self.owner.followed(T).numbered.next_seqno - 1
        start = self.known[-1][1] + 1 if self.known else 1
        if start + length - 1 <= high and self._oldest() <= start:
            self._add(start, start + length - 1)
            self.known.append((start, start + length - 1))

    def snapshot(self) -> None:
        self.owner.snapshot(T)
        self.durable = [*self.known]

    def fail(self, appends: int) -> None:
        """A snapshot fails after some appends; what is durable then shows at the next restart."""
        count = 0

        def before(name: str, topic: str) -> None:
            nonlocal count
            if name == "append" and topic == SNAPSHOT_TOPIC:
                count += 1
                if count > appends:
                    raise DiskFailed("no space")

        self.between.before = before
        with contextlib.suppress(DiskFailed):
            self.snapshot()
        self.between.before = lambda name, topic: None

    def restart(self) -> None:
        self.owner = manager_on(self.between)
        found = bounds_of(self.owner, T)
        assert any(self._agree(found, expected) for expected in (self.durable, self.known))
        self.known, self.durable = found, [*found]

    def trim(self) -> None:
        ledgers = self.broker.ledgers(T)
        self.owner.trim(T, ledgers[len(ledgers) // 2].ledger)
        self.durable = [*self.known]
        assert self._agree(bounds_of(self.owner, T), self.known)

    def _agree(self, found: list[tuple[int, int]], expected: list[tuple[int, int]]) -> bool:
        """Whether all that the log still holds is found; a segment is kept while it holds any of its mutations."""
        needed = [bounds for bounds in expected if bounds[1] >= self._oldest()]
        return found == expected[len(expected) - len(found) :] and needed == found[len(found) - len(needed) :]

    def _oldest(self) -> int:
        return self.owner.followed(T).numbered.oldest(self.broker.ledgers(T)[0].ledger)

    def _add(self, start: int, end: int) -> None:
        followed = self.owner.followed(T)
        missing = followed.numbered.next_seqno - 1 - len(self.positions)
        if missing:
            self.positions += visible_positions(self.broker, self.owner, T)[-missing:]
        index = SnapshotIndex(followed.index, segment_entries=2)
        index.add(SnapshotIndexEntry(start, end, self.positions[start - 1], self.positions[end - 1], end - start + 1))
        followed.index = index.state()


steps = st.lists(
    st.one_of(
        st.tuples(st.just("records"), st.integers(1, 6)),
        st.tuples(st.just("bounds"), st.integers(1, 3)),
        st.tuples(st.just("bounds"), st.integers(1, 2)),
        st.tuples(st.just("snapshot")),
        st.tuples(st.just("fail"), st.integers(0, 2)),
        st.tuples(st.just("restart")),
        st.tuples(st.just("trim")),
    ),
    max_size=25,
)


@given(steps)
@settings(deadline=None)
def test_an_owner_knows_what_was_durable_and_nothing_else(history: list[tuple[Any, ...]]) -> None:
    life = Life()
    for name, *arguments in history:
        getattr(life, name)(*arguments)
    life.snapshot()
    life.restart()
    assert verify(life.broker, T)[0].level is Level.OK


def test_a_segment_is_written_once_and_a_snapshot_writes_what_changed() -> None:
    broker, owner, writer = streamed(1, 2, 3, 4, 5)
    for _ in range(2):
        writer.plain("p")
        owner.pump()
        owner.snapshot(T)
    keys = [one.key for one in written(broker) if one.properties["tb.kind"] == "mutations"]
    assert keys == [b"t-m1", b"t-m2"]
    owner.close()
    assert bounds_of(manager_on(broker), T) == [(n, n) for n in range(1, 6)]


def test_segments_are_dropped_with_their_ledgers() -> None:
    broker, owner, _ = streamed(*range(1, 12), ledger_entries=3)
    owner.snapshot(T)
    owner.trim(T, broker.ledgers(T)[2].ledger)
    owner.snapshot(T)
    assert [*entries(broker, T).numbered[MUTATIONS]] == [4, 5]
    assert bounds_of(owner, T) == [(n, n) for n in range(7, 12)]
    assert bounds_of(manager_on(broker), T) == [(n, n) for n in range(7, 12)]


def test_readers_of_a_topic_do_not_decode_its_mutation_snapshots() -> None:
    broker, _, _ = streamed(1, 2, 3, 4, 5)
    assert restore(broker, scan(broker), T, owned=False).index.state.segments == ()
    assert len(restore(broker, scan(broker), T).index.state.segments) == 2


def test_every_flipped_bit_is_damage_by_name_and_stops_no_topic() -> None:
    broker, _, _ = streamed(1, 2, 3, 4, 5)
    found = entries(broker, T)
    snapshot = read_snapshot(T, found)
    for number, entry in found.numbered[MUTATIONS].items():
        for at in range(len(entry.value)):
            wrong = found.numbered[MUTATIONS] | {number: entry._replace(value=flipped(entry.value, at))}
            with pytest.raises(Exception, match=f"entry t-m{number}: "):
                read_index(T, snapshot, with_entries(found, MUTATIONS, wrong))


@pytest.mark.parametrize("missing", [False, True])
def test_damaged_bounds_are_named_and_a_new_owner_continues_with_the_others(*, missing: bool) -> None:
    broker, owner, writer = streamed(*range(1, 12))
    key = EntryKey(T, MUTATIONS, 3)
    value = entries(broker, T).numbered[MUTATIONS][3].value
    put(broker, gone(key, owner.epoch) if missing else message(key, owner.epoch, flipped(value, 30)))
    errors = [one for one in verify(broker, T) if one.level is Level.ERROR]
    assert [one.entry for one in errors] == ["t-m3"]
    assert "t-m3" in str(compare(broker, T)[2])
    owner = manager_on(broker)
    assert owner.problems == {}
    assert "t-m3" in str(owner.notes)
    left = [(n, n) for n in (1, 2, 3, 4, 7, 8, 9, 10, 11)]
    assert bounds_of(owner, T) == left
    assert owner.followed(T).index.first == 6
    assert_true(owner, broker, T)
    writer.plain("p")
    owner.pump()
    add_bounds(broker, owner, T, 13)
    owner.snapshot(T)
    assert bounds_of(manager_on(broker), T) == [*left, (12, 13)]
    assert [one.level for one in verify(broker, T)] == [Level.OK]


def test_bounds_of_another_chain_are_not_taken() -> None:
    broker, owner, _ = streamed(*range(1, 12))
    segment = decode_mutations(T, 3, entries(broker, T).numbered[MUTATIONS][3]).segment
    other = MutationsPayload(segment).encode(T, owner.epoch, chain_before=bytes(16))
    put(broker, message(EntryKey(T, MUTATIONS, 3), owner.epoch, other))
    assert [one.entry for one in verify(broker, T) if one.level is Level.ERROR] == ["t-m3"]
    owner = manager_on(broker)
    assert "t-m3" in str(owner.notes)
    assert bounds_of(owner, T) == [(n, n) for n in (1, 2, 3, 4, 7, 8, 9, 10, 11)]


def test_damage_of_bounds_hides_no_other_difference() -> None:
    broker, owner, _ = streamed(1, 2, 3, 4, 5)
    owner.followed(T).numbered.next_seqno += 5
    owner.snapshot(T)
    value = entries(broker, T).numbered[MUTATIONS][2].value
    put(broker, message(EntryKey(T, MUTATIONS, 2), owner.epoch, flipped(value, 30)))
    found = [one.what for one in verify(broker, T) if one.level is Level.ERROR]
    assert len(found) == 2
    assert "next seqno: 18 != 13" in str(found)


def test_damaged_bounds_do_not_make_a_trimmed_topic_be_rebuilt() -> None:
    """A rebuild loses what the trimmed ledgers decided, the seqnos and the cursors."""
    broker, owner, _ = streamed(*range(1, 12), ledger_entries=3)
    owner.trim(T, broker.ledgers(T)[2].ledger)
    owner.followed(T).cursors = {"mine": 9}
    owner.snapshot(T)
    owner.close()
    number = min(entries(broker, T).numbered[MUTATIONS])
    value = entries(broker, T).numbered[MUTATIONS][number].value
    put(broker, message(EntryKey(T, MUTATIONS, number), 1, flipped(value, 30)))
    assert compare(broker, T)[2:] == ([], True)
    assert fold_log(broker, T).sound


def test_a_replay_from_the_start_of_the_log_keeps_the_bounds() -> None:
    broker, owner, writer = streamed(*range(1, 8), ledger_entries=7)
    abort_some(writer, *range(1, 12))
    owner.pump()
    owner.snapshot(T)
    owner.close()
    value = entries(broker, T).numbered[SEGMENT][2].value
    put(broker, message(EntryKey(T, SEGMENT, 2), 1, flipped(value, 30)))
    broker.compact(SNAPSHOT_TOPIC)
    broker.trim(SNAPSHOT_TOPIC, broker.ledgers(SNAPSHOT_TOPIC)[-1].ledger)
    owner = manager_on(broker)
    assert "replayed from the start" in str(owner.notes)
    assert bounds_of(owner, T) == [(n, n) for n in range(1, 8)]
    assert owner.followed(T).index.first == 4
    assert_true(manager_on(broker), broker, T)


def test_what_changed_without_messages_is_stored_at_a_close() -> None:
    broker, owner, _ = streamed(1, 2)
    add_bounds(broker, owner, T, 5)
    owner.followed(T).cursors = {"mine": 4}
    owner.close()
    owner = manager_on(broker)
    assert bounds_of(owner, T) == [(1, 1), (2, 2), (3, 5)]
    assert owner.followed(T).cursors == {"mine": 4}
    assert not owner.followed(T).unstored
    before = broker.last_position(SNAPSHOT_TOPIC)
    owner.close()
    assert broker.last_position(SNAPSHOT_TOPIC) == before


def test_a_topic_that_comes_back_names_its_damage() -> None:
    broker, owner, _ = streamed(1, 2, 3, 4, 5)
    value = entries(broker, T).numbered[MUTATIONS][2].value
    owner._ownership.append([message(EntryKey(T, MUTATIONS, 2), owner.epoch, flipped(value, 30))])
    owner.stop(T, TopicNotFound("gone for a moment"))
    owner.recreate(T)
    assert "t-m2" in str(owner.notes)
    assert bounds_of(owner, T) == [(1, 1), (2, 2), (5, 5)]


def test_a_rebuild_keeps_the_bounds_that_the_log_confirms() -> None:
    broker, owner, _ = streamed(1, 2, 3, 4, 5)
    value = entries(broker, T).numbered[MUTATIONS][2].value
    owner._ownership.append([message(EntryKey(T, MUTATIONS, 2), owner.epoch, flipped(value, 30))])
    owner.rebuild(T)
    assert bounds_of(owner, T) == [(1, 1), (2, 2), (5, 5)]
    owner.close()
    assert bounds_of(manager_on(broker), T) == [(1, 1), (2, 2), (5, 5)]
    assert_true(manager_on(broker), broker, T)


def test_a_folded_log_keeps_the_bounds_and_says_why_others_are_lost() -> None:
    broker, owner, _ = streamed(1, 2, 3, 4, 5)
    assert fold_log(broker, T).differences == ()
    value = entries(broker, T).numbered[MUTATIONS][1].value
    put(broker, message(EntryKey(T, MUTATIONS, 1), owner.epoch, flipped(value, 30)))
    owner.close()
    found = fold_log(broker, T)
    assert "its mutation snapshots are lost" in str(found.differences)

    ownership, table = acquire(broker)
    with ownership:
        write(broker, ownership, table, found, 1)
    assert bounds_of(manager_on(broker), T) == [(3, 3), (4, 4), (5, 5)]
    assert fold_log(broker, T).differences == ()


def test_bounds_that_the_log_contradicts_are_found() -> None:
    broker, owner, _ = streamed(1, 2, 3)
    followed = owner.followed(T)
    state = followed.index
    (entry,) = state.unsealed
    moved = replace(state.unsealed, firsts=type(state.unsealed.firsts).of([entry.last._replace(entry=9)]))
    followed.index = state._replace(unsealed=moved)
    owner.snapshot(T)
    assert "1 mutation snapshots, such as 3 to 3, are elsewhere in the log" in str(verify(broker, T))
    owner.rebuild(T)
    assert bounds_of(owner, T) == [(1, 1), (2, 2)]


@pytest.mark.parametrize("deleted", [False, True])
def test_an_older_snapshot_brings_its_mutation_snapshots_back(*, deleted: bool) -> None:
    broker, owner, writer = streamed(1, 2, 3, 4, 5)
    writer.plain("p")
    owner.pump()
    owner.snapshot(T)
    end = entries(broker, T).end
    others = [gone(EntryKey(T, MUTATIONS, 1), owner.epoch)] if deleted else []
    put(broker, *others, message(EntryKey(T, END), owner.epoch, flipped(end.value, 30)))
    owner = manager_on(broker)
    assert "older snapshot" in str(owner.notes)
    assert bounds_of(owner, T) == [(n, n) for n in range(1, 6)]
    assert bounds_of(manager_on(broker), T) == [(n, n) for n in range(1, 6)]


def test_a_snapshot_of_version_1_is_read_and_replaced_by_version_2() -> None:
    broker, owner, _ = streamed(1, 2)
    found = entries(broker, T)
    end = decode_end(T, found.end)
    chain = end.chains[SEGMENT]
    values = {
        "topic": T,
        "incarnation": end.incarnation,
        "epoch": end.epoch,
        "snapshot_id": end.snapshot_id + 1,
        "deleted": False,
        "first_part": chain.first,
        "next_part": chain.next,
        "chain_first": chain.before,
        "chain_next": chain.after,
        "next_spill": end.next_overflow,
        "spills": [],
        "state": end.state,
    }
    old = message(EntryKey(T, END), owner.epoch, sealed(record("end-1", "snapshots"), values, "digest"))
    put(broker, old._replace(properties={**old.properties, "tb.v": "1"}))
    owner = manager_on(broker)
    assert owner.notes == []
    assert bounds_of(owner, T) == [(1, 1), (2, 2)]
    owner.snapshot(T)
    assert entries(broker, T).end.version == "2"
    assert bounds_of(manager_on(broker), T) == [(1, 1), (2, 2)]
