"""The counterexamples that concern the coordinator: for each rule the history that breaks without it."""

from __future__ import annotations

import pytest
from coordinator_world import SHARD, Owner, World

from txnbuffer.coordinator.config import Config
from txnbuffer.coordinator.entries import EndedIds, Mark, decode
from txnbuffer.coordinator.history import History
from txnbuffer.coordinator.messages import (
    Branch,
    Commit,
    ConsumerPosition,
    Joined,
    Leased,
    NameOpened,
    Naming,
    Opened,
    Result,
)
from txnbuffer.coordinator.ownership import Acquisition
from txnbuffer.coordinator.states import State
from txnbuffer.errors import (
    AlreadyCommitted,
    OutcomeForgotten,
    PositionConflict,
    ProducerFenced,
    StaleGeneration,
    TransactionAborted,
)
from txnbuffer.model import Outcome, TxnId

DECIDED = Config(one_phase=False, verify_counts=False)
S = "session"


def txn(least: int) -> TxnId:
    return TxnId(SHARD, least)


def ask_commit(owner: Owner, least: int, *topics: str, session: str = S, **more: object) -> int:
    """Commit with one record in each topic; returns the request."""
    request = owner.request()
    commit = Commit(request, txn(least), topics, (1,) * len(topics), **more)  # type: ignore[arg-type]  # by keyword
    owner.coordinator.commit_many(session, [commit], owner.world.now)
    owner.take()
    return request


def ask_abort(owner: Owner, least: int, *topics: str) -> int:
    request = owner.request()
    owner.coordinator.abort(S, request, txn(least), topics, owner.world.now)
    owner.take()
    return request


def query(owner: Owner, least: int) -> Result | None:
    request = owner.request()
    owner.coordinator.query(S, request, txn(least), owner.world.now)
    owner.take()
    return owner.heard(S, request)


def aborted(result: Result | None) -> bool:
    return isinstance(result, TransactionAborted)


class TestH4ZombieOnePhase:
    def test_marker_of_a_zombie_lands_behind_the_border(self) -> None:
        world = World()
        zombie = world.take_over()
        first = zombie.client(S)
        world.record("a", txn(first), 1, b"x")
        ask_commit(zombie, first, "a")
        zombie.count()
        owner = world.take_over()
        owner.settle()
        owner.open(S, txn(first))
        told = ask_abort(owner, first, "a")
        owner.settle()
        assert owner.heard(S, told) is Outcome.ABORT
        zombie.land_marker()
        zombie.pump("a")
        assert zombie.stopped
        assert world.read("a").values == []
        assert S not in [session for session, _ in zombie.answers if zombie.answers[session, _] is Outcome.COMMIT]

    def test_marker_of_a_zombie_lands_before_the_border(self) -> None:
        world = World()
        zombie = world.take_over()
        first = zombie.client(S)
        world.record("a", txn(first), 1, b"x")
        ask_commit(zombie, first, "a")
        zombie.count()
        owner = world.take_over()
        zombie.land_marker()
        owner.open(S, txn(first))
        told = ask_abort(owner, first, "a")
        owner.take()
        assert owner.heard(S, told) is None
        owner.settle()
        assert owner.heard(S, told) is Outcome.COMMIT
        assert world.read("a").values == [b"x"]

    def test_nothing_is_said_of_older_ids_before_the_border_is_read(self) -> None:
        world = World()
        first = world.take_over().client(S)
        owner = world.take_over()
        opened = owner.open(S, txn(first))
        asked = ask_abort(owner, first, "a")
        owner.tail("a")
        world.record("a", txn(first), 1)
        owner.pump("a")
        owner.ask("a")
        owner.tick(100.0)
        assert query(owner, first) is None
        assert not owner.coordinator.ready
        assert (owner.heard(S, opened), owner.heard(S, asked)) == (None, None)
        assert not owner.markers
        owner.settle()
        assert owner.heard(S, asked) is Outcome.ABORT

    def test_new_leases_are_served_meanwhile(self) -> None:
        world = World()
        world.take_over().client(S)
        owner = world.take_over()
        borders, owner.borders = owner.borders, []
        first = owner.client("new")
        world.record("a", txn(first), 1, b"x")
        told = ask_commit(owner, first, "a", session="new")
        owner.settle()
        assert owner.heard("new", told) is Outcome.COMMIT
        assert not owner.coordinator.ready
        owner.borders = borders
        owner.settle()
        assert owner.coordinator.ready

    def test_a_topic_is_durably_known_before_its_first_one_phase_marker(self) -> None:
        world = World()
        owner = world.take_over()
        first = owner.client(S, topics=())
        owner.coordinator.register_topic(S, 99, "a", world.now)
        owner.take()
        owner.snapshot()
        assert owner.heard(S, 99) is None
        owner.land_append()
        assert owner.heard(S, 99) is None
        owner.acknowledge_append()
        assert owner.heard(S, 99) is not None
        world.record("a", txn(first), 1, b"x")
        ask_commit(owner, first, "a")
        owner.settle()
        assert History.read(world.decisions).topics == {"a": True}

    def test_a_commit_wins_over_the_abort_of_a_topic_that_it_does_not_name(self) -> None:
        """The stray record on b is ended there as ABORT, while the transaction committed on a."""
        world = World()
        owner = world.take_over()
        first = owner.client(S)
        world.record("a", txn(first), 1, b"x")
        ask_commit(owner, first, "a")
        owner.settle()
        world.record("b", txn(first), 1, b"stray")
        owner.pump("b")
        owner.ask("b")
        owner.settle()
        assert world.read("b").outcomes[txn(first)] is Outcome.ABORT
        successor = world.take_over()
        successor.settle()
        assert query(successor, first) is Outcome.COMMIT


