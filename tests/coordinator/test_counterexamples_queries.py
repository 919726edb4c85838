"""Counterexamples of outcome queries about ongoing transactions: H7, H8, H9."""

from __future__ import annotations

from coordinator.coordinator_stage import DECIDED, S, ask_abort, ask_commit, query, txn
from coordinator_world import Owner, World

from txnbuffer.coordinator.history import History
from txnbuffer.coordinator.messages import (
    Leased,
    State,
)
from txnbuffer.model import Outcome


class TestH7Ask:
    def decided(self) -> tuple[World, Owner, int]:
        """A COMMIT on a and b is durable; its markers are not durable yet."""
        world = World()
        owner = world.take_over(DECIDED)
        first = owner.client(S)
        for topic in "ab":
            world.record(topic, txn(first), 1, b"x")
            owner.pump(topic)
        ask_commit(owner, first, "a", "b")
        return world, owner, first

    def test_undecided_says_nothing(self) -> None:
        _, owner, _ = self.decided()
        owner.query_outcomes("b")
        owner.land_append()
        owner.query_outcomes("b")
        assert not owner.markers

    def test_a_marker_that_is_being_written_is_not_repeated(self) -> None:
        world, owner, first = self.decided()
        owner.land_append()
        owner.acknowledge_append()
        assert [marker.topic for marker in owner.markers] == ["a", "b"]
        owner.query_outcomes("b")
        assert len(owner.markers) == 2
        owner.land_marker(1)
        owner.land_marker(0)
        assert world.read("b").values == world.read("a").values == [b"x"]
        assert world.read("b").outcomes == {txn(first): Outcome.COMMIT}

    def test_committed_says_commit_again_once(self) -> None:
        world, owner, first = self.decided()
        owner.land_append()
        owner.acknowledge_append()
        owner.land_marker(1)
        owner.acknowledge_marker()
        for _ in range(3):
            owner.query_outcomes("b")
        assert [marker.topic for marker in owner.markers] == ["a", "b"]
        assert [item.outcome for marker in owner.markers for item in marker.marker.items] == [Outcome.COMMIT] * 2
        owner.settle()
        assert world.read("b").outcomes == {txn(first): Outcome.COMMIT}

    def test_settled_says_abort_once_until_that_fails_or_the_topic_is_another_one(self) -> None:
        _, owner, _ = self.decided()
        owner.land_append()
        owner.acknowledge_append()
        for _ in "ab":
            owner.land_marker()
            owner.acknowledge_marker()
        for _ in range(3):
            owner.query_outcomes("b")
        assert [marker.marker.items[0].outcome for marker in owner.markers] == [Outcome.ABORT]
        owner.lose_marker()
        owner.tick(1.0)
        assert not owner.markers
        for _ in range(3):
            owner.query_outcomes("b")
        assert len(owner.markers) == 1
        owner.coordinator.topic_missing("b", owner.world.now)
        owner.query_outcomes("b")
        assert len(owner.markers) == 2
        owner.pump("b")
        owner.query_outcomes("b")
        assert len(owner.markers) == 2

    def test_answered_queries_are_forgotten_once_the_marker_is_read(self) -> None:
        _, owner, _ = self.decided()
        owner.land_append()
        owner.acknowledge_append()
        owner.land_marker(1)
        owner.acknowledge_marker()
        owner.query_outcomes("b")
        assert owner.coordinator._core.markers._answered
        owner.pump("b")
        assert not owner.coordinator._core.markers._answered

    def test_a_topic_that_the_commit_does_not_name_gets_abort(self) -> None:
        world, owner, first = self.decided()
        world.topic("c")
        owner.tail("c")
        world.record("c", txn(first), 1, b"stray")
        owner.pump("c")
        owner.land_append()
        owner.acknowledge_append()
        owner.query_outcomes("c")
        owner.settle()
        assert world.read("c").outcomes == {txn(first): Outcome.ABORT}
        assert world.read("a").values == [b"x"]

    def test_an_abort_says_abort_once_it_is_durable(self) -> None:
        world = World()
        owner = world.take_over(DECIDED)
        first = owner.client(S)
        world.record("a", txn(first), 1)
        owner.pump("a")
        ask_abort(owner, first)
        owner.query_outcomes("a")
        assert not owner.markers
        owner.land_append()
        owner.query_outcomes("a")
        assert not owner.markers
        owner.acknowledge_append()
        owner.query_outcomes("a")
        owner.settle()
        assert world.read("a").outcomes == {txn(first): Outcome.ABORT}

    def test_at_or_below_the_durable_mark_it_is_abort(self) -> None:
        world = World()
        owner = world.take_over(DECIDED)
        first = owner.client(S, ids=1)
        owner.coordinator.return_ids(S, 98, [(first, 1)], world.now)
        owner.age(3)
        assert owner.coordinator.low_water_mark == first
        world.record("a", txn(first), 1)
        owner.pump("a")
        owner.query_outcomes("a")
        owner.settle()
        assert world.read("a").ongoing == []


