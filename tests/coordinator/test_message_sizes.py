"""No message of a coordinator exceeds the limit, and splitting loses and reorders nothing."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from coordinator.coordinator_stage import DECIDED, S, Stage, aborted
from hypothesis import given
from hypothesis import strategies as st
from pyroaring import BitMap64

from broker_io.batch import Batch, Message
from broker_io.errors import MessageTooLarge
from broker_io.position import EARLIEST, Position
from txnbuffer.coordinator.core import DecisionJournal, Markers, TooLarge
from txnbuffer.coordinator.decisions import (
    Consumers,
    DecisionRows,
    EndedIds,
    Group,
    NamedCommit,
    Owner,
    OwnerEpoch,
    PositionCommit,
    RegisteredTopic,
    Retired,
    Row,
    consumers_bytes,
    decode,
    encode,
    retired_blocks,
)
from txnbuffer.coordinator.history import History
from txnbuffer.coordinator.messages import (
    SMALLEST_LIMIT,
    ConsumerPosition,
    CoordinatorConfig,
    GroupHeartbeat,
    Joined,
    MemberAssignments,
)
from txnbuffer.coordinator.shard_messages import ShardMessage, encode_shard_message, pack_shard_messages
from txnbuffer.coordinator.takeover import Acquisition
from txnbuffer.coordinator.transaction import Retirement, Session, SettledIds, TransactionState, block
from txnbuffer.errors import InvalidConfiguration
from txnbuffer.model import MAX_LEAST, Marker, MarkerItem, Outcome, TxnId
from txnbuffer.protocol import encode_marker

LIMIT = SMALLEST_LIMIT
LAST = Position(2**62, 2**62, 2**31 - 1)
SMALL = CoordinatorConfig(one_phase=False, verify_counts=False, max_message_bytes=LIMIT)

NAMES = ("a", "b", "größe" * 20, "t" * 400, *(f"{number:03}" + "x" * 97 for number in range(40)))

limits = st.sampled_from([4096, 5000, 16384])
seeds = st.integers(0, 2**32)


def size(message: Message) -> int:
    return int(Batch.of([message]).sizes()[0])


class Chance(random.Random):
    """Random inputs of clients and logs; drawn with one seed, since a thousand draws are slow."""

    def least(self) -> int:
        return self.choice([self.randint(1, 300), self.randint(1, MAX_LEAST)])

    def count(self) -> int:
        return self.choice([self.randint(1, 100), 2**62])

    def names(self, most: int) -> list[str]:
        return self.sample(NAMES, self.randint(0, min(most, len(NAMES))))

    def row(self) -> Row:
        topics = self.names(self.choice([3, 44]))
        return Row(self.least(), Outcome(self.random() < 0.5), tuple(topics), tuple(self.count() for _ in topics))

    def operation(self) -> tuple[Any, ...]:
        match self.choice(["decide", "decide", "abort", "retire", "put"]):
            case "put":
                return "put", self.choice(NAMES)
            case "retire":
                return "retire", [Retired(self.least(), self.randint(1, 2**20)) for _ in range(self.randint(1, 150))]
            case "abort":
                return "abort", [self.row() for _ in range(self.randint(1, 3))]
            case _:
                names = [NamedCommit(name, self.count()) for name in self.names(1)]
                positions = [PositionCommit(name, self.choice(NAMES), LAST) for name in self.names(4)]
                return "decide", [self.row() for _ in range(self.randint(1, 3))], names, positions


def tried(journal: DecisionJournal, rows: Any, commits: Any, positions: Any) -> int | None:
    """The number of the group, None if it is too large."""
    try:
        return journal.decide(rows, commits, positions)
    except TooLarge:
        return None


def group_of(number: int, rows: Sequence[Row], commits: Sequence[Any] = (), positions: Sequence[Any] = ()) -> Group:
    return Group(number, 1, 0, DecisionRows.of(rows), (), tuple(commits), tuple(positions))


@given(limits, seeds)
def test_groups_never_exceed_the_limit_and_nothing_is_lost(limit: int, seed: int) -> None:
    chance = Chance(seed)
    operations = [chance.operation() for _ in range(chance.randint(1, 40))]
    journal = DecisionJournal(1, 7, 10_000, limit, lambda *_: None)
    said: list[tuple[str, Any]] = []  # in order, group by group or not
    together: list[tuple[int, list[Row], Sequence[NamedCommit], Sequence[PositionCommit]]] = []
    for kind, *what in operations:
        if kind == "put":
            journal.put(RegisteredTopic(what[0], one_phase=False))
            said.append(("topic", what[0]))
        elif kind == "retire":
            blocks = what[0][: retired_blocks(limit)]
            journal.retire(Retirement(Session("session"), BitMap64()), blocks)
            said += [("retired", one) for one in blocks]
        else:
            rows = [(one, TransactionState(TxnId(0, one.least), None, None)) for one in what[0]]
            if kind == "abort":
                journal.abort(rows)
                said += [("row", (one.least, one.outcome)) for one, _ in rows]
                continue
            number = tried(journal, rows, *what[1:])
            alone = size(encode(group_of(journal.next_group, *what)))
            assert (number is not None) == (alone <= limit)
            if number is not None:
                said += [("row", (one.least, one.outcome)) for one, _ in rows]
                together.append((number, *what))
    append = journal.take()
    messages = () if append is None else append.messages
    assert all(size(message) <= limit for message in messages)
    entries = [decode(message) for message in messages]
    groups = {entry.number: entry for entry in entries if isinstance(entry, Group)}
    assert [*groups] == [*range(7, 7 + len(groups))]
    for number, rows, commits, positions in together:
        group = groups[number]
        assert set(rows) <= set(group.rows)
        assert set(commits) <= set(group.names)
        assert set(positions) <= set(group.positions)
    for kind in ("row", "retired", "topic"):
        assert [what for name, what in told(entries) if name == kind] == [what for name, what in said if name == kind]
    # An entry comes after all decisions so far, and before all later ones.
    assert between_topics(told(entries)) == between_topics(said)


def between_topics(said: Sequence[tuple[str, Any]]) -> list[set[Any]]:
    found: list[set[Any]] = [set()]
    for kind, what in said:
        if kind == "topic":
            found.append(set())
        else:
            found[-1].add((kind, what))
    return found


def told(entries: Sequence[Any]) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for entry in entries:
        if isinstance(entry, RegisteredTopic):
            found.append(("topic", entry.topic))
        else:
            found += [("row", (one.least, one.outcome)) for one in entry.rows]
            found += [("retired", one) for one in entry.retired]
    return found


def test_a_group_is_filled_before_the_next_one_begins() -> None:
    journal = DecisionJournal(1, 1, 10_000, 16384, lambda *_: None)
    for least in range(1, 5001):
        journal.decide(
            [(Row(least, Outcome.COMMIT, ("a", "b"), (1, 1)), TransactionState(TxnId(0, least), None, None))]
        )
    append = journal.take()
    assert append is not None
    assert len(append.messages) <= 4


# Requests of clients


def test_a_commit_that_fits_no_message_is_refused_and_aborts() -> None:
    stage = Stage(SMALL)
    topics = [f"{number:02}" + "x" * 300 for number in range(20)]
    stage.owner.client("other", ids=1, topics=topics)
    for topic in topics:
        stage.write(0, topic)
    refused = stage.commit(0, *topics)
    assert isinstance(refused, MessageTooLarge)
    assert f"the commit of {stage.txn(0)} names 20 topics and needs 6" in str(refused)
    assert f"the limit is {LIMIT}: commit fewer topics" in str(refused)
    assert stage.commit(1, "a", "b") is Outcome.COMMIT
    assert stage.query(0) is Outcome.ABORT
    assert aborted(stage.commit(0, *topics))
    assert all(size(message) <= LIMIT for message in stage.world.decisions)
    stage.owner = stage.world.take_over(SMALL)
    stage.owner.settle()
    assert all(stage.world.read(topic).values == [] for topic in topics)
    assert not any(stage.world.read(topic).ongoing for topic in topics)


def test_a_commit_that_fits_a_message_of_its_own_is_taken_whatever_the_bounds_say() -> None:
    stage = Stage(SMALL)
    topics = [f"{number:03}" for number in range(300)]
    stage.owner.client("other", ids=1, topics=topics)
    for topic in topics:
        stage.write(0, topic)
    assert stage.commit(0, *topics) is Outcome.COMMIT
    assert all(stage.world.read(topic).values for topic in topics)


def test_an_abort_of_more_topics_than_a_message_names_is_taken() -> None:
    stage = Stage(SMALL)
    topics = [f"{number:02}" + "x" * 300 for number in range(20)]
    stage.owner.client("other", ids=1, topics=topics)
    for topic in topics:
        stage.write(0, topic)
    assert stage.abort(0, *topics) is Outcome.ABORT
    assert not any(stage.world.read(topic).ongoing for topic in topics)
    assert all(size(message) <= LIMIT for message in stage.world.decisions)


def test_ids_left_in_many_pieces_are_given_back_in_several_groups() -> None:
    stage = Stage(SMALL, ids=3000)
    for at in range(0, 3000, 2):
        stage.owner.coordinator.abort(S, stage.owner.request(), stage.txn(at), (), stage.world.now)
    stage.owner.settle()
    stage.owner.coordinator.close_session(S, stage.owner.request(), stage.world.now)
    stage.owner.settle()
    assert all(size(message) <= LIMIT for message in stage.world.decisions)
    known = History.read(stage.world.decisions)
    gone = [one for group in known.groups.values() for one in group.retired]
    assert sum(one.size for one in gone) >= 1500
    assert not [*stage.owner.coordinator.transactions()]


def test_a_group_begins_on_no_more_partitions_than_an_entry_holds() -> None:
    stage = Stage(SMALL)
    topics = tuple(f"{number:03}" + "x" * 97 for number in range(40))

    def part(count: int, leaves: bool = False) -> Any:
        ends = (LAST,) * count
        return stage.call(
            lambda request: stage.owner.coordinator.heartbeat(
                S, GroupHeartbeat(request, "g", "m", topics[:count], topics[:count], ends, leaves), stage.world.now
            )
        )

    refused = part(40)
    assert isinstance(refused, MessageTooLarge)
    assert "group 'g' with positions on 40 topics" in str(refused)
    assert isinstance(part(20), MemberAssignments)
    assert isinstance(part(40), MessageTooLarge)
    assert part(0, leaves=True) == MemberAssignments(2) or isinstance(part(0, leaves=True), MemberAssignments)
    assert all(size(message) <= LIMIT for message in stage.world.decisions)


def test_a_group_comes_by_commits_to_no_more_topics_than_an_entry_holds() -> None:
    stage = Stage(SMALL, ids=20)
    joined = stage.call(lambda request: stage.owner.coordinator.join_group(S, request, "g", stage.world.now))
    assert isinstance(joined, Joined)
    came = 0
    for at in range(20):
        moved = ConsumerPosition("g", f"{at:03}" + "x" * 300, joined.generation, EARLIEST, LAST)
        result = stage.commit(at, positions=(moved,))
        came += result is Outcome.COMMIT
        assert result is Outcome.COMMIT or isinstance(result, MessageTooLarge)
    assert came == 10
    again = stage.call(lambda request: stage.owner.coordinator.join_group(S, request, "g", stage.world.now))
    assert isinstance(again, Joined)
    assert len(again.positions) == came
    assert all(size(message) <= LIMIT for message in stage.world.decisions)


def test_a_group_of_an_owner_that_could_write_more_waits_for_a_larger_limit() -> None:
    stage = Stage(DECIDED, ids=100)
    joined = stage.call(lambda request: stage.owner.coordinator.join_group(S, request, "g", stage.world.now))
    assert isinstance(joined, Joined)
    moved = [ConsumerPosition("g", f"{number}" + "x" * 300, joined.generation, EARLIEST, LAST) for number in range(20)]
    assert stage.commit(0, positions=tuple(moved)) is Outcome.COMMIT
    before = len(stage.world.decisions)
    smaller = CoordinatorConfig(
        one_phase=False, verify_counts=False, max_message_bytes=LIMIT, remember=1.0, ended_interval=0.0
    )
    stage.owner = stage.world.take_over(smaller, compact=True)
    stage.first = stage.owner.client("after", ids=10)
    again = stage.call(
        lambda request: stage.owner.coordinator.join_group("after", request, "g", stage.world.now), "after"
    )
    assert isinstance(again, MessageTooLarge)
    assert "or raise log.max_message_bytes" in str(again)
    for _ in range(5):
        stage.world.now += 10.0
        stage.owner.coordinator.tick(stage.world.now)
        stage.owner.settle()
    assert all(size(message) <= LIMIT for message in stage.world.decisions[before:])
    forgotten = stage.call(
        lambda request: stage.owner.coordinator.forget_group(request, "g", None, stage.world.now), ""
    )
    assert not isinstance(forgotten, Exception)
    assert stage.owner.coordinator.stopped is None


# Entries that the coordinator writes by itself


def test_a_mark_passes_as_many_outcomes_as_a_message_holds() -> None:
    stage = Stage(CoordinatorConfig(max_message_bytes=LIMIT, low_water_mark_interval=0.0, remember=1e6), ids=60_000)
    progress, chance = stage.owner.coordinator._core.progress, random.Random(5)
    for least in range(stage.first, stage.first + 60_000):
        progress.settled.add(least)
        progress.one_phase[Outcome(chance.random() < 0.5)].add(least)
    committed = progress.one_phase[Outcome.COMMIT].copy()
    for _ in range(50):
        stage.world.now += 1.0
        stage.owner.coordinator.tick(stage.world.now)
        stage.owner.settle()
    marks = History.read(stage.world.decisions).marks.values()
    assert all(size(message) <= LIMIT for message in stage.world.decisions)
    assert BitMap64.union(*(mark.committed for mark in marks)) == committed
    assert stage.owner.coordinator.low_water_mark == stage.first + 60_000 - 1


@pytest.mark.parametrize("skipped", [0, 2**39])
def test_the_lowest_of_what_has_ended_is_written_down_and_what_was_stays_covered(skipped: int) -> None:
    stage = Stage(CoordinatorConfig(max_message_bytes=LIMIT, ended_interval=0.0, max_open_session=200_000), ids=200_000)
    core, chance = stage.owner.coordinator._core, random.Random(5)
    retention, first = stage.owner.coordinator._retention, stage.first + skipped
    was = block(first + 150_000, 10)
    retention._ended = was.copy()
    core.progress.settled.update(was)
    core.progress.settled.update(
        BitMap64(least for least in range(first + 1, first + 150_000) if chance.random() < 0.5)
    )
    retention._cover()
    stage.owner.settle()
    (entry,) = [one for one in map(decode, stage.world.decisions) if isinstance(one, EndedIds)]
    assert all(size(message) <= LIMIT for message in stage.world.decisions)
    assert was.issubset(entry.ids)
    assert entry.ids.issubset(core.progress.settled)
    assert len(entry.ids) > 1000


def test_an_owner_entry_lists_as_many_owners_as_a_message_holds() -> None:
    older = {epoch: OwnerEpoch(epoch, f"{epoch:032}", 2**62, 2**63) for epoch in range(1, 900)}
    entry = Acquisition("o" * 100, 900, "h" * 200, "a" * 32, older, LIMIT, last=2**62).entry()
    assert size(entry) <= LIMIT
    owner = decode(entry)
    assert isinstance(owner, Owner)
    assert owner.owners[-1][:2] == (900, "a" * 32)
    assert len(owner.owners) > 20
    assert [one.epoch for one in owner.owners] == [*range(901 - len(owner.owners), 901)]


@given(limits, seeds)
def test_markers_never_exceed_the_limit(limit: int, seed: int) -> None:
    markers, chance = Markers(2**31 - 1, 2**62, SettledIds(MAX_LEAST), limit), Chance(seed)
    items = [MarkerItem(TxnId(2**31 - 1, chance.least()), Outcome.COMMIT, chance.count()) for _ in range(600)]
    for item in items:
        markers.add("t", True, item)
    taken: list[Marker] = [effect.marker for effect in markers.take()]
    assert [item for marker in taken for item in marker.items] == items
    assert all(size(encode_marker(marker)) <= limit for marker in taken)


@given(limits, seeds)
def test_shard_messages_never_exceed_the_limit_and_lose_nothing(limit: int, seed: int) -> None:
    chance, texts, ids = Chance(seed), ShardMessage._fields[1:3], ("asked", "awaited", "applied")
    found: dict[str, list[Any]] = {field: chance.names(44) for field in (*texts, "known", "missing", "final")}
    for field in ids:
        found[field] = [
            (name, tuple(chance.least() for _ in range(chance.randint(1, 600)))) for name in chance.names(3)
        ]
    found["refused"] = [(name, chance.choice(["why", "größer" * 80, "x" * 500])) for name in chance.names(20)]
    found["floors_wanted"] = [(name, chance.least()) for name in chance.names(44)]
    found["floors"] = [(name, chance.least(), -1) for name in chance.names(44)]
    found = {field: rows for field, rows in found.items() if chance.random() < 0.6}
    sent = [*pack_shard_messages(3, found, limit)]
    assert sent
    assert all(size(encode_shard_message(message)) <= limit for message in sent)
    for field in ShardMessage._fields[1:-1]:
        rows = [row for message in sent for row in getattr(message, field)]
        if field in ids:
            assert flat(rows) == flat(found.get(field, []))
        else:
            assert rows == found.get(field, [])
    final = {topic for message in sent for topic in message.final}
    assert final == {topic for topic, _ in found.get("refused", ())} & {*found.get("final", ())}


def flat(rows: Sequence[tuple[str, tuple[int, ...]]]) -> list[tuple[str, int]]:
    return [(topic, one) for topic, some in rows for one in some]


@given(seeds)
def test_a_group_entry_is_never_larger_than_estimated(seed: int) -> None:
    chance = Chance(seed)
    group, topics = chance.choice(NAMES), chance.names(44)
    entry = Consumers(group, 2**62, tuple((topic, LAST) for topic in topics), since=2**62)
    assert size(encode(entry)) <= consumers_bytes(group, topics)


def test_a_limit_that_holds_no_decision_is_refused() -> None:
    with pytest.raises(InvalidConfiguration, match="max_message_bytes must be at least 4096, got 4095"):
        CoordinatorConfig(max_message_bytes=LIMIT - 1)
