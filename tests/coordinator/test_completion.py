"""How transactions commit and abort, one promise at a time."""

from __future__ import annotations

import pytest
from coordinator.coordinator_stage import DECIDED, S, Stage

from broker_io.errors import Error
from txnbuffer.coordinator.decisions import Group, decode
from txnbuffer.coordinator.history import History
from txnbuffer.coordinator.messages import Branch, Commit, CoordinatorConfig, State
from txnbuffer.errors import (
    ForeignTransaction,
    InvalidRequest,
    NotVisible,
    TransactionAborted,
    UnregisteredTopic,
)
from txnbuffer.model import Outcome


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

    def test_a_commit_that_does_not_become_visible_in_time_is_answered_so(self) -> None:
        stage = Stage(DECIDED)
        stage.write(0, "a")

        def ask() -> int:
            return stage.send(lambda request: stage.ask_commit(request, 0, "a", wait_visible=True))

        first = ask()
        stage.owner.land_append()
        stage.owner.tick(DECIDED.visible_timeout)  # an undecided one has no outcome to answer
        assert stage.owner.heard(S, first) is None
        stage.owner.acknowledge_append()
        stage.owner.tick(DECIDED.visible_timeout - 1)
        assert stage.owner.heard(S, first) is None
        stage.owner.tick(1)
        assert isinstance(stage.owner.heard(S, first), NotVisible)
        again = ask()
        stage.owner.tick(DECIDED.visible_timeout)
        assert isinstance(stage.owner.heard(S, again), NotVisible)
        stage.owner.land_marker()
        stage.owner.acknowledge_marker()
        stage.owner.pump("a")
        assert not list(stage.owner.coordinator.transactions())
        assert stage.owner.heard(S, ask()) is Outcome.COMMIT

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
        stage = Stage(CoordinatorConfig(one_phase=False, verify_counts=False, max_group=6))
        commits = [Commit(100 + at, stage.txn(at), ("a",), (1,)) for at in range(7)]
        stage.owner.coordinator.commit_many(S, commits, stage.world.now)
        stage.owner.settle()
        assert [len(group.rows) for group in History.read(stage.world.decisions).groups.values()] == [3, 3, 1]
        assert all(stage.owner.heard(S, 100 + at) is Outcome.COMMIT for at in range(7))

    @pytest.mark.parametrize("config", [None, CoordinatorConfig(one_phase=False)])
    def test_a_wrong_count_aborts(self, config: CoordinatorConfig | None) -> None:
        stage = Stage(config)
        stage.write(0, "a", 2)
        result = stage.commit(0, "a", records=3)
        assert isinstance(result, TransactionAborted)
        assert "has 2 records of" in str(result)
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

    @pytest.mark.parametrize("config", [None, DECIDED], ids=["by a marker", "decided"])
    def test_a_commit_with_a_topic_that_is_gone_is_answered_when_its_abort_is_durable(
        self, config: CoordinatorConfig | None
    ) -> None:
        stage = Stage(config)
        stage.write(0, "a")
        owner, bad = stage.owner, Commit(77, stage.txn(0), ("a", "nowhere"), (1, 1))
        owner.coordinator.commit_many(S, [bad], stage.world.now)
        owner.take()
        assert len(owner.appends) + len(owner.markers) == 1
        assert owner.heard(S, 77) is None
        owner.settle()
        assert isinstance(owner.heard(S, 77), UnregisteredTopic)
        assert stage.query(0) is Outcome.ABORT
        assert isinstance(stage.commit(0, "a"), TransactionAborted)
        assert stage.world.read("a").values == stage.world.read("a").ongoing == []

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
        stage.owner.query_outcomes("a")
        stage.owner.query_outcomes("b")
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

    def test_an_operator_may_abort_what_nobody_has_begun_yet(self) -> None:
        stage = Stage()
        stage.owner.open("operator")
        assert stage.abort(0, session="operator", operator=True) is Outcome.ABORT
        assert isinstance(stage.commit(0, "a"), TransactionAborted)
        stage.write(1, "a")
        assert stage.commit(1, "a") is Outcome.COMMIT
