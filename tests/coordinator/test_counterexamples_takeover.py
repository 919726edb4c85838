"""Histories that break the takeover or the low-water mark if the protocol lacks one of its rules."""

from __future__ import annotations

from coordinator.coordinator_stage import DECIDED, S, aborted, ask_abort, ask_commit, query, txn
from coordinator_world import World
from pyroaring import BitMap64

from broker_io.errors import Error
from txnbuffer.coordinator.decisions import LowWaterMark, Owner, OwnerEpoch, decode
from txnbuffer.coordinator.history import History
from txnbuffer.coordinator.messages import SessionOpened
from txnbuffer.coordinator.takeover import Acquisition, first_transaction_id
from txnbuffer.coordinator.transaction import SettledIds
from txnbuffer.errors import UnknownTransaction
from txnbuffer.model import MAX_LEAST, Outcome


class TestH4ZombieOnePhase:
    def test_marker_of_a_zombie_lands_after_the_epoch_marker(self) -> None:
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

    def test_marker_of_a_zombie_lands_before_the_epoch_marker(self) -> None:
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

    def test_older_ids_get_no_answer_before_the_epoch_marker_is_read(self) -> None:
        world = World()
        first = world.take_over().client(S)
        owner = world.take_over()
        opened = owner.open(S, txn(first))
        asked = ask_abort(owner, first, "a")
        owner.tail("a")
        world.record("a", txn(first), 1)
        owner.pump("a")
        owner.query_outcomes("a")
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
        epoch_markers, owner.epoch_markers = owner.epoch_markers, []
        first = owner.client("new")
        world.record("a", txn(first), 1, b"x")
        told = ask_commit(owner, first, "a", session="new")
        owner.settle()
        assert owner.heard("new", told) is Outcome.COMMIT
        assert not owner.coordinator.ready
        owner.epoch_markers = epoch_markers
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
        owner.query_outcomes("b")
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
    owner.coordinator.return_ids(S, 98, [(first + 2, 1)], world.now)
    owner.age(5)
    assert owner.coordinator.low_water_mark == first + 2
    world.record("a", txn(first + 3), 1)
    owner.settle()
    successor = world.take_over(compact=True)
    successor.settle()
    assert query(successor, first) is Outcome.COMMIT
    assert query(successor, first + 1) is Outcome.ABORT


def test_a_take_over_waits_for_the_markers_of_decisions_but_not_where_a_topic_has_stopped() -> None:
    world = World()
    owner = world.take_over(DECIDED)
    first = owner.client(S)
    ask_commit(owner, first, "a", "b")
    owner.land_append()
    successor = world.take_over(DECIDED)
    opened = successor.open(S, txn(first + 1))
    successor.coordinator.topic_stopped("a", Error("its buffer goes no further"), world.now)
    assert sorted(marker.topic for marker in successor.markers) == ["a", "b"]
    successor.take()
    assert successor.heard(S, opened) is None
    which = [marker.topic for marker in successor.markers].index("b")
    successor.land_marker(which)
    successor.acknowledge_marker()
    successor.take()
    assert isinstance(successor.heard(S, opened), SessionOpened)
    assert successor.coordinator.transaction(txn(first)) is not None
    successor.settle()  # it continues, and its marker is written
    assert successor.coordinator.transaction(txn(first)) is None


class TestH6LowWaterMark:
    def test_markers_carry_a_durable_mark_only(self) -> None:
        world = World()
        owner = world.take_over()
        first = owner.client(S, ids=2)
        world.record("a", txn(first), 1)
        ask_commit(owner, first, "a")
        owner.settle()
        owner.tick(5.0)
        assert [type(decode(message)) for message in owner.appends[-1].messages] == [LowWaterMark]
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
        owner.coordinator.return_ids(S, 98, [(first, 1)], world.now)
        owner.age(3)
        assert owner.coordinator.low_water_mark == first
        told = ask_commit(owner, first, "a")
        assert aborted(owner.heard(S, told))

    def test_unused_ids_count_as_ended_only_once_that_is_durable(self) -> None:
        world = World()
        owner = world.take_over()
        first = owner.client(S, ids=1)
        owner.coordinator.return_ids(S, 98, [(first, 1)], world.now)
        owner.tick(5.0)
        owner.tick(5.0)
        assert all(not isinstance(decode(one), LowWaterMark) for append in owner.appends for one in append.messages)


