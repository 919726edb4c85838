"""What clients can ask of a coordinator, one promise at a time."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from coordinator_world import SHARD, Owner, World

from broker_io.errors import Error
from txnbuffer.coordinator.config import Config
from txnbuffer.coordinator.entries import Group, Mark, decode
from txnbuffer.coordinator.history import History
from txnbuffer.coordinator.messages import Begin, Branch, Commit, Done, Leased, NameOpened, Naming, Opened, Result
from txnbuffer.coordinator.states import State
from txnbuffer.coordinator.transaction import Transaction
from txnbuffer.errors import (
    ForeignTransaction,
    InvalidConfiguration,
    InvalidRequest,
    RegistrationFailed,
    TooManyTransactions,
    TransactionAborted,
    UnknownSession,
    UnknownTransaction,
    UnregisteredTopic,
)
from txnbuffer.model import Outcome, TxnId

S = "session"
DECIDED = Config(one_phase=False, verify_counts=False)


def txn(least: int) -> TxnId:
    return TxnId(SHARD, least)


class Stage:
    """One owner, one client with ids from `first` on and topics a and b."""

    def __init__(self, config: Config | None = None, ids: int = 10) -> None:
        self.world = World()
        self.owner = self.world.take_over(config)
        self.first = self.owner.client(S, ids=ids)

    def txn(self, at: int) -> TxnId:
        return txn(self.first + at)

    def write(self, at: int, topic: str, count: int = 1) -> None:
        for seq in range(1, count + 1):
            self.world.record(topic, self.txn(at), seq, f"{at}/{topic}/{seq}".encode())

    def send(self, ask: Callable[[int], None]) -> int:
        request = self.owner.request()
        ask(request)
        self.owner.take()
        return request

    def call(self, ask: Callable[[int], None], session: str = S) -> Result | None:
        request = self.send(ask)
        self.owner.settle()
        return self.owner.heard(session, request)

    def commit(self, at: int, *topics: str, session: str = S, records: int = 1, **more: object) -> Result | None:
        return self.call(
            lambda request: self.ask_commit(request, at, *topics, session=session, records=records, **more)
        )

    def ask_commit(
        self, request: int, at: int, *topics: str, session: str = S, records: int = 1, **more: object
    ) -> None:
        commit = Commit(request, self.txn(at), topics, (records,) * len(topics), **more)  # type: ignore[arg-type]  # by keyword
        self.owner.coordinator.commit_many(session, [commit], self.world.now)

    def abort(self, at: int, *topics: str, session: str = S, operator: bool = False) -> Result | None:
        return self.call(
            lambda request: self.owner.coordinator.abort(
                session, request, self.txn(at), topics, self.world.now, operator=operator
            ),
            session,
        )

    def query(self, at: int) -> Result | None:
        return self.call(lambda request: self.owner.coordinator.query(S, request, self.txn(at), self.world.now))

    def begin(self, at: int, **more: object) -> int:
        return self.send(
            lambda request: self.owner.coordinator.begin_many(
                S,
                [Begin(request, self.txn(at), **more)],
                self.world.now,  # type: ignore[arg-type]  # by keyword
            )
        )

    def decided(self) -> set[int]:
        """The ids that groups of the decision log decide one by one."""
        groups = History.read(self.world.decisions).groups.values()
        return {row.least for group in groups for row in group.rows}

    def lease(self, count: int, session: str = S) -> Result | None:
        return self.call(lambda request: self.owner.coordinator.lease(session, request, count, self.world.now), session)


class TestCommit:
    def test_one_topic_needs_no_decision_record(self) -> None:
        stage = Stage()
        stage.write(0, "a")
        assert stage.commit(0, "a") is Outcome.COMMIT
        assert History.read(stage.world.decisions).groups == {}
        assert stage.world.read("a").values == [b"0/a/1"]

    def test_it_is_answered_when_the_buffer_has_applied_the_marker(self) -> None:
        stage = Stage()
        stage.write(0, "a")
        request = stage.send(lambda request: stage.ask_commit(request, 0, "a"))
        stage.owner.count()
        stage.owner.land_marker()
        stage.owner.acknowledge_marker()
        assert stage.owner.heard(S, request) is None
        stage.owner.pump("a")
        assert stage.owner.heard(S, request) is Outcome.COMMIT

    def test_several_topics_are_answered_when_the_decision_is_durable(self) -> None:
        stage = Stage(DECIDED)
        request = stage.send(lambda request: stage.ask_commit(request, 0, "a", "b"))
        assert not stage.owner.markers
        stage.owner.land_append()
        assert not stage.owner.markers
        assert stage.owner.heard(S, request) is None
        stage.owner.acknowledge_append()
        assert stage.owner.heard(S, request) is Outcome.COMMIT
        assert {marker.topic for marker in stage.owner.markers} == {"a", "b"}
        assert all(marker.marker.decided for marker in stage.owner.markers)

    def test_wait_visible_waits_for_the_buffers_of_all_branches(self) -> None:
        stage = Stage(DECIDED)
        stage.write(0, "a")
        stage.write(1, "b")
        branch = Branch(stage.txn(1), ("b",), (1,))
        request = stage.send(lambda request: stage.ask_commit(request, 0, "a", wait_visible=True, winners=(branch,)))
        stage.owner.land_append()
        stage.owner.acknowledge_append()
        while stage.owner.markers:
            stage.owner.land_marker()
        stage.owner.acknowledge_marker()
        stage.owner.acknowledge_marker()
        stage.owner.pump("a")
        assert stage.owner.heard(S, request) is None
        stage.owner.pump("b")
        assert stage.owner.heard(S, request) is Outcome.COMMIT
        assert not list(stage.owner.coordinator.transactions())

    def test_many_are_decided_in_one_message(self) -> None:
        stage = Stage(DECIDED)
        for at in range(5):
            stage.send(lambda request, at=at: stage.owner.coordinator.query(S, request, stage.txn(at), stage.world.now))
        commits = [Commit(100 + at, stage.txn(at), ("a",), (1,)) for at in range(5)]
        stage.owner.coordinator.commit_many(S, commits, stage.world.now)
        stage.owner.take()
        groups = [decode(one) for append in stage.owner.appends for one in append.messages]
        assert [len(group.rows) for group in groups if isinstance(group, Group)] == [5]

    def test_a_group_holds_so_many_rows(self) -> None:
        stage = Stage(Config(one_phase=False, verify_counts=False, max_group=6))
        commits = [Commit(100 + at, stage.txn(at), ("a",), (1,)) for at in range(7)]
        stage.owner.coordinator.commit_many(S, commits, stage.world.now)
        stage.owner.settle()
        assert [len(group.rows) for group in History.read(stage.world.decisions).groups.values()] == [3, 3, 1]
        assert all(stage.owner.heard(S, 100 + at) is Outcome.COMMIT for at in range(7))

    @pytest.mark.parametrize("config", [None, Config(one_phase=False)])
    def test_a_wrong_count_aborts(self, config: Config | None) -> None:
        stage = Stage(config)
        stage.write(0, "a", 2)
        result = stage.commit(0, "a", records=3)
        assert isinstance(result, TransactionAborted)
        assert "holds 2 of the 3 records" in str(result)
        assert stage.world.read("a").values == []
        assert stage.query(0) is Outcome.ABORT

    def test_counts_that_never_come_abort(self) -> None:
        stage = Stage()
        stage.write(0, "a")
        request = stage.send(lambda request: stage.ask_commit(request, 0, "a"))
        stage.owner.checks.clear()
        stage.owner.age(70)
        assert isinstance(stage.owner.heard(S, request), TransactionAborted)

    def test_asked_again_it_is_the_same_commit(self) -> None:
        stage = Stage()
        stage.write(0, "a")
        first = stage.send(lambda request: stage.ask_commit(request, 0, "a"))
        second = stage.send(lambda request: stage.ask_commit(request, 0, "a"))
        stage.owner.settle()
        assert stage.owner.heard(S, first) is stage.owner.heard(S, second) is Outcome.COMMIT
        assert stage.commit(0, "a") is Outcome.COMMIT
        assert stage.world.read("a").values == [b"0/a/1"]

    def test_an_empty_one_commits(self) -> None:
        assert Stage().commit(0) is Outcome.COMMIT

    @pytest.mark.parametrize(
        ("topics", "records", "error"),
        [
            (("a", "a"), (1, 1), InvalidRequest),
            (("a",), (0,), InvalidRequest),
            (("a",), (), InvalidRequest),
            (("nowhere",), (1,), UnregisteredTopic),
        ],
    )
    def test_bad_input_gets_one_error_and_loses_nothing(
        self, topics: tuple[str, ...], records: tuple[int, ...], error: type[Error]
    ) -> None:
        stage = Stage()
        stage.write(0, "a")
        bad = Commit(77, stage.txn(0), topics, records)
        stage.owner.coordinator.commit_many(S, [bad], stage.world.now)
        stage.owner.settle()
        assert isinstance(stage.owner.heard(S, 77), error)
        assert stage.commit(0, "a") is Outcome.COMMIT

    def test_a_marker_that_failed_is_written_again(self) -> None:
        for config in (None, DECIDED):
            stage = Stage(config)
            stage.write(0, "a")
            stage.send(lambda request, stage=stage: stage.ask_commit(request, 0, "a"))
            while not stage.owner.markers:
                if stage.owner.checks:
                    stage.owner.count()
                if stage.owner.appends:
                    stage.owner.land_append()
                if stage.owner.acks:
                    stage.owner.acknowledge_append()
            stage.owner.lose_marker()
            stage.owner.settle()
            assert stage.world.read("a").values == []
            stage.owner.tick()
            stage.owner.settle()
            assert stage.world.read("a").values == [b"0/a/1"]


class TestAbort:
    def test_one_topic_needs_no_decision_record(self) -> None:
        stage = Stage()
        stage.write(0, "a")
        assert stage.abort(0, "a") is Outcome.ABORT
        assert History.read(stage.world.decisions).groups == {}
        assert stage.world.read("a").ongoing == []

    @pytest.mark.parametrize("topics", [(), ("a", "b"), ("a", "unregistered", "b")])
    def test_otherwise_it_is_decided_in_the_log(self, topics: tuple[str, ...]) -> None:
        stage = Stage()
        stage.write(0, "a")
        stage.write(0, "b")
        assert stage.abort(0, *topics) is Outcome.ABORT
        assert len(History.read(stage.world.decisions).groups) == 1
        stage.owner.ask("a")
        stage.owner.ask("b")
        stage.owner.settle()
        assert stage.world.read("a").ongoing == stage.world.read("b").ongoing == []

    def test_after_a_commit_it_is_a_query(self) -> None:
        stage = Stage()
        stage.write(0, "a")
        stage.send(lambda request: stage.ask_commit(request, 0, "a"))
        assert stage.abort(0, "a") is Outcome.COMMIT
        assert stage.abort(0, "a") is Outcome.COMMIT

    def test_a_commit_after_it_is_an_error(self) -> None:
        stage = Stage()
        stage.abort(0, "a")
        assert isinstance(stage.commit(0, "a"), TransactionAborted)

    def test_an_operator_may_abort_what_is_not_his(self) -> None:
        stage = Stage()
        stage.begin(0)
        stage.owner.open("operator")
        assert isinstance(stage.abort(0, session="operator"), ForeignTransaction)
        assert stage.query(0) is State.OPEN
        assert stage.abort(0, session="operator", operator=True) is Outcome.ABORT


class TestIds:
    def test_a_lease_is_durable_before_it_is_answered(self) -> None:
        stage = Stage()
        request = stage.send(lambda request: stage.owner.coordinator.lease(S, request, 5, stage.world.now))
        stage.owner.land_append()
        assert stage.owner.heard(S, request) is None
        stage.owner.acknowledge_append()
        assert stage.owner.heard(S, request) == Leased(stage.first + 10, 5)

    def test_a_lease_outlives_the_owner(self) -> None:
        stage = Stage()
        successor = stage.world.take_over(compact=True)
        assert successor.client("other") == stage.first + 10

    @pytest.mark.parametrize("count", [0, -1])
    def test_a_lease_of_none_is_refused(self, count: int) -> None:
        assert isinstance(Stage().lease(count), InvalidRequest)

    def test_so_many_may_be_open_in_a_session_and_in_all(self) -> None:
        stage = Stage(Config(max_open_session=12, max_open=15))
        assert isinstance(stage.lease(3), TooManyTransactions)
        assert isinstance(stage.lease(2), Leased)
        stage.owner.open("other")
        assert isinstance(stage.lease(4, "other"), TooManyTransactions)
        assert isinstance(stage.lease(3, "other"), Leased)
        stage.write(0, "a")
        assert stage.commit(0, "a") is Outcome.COMMIT
        assert isinstance(stage.lease(1, "other"), Leased)

    def test_limits_count_what_older_owners_leased(self) -> None:
        config = Config(max_open_session=12)
        stage = Stage(config)
        stage.write(0, "a")
        stage.commit(0, "a")
        stage.owner = stage.world.take_over(config)
        stage.owner.open(S, *map(stage.txn, range(10)))
        stage.owner.settle()
        assert isinstance(stage.lease(4), TooManyTransactions)
        assert isinstance(stage.lease(3), Leased)

    def test_ids_given_back_are_ended_and_never_leased_again(self) -> None:
        stage = Stage()
        stage.owner.coordinator.give_back(S, 99, stage.first + 4, 6, stage.world.now)
        stage.owner.take()
        waiting = stage.send(lambda request: stage.ask_commit(request, 5, "a"))
        assert stage.owner.heard(S, waiting) is None
        assert stage.query(4) is State.ABORTING
        assert stage.query(4) is Outcome.ABORT
        assert isinstance(stage.owner.heard(S, waiting), TransactionAborted)
        block = stage.lease(3)
        assert isinstance(block, Leased)
        assert block.first == stage.first + 10
        stage.write(0, "a")
        assert stage.commit(0, "a") is Outcome.COMMIT

    def test_a_lease_that_is_not_used_in_time_ends(self) -> None:
        stage = Stage(Config(lease_timeout=100.0))
        stage.begin(0, timeout=500.0)
        stage.owner.age(110, step=10)
        assert isinstance(stage.commit(5, "a"), TransactionAborted)
        stage.write(0, "a")
        assert stage.commit(0, "a") is Outcome.COMMIT

    def test_ids_of_others_are_refused(self) -> None:
        stage = Stage()
        stage.owner.open("other")
        assert isinstance(stage.abort(0, session="other"), ForeignTransaction)
        stage.begin(1)
        assert isinstance(stage.abort(1, session="other"), ForeignTransaction)
        assert isinstance(stage.abort(100), UnknownTransaction)
        request = stage.send(
            lambda request: stage.owner.coordinator.abort(S, request, TxnId(9, stage.first), (), stage.world.now)
        )
        assert isinstance(stage.owner.heard(S, request), ForeignTransaction)
        assert stage.query(0) is State.OPEN

    def test_the_low_water_mark_passes_what_is_settled(self) -> None:
        stage = Stage(DECIDED, ids=3)
        stage.commit(0, "a")
        stage.commit(2, "a")
        stage.owner.age(3)
        assert stage.owner.coordinator.low_water_mark == stage.first
        stage.send(lambda request: stage.ask_commit(request, 1, "a", "b"))
        stage.owner.land_append()
        stage.owner.acknowledge_append()
        stage.owner.land_marker()
        stage.owner.acknowledge_marker()
        stage.owner.tick(5.0)
        assert not stage.owner.appends
        stage.owner.settle()
        stage.owner.age(3)
        assert stage.owner.coordinator.low_water_mark == stage.first + 2

    def test_of_marks_the_newest_stays_and_older_ones_are_remembered_for_their_time(self) -> None:
        stage = Stage(Config(remember=20.0))
        for at in range(3):
            stage.write(at, "a")
            stage.commit(at, "a")
            stage.owner.age(2)
        marks = [entry for entry in map(decode, stage.world.compacted()) if isinstance(entry, Mark)]
        assert [mark.low_water_mark for mark in marks] == [stage.first, stage.first + 1, stage.first + 2]
        stage.owner.age(60, step=5)
        assert len(History.read(stage.world.compacted()).marks) == 1


class TestSessions:
    def test_an_unknown_session_is_told_to_open(self) -> None:
        stage = Stage()
        assert isinstance(stage.lease(1, "nobody"), UnknownSession)
        stage.owner.coordinator.session_disconnected(S, stage.world.now)
        commits = [Commit(70, stage.txn(0), ("a",), (1,)), Commit(71, stage.txn(1), ("a",), (1,))]
        stage.owner.coordinator.commit_many(S, commits, stage.world.now)
        stage.owner.take()
        assert isinstance(stage.owner.heard(S, 70), UnknownSession)
        assert isinstance(stage.owner.heard(S, 71), UnknownSession)

    def test_a_client_that_comes_back_keeps_what_it_names(self) -> None:
        stage = Stage()
        stage.begin(0)
        stage.begin(1)
        stage.owner.coordinator.session_disconnected(S, stage.world.now)
        request = stage.owner.open(S, stage.txn(0), txn(900))
        stage.owner.settle()
        opened = stage.owner.heard(S, request)
        assert isinstance(opened, Opened)
        assert opened.states[0] == (stage.txn(0), State.OPEN)
        assert isinstance(opened.states[1][1], ForeignTransaction)
        stage.write(0, "a")
        assert stage.commit(0, "a") is Outcome.COMMIT
        assert stage.query(1) is Outcome.ABORT
        assert stage.query(2) is Outcome.ABORT

    def test_a_client_that_stays_away_loses_what_it_has_open(self) -> None:
        stage = Stage(Config(session_timeout=10.0))
        stage.begin(0)
        stage.owner.coordinator.session_disconnected(S, stage.world.now)
        stage.owner.age(8)
        assert stage.query(0) is State.OPEN
        stage.owner.age(4)
        assert stage.query(0) is Outcome.ABORT
        assert stage.query(9) is Outcome.ABORT
        stage.owner.age(3)
        assert stage.owner.coordinator.low_water_mark == stage.first + 9

    def test_a_session_that_is_closed_ends_what_it_has_open(self) -> None:
        stage = Stage()
        stage.begin(0)
        assert stage.call(lambda request: stage.owner.coordinator.close_session(S, request, stage.world.now)) == Done()
        assert stage.query(0) is Outcome.ABORT

    def test_a_lease_for_a_session_that_closed_meanwhile_is_given_back(self) -> None:
        stage = Stage()
        stage.send(lambda request: stage.owner.coordinator.lease(S, request, 5, stage.world.now))
        stage.send(lambda request: stage.owner.coordinator.close_session(S, request, stage.world.now))
        stage.owner.settle()
        stage.owner.age(3)
        assert stage.owner.coordinator.low_water_mark == stage.first + 14

    def test_ids_leased_while_a_claim_waits_are_not_given_back_by_it(self) -> None:
        stage = Stage()
        owner = stage.owner = stage.world.take_over()
        borders, owner.borders = owner.borders, []
        opened = owner.open(S, stage.txn(0))
        block = stage.lease(3)
        assert isinstance(block, Leased)
        assert owner.heard(S, opened) is None
        owner.borders = borders
        owner.settle()
        assert isinstance(owner.heard(S, opened), Opened)
        stage.first = block.first
        stage.write(0, "a")
        assert stage.commit(0, "a") is Outcome.COMMIT

    def test_after_a_take_over_unclaimed_transactions_are_aborted(self) -> None:
        stage = Stage(Config(session_timeout=10.0))
        stage.begin(0)
        stage.write(0, "a")
        stage.owner = stage.world.take_over(Config(session_timeout=10.0))
        stage.owner.settle()
        assert stage.query(0) is State.OPEN
        stage.owner.age(12)
        assert stage.query(0) is Outcome.ABORT


class TestTime:
    def test_a_transaction_may_last_its_timeout(self) -> None:
        stage = Stage(Config(transaction_timeout=20.0, max_transaction_timeout=100.0))
        stage.begin(0)
        stage.begin(1, timeout=5.0)
        stage.begin(2, timeout=90.0)
        stage.owner.age(10)
        assert [stage.query(at) for at in range(3)] == [State.OPEN, Outcome.ABORT, State.OPEN]
        stage.owner.age(15)
        assert [stage.query(at) for at in range(3)] == [Outcome.ABORT, Outcome.ABORT, State.OPEN]
        result = stage.commit(0, "a")
        assert isinstance(result, TransactionAborted)

    def test_nobody_may_ask_for_more_than_the_maximum(self) -> None:
        stage = Stage(Config(max_transaction_timeout=100.0))
        request = stage.begin(0, timeout=101.0)
        assert isinstance(stage.owner.heard(S, request), InvalidRequest)

    def test_watching_many_forgets_those_that_ended(self) -> None:
        stage = Stage(DECIDED, ids=6000)
        for at in range(6000):
            stage.begin(at)
            if at % 500 == 499:
                commits = [Commit(10**6 + one, stage.txn(one), ("a",), (1,)) for one in range(at - 499, at + 1)]
                stage.owner.coordinator.commit_many(S, commits, stage.world.now)
                stage.owner.settle()
        assert len(stage.owner.coordinator._core._deadlines) < 3500  # what is kept is the point here
        stage.owner.age(70, step=35)
        assert stage.query(0) is Outcome.COMMIT


class TestBranches:
    def test_a_branch_begun_for_a_transaction_ends_with_it(self) -> None:
        stage = Stage()
        stage.write(0, "a")
        stage.begin(1, parent=stage.txn(0))
        assert stage.commit(0, "a") is Outcome.COMMIT
        assert stage.query(1) is Outcome.ABORT

    def test_an_abort_ends_the_branches(self) -> None:
        stage = Stage()
        stage.begin(1, parent=stage.txn(0))
        assert stage.abort(0, "a") is Outcome.ABORT
        assert stage.query(1) is Outcome.ABORT

    def test_a_branch_outlives_its_own_session(self) -> None:
        stage = Stage()
        owner = stage.owner
        task = owner.client("task", ids=1)
        begin = Begin(owner.request(), txn(task), None, stage.txn(0))
        owner.coordinator.begin_many("task", [begin], stage.world.now)
        stage.world.record("b", txn(task), 1, b"task")
        owner.coordinator.close_session("task", owner.request(), stage.world.now)
        owner.settle()
        assert stage.commit(0, winners=(Branch(txn(task), ("b",), (1,)),)) is Outcome.COMMIT
        assert stage.world.read("b").values == [b"task"]

    def test_a_branch_of_an_ended_transaction_is_aborted(self) -> None:
        stage = Stage()
        stage.abort(0)
        stage.begin(1, parent=stage.txn(0))
        stage.owner.settle()
        assert stage.query(1) is Outcome.ABORT

    def test_a_branch_is_not_committed_alone(self) -> None:
        stage = Stage()
        stage.begin(1, parent=stage.txn(0))
        assert isinstance(stage.commit(1, "a"), InvalidRequest)

    def test_a_foreign_transaction_is_no_branch(self) -> None:
        stage = Stage()
        other = stage.owner.client("other", ids=2)
        for least in (other, other + 1):
            winner = Branch(txn(least), ("a",), (1,))
            assert isinstance(stage.commit(0, "a", winners=(winner,)), ForeignTransaction)
        begin = Begin(stage.owner.request(), txn(other), None)
        stage.owner.coordinator.begin_many("other", [begin], stage.world.now)
        assert isinstance(stage.commit(0, "a", losers=(txn(other),)), ForeignTransaction)
        assert isinstance(stage.commit(0, "a", losers=(TxnId(5, 1),)), ForeignTransaction)
        stage.write(0, "a")
        assert stage.commit(0, "a") is Outcome.COMMIT

    def test_a_wrong_count_of_a_branch_aborts_the_whole(self) -> None:
        stage = Stage()
        stage.write(0, "a")
        stage.write(1, "b")
        winner = Branch(stage.txn(1), ("b",), (2,))
        assert isinstance(stage.commit(0, "a", winners=(winner,)), TransactionAborted)
        assert stage.query(1) is Outcome.ABORT

    def test_naming_a_branch_twice_or_too_many_is_refused(self) -> None:
        stage = Stage(Config(max_group=4))
        winner = Branch(stage.txn(1), ("b",), (1,))
        assert isinstance(stage.commit(0, "a", winners=(winner,), losers=(stage.txn(1),)), InvalidRequest)
        losers = tuple(stage.txn(at) for at in range(1, 6))
        assert isinstance(stage.commit(0, "a", losers=losers), InvalidRequest)

    def test_aborting_a_winner_while_its_commit_is_counted_aborts_the_whole(self) -> None:
        stage = Stage()
        stage.write(0, "a")
        stage.write(1, "b")
        winner = Branch(stage.txn(1), ("b",), (1,))
        request = stage.send(lambda request: stage.ask_commit(request, 0, "a", winners=(winner,)))
        stage.owner.count()
        assert stage.abort(1, operator=True) is Outcome.ABORT
        assert isinstance(stage.owner.heard(S, request), TransactionAborted)

    def test_after_a_take_over_a_commit_claims_the_branches_that_it_names(self) -> None:
        stage = Stage()
        task = stage.owner.client("task", ids=1)
        stage.world.record("b", txn(task), 1, b"task")
        stage.owner = stage.world.take_over()
        stage.owner.open(S, stage.txn(0))
        stage.owner.settle()
        assert stage.commit(0, winners=(Branch(txn(task), ("b",), (1,)),)) is Outcome.COMMIT
        assert stage.world.read("b").values == [b"task"]


class TestNames:
    def test_a_number_below_one_or_a_commit_without_the_name_is_refused(self) -> None:
        stage = Stage()
        opened = stage.call(lambda request: stage.owner.coordinator.open_name(S, request, "n", stage.world.now))
        assert isinstance(opened, NameOpened)
        stage.begin(0, naming=Naming("n", 1, opened.opening))
        assert isinstance(stage.commit(0, "a"), InvalidRequest)
        assert isinstance(stage.commit(0, "a", naming=Naming("n", 0, opened.opening)), InvalidRequest)
        stage.write(0, "a")
        assert stage.commit(0, "a", naming=Naming("n", 1, opened.opening)) is Outcome.COMMIT

    def test_one_commit_of_a_name_is_under_way_at_a_time(self) -> None:
        stage = Stage()
        opened = stage.call(lambda request: stage.owner.coordinator.open_name(S, request, "n", stage.world.now))
        assert isinstance(opened, NameOpened)
        stage.write(0, "a")
        first = stage.send(lambda request: stage.ask_commit(request, 0, "a", naming=Naming("n", 1, opened.opening)))
        second = stage.send(lambda request: stage.ask_commit(request, 1, "b", naming=Naming("n", 2, opened.opening)))
        assert isinstance(stage.owner.heard(S, second), InvalidRequest)
        stage.owner.settle()
        assert stage.owner.heard(S, first) is Outcome.COMMIT

    def test_beginning_under_a_name_that_another_opened_is_refused(self) -> None:
        stage = Stage()
        request = stage.begin(0, naming=Naming("n", 1, 1))
        stage.owner.settle()
        assert isinstance(stage.owner.heard(S, request), Error)
        assert stage.query(0) is Outcome.ABORT


class TestTopics:
    def test_a_registration_that_failed_can_be_tried_again(self) -> None:
        stage = Stage()
        request = stage.send(lambda request: stage.owner.coordinator.register_topic(S, request, "c", stage.world.now))
        stage.owner.registrations.clear()
        stage.owner.coordinator.registration_failed("c", "no space", stage.world.now)
        stage.owner.take()
        assert isinstance(stage.owner.heard(S, request), RegistrationFailed)
        again = stage.call(lambda request: stage.owner.coordinator.register_topic(S, request, "c", stage.world.now))
        assert again == Done()

    def test_sessions_that_register_at_once_wait_for_the_same_snapshot(self) -> None:
        stage = Stage()
        stage.owner.open("other")
        coordinator = stage.owner.coordinator
        first = stage.send(lambda request: coordinator.register_topic(S, request, "c", stage.world.now))
        second = stage.send(lambda request: coordinator.register_topic("other", request, "c", stage.world.now))
        assert stage.owner.registrations == ["c"]
        stage.owner.settle()
        assert stage.owner.heard(S, first) == stage.owner.heard("other", second) == Done()

    def test_a_deleted_topic_holds_nothing_back(self) -> None:
        stage = Stage(DECIDED)
        request = stage.send(lambda request: stage.ask_commit(request, 0, "a", "b", wait_visible=True))
        stage.owner.land_append()
        stage.owner.acknowledge_append()
        stage.owner.markers = [marker for marker in stage.owner.markers if marker.topic != "b"]
        stage.owner.coordinator.topic_deleted("b", stage.world.now)
        stage.owner.settle()
        assert stage.owner.heard(S, request) is Outcome.COMMIT
        assert "b" not in History.read(stage.world.compacted()).topics
        assert isinstance(stage.commit(1, "b"), UnregisteredTopic)

    def test_a_take_over_waits_for_no_deleted_topic(self) -> None:
        stage = Stage()
        owner = stage.world.take_over()
        owner.borders = [border for border in owner.borders if border.topic == "a"]
        owner.settle()
        assert not owner.coordinator.ready
        owner.coordinator.topic_deleted("b", stage.world.now)
        owner.take()
        assert owner.coordinator.ready

    def test_a_topic_gets_one_phase_markers_only_once_the_log_says_so(self) -> None:
        stage = Stage(DECIDED)
        stage.owner = stage.world.take_over(Config())
        stage.owner.open(S, stage.txn(0), stage.txn(1))
        stage.owner.settle()
        stage.write(0, "a")
        stage.commit(0, "a")
        assert stage.decided() == {stage.txn(0).least}
        stage.call(lambda request: stage.owner.coordinator.register_topic(S, request, "a", stage.world.now))
        assert History.read(stage.world.decisions).topics["a"] is True
        stage.write(1, "a")
        assert stage.commit(1, "a") is Outcome.COMMIT
        assert stage.decided() == {stage.txn(0).least}


class TestStopping:
    def stopped(self, stop: Callable[[Owner], None]) -> None:
        stage = Stage()
        stage.write(0, "a")
        request = stage.send(lambda request: stage.ask_commit(request, 0, "a"))
        stop(stage.owner)
        stage.owner.take()
        assert stage.owner.stopped
        assert stage.owner.coordinator.stopped
        stage.owner.count()
        stage.owner.tick(100.0)
        assert stage.lease(1) is None
        assert stage.owner.heard(S, request) is None
        assert not stage.owner.appends
        assert not stage.owner.markers

    def test_when_the_log_fails(self) -> None:
        self.stopped(lambda owner: owner.coordinator.decisions_failed("time-out"))

    def test_when_a_newer_epoch_is_seen(self) -> None:
        self.stopped(lambda owner: owner.coordinator.newer_epoch_seen(2, "a"))

    def test_when_a_topic_ends_an_open_transaction(self) -> None:
        def end(owner: Owner) -> None:
            [one] = owner.coordinator.transactions()
            owner.coordinator.ended("a", [(one.txn, Outcome.COMMIT)], owner.world.now)

        self.stopped(end)

    def test_not_by_its_own_epoch_or_an_older_one(self) -> None:
        stage = Stage()
        stage.owner.coordinator.newer_epoch_seen(1, "a")
        stage.owner.coordinator.newer_epoch_seen(0, "a")
        assert stage.owner.coordinator.stopped is None
        assert (stage.owner.coordinator.shard, stage.owner.coordinator.epoch) == (SHARD, 1)

    def test_when_a_topic_ends_it_otherwise(self) -> None:
        stage = Stage()
        stage.write(0, "a")
        stage.send(lambda request: stage.ask_commit(request, 0, "a"))
        stage.owner.count()
        stage.owner.coordinator.ended("a", [(stage.txn(0), Outcome.ABORT)], stage.world.now)
        assert stage.owner.coordinator.stopped

    def test_another_coordinators_ends_are_none_of_its_business(self) -> None:
        stage = Stage()
        stage.begin(0)
        stage.owner.coordinator.ended("a", [(TxnId(7, stage.first), Outcome.COMMIT)], stage.world.now)
        stage.owner.coordinator.ask("a", [TxnId(7, 3)], stage.world.now)
        stage.owner.settle()
        assert stage.owner.coordinator.stopped is None
        assert stage.world.topic("a").messages == []


def test_a_step_that_the_table_does_not_have_is_a_bug() -> None:
    transaction = Transaction(txn(1), None, None)
    with pytest.raises(AssertionError, match="OPEN to COMMITTED"):
        transaction.advance(State.COMMITTED)


@pytest.mark.parametrize(
    "more",
    [
        {"transaction_timeout": 0.0},
        {"max_open": 0},
        {"max_transaction_timeout": 59.0},
        {"one_phase": True, "verify_counts": False},
    ],
)
def test_impossible_configurations_are_refused(more: dict[str, float]) -> None:
    with pytest.raises(InvalidConfiguration):
        Config(**more)  # type: ignore[arg-type]  # by keyword
