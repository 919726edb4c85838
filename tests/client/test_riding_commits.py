"""The core of a client: a commit is sent in the frame with the last of its records, or in a later one."""

from __future__ import annotations

import pytest
from client.core_setup import registered, rows, taken, welcomed

from broker_io.errors import DiskWatermark, Error, MessageTooLarge
from txnbuffer.client.path.record_path import MAX_IN_FLIGHT, EndPlan, OpenTransaction
from txnbuffer.client.session.session_core import SessionCore
from txnbuffer.coordinator.messages import Done, State
from txnbuffer.errors import (
    CoordinatorStopped,
    NotAuthorized,
    OutcomeForgotten,
    OutcomeUnknown,
    ProducerFenced,
    ServiceUnavailable,
    TransactionAborted,
    Unauthenticated,
)
from txnbuffer.model import Outcome, TxnId
from txnbuffer.rpc.frames import FRAME_BYTES, SEND_BYTES, ClientFrame, Failure, ServerFrame, Welcome

LARGE = b"x" * (SEND_BYTES - 100)


def topic_known(core: SessionCore) -> None:
    """Register topic "a" and finish a transaction on it."""
    transaction = registered(core)
    core.transactions.end(transaction, EndPlan(False, None))
    core.receive(ServerFrame(acknowledged=1))
    core.receive(ServerFrame(answers=((taken(core).aborts[0].request, Outcome.ABORT),)))


def sent(frame: ClientFrame) -> list[bytes | None]:
    return [message.value for send in frame.sends for message in send.batch]


def commits(frame: ClientFrame) -> list[TxnId]:
    return [commit.txn for commit in frame.commits]


def committing(core: SessionCore, value: bytes = b"v", waiter: str = "w") -> OpenTransaction:
    """A transaction with one record whose commit was requested."""
    transaction = core.begin()
    core.send("a", rows(value), transaction)
    core.transactions.end(transaction, EndPlan(True, waiter))
    return transaction


def reconnected(core: SessionCore, *states: tuple[TxnId, State]) -> None:
    core.lost()
    core.hello()
    core.receive(ServerFrame(welcome=Welcome("s", 0, 2, 1000, states)))


def test_commit_is_sent_with_the_last_of_its_records() -> None:
    core = welcomed()
    topic_known(core)
    first, second = committing(core, b"1"), committing(core, b"2")
    frame = taken(core)
    assert sent(frame) == [b"1", b"2"]
    assert commits(frame) == [first.txn, second.txn]
    assert [(commit.topics, commit.records) for commit in frame.commits] == [(("a",), (1,))] * 2


def test_commit_waits_for_the_registration_of_its_topic() -> None:
    core = welcomed()
    transaction = committing(core)
    frame = taken(core)
    assert (frame.sends, frame.commits) == ((), ())
    core.receive(ServerFrame(answers=((frame.registers[0].request, Done()),)))
    frame = taken(core)
    assert (sent(frame), commits(frame)) == ([b"v"], [transaction.txn])


def larger_than_a_frame(core: SessionCore) -> tuple[OpenTransaction, int]:
    """An open transaction whose records need two frames, and how many it has sent."""
    transaction = core.begin()
    count = FRAME_BYTES // len(LARGE) + 2
    for _ in range(count):
        core.send("a", rows(LARGE), transaction)
    return transaction, count


def test_commit_waits_for_the_frame_with_its_last_record() -> None:
    core = welcomed()
    topic_known(core)
    transaction, count = larger_than_a_frame(core)
    core.transactions.end(transaction, EndPlan(True, "w"))
    first = taken(core)
    assert commits(first) == []
    last = taken(core)
    assert len(sent(first)) + len(sent(last)) == count
    assert commits(last) == [transaction.txn]


def test_commit_waits_while_the_most_frames_are_unacknowledged() -> None:
    core = welcomed()
    topic_known(core)
    for number in range(MAX_IN_FLIGHT):
        committing(core, b"%d" % number)
        taken(core)
    transaction = committing(core, b"last")
    assert core.take_frame() is None
    core.receive(ServerFrame(acknowledged=2))
    frame = taken(core)
    assert (sent(frame), commits(frame)) == ([b"last"], [transaction.txn])


def test_lost_commit_is_repeated_with_its_records_or_after_them() -> None:
    core = welcomed()
    topic_known(core)
    transaction, count = larger_than_a_frame(core)
    small = committing(core, b"small")
    core.transactions.end(transaction, EndPlan(True, "w"))
    lost = [taken(core), taken(core)]
    assert commits(lost[1]) == [transaction.txn, small.txn]
    for _ in range(2):  # it is lost again
        reconnected(core, (transaction.txn, State.OPEN), (small.txn, State.OPEN))
        first = taken(core)
        assert commits(first) == []
        second = taken(core)
        assert sent(first) + sent(second) == [LARGE] * count + [b"small"]
        assert commits(second) == [transaction.txn, small.txn]
        assert [commit.request for commit in second.commits] == [commit.request for commit in lost[1].commits]


def test_lost_commit_whose_records_were_acknowledged_is_repeated_at_once() -> None:
    core = welcomed()
    topic_known(core)
    transaction = committing(core)
    taken(core)
    core.receive(ServerFrame(acknowledged=2))
    reconnected(core, (transaction.txn, State.OPEN))
    frame = taken(core)
    assert (sent(frame), commits(frame)) == ([], [transaction.txn])