def test_h5_one_phase_outcomes_outlive_the_low_water_mark() -> None:
    world = World()
    owner = world.take_over()
    first = owner.client(S, ids=3)
    for least, commits in ((first, True), (first + 1, False)):
        world.record("a", txn(least), 1)
        ask_commit(owner, least, "a") if commits else ask_abort(owner, least, "a")
    owner.coordinator.give_back(S, 98, first + 2, 1, world.now)
    owner.age(5)
    assert owner.coordinator.low_water_mark == first + 2
    world.record("a", txn(first + 3), 1)
    owner.settle()
    successor = world.take_over(compact=True)
    successor.settle()
    assert query(successor, first) is Outcome.COMMIT
    assert query(successor, first + 1) is Outcome.ABORT


class TestH6LowWaterMark:
    def test_markers_carry_a_durable_mark_only(self) -> None:
        world = World()
        owner = world.take_over()
        first = owner.client(S, ids=2)
        world.record("a", txn(first), 1)
        ask_commit(owner, first, "a")
        owner.settle()
        owner.tick(5.0)
        assert [type(decode(message)) for message in owner.appends[-1].messages] == [Mark]
        assert owner.coordinator.low_water_mark == 0
        world.record("a", txn(first + 1), 1)
        ask_commit(owner, first + 1, "a")
        owner.count()
        assert owner.markers[-1].marker.low_water_mark == 0
        owner.land_append()
        assert owner.coordinator.low_water_mark == 0
        owner.acknowledge_append()
        assert owner.coordinator.low_water_mark == first

    def test_an_owner_refuses_ids_at_or_below_it(self) -> None:
        world = World()
        owner = world.take_over()
        first = owner.client(S, ids=2)
        owner.coordinator.give_back(S, 98, first, 1, world.now)
        owner.age(3)
        assert owner.coordinator.low_water_mark == first
        told = ask_commit(owner, first, "a")
        assert aborted(owner.heard(S, told))

    def test_unused_ids_count_as_ended_only_once_that_is_durable(self) -> None:
        world = World()
        owner = world.take_over()
        first = owner.client(S, ids=1)
        owner.coordinator.give_back(S, 98, first, 1, world.now)
        owner.tick(5.0)
        owner.tick(5.0)
        assert all(not isinstance(decode(one), Mark) for append in owner.appends for one in append.messages)


