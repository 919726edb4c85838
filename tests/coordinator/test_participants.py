"""Participants: numbers of a named producer written by several sessions, of which some win, are late or disappear."""

from __future__ import annotations

from coordinator.coordinator_stage import DECIDED, S, Stage, txn

from txnbuffer.coordinator.history import History, NameState
from txnbuffer.coordinator.messages import (
    FINISHED_PARTICIPANT,
    PARTICIPANT,
    Begin,
    Branch,
    CoordinatorConfig,
    NameOpened,
    ProducerSequence,
    Result,
    State,
)
from txnbuffer.coordinator.sessions import PARTICIPANT_GRACE
from txnbuffer.errors import AlreadyCommitted, ForeignTransaction, InvalidRequest, ProducerFenced, TransactionAborted
from txnbuffer.model import Outcome

FIRST = ProducerSequence("query", 1, PARTICIPANT)


class Writers:
    """A driver with a session of its own, and tasks that start, write and end."""

    def __init__(self, config: CoordinatorConfig | None = None) -> None:
        self.stage = Stage(config)
        self.tasks = 0

    def task(self, number: int = 1, *, goes: bool = True) -> int:
        """Let a task write one record to b; return its transaction id."""
        self.tasks += 1
        session = f"task{self.tasks}"
        least = self.stage.owner.client(session, ids=1)
        self.begin(session, least, number)
        self.stage.world.record("b", txn(least), 1, str(self.tasks).encode())
        if goes:
            self.begin(session, least, number, FINISHED_PARTICIPANT)
            self.go(session)
        return least

    def go(self, session: str) -> None:
        owner = self.stage.owner
        owner.coordinator.close_session(session, owner.request(), self.stage.world.now)
        owner.settle()

    def begin(self, session: str, least: int, number: int, opening: int = PARTICIPANT) -> Result | None:
        owner = self.stage.owner
        request = owner.request()
        begin = Begin(request, txn(least), None, None, ProducerSequence("query", number, opening))
        owner.coordinator.begin_many(session, [begin], self.stage.world.now)
        owner.take()
        owner.settle()
        return owner.heard(session, request)

    def opened(self) -> NameOpened:
        opened = self.stage.call(
            lambda request: self.stage.owner.coordinator.open_name(S, request, "query", self.stage.world.now)
        )
        assert isinstance(opened, NameOpened)
        return opened

    def delete(self, over: int = 0) -> None:
        now = self.stage.world.now
        self.stage.call(lambda request: self.stage.owner.coordinator.delete_name(S, request, "query", now, over=over))

    def commit(self, at: int, number: int, *winners: int) -> Result | None:
        opening = self.opened().epoch
        branches = tuple(Branch(txn(least), ("b",), (1,)) for least in winners)
        return self.stage.commit(at, sequence=ProducerSequence("query", number, opening), winners=branches)

    def state(self, least: int) -> Result | None:
        return self.stage.query(least - self.stage.first)

    @property
    def values(self) -> list[bytes]:
        return self.stage.world.read("b").values


def test_winners_of_sessions_that_are_gone_commit_and_all_others_abort() -> None:
    for config in (CoordinatorConfig(), DECIDED):
        writers = Writers(config)
        first, second, third = writers.task(), writers.task(), writers.task(goes=False)
        assert writers.state(second) is State.OPEN
        assert writers.commit(0, 1, first, third) is Outcome.COMMIT
        assert writers.state(second) is Outcome.ABORT
        for _ in range(2):
            writers.stage.owner.query_outcomes("b")
            writers.stage.owner.settle()
        assert writers.values == [b"1", b"3"]


def test_opening_the_name_leaves_them_alone_and_deleting_it_does_not() -> None:
    writers = Writers()
    least = writers.task()
    writers.opened()
    assert writers.state(least) is State.OPEN
    writers.delete()
    assert writers.state(least) is Outcome.ABORT


def test_what_is_not_finished_ends_with_its_session() -> None:
    for leaves in (True, False):
        writers = Writers(CoordinatorConfig(session_timeout=30.0, transaction_timeout=900.0))
        finished, unfinished = writers.task(), writers.task(goes=False)
        owner = writers.stage.owner
        if leaves:
            writers.go("task2")
        else:
            owner.coordinator.session_disconnected("task2", writers.stage.world.now)
            owner.age(PARTICIPANT_GRACE)
        assert writers.state(unfinished) is Outcome.ABORT
        assert writers.state(finished) is State.OPEN
        assert writers.commit(0, 1, finished) is Outcome.COMMIT
        assert writers.values == [b"1"]


def test_finishing_leaves_the_time_as_it_was() -> None:
    writers = Writers()
    least = writers.task(goes=False)
    writers.stage.owner.age(59.0)
    assert writers.begin("task1", least, 1, FINISHED_PARTICIPANT) is None
    writers.stage.owner.age(2.0)
    assert writers.state(least) is Outcome.ABORT


