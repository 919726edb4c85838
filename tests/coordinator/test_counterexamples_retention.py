"""Counterexamples of retention: H11, H18, H19, H20."""

from __future__ import annotations

import pytest
from coordinator.coordinator_stage import S, aborted, ask_abort, ask_commit, query, txn
from coordinator_world import Owner, World, position

from txnbuffer.coordinator.decisions import EndedIds, decode
from txnbuffer.coordinator.history import History
from txnbuffer.coordinator.messages import (
    Begin,
    Branch,
    ConsumerPosition,
    CoordinatorConfig,
    Joined,
    NameOpened,
    ProducerSequence,
    Result,
    SessionOpened,
    State,
)
from txnbuffer.errors import (
    AlreadyCommitted,
    OutcomeForgotten,
    PositionConflict,
    ProducerFenced,
    StaleGeneration,
)
from txnbuffer.model import Outcome


class TestH11Forgetting:
    def test_a_group_stays_while_an_older_open_id_holds_the_mark_and_no_bitmap_covers_it(self) -> None:
        config = CoordinatorConfig(
            remember=10.0, ended_interval=1e9, max_transaction_timeout=1e6, transaction_timeout=1e5
        )
        world, owner, first = self.held(config)
        owner.age(30)
        owner.tick()
        kept = History.read(world.compacted()).groups
        assert [row.least for group in kept.values() for row in group.rows] == [first + 1]
        owner.coordinator.return_ids(S, 97, [(first, 1)], world.now)

    def test_a_group_stays_as_long_as_its_outcomes_are_remembered(self) -> None:
        world = World()
        owner = world.take_over(CoordinatorConfig(remember=20.0))
        first = owner.client(S, ids=1)
        assert ask_commit(owner, first)
        owner.settle()
        owner.age(10)
        assert owner.coordinator.low_water_mark == first
        assert len(History.read(world.compacted()).groups) == 1
        successor = world.take_over(CoordinatorConfig(remember=20.0), compact=True)
        assert query(successor, first) is Outcome.COMMIT
        owner.settle()
        successor.age(15)
        assert History.read(world.compacted()).groups == {}

    def test_the_ended_bitmap_is_durable_before_the_tombstone(self) -> None:
        config = CoordinatorConfig(
            remember=10.0, ended_interval=0.0, max_transaction_timeout=1e6, transaction_timeout=1e5, session_timeout=1e6
        )
        world, owner, first = self.held(config)
        world.now += 20
        owner.tick()
        entries = [decode(one) for append in owner.appends for one in append.messages]
        assert [set(entry.ids) for entry in entries if isinstance(entry, EndedIds)] == [{first + 1}]
        assert None not in entries
        owner.tick()
        assert None not in [decode(one) for append in owner.appends for one in append.messages]
        owner.settle()
        owner.age(2)
        assert History.read(world.compacted()).groups == {}
        successor = world.take_over(config, compact=True)
        successor.settle()
        assert isinstance(query(successor, first + 1), OutcomeForgotten)
        told = successor.open(S, txn(first), txn(first + 1))
        successor.settle()
        opened = successor.heard(S, told)
        assert isinstance(opened, SessionOpened)
        assert opened.states[0] == (txn(first), State.OPEN)
        assert isinstance(opened.states[1][1], OutcomeForgotten)

    def held(self, config: CoordinatorConfig) -> tuple[World, Owner, int]:
        """`first` is open and holds the mark; `first + 1` has committed on two topics."""
        world = World()
        owner = world.take_over(config)
        first = owner.client(S)
        world.record("a", txn(first), 1)
        owner.pump("a")
        owner.query_outcomes("a")
        for topic in "ab":
            world.record(topic, txn(first + 1), 1)
        ask_commit(owner, first + 1, "a", "b")
        owner.settle()
        return world, owner, first

    def test_a_forgotten_outcome_is_never_reported_as_aborted(self) -> None:
        world = World()
        owner = world.take_over(CoordinatorConfig(remember=10.0))
        first = owner.client(S)
        world.record("a", txn(first), 1)
        told = ask_commit(owner, first, "a")
        owner.settle()
        assert owner.heard(S, told) is Outcome.COMMIT
        owner.age(5)
        assert query(owner, first) is Outcome.COMMIT
        owner.age(15)
        assert isinstance(query(owner, first), OutcomeForgotten)
        told = ask_commit(owner, first, "a")
        assert isinstance(owner.heard(S, told), OutcomeForgotten)


class TestH18Branches:
    def test_winners_commit_and_all_others_abort(self) -> None:
        world = World()
        owner = world.take_over()
        lead = owner.client(S)
        winner, loser = lead + 1, lead + 2
        for least in (lead, winner, loser):
            world.record("a", txn(least), 1, str(least).encode())
        branch = Branch(txn(winner), ("a",), (1,))
        told = ask_commit(owner, lead, "a", winners=(branch,), losers=(txn(loser),))
        owner.settle()
        assert owner.heard(S, told) is Outcome.COMMIT
        owner.query_outcomes("a")
        owner.settle()
        assert world.read("a").values == [str(lead).encode(), str(winner).encode()]
        assert query(owner, loser) is Outcome.ABORT

    def test_a_winner_that_has_ended_aborts_the_whole(self) -> None:
        world = World()
        owner = world.take_over()
        lead = owner.client(S)
        world.record("a", txn(lead), 1, b"lead")
        world.record("a", txn(lead + 1), 1, b"branch")
        ask_abort(owner, lead + 1, "a")
        owner.settle()
        told = ask_commit(owner, lead, "a", winners=(Branch(txn(lead + 1), ("a",), (1,)),))
        owner.settle()
        assert aborted(owner.heard(S, told))
        owner.query_outcomes("a")
        owner.settle()
        assert world.read("a").values == []
        assert world.read("a").ongoing == []


