"""Branches, named producers, topics, one promise at a time."""

from __future__ import annotations

import pytest
from coordinator.coordinator_stage import DECIDED, S, Stage, txn

from broker_io.errors import Error
from txnbuffer.coordinator.history import History
from txnbuffer.coordinator.messages import Begin, Branch, CoordinatorConfig, Done, NameOpened, ProducerSequence
from txnbuffer.errors import (
    AlreadyCommitted,
    ForeignTransaction,
    InvalidRequest,
    ProducerFenced,
    RegistrationFailed,
    TransactionAborted,
    UnregisteredTopic,
)
from txnbuffer.model import Outcome, TxnId


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

    def test_a_number_whose_commit_had_an_unknown_outcome_and_took_effect_is_answered_as_committed(self) -> None:
        """A client that got no answer commits the branches again, in another transaction."""
        stage = Stage()
        opened = stage.call(lambda request: stage.owner.coordinator.open_name(S, request, "n", stage.world.now))
        assert isinstance(opened, NameOpened)
        stage.write(1, "b")
        winner = Branch(stage.txn(1), ("b",), (1,))
        sequence = ProducerSequence("n", 1, opened.epoch)
        assert stage.commit(0, sequence=sequence, winners=(winner,)) is Outcome.COMMIT
        assert isinstance(stage.commit(2, sequence=sequence, winners=(winner,)), AlreadyCommitted)
        other = ProducerSequence("n", 2, opened.epoch)
        assert isinstance(stage.commit(3, sequence=other, winners=(winner,)), TransactionAborted)
        assert stage.query(1) is Outcome.COMMIT

    def test_naming_a_branch_twice_or_too_many_is_refused(self) -> None:
        stage = Stage(CoordinatorConfig(max_group=4))
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
    @pytest.mark.parametrize(("what", "number"), [("open_name", "epoch"), ("join_group", "generation")])
    @pytest.mark.parametrize("durable", [False, True])
    def test_a_request_that_is_repeated_is_executed_once(self, what: str, number: str, *, durable: bool) -> None:
        """A client repeats it after a lost connection; its first answer may arrive before the repeat does."""
        stage, answers = Stage(), []
        request = stage.owner.request()
        for _ in range(2):
            getattr(stage.owner.coordinator, what)(S, request, "n", stage.world.now)
            if durable:  # the connection breaks after the answer, or before the client has taken it
                stage.owner.settle()
                answers.append(stage.owner.answers.pop((S, request)))
        stage.owner.settle()
        answers += [stage.owner.heard(S, request)] * (not durable)
        assert {getattr(answer, number) for answer in answers} == {1}
        again = stage.call(lambda request: getattr(stage.owner.coordinator, what)(S, request, "n", stage.world.now))
        assert getattr(again, number) == 2

    def test_a_fenced_commit_is_not_under_way(self) -> None:
        """A commit of a former holder that is being aborted does not stand in the way of the new holder."""
        stage = Stage()
        names = [
            stage.call(lambda request: stage.owner.coordinator.open_name(S, request, "n", stage.world.now))
            for _ in range(2)
        ]
        former, holder = (ProducerSequence("n", 1, name.epoch) for name in names if isinstance(name, NameOpened))
        stage.write(0, "a")
        stage.write(1, "a")
        late = stage.send(lambda request: stage.ask_commit(request, 0, "a", sequence=former))
        current = stage.send(lambda request: stage.ask_commit(request, 1, "a", sequence=holder))
        stage.owner.settle()
        assert isinstance(stage.owner.heard(S, late), ProducerFenced)
        assert stage.owner.heard(S, current) is Outcome.COMMIT

    def test_a_number_below_one_or_a_commit_without_the_name_is_refused(self) -> None:
        stage = Stage()
        opened = stage.call(lambda request: stage.owner.coordinator.open_name(S, request, "n", stage.world.now))
        assert isinstance(opened, NameOpened)
        stage.begin(0, sequence=ProducerSequence("n", 1, opened.epoch))
        assert isinstance(stage.commit(0, "a"), InvalidRequest)
        assert isinstance(stage.commit(0, "a", sequence=ProducerSequence("n", 0, opened.epoch)), InvalidRequest)
        stage.write(0, "a")
        assert stage.commit(0, "a", sequence=ProducerSequence("n", 1, opened.epoch)) is Outcome.COMMIT

    def test_one_commit_of_a_name_is_under_way_at_a_time(self) -> None:
        stage = Stage()
        opened = stage.call(lambda request: stage.owner.coordinator.open_name(S, request, "n", stage.world.now))
        assert isinstance(opened, NameOpened)
        stage.write(0, "a")
        first = stage.send(
            lambda request: stage.ask_commit(request, 0, "a", sequence=ProducerSequence("n", 1, opened.epoch))
        )
        second = stage.send(
            lambda request: stage.ask_commit(request, 1, "b", sequence=ProducerSequence("n", 2, opened.epoch))
        )
        assert isinstance(stage.owner.heard(S, second), InvalidRequest)
        stage.owner.settle()
        assert stage.owner.heard(S, first) is Outcome.COMMIT

    def test_beginning_under_a_name_that_another_opened_is_refused(self) -> None:
        stage = Stage()
        request = stage.begin(0, sequence=ProducerSequence("n", 1, 1))
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
        owner.epoch_markers = [epoch_marker for epoch_marker in owner.epoch_markers if epoch_marker.topic == "a"]
        owner.settle()
        assert not owner.coordinator.ready
        owner.coordinator.topic_deleted("b", stage.world.now)
        owner.take()
        assert owner.coordinator.ready

    def test_a_topic_gets_one_phase_markers_only_once_the_log_says_so(self) -> None:
        stage = Stage(DECIDED)
        stage.owner = stage.world.take_over(CoordinatorConfig())
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