def test_numbers_that_are_over_are_refused_until_outcomes_are_forgotten() -> None:
    config = CoordinatorConfig(remember=10.0, ended_interval=1.0)
    for used in (True, False):
        writers = Writers(config)
        stage = writers.stage
        if used:
            assert writers.commit(0, 1, writers.task()) is Outcome.COMMIT
            is_open = writers.task(2)
        writers.delete(over=2)
        assert not used or writers.state(is_open) is Outcome.ABORT
        stage.owner.age(5.0)
        for taken_over in (False, True):
            if taken_over:
                stage.owner = stage.world.take_over(config, compact=True)
            late = stage.owner.client("late", ids=3)
            for number in (1, 2):
                assert isinstance(writers.begin("late", late + number - 1, number), ProducerFenced)
            assert writers.begin("late", late + 2, 3) is None
            assert isinstance(History.read(stage.world.compacted()).names["query"], NameState)
        for _ in range(3):
            stage.owner.age(10.0)
        assert "query" not in History.read(stage.world.compacted()).names
        again = stage.owner.client("again", ids=1)
        assert writers.begin("again", again, 1) is None


def test_a_name_that_is_deleted_and_used_again_is_forgotten_once() -> None:
    config = CoordinatorConfig(remember=10.0, ended_interval=1.0)
    writers = Writers(config)
    assert writers.commit(0, 1, writers.task()) is Outcome.COMMIT
    writers.delete()
    writers.stage.owner.age(5.0)
    assert writers.commit(1, 1, writers.task()) is Outcome.COMMIT
    writers.delete()
    for _ in range(4):
        writers.stage.owner.age(4.0)
        kept = History.read(writers.stage.world.compacted()).names.get("query")
        assert kept is None or kept.committed == 0
    assert "query" not in History.read(writers.stage.world.compacted()).names


def test_a_participant_that_begins_after_the_commit_hears_that_it_is_done() -> None:
    writers = Writers()
    assert writers.commit(0, 2, writers.task(2)) is Outcome.COMMIT
    late = writers.stage.owner.client("late", ids=3)
    for number in (1, 2):
        assert isinstance(writers.begin("late", late + number - 1, number), AlreadyCommitted)
    assert writers.begin("late", late + 2, 3) is None
    assert isinstance(writers.commit(1, 2), AlreadyCommitted)
    assert writers.values == [b"1"]


def test_an_older_number_ends_with_a_newer_one_and_a_newer_one_continues() -> None:
    writers = Writers()
    older, newer = writers.task(1), writers.task(3)
    assert writers.commit(0, 2, writers.task(2)) is Outcome.COMMIT
    assert writers.state(older) is Outcome.ABORT
    assert writers.state(newer) is State.OPEN
    assert writers.commit(1, 3, newer) is Outcome.COMMIT


def test_a_participant_that_begins_while_records_are_counted_is_too_late() -> None:
    writers = Writers()
    winner, opening = writers.task(), writers.opened().epoch
    branch = Branch(txn(winner), ("b",), (1,))
    writers.stage.send(
        lambda request: writers.stage.ask_commit(
            request, 0, sequence=ProducerSequence("query", 1, opening), winners=(branch,)
        )
    )
    least = writers.stage.owner.client("late", ids=1)  # which lets the buffers count
    stage = writers.stage
    assert stage.query(0) is Outcome.COMMIT
    assert isinstance(writers.begin("late", least, 1), AlreadyCommitted)

    writers = Writers()
    winner, opening = writers.task(), writers.opened().epoch
    least = writers.stage.owner.client("late", ids=1)
    branch = Branch(txn(winner), ("b",), (1,))
    writers.stage.send(
        lambda request: writers.stage.ask_commit(
            request, 0, sequence=ProducerSequence("query", 1, opening), winners=(branch,)
        )
    )
    owner, request = writers.stage.owner, writers.stage.owner.request()
    owner.coordinator.begin_many("late", [Begin(request, txn(least), None, None, FIRST)], writers.stage.world.now)
    owner.take()
    owner.settle()
    assert isinstance(owner.heard("late", request), ProducerFenced)
    assert writers.stage.query(0) is Outcome.COMMIT


def test_a_winner_of_another_number_or_name_is_refused() -> None:
    writers = Writers()
    other = writers.task(2)
    assert isinstance(writers.commit(0, 1, other), ForeignTransaction)
    branch = Branch(txn(other), ("b",), (1,))
    assert isinstance(writers.stage.commit(1, winners=(branch,)), ForeignTransaction)


