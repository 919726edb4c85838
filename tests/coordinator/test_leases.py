"""Ids, sessions and time, one promise at a time."""

from __future__ import annotations

import pytest
from coordinator.coordinator_stage import DECIDED, S, Stage, txn
from pyroaring import BitMap64

from txnbuffer.coordinator.decisions import LowWaterMark, decode
from txnbuffer.coordinator.history import History
from txnbuffer.coordinator.messages import (
    MOST_OPEN_SESSION,
    Commit,
    CoordinatorConfig,
    Done,
    Leased,
    SessionOpened,
    State,
)
from txnbuffer.coordinator.sessions import in_blocks
from txnbuffer.errors import (
    ForeignTransaction,
    InvalidConfiguration,
    InvalidRequest,
    TooManyTransactions,
    TransactionAborted,
    UnknownSession,
    UnknownTransaction,
)
from txnbuffer.model import Outcome, TxnId
from txnbuffer.rpc.frames import ClientFrame, SessionHello
from txnbuffer.rpc.session_encoding import decode_client_frame, encode_client_frame


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
        assert successor.client("other") >= stage.first + 10

    @pytest.mark.parametrize("count", [0, -1])
    def test_a_lease_of_none_is_refused(self, count: int) -> None:
        assert isinstance(Stage().lease(count), InvalidRequest)

    def test_so_many_may_be_open_in_a_session_and_in_all(self) -> None:
        stage = Stage(CoordinatorConfig(max_open_session=12, max_open=15))
        assert isinstance(stage.lease(3), TooManyTransactions)
        assert isinstance(stage.lease(2), Leased)
        stage.owner.open("other")
        assert isinstance(stage.lease(4, "other"), TooManyTransactions)
        assert isinstance(stage.lease(3, "other"), Leased)
        stage.write(0, "a")
        assert stage.commit(0, "a") is Outcome.COMMIT
        assert isinstance(stage.lease(1, "other"), Leased)

    def test_a_session_can_name_all_that_it_may_have_open(self) -> None:
        with pytest.raises(InvalidConfiguration, match="at most 200000, got 200001"):
            CoordinatorConfig(max_open_session=MOST_OPEN_SESSION + 1)
        hello = SessionHello("a", tuple([TxnId(0, 2**50 + number) for number in range(MOST_OPEN_SESSION)]))
        assert decode_client_frame(encode_client_frame(ClientFrame(hello))).hello == hello

    def test_limits_count_what_older_owners_leased(self) -> None:
        config = CoordinatorConfig(max_open_session=12)
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
        stage.owner.coordinator.return_ids(S, 99, [(stage.first + 4, 6)], stage.world.now)
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
        stage = Stage(CoordinatorConfig(lease_timeout=100.0))
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
        stage = Stage(CoordinatorConfig(remember=20.0))
        for at in range(3):
            stage.write(at, "a")
            stage.commit(at, "a")
            stage.owner.age(2)
        marks = [entry for entry in map(decode, stage.world.compacted()) if isinstance(entry, LowWaterMark)]
        assert [mark.low_water_mark for mark in marks] == [stage.first, stage.first + 1, stage.first + 2]
        stage.owner.age(60, step=5)
        assert len(History.read(stage.world.compacted()).marks) == 1