class TestH7Ask:
    def decided(self) -> tuple[World, Owner, int]:
        """A COMMIT on a and b is durable; its markers are on their way."""
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
        owner.ask("b")
        owner.land_append()
        owner.ask("b")
        assert not owner.markers

    def test_committed_says_commit_again(self) -> None:
        world, owner, first = self.decided()
        owner.land_append()
        owner.acknowledge_append()
        queued = len(owner.markers)
        owner.ask("b")
        owner.land_marker(queued)
        owner.land_marker(0)
        assert world.read("b").values == world.read("a").values == [b"x"]
        assert world.read("b").outcomes == {txn(first): Outcome.COMMIT}

    def test_a_topic_that_the_commit_does_not_name_gets_abort(self) -> None:
        world, owner, first = self.decided()
        world.topic("c")
        owner.tail("c")
        world.record("c", txn(first), 1, b"stray")
        owner.pump("c")
        owner.land_append()
        owner.acknowledge_append()
        owner.ask("c")
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
        owner.ask("a")
        assert not owner.markers
        owner.land_append()
        owner.ask("a")
        assert not owner.markers
        owner.acknowledge_append()
        owner.ask("a")
        owner.settle()
        assert world.read("a").outcomes == {txn(first): Outcome.ABORT}

    def test_at_or_below_the_durable_mark_it_is_abort(self) -> None:
        world = World()
        owner = world.take_over(DECIDED)
        first = owner.client(S, ids=1)
        owner.coordinator.give_back(S, 98, first, 1, world.now)
        owner.age(3)
        assert owner.coordinator.low_water_mark == first
        world.record("a", txn(first), 1)
        owner.pump("a")
        owner.ask("a")
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
        zombie.ask("a")
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
        zombie.ask("a")
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
        owner.ask("a")
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
        owner.ask("a")
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
        assert leased == [first + 1, first + 2, first + 4, first + 5, first + 6, first + 7]


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
        owner.ask("b")
        owner.settle()
        assert world.read("b").ongoing == []

    def test_a_transaction_that_nobody_announced_is_watched_from_the_first_asking(self) -> None:
        world = World()
        owner = world.take_over()
        first = owner.client(S)
        world.record("a", txn(first), 1)
        owner.pump("a")
        owner.ask("a")
        owner.age(30)
        assert query(owner, first) is State.OPEN
        owner.age(40)
        assert query(owner, first) is Outcome.ABORT
        owner.ask("a")
        owner.settle()
        assert world.read("a").ongoing == []


class TestH11Forgetting:
    def test_a_group_stays_while_an_older_open_id_holds_the_mark_and_no_bitmap_covers_it(self) -> None:
        config = Config(remember=10.0, ended_interval=1e9, max_transaction_timeout=1e6, transaction_timeout=1e5)
        world, owner, first = self.held(config)
        owner.age(30)
        owner.tick()
        kept = History.read(world.compacted()).groups
        assert [row.least for group in kept.values() for row in group.rows] == [first + 1]
        owner.coordinator.give_back(S, 97, first, 1, world.now)

    def test_the_ended_bitmap_is_durable_before_the_tombstone(self) -> None:
        config = Config(remember=10.0, ended_interval=0.0, max_transaction_timeout=1e6, transaction_timeout=1e5)
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
        assert isinstance(opened, Opened)
        assert opened.states[0] == (txn(first), State.OPEN)
        assert isinstance(opened.states[1][1], OutcomeForgotten)

    def held(self, config: Config) -> tuple[World, Owner, int]:
        """`first` is open and holds the mark; `first + 1` has committed on two topics."""
        world = World()
        owner = world.take_over(config)
        first = owner.client(S)
        world.record("a", txn(first), 1)
        owner.pump("a")
        owner.ask("a")
        for topic in "ab":
            world.record(topic, txn(first + 1), 1)
        ask_commit(owner, first + 1, "a", "b")
        owner.settle()
        return world, owner, first

    def test_a_forgotten_outcome_is_never_told_as_aborted(self) -> None:
        world = World()
        owner = world.take_over(Config(remember=10.0))
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