class TestH19ConsumerPositions:
    def move(self, generation: int, start: int, end: int) -> ConsumerPosition:

        return ConsumerPosition("group", "source", generation, position(start), position(end))

    def join(self, owner: Owner) -> Joined:
        request = owner.request()
        owner.coordinator.join_group(S, request, "group", owner.world.now)
        owner.settle()
        joined = owner.heard(S, request)
        assert isinstance(joined, Joined)
        return joined

    def commit(self, owner: Owner, least: int, move: ConsumerPosition) -> Result | None:
        owner.world.record("a", txn(least), 1, str(least).encode())
        request = ask_commit(owner, least, "a", positions=(move,))
        owner.settle()
        return owner.heard(S, request)

    def test_a_zombie_consumer_is_refused(self) -> None:
        world = World()
        owner = world.take_over()
        first = owner.client(S)
        zombie = self.join(owner).generation
        new = self.join(owner).generation
        assert self.commit(owner, first, self.move(new, 0, 10)) is Outcome.COMMIT
        assert isinstance(self.commit(owner, first + 1, self.move(zombie, 0, 10)), StaleGeneration)
        assert world.read("a").values == [str(first).encode()]

    @pytest.mark.parametrize("compact", [False, True])
    def test_a_commit_starts_where_the_last_one_ended(self, compact: bool) -> None:
        config = CoordinatorConfig(remember=10.0, ended_interval=0.0)
        world = World()
        owner = world.take_over(config)
        first = owner.client(S)
        generation = self.join(owner).generation
        assert self.commit(owner, first, self.move(generation, 0, 10)) is Outcome.COMMIT
        assert isinstance(self.commit(owner, first + 1, self.move(generation, 0, 10)), PositionConflict)
        owner.age(30)
        successor = world.take_over(config, compact=compact)
        first = successor.client(S)
        assert isinstance(self.commit(successor, first, self.move(generation, 5, 10)), PositionConflict)
        assert self.commit(successor, first + 1, self.move(generation, 10, 12)) is Outcome.COMMIT
        assert self.join(successor).positions == (("source", (1, 12, -1)),)


class TestH20NamedProducers:
    def open_name(self, owner: Owner, session: str = S) -> NameOpened:
        request = owner.request()
        owner.coordinator.open_name(session, request, "query", owner.world.now)
        owner.settle()
        opened = owner.heard(session, request)
        assert isinstance(opened, NameOpened)
        return opened

    def commit(self, owner: Owner, least: int, number: int, opening: int) -> Result | None:
        owner.world.record("a", txn(least), 1, str(least).encode())
        request = ask_commit(owner, least, "a", sequence=ProducerSequence("query", number, opening))
        owner.settle()
        return owner.heard(S, request)

    @pytest.mark.parametrize("compact", [False, True])
    def test_a_batch_retried_days_later_is_already_committed(self, compact: bool) -> None:
        config = CoordinatorConfig(remember=10.0)
        world = World()
        owner = world.take_over(config)
        first = owner.client(S)
        assert self.commit(owner, first, 7, self.open_name(owner).epoch) is Outcome.COMMIT
        owner.age(40)
        assert History.read(world.compacted()).groups == {}
        successor = world.take_over(config, compact=compact)
        least = successor.client(S)
        opened = self.open_name(successor)
        assert opened.committed == 7
        result = self.commit(successor, least, 7, opened.epoch)
        assert isinstance(result, AlreadyCommitted)
        successor.query_outcomes("a")
        successor.settle()
        assert world.read("a").values == [str(first).encode()]
        assert self.commit(successor, least + 1, 8, opened.epoch) is Outcome.COMMIT

    def test_opening_a_name_fences_its_holder_and_ends_its_attempt(self) -> None:
        world = World()
        owner = world.take_over()
        first = owner.client(S)
        old = self.open_name(owner)
        world.record("a", txn(first), 1, b"x")
        request = ask_commit(owner, first, "a", sequence=ProducerSequence("query", 1, old.epoch))
        owner.open("other")
        new = self.open_name(owner, "other")
        assert new.epoch > old.epoch
        assert isinstance(owner.heard(S, request), ProducerFenced)
        assert new.committed == 0
        assert isinstance(self.commit(owner, first + 1, 2, old.epoch), ProducerFenced)

    def test_opening_a_name_ends_what_was_only_begun_under_it(self) -> None:
        world = World()
        owner = world.take_over()
        first = owner.client(S)
        sequence = ProducerSequence("query", 1, self.open_name(owner).epoch)
        owner.coordinator.begin_many(S, [Begin(owner.request(), txn(first), None, None, sequence)], world.now)
        assert query(owner, first) is State.OPEN
        owner.open("other")
        self.open_name(owner, "other")
        assert query(owner, first) is Outcome.ABORT

    def test_a_deleted_name_starts_again_whatever_is_compacted(self) -> None:
        config = CoordinatorConfig(remember=10.0)
        world = World()
        owner = world.take_over(config)
        first = owner.client(S)
        opened = self.open_name(owner)
        assert self.commit(owner, first, 7, opened.epoch) is Outcome.COMMIT
        owner.coordinator.delete_name(S, 900, "query", world.now)
        owner.settle()
        assert isinstance(self.commit(owner, first + 1, 8, opened.epoch), ProducerFenced)
        for _ in range(3):
            state = History.read(world.compacted()).names.get("query")
            assert state is None or state.committed == 0
            owner.age(10)
        assert "query" not in History.read(world.compacted()).names
        assert self.open_name(world_owner(world, config)).committed == 0


def world_owner(world: World, config: CoordinatorConfig) -> Owner:
    owner = world.take_over(config, compact=True)
    owner.client(S)
    return owner