class TestH8UnknownIds:
    def test_a_zombie_that_does_not_know_the_id_writes_no_marker(self) -> None:
        world = World()
        zombie = world.take_over(DECIDED)
        zombie.client("other")
        owner = world.take_over(DECIDED)
        first = owner.client(S)
        world.record("a", txn(first), 1, b"x")
        world.record("b", txn(first), 1, b"x")
        zombie.pump("a")
        zombie.query_outcomes("a")
        zombie.settle()
        assert zombie.stopped
        told = ask_commit(owner, first, "a", "b")
        owner.settle()
        assert owner.heard(S, told) is Outcome.COMMIT
        assert world.read("a").values == world.read("b").values == [b"x"]

    def test_an_id_that_a_zombie_would_retire_is_used_through_the_owner(self) -> None:
        world = World()
        zombie = world.take_over(DECIDED)
        first = zombie.client(S)
        zombie.coordinator.session_disconnected(S, world.now)
        owner = world.take_over(DECIDED)
        owner.settle()
        owner.open(S, txn(first))
        zombie.tick(60.0)
        world.record("a", txn(first), 1, b"x")
        zombie.pump("a")
        zombie.query_outcomes("a")
        assert not zombie.markers
        zombie.settle()
        ask_commit(owner, first, "a")
        owner.settle()
        assert world.read("a").values == [b"x"]

    def test_an_id_that_nobody_leased_is_aborted_in_the_log_first(self) -> None:
        world = World()
        owner = world.take_over()
        owner.client(S)
        world.record("a", txn(500), 1)
        owner.pump("a")
        owner.query_outcomes("a")
        assert owner.appends
        assert not owner.markers
        owner.settle()
        assert world.read("a").ongoing == []
        assert 500 in {row.least for group in History.read(world.decisions).groups.values() for row in group.rows}

    def test_such_an_id_is_never_leased(self) -> None:
        world = World()
        owner = world.take_over()
        first = owner.client(S, ids=1)
        world.record("a", txn(first + 3), 1)
        owner.pump("a")
        owner.query_outcomes("a")
        owner.settle()
        leased: list[int] = []
        for take_over in (False, True):
            holder = world.take_over() if take_over else owner
            holder.open("other")
            for request in range(1000, 1003):
                holder.coordinator.lease("other", request, 1, world.now)
                holder.settle()
                block = holder.heard("other", request)
                assert isinstance(block, Leased)
                leased += range(block.first, block.first + block.size)
        assert leased[:3] == [first + 1, first + 2, first + 4]
        assert leased[3:] == [*range(max(first + 5, leased[3]), leased[3] + 3)]


class TestH9Asking:
    def test_records_that_a_dead_client_left_are_ended(self) -> None:
        """They reach b after the ABORT, whose decision names no topic."""
        world = World()
        owner = world.take_over()
        first = owner.client(S)
        owner.coordinator.session_disconnected(S, world.now)
        owner.age(40)
        world.record("b", txn(first), 1)
        owner.pump("b")
        assert world.read("b").ongoing == [txn(first)]
        owner.query_outcomes("b")
        owner.settle()
        assert world.read("b").ongoing == []

    def test_an_unannounced_transaction_is_watched_from_the_first_query(self) -> None:
        world = World()
        owner = world.take_over()
        first = owner.client(S)
        world.record("a", txn(first), 1)
        owner.pump("a")
        owner.query_outcomes("a")
        owner.age(30)
        assert query(owner, first) is State.OPEN
        owner.age(40)
        assert query(owner, first) is Outcome.ABORT
        owner.query_outcomes("a")
        owner.settle()
        assert world.read("a").ongoing == []