class TestH12OneEpoch:
    def test_an_owner_that_finds_its_own_epoch_before_its_entry_writes_a_higher_one(self) -> None:
        acquisition = Acquisition("new", 5)
        assert decode(acquisition.entry()) == (6, "new")
        assert not acquisition.read(6)
        assert decode(acquisition.entry()) == (7, "new")
        assert acquisition.read(6)
        assert acquisition.epoch == 7

    def test_an_undisturbed_owner_writes_once(self) -> None:
        acquisition = Acquisition("new", 5)
        assert acquisition.read(5)
        assert acquisition.epoch == 6


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
        owner.ask("a")
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
        owner.ask("a")
        owner.settle()
        assert world.read("a").values == []
        assert world.read("a").ongoing == []


class TestH19ConsumerPositions:
    def move(self, generation: int, start: int, end: int) -> ConsumerPosition:
        from coordinator_world import position

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
        config = Config(remember=10.0, ended_interval=0.0)
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
        request = ask_commit(owner, least, "a", naming=Naming("query", number, opening))
        owner.settle()
        return owner.heard(S, request)

    @pytest.mark.parametrize("compact", [False, True])
    def test_a_batch_retried_days_later_is_already_committed(self, compact: bool) -> None:
        config = Config(remember=10.0)
        world = World()
        owner = world.take_over(config)
        first = owner.client(S)
        assert self.commit(owner, first, 7, self.open_name(owner).opening) is Outcome.COMMIT
        owner.age(40)
        assert History.read(world.compacted()).groups == {}
        successor = world.take_over(config, compact=compact)
        least = successor.client(S)
        opened = self.open_name(successor)
        assert opened.committed == 7
        result = self.commit(successor, least, 7, opened.opening)
        assert isinstance(result, AlreadyCommitted)
        successor.ask("a")
        successor.settle()
        assert world.read("a").values == [str(first).encode()]
        assert self.commit(successor, least + 1, 8, opened.opening) is Outcome.COMMIT

    def test_opening_a_name_fences_its_holder_and_ends_its_attempt(self) -> None:
        world = World()
        owner = world.take_over()
        first = owner.client(S)
        old = self.open_name(owner)
        world.record("a", txn(first), 1, b"x")
        request = ask_commit(owner, first, "a", naming=Naming("query", 1, old.opening))
        owner.open("other")
        new = self.open_name(owner, "other")
        assert new.opening > old.opening
        assert isinstance(owner.heard(S, request), ProducerFenced)
        assert new.committed == 0
        assert isinstance(self.commit(owner, first + 1, 2, old.opening), ProducerFenced)

    def test_a_deleted_name_starts_anew_whatever_is_compacted(self) -> None:
        config = Config(remember=10.0)
        world = World()
        owner = world.take_over(config)
        first = owner.client(S)
        opened = self.open_name(owner)
        assert self.commit(owner, first, 7, opened.opening) is Outcome.COMMIT
        owner.coordinator.delete_name(S, 900, "query", world.now)
        owner.settle()
        assert isinstance(self.commit(owner, first + 1, 8, opened.opening), ProducerFenced)
        for _ in range(3):
            state = History.read(world.compacted()).names.get("query")
            assert state is None or state.committed == 0
            owner.age(10)
        assert "query" not in History.read(world.compacted()).names
        assert self.open_name(world_owner(world, config)).committed == 0


def world_owner(world: World, config: Config) -> Owner:
    owner = world.take_over(config, compact=True)
    owner.client(S)
    return owner