class TestH12OneEpoch:
    def test_an_owner_that_finds_its_own_epoch_before_its_entry_writes_a_higher_one(self) -> None:
        acquisition = Acquisition("new", 6)
        assert decode(acquisition.entry()) == Owner(6, "new")
        assert not acquisition.read(6)
        assert decode(acquisition.entry()) == Owner(7, "new")
        assert acquisition.read(6)
        assert acquisition.epoch == 7

    def test_an_undisturbed_owner_writes_once(self) -> None:
        acquisition = Acquisition("new", 6)
        assert acquisition.read(5)
        assert acquisition.epoch == 6


def test_an_owner_entry_lists_all_owners_before_it_also_a_late_one() -> None:
    known = {4: OwnerEpoch(4, "c"), 5: OwnerEpoch(5, "d", 7, 90)}
    acquisition = Acquisition("new", 6, owner_id="e", known=known)
    assert acquisition.owners == (*known.values(), OwnerEpoch(6, "e"))
    late = known | {6: OwnerEpoch(6, "1a7e")}
    assert not acquisition.read(6, late), "it is told of before anything is answered"
    assert acquisition.owners == (*late.values(), OwnerEpoch(7, "e"))
    assert acquisition.read(0, known | {6: OwnerEpoch(6, "e")}), "its own first entry is none of another"
    entry = decode(acquisition.entry())
    assert isinstance(entry, Owner)
    assert entry.owners == acquisition.owners


class TestSkippedIds:
    """Each owner of an embedded log leases ids far above its predecessor's: an older copy may have been restored."""

    def test_an_owner_sees_leases_that_became_durable_late(self) -> None:
        acquisition = Acquisition("new", 6, owner_id="ff", last=20)
        assert acquisition.owners[-1] == OwnerEpoch(6, "ff", 21, 21 + 0xFF)
        assert not acquisition.read(0, {}, 30)
        assert acquisition.owners[-1] == OwnerEpoch(7, "ff", 31, 31 + 0xFF)
        assert acquisition.read(0, {}, 30)

    def test_ids_never_run_out(self) -> None:
        last, most = 0, "f" * 32
        for _ in range(2000):
            step = first_transaction_id(last, most) - last
            assert 1 <= step <= 2**39
            last += step
        assert first_transaction_id(MAX_LEAST - 1, most) == MAX_LEAST

    def test_ids_of_a_lost_owner_are_never_leased_again(self) -> None:
        """A query of it answers neither an outcome nor that it ended, before and after the mark passes it."""
        world = World()
        world.take_over().client(S)
        copy = list(world.decisions)
        gone = world.take_over(name="gone").client(S)
        world.decisions = copy
        owner = world.take_over()
        owner.settle()
        first = owner.client("new")
        assert gone not in range(first, first + 10)
        for _ in range(2):
            for least in (gone, first - 1):
                assert isinstance(query(owner, least), UnknownTransaction)
            ask_commit(owner, first, session="new")
            owner.age(100.0)
        assert owner.coordinator.low_water_mark >= first

    def test_the_mark_passes_them_once_all_before_has_ended(self) -> None:
        world = World()
        older = world.take_over(DECIDED)
        first = older.client(S)
        world.record("a", txn(first), 1)
        owner = world.take_over(DECIDED)
        owner.settle()
        owner.open(S, txn(first))
        second = owner.client("other")
        ask_commit(owner, second, session="other")
        owner.age(5.0)
        assert owner.coordinator.low_water_mark < first
        ask_commit(owner, first, "a")
        owner.age(5.0)
        assert owner.coordinator.low_water_mark >= second
        later = world.take_over(DECIDED, compact=True)
        later.settle()
        assert later.client("third") > second + 10

    def test_the_low_water_mark_waits_for_ids_used_there(self) -> None:
        progress = SettledIds(5, BitMap64([6, 7, 100]), [(8, 99)])
        assert progress.reachable([50]) == 7
        assert progress.reachable([7, 101]) == 100
        progress.raise_to(100)
        assert progress.gaps == []