class TestSessions:
    def test_an_unknown_session_has_to_be_opened(self) -> None:
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
        assert isinstance(opened, SessionOpened)
        assert opened.states[0] == (stage.txn(0), State.OPEN)
        assert isinstance(opened.states[1][1], ForeignTransaction)
        stage.write(0, "a")
        assert stage.commit(0, "a") is Outcome.COMMIT
        assert stage.query(1) is Outcome.ABORT
        assert stage.query(2) is Outcome.ABORT

    def test_a_client_that_stays_away_loses_what_it_has_open(self) -> None:
        stage = Stage(CoordinatorConfig(session_timeout=10.0))
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

    def test_a_lease_for_a_session_that_closed_meanwhile_is_returned(self) -> None:
        stage = Stage()
        stage.send(lambda request: stage.owner.coordinator.lease(S, request, 5, stage.world.now))
        stage.send(lambda request: stage.owner.coordinator.close_session(S, request, stage.world.now))
        stage.owner.settle()
        stage.owner.age(3)
        assert stage.owner.coordinator.low_water_mark == stage.first + 14

    def test_ids_leased_while_a_claim_waits_are_not_given_back_by_it(self) -> None:
        stage = Stage()
        owner = stage.owner = stage.world.take_over()
        epoch_markers, owner.epoch_markers = owner.epoch_markers, []
        opened = owner.open(S, stage.txn(0))
        block = stage.lease(3)
        assert isinstance(block, Leased)
        assert owner.heard(S, opened) is None
        owner.epoch_markers = epoch_markers
        owner.settle()
        assert isinstance(owner.heard(S, opened), SessionOpened)
        stage.first = block.first
        stage.write(0, "a")
        assert stage.commit(0, "a") is Outcome.COMMIT

    def test_after_a_take_over_unclaimed_transactions_are_aborted(self) -> None:
        stage = Stage(CoordinatorConfig(session_timeout=10.0))
        stage.begin(0)
        stage.write(0, "a")
        stage.owner = stage.world.take_over(CoordinatorConfig(session_timeout=10.0))
        stage.owner.settle()
        assert stage.query(0) is State.OPEN
        stage.owner.age(12)
        assert stage.query(0) is Outcome.ABORT

    def test_the_time_of_a_client_counts_from_its_last_sign_of_life(self) -> None:
        config = CoordinatorConfig(transaction_timeout=900.0, session_timeout=30.0, reconnect_seconds=0.0)
        stage = Stage(config)
        stage.begin(0)
        stage.write(0, "a")
        stage.owner.age(100)  # it stays connected
        for _ in range(3):
            stage.owner = stage.world.take_over(config)
            stage.owner.settle()
            stage.owner.age(9)
            assert stage.query(0) is State.OPEN
        stage.owner = stage.world.take_over(config)
        stage.owner.settle()
        stage.owner.age(14)
        assert stage.query(0) is Outcome.ABORT

    def test_an_owner_that_clients_can_connect_to_gives_them_time_to_do_so(self) -> None:
        config = CoordinatorConfig(session_timeout=30.0)
        stage = Stage(config)
        stage.begin(0)
        stage.write(0, "a")
        stage.world.now += 1000.0  # no owner runs
        stage.owner = stage.world.take_over(config)
        stage.owner.settle()
        stage.owner.age(9)
        assert stage.query(0) is State.OPEN
        stage.owner.age(3)
        assert stage.query(0) is Outcome.ABORT

    def test_recording_signs_of_life_holds_back_no_ids(self) -> None:
        config = CoordinatorConfig(transaction_timeout=900.0, session_timeout=30.0)
        stage = Stage(config)
        stage.begin(0)
        (session,) = stage.owner.coordinator.sessions()
        leased = session.outstanding
        stage.owner.age(100)
        assert session.outstanding == leased
        assert stage.commit(0) is Outcome.COMMIT


class TestTime:
    def test_a_transaction_may_last_its_timeout(self) -> None:
        stage = Stage(CoordinatorConfig(transaction_timeout=20.0, max_transaction_timeout=100.0))
        stage.begin(0)
        stage.begin(1, timeout=5.0)
        stage.begin(2, timeout=90.0)
        stage.owner.age(10)
        assert [stage.query(at) for at in range(3)] == [State.OPEN, Outcome.ABORT, State.OPEN]
        stage.owner.age(15)
        assert [stage.query(at) for at in range(3)] == [Outcome.ABORT, Outcome.ABORT, State.OPEN]
        result = stage.commit(0, "a")
        assert isinstance(result, TransactionAborted)
        assert result.timed_out  # although it was settled before the request
        stage.abort(2)
        result = stage.commit(2, "a")
        assert isinstance(result, TransactionAborted)
        assert not result.timed_out

    def test_a_transaction_whose_first_request_is_an_invalid_commit_ends_in_time(self) -> None:
        stage = Stage(CoordinatorConfig(transaction_timeout=20.0))
        assert isinstance(stage.commit(0, "a", "a"), InvalidRequest)
        stage.owner.age(10)
        assert stage.query(0) is State.OPEN
        stage.owner.age(15)
        assert stage.query(0) is Outcome.ABORT

    def test_nobody_may_ask_for_more_than_the_maximum(self) -> None:
        stage = Stage(CoordinatorConfig(max_transaction_timeout=100.0))
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
        assert len(stage.owner.coordinator._core._deadlines) < 3500  # the test is about what is kept
        stage.owner.age(70, step=35)
        assert stage.query(0) is Outcome.COMMIT


def test_ids_with_a_wide_gap_are_retired_in_blocks() -> None:
    ids = BitMap64([1, 2, 3, 7, 2**40, 2**40 + 1, 2**62])
    parts = [(list(some), blocks) for some, blocks in in_blocks(ids, 2)]
    assert parts == [([1, 2, 3, 7], [(1, 3), (7, 1)]), ([2**40, 2**40 + 1, 2**62], [(2**40, 2), (2**62, 1)])]
    assert [list(some) for some, _ in in_blocks(ids, 3)] == [[1, 2, 3, 7, 2**40, 2**40 + 1], [2**62]]
    assert not [*in_blocks(BitMap64(), 1)]