@pytest.mark.parametrize("requested_before", [True, False])
def test_commit_that_was_not_sent_waits_for_repeated_records_and_can_be_withdrawn(requested_before: bool) -> None:
    core = welcomed()
    transaction = registered(core)  # its record is in a frame
    if requested_before:
        core.transactions.end(transaction, EndPlan(True, "w"))
    core.lost()
    if not requested_before:
        core.transactions.end(transaction, EndPlan(True, "w"))
    core.hello()
    core.receive(ServerFrame(welcome=Welcome("s", 0, 2, 1000, ((transaction.txn, State.OPEN),))))
    assert not core.transactions.commit_sent(transaction)
    assert core.transactions.withdraw_commit(transaction)
    frame = taken(core)
    assert (sent(frame), commits(frame), frame.aborts) == ([b"v"], [], ())
    core.receive(ServerFrame(acknowledged=1))
    assert [abort.txn for abort in taken(core).aborts] == [transaction.txn]


def test_commit_that_was_not_sent_has_aborted_when_its_records_cannot_be_repeated() -> None:
    core = welcomed()
    transaction = registered(core)
    core.transactions.end(transaction, EndPlan(True, "w"))
    reconnected(core, (transaction.txn, State.OPEN))
    core.give_up(ServiceUnavailable("nobody there"))
    ((_, result),) = core.take_results()
    assert isinstance(result, TransactionAborted)


def test_outcome_of_a_commit_that_waits_for_repeated_records_is_unknown() -> None:
    core = welcomed()
    topic_known(core)
    transaction = committing(core)
    taken(core)
    reconnected(core, (transaction.txn, State.OPEN))
    assert core.transactions.commit_sent(transaction)
    assert not core.transactions.withdraw_commit(transaction, "w")
    core.give_up(ServiceUnavailable("nobody there"))
    ((_, result),) = core.take_results()
    assert isinstance(result, OutcomeUnknown)


@pytest.mark.parametrize("sent_before", [False, True])
def test_commit_that_the_service_did_not_take_was_never_sent(sent_before: bool) -> None:
    core = welcomed()
    topic_known(core)
    transaction = committing(core)
    taken(core)
    if sent_before:
        reconnected(core, (transaction.txn, State.OPEN))
        taken(core)
    core.receive(ServerFrame(goodbye=Unauthenticated("it has expired"), settled=True))
    core.lost()
    assert core.transactions.commit_sent(transaction) is sent_before
    core.give_up(Unauthenticated("it has expired"))
    ((_, result),) = core.take_results()
    assert isinstance(result, OutcomeUnknown if sent_before else Unauthenticated)


def test_commit_that_the_service_did_not_take_is_repeated() -> None:
    core = welcomed()
    topic_known(core)
    transaction = committing(core)
    first = taken(core)
    core.receive(ServerFrame(goodbye=CoordinatorStopped("it stops"), settled=True))
    reconnected(core, (transaction.txn, State.OPEN))
    frame = taken(core)
    assert (sent(frame), frame.commits) == ([b"v"], first.commits)
    assert core.take_frame() is None


@pytest.mark.parametrize("failure", [NotAuthorized("no"), MessageTooLarge("no"), DiskWatermark("low")])
@pytest.mark.parametrize("together", [True, False])
def test_refused_commit_reports_why_its_records_were_refused(failure: Error, together: bool) -> None:
    core = welcomed()
    topic_known(core)
    transaction = committing(core)
    frame = taken(core)
    failures = (Failure(2, failure, transaction.txn),)
    answers = ((frame.commits[0].request, TransactionAborted(transaction.txn, "1 record is missing")),)
    if together:
        core.receive(ServerFrame(acknowledged=2, failures=failures, answers=answers))
    else:
        core.receive(ServerFrame(acknowledged=2, failures=failures))
        core.receive(ServerFrame(answers=answers))
    ((_, result),) = core.take_results()
    assert result is transaction.failure
    assert type(result) is type(failure) or (isinstance(result, TransactionAborted) and str(failure) in str(result))
    assert core.take_frame() is None
    assert core.transactions.ids() == ()


@pytest.mark.parametrize("error", [ProducerFenced("stop"), OutcomeForgotten(TxnId(0, 2))])
def test_other_errors_of_a_commit_are_reported_although_its_records_were_refused(error: Error) -> None:
    core = welcomed()
    topic_known(core)
    transaction = committing(core)
    frame = taken(core)
    failures = (Failure(2, TransactionAborted(transaction.txn, "it had ended"), transaction.txn),)
    core.receive(
        ServerFrame(acknowledged=2, failures=failures, answers=((frame.commits[0].request, error),)),
    )
    assert core.take_results() == [("w", error)]


def test_repeated_commit_has_committed_although_its_repeated_records_are_refused() -> None:
    core = welcomed()
    topic_known(core)
    transaction = committing(core)
    taken(core)
    reconnected(core, (transaction.txn, State.COMMITTED))
    frame = taken(core)
    assert (sent(frame), commits(frame)) == ([b"v"], [transaction.txn])
    failures = (Failure(1, TransactionAborted(transaction.txn, "it had ended"), transaction.txn),)
    core.receive(
        ServerFrame(acknowledged=1, failures=failures, answers=((frame.commits[0].request, Outcome.COMMIT),)),
    )
    assert core.take_results() == [("w", Outcome.COMMIT)]


def test_abort_after_a_refused_commit_waits_until_its_sends_are_settled() -> None:
    core = welcomed()
    topic_known(core)
    transaction = committing(core)
    frame = taken(core)
    error = NotAuthorized("no")
    core.receive(ServerFrame(answers=((frame.commits[0].request, error),)))
    assert core.take_results() == [("w", error)]
    assert core.take_frame() is None
    core.receive(ServerFrame(acknowledged=2))
    assert [abort.txn for abort in taken(core).aborts] == [transaction.txn]