def test_one_of_many_is_not_committed_alone() -> None:
    writers = Writers()
    least = writers.task(goes=False)
    assert isinstance(writers.stage.commit(least - writers.stage.first, "b"), InvalidRequest)
    for opening in (PARTICIPANT, FINISHED_PARTICIPANT):
        assert isinstance(writers.stage.commit(1, "b", sequence=ProducerSequence("query", 1, opening)), InvalidRequest)
    number = Begin(
        writers.stage.owner.request(), writers.stage.txn(0), None, None, ProducerSequence("query", 0, PARTICIPANT)
    )
    writers.stage.owner.coordinator.begin_many(S, [number], writers.stage.world.now)
    writers.stage.owner.settle()
    assert writers.stage.query(0) is Outcome.ABORT


def test_anybody_may_abort_one_and_its_time_ends_it() -> None:
    writers = Writers()
    first, second = writers.task(goes=False), writers.task()
    assert writers.stage.abort(first - writers.stage.first, "b") is Outcome.ABORT
    assert first in writers.stage.decided()  # by a marker alone it would stay known under its name
    writers.stage.owner.age(61.0)
    assert writers.state(second) is Outcome.ABORT
    assert isinstance(writers.commit(0, 1, second), TransactionAborted)
    assert writers.values == []


def test_a_driver_that_aborts_a_finished_participant_aborts_the_whole_number() -> None:
    writers = Writers()
    finished, running, other = writers.task(), writers.task(goes=False), writers.task(2)
    assert writers.stage.abort(finished - writers.stage.first, "b") is Outcome.ABORT
    assert writers.state(running) is Outcome.ABORT
    assert writers.state(other) is State.OPEN
    again = writers.task()
    assert writers.commit(0, 1, again) is Outcome.COMMIT

    writers = Writers()
    finished, failed = writers.task(), writers.task(goes=False)
    own = failed - writers.stage.first
    stage = writers.stage
    stage.call(lambda request: stage.owner.coordinator.abort("task2", request, stage.txn(own), ("b",), stage.world.now))
    assert writers.state(failed) is Outcome.ABORT
    assert writers.state(finished) is State.OPEN


def test_a_wrong_count_of_a_winner_aborts_all() -> None:
    writers = Writers()
    first, second = writers.task(), writers.task()
    opening = writers.opened().epoch
    wrong = Branch(txn(first), ("b",), (2,))
    assert isinstance(
        writers.stage.commit(0, sequence=ProducerSequence("query", 1, opening), winners=(wrong,)), TransactionAborted
    )
    assert writers.state(second) is Outcome.ABORT
    assert writers.opened().committed == 0


def test_a_commit_soon_after_a_take_over_finds_its_winners() -> None:
    writers = Writers()
    gone, there = writers.task(), writers.task(goes=False)
    writers.stage.owner = writers.stage.world.take_over()
    writers.stage.owner.open(S, writers.stage.txn(0))
    writers.stage.owner.open("task2", txn(there))
    writers.stage.owner.settle()
    assert writers.begin("task2", there, 1) is None
    assert writers.commit(0, 1, gone, there) is Outcome.COMMIT
    assert writers.values == [b"1", b"2"]


def test_an_unfinished_participant_soon_follows_its_connection() -> None:
    writers = Writers()
    killed, finished, back, other = (
        writers.task(goes=False), writers.task(), writers.task(goes=False), writers.task(2, goes=False)
    )  # fmt: skip
    owner = writers.stage.owner
    plain = owner.client("task5", ids=1)
    owner.coordinator.begin_many("task5", [Begin(owner.request(), txn(plain), None, None)], writers.stage.world.now)
    for task in ("task1", "task2", "task3", "task5"):
        owner.coordinator.session_disconnected(task, writers.stage.world.now)
    owner.age(PARTICIPANT_GRACE / 2)
    assert writers.state(killed) is State.OPEN
    owner.open("task3", txn(back))
    owner.age(PARTICIPANT_GRACE / 2 + 0.1)
    assert writers.state(killed) is Outcome.ABORT
    assert [writers.state(least) for least in (finished, back, other)] == [State.OPEN] * 3
    assert writers.state(plain) is State.OPEN  # it has `session_timeout`
    assert writers.commit(0, 1, finished) is Outcome.COMMIT


def test_the_participants_of_an_earlier_owner_have_the_session_timeout() -> None:
    writers = Writers()
    there = writers.task(goes=False)
    owner = writers.stage.owner = writers.stage.world.take_over()
    owner.age(PARTICIPANT_GRACE + 1.0)
    owner.open(S, writers.stage.txn(0))
    owner.open("task1", txn(there))
    assert writers.begin("task1", there, 1) is None
    assert writers.begin("task1", there, 1, FINISHED_PARTICIPANT) is None
    assert writers.commit(0, 1, there) is Outcome.COMMIT
