"""The core of a client, case by case: what it says, and what it makes of what it is told."""

from __future__ import annotations

import pytest
from client.core_setup import registered, rows, taken, welcomed

from broker_io.errors import DiskFailed, DiskFull, DiskWatermark, Error, MessageTooLarge
from txnbuffer.client.path.record_path import EndPlan, ServicePath
from txnbuffer.client.session.session_core import IDLE_TICKS, SessionCore
from txnbuffer.coordinator.messages import Done, Leased, NameOpened, ProducerSequence, State
from txnbuffer.errors import (
    AlreadyCommitted,
    CoordinatorStopped,
    OutcomeForgotten,
    OutcomeUnknown,
    ProducerFenced,
    SendUnknown,
    ServiceUnavailable,
    TooManyTransactions,
    TransactionAborted,
    UnregisteredTopic,
)
from txnbuffer.model import Outcome, TxnId
from txnbuffer.rpc.frames import Failure, NamedRequest, Query, ServerFrame, Welcome


def test_transaction_with_a_failed_send_can_only_abort() -> None:
    core = welcomed()
    transaction = registered(core)
    core.receive(ServerFrame(failures=(Failure(1, MessageTooLarge("no"), transaction.txn),)))
    core.transactions.end(transaction, EndPlan(True, "w"))
    assert core.take_frame() is None  # an abort waits until all sends are settled
    core.receive(ServerFrame(acknowledged=1))
    ((waiter, result),) = core.take_results()
    assert waiter == "w"
    assert isinstance(result, MessageTooLarge)
    frame = core.take_frame()
    assert frame is not None
    assert (frame.commits, [abort.txn for abort in frame.aborts]) == ((), [transaction.txn])


def test_failure_of_another_transaction_in_the_same_send_is_ignored() -> None:
    core = welcomed()
    first = registered(core)
    second, third = core.begin(), core.begin()
    core.send("a", rows(b"2"), second)
    core.send("a", rows(b"3"), third)
    core.transactions.send_all_early()
    frame = core.take_frame()
    assert frame is not None
    assert len(frame.sends) == 1
    core.receive(ServerFrame(acknowledged=2, failures=(Failure(2, MessageTooLarge("no"), third.txn),)))
    assert [one.failure is None for one in (first, second, third)] == [True, True, False]


def test_state_lost_by_the_service_is_a_retryable_abort() -> None:
    core = welcomed()
    transaction = registered(core)
    core.receive(ServerFrame(acknowledged=1, failures=(Failure(1, UnregisteredTopic("who?"), transaction.txn),)))
    assert isinstance(transaction.failure, TransactionAborted)
    again = core.begin()
    core.send("a", rows(b"v"), again)
    core.transactions.send_all_early()
    frame = core.take_frame()
    assert frame is not None
    assert [name for _, name in frame.registers] == ["a"]


def test_error_of_a_begin_precedes_other_answers_of_a_frame() -> None:
    core = welcomed()
    transaction = core.begin(5.0, ProducerSequence("n", 1, 3))
    core.transactions.end(transaction, EndPlan(False, "w"))
    frame = core.take_frame()
    assert frame is not None
    refused = (frame.begins[0].request, AlreadyCommitted("n", 1, 1))
    core.receive(ServerFrame(answers=((frame.aborts[0].request, Outcome.ABORT), refused)))
    assert isinstance(transaction.failure, AlreadyCommitted)
    assert core.take_results() == [("w", Outcome.ABORT)]


def test_commit_whose_answer_was_lost_is_sent_again() -> None:
    core = welcomed()
    transaction = registered(core)
    core.transactions.end(transaction, EndPlan(True, "w"))
    core.receive(ServerFrame(acknowledged=1))
    first = core.take_frame()
    core.lost()
    hello = core.hello()
    assert hello.hello is not None
    assert hello.hello.session == "s"
    assert hello.hello.open == (transaction.txn,)
    core.receive(ServerFrame(welcome=Welcome("s", 0, 2, 1000, ((transaction.txn, State.COMMITTED),))))
    second = core.take_frame()
    assert first is not None
    assert second is not None
    assert first.commits == second.commits
    core.receive(ServerFrame(answers=((second.commits[0].request, Outcome.COMMIT),)))
    assert core.take_results() == [("w", Outcome.COMMIT)]
    assert core.hello().hello == hello.hello._replace(open=())


def test_unacknowledged_records_are_sent_again_with_their_numbers() -> None:
    core = welcomed()
    transaction = registered(core)
    core.send("a", rows(b"w"), transaction)
    frame = taken(core)
    core.receive(ServerFrame(acknowledged=1))
    core.lost()
    core.hello()
    core.receive(ServerFrame(welcome=Welcome("s", 0, 2, 1000, ((transaction.txn, State.OPEN),))))
    frame = core.take_frame()
    assert frame is not None
    (send,) = frame.sends
    assert [(message.value, message.properties["tb.seq"]) for message in send.batch] == [(b"w", "2")]


@pytest.mark.parametrize(
    ("error", "known"), [(DiskFull("full"), False), (DiskFailed("EIO"), False), (DiskWatermark("low"), True)]
)
def test_a_log_that_stopped_may_have_stored_an_ordinary_record(error: Error, known: bool) -> None:
    core = welcomed()
    core.send("a", rows(b"v"), None, "sent")
    core.take_frame()
    core.receive(ServerFrame(failures=(Failure(1, error),)))
    ((waiter, result),) = core.take_results()
    assert waiter == "sent"
    assert result is error if known else isinstance(result, SendUnknown) and result.__cause__ is error


def test_ordinary_records_in_flight_are_not_sent_again() -> None:
    core = welcomed()
    core.send("a", rows(b"v"), None, "sent")
    core.take_frame()
    core.send("a", rows(b"w"), None, "queued")
    core.lost()
    ((waiter, result),) = core.take_results()
    assert waiter == "sent"
    assert isinstance(result, SendUnknown)
    core.hello()
    core.receive(ServerFrame(welcome=Welcome("s", 0, 2, 1000)))
    frame = core.take_frame()
    assert frame is not None
    assert [message.value for send in frame.sends for message in send.batch] == [b"w"]


def test_ordinary_records_that_the_service_did_not_take_are_sent_again() -> None:
    core = welcomed()
    for number in (1, 2):
        core.send("a", rows(b"%d" % number), None, f"sent {number}")
        core.take_frame()
    core.receive(ServerFrame(acknowledged=1, goodbye=CoordinatorStopped("it stops"), settled=True))
    core.lost()
    assert core.take_results() == [("sent 1", None)]
    core.hello()
    core.receive(ServerFrame(welcome=Welcome("s", 0, 2, 1000)))
    frame = core.take_frame()
    assert frame is not None
    assert [message.value for send in frame.sends for message in send.batch] == [b"2"]
    core.lost()  # without a word of the service
    ((waiter, result),) = core.take_results()
    assert waiter == "sent 2"
    assert isinstance(result, SendUnknown)


def test_ids_of_an_older_connection_are_not_used() -> None:
    core = welcomed()
    assert core.begin().txn == TxnId(0, 1)
    core.lost()
    assert not core.ids
    core.hello()
    core.receive(ServerFrame(welcome=Welcome("s", 0, 2, 1000)))
    assert not core.ids


def test_rejected_lease_is_requested_with_fewer_ids() -> None:
    core = SessionCore(ServicePath())
    core.hello()
    core.receive(ServerFrame(welcome=Welcome("s", 0, 1, 1000)))
    core.wait_to_begin("w")
    sizes = []
    while not (results := core.take_results()):
        frame = core.take_frame()
        assert frame is not None
        ((request, size),) = frame.leases
        sizes.append(size)
        core.receive(ServerFrame(answers=((request, TooManyTransactions("too many")),)))
    assert sizes == [64, 16]
    assert [type(result) for _, result in results] == [TooManyTransactions]


def test_unused_ids_are_returned_when_idle() -> None:
    core = welcomed(ids=40)
    core.transactions.end(core.begin(), EndPlan(True, "w"))
    frame = core.take_frame()
    assert frame is not None
    core.receive(ServerFrame(answers=((frame.commits[0].request, Outcome.COMMIT),)))
    for _ in range(IDLE_TICKS):
        core.tick()
        assert core.take_frame() is None
    assert not core.has_frame
    core.tick()
    assert core.has_frame
    frame = core.take_frame()
    assert frame is not None
    assert frame.returned == ((2, 39),)
    assert not core.ids


def test_transaction_is_announced_after_a_tick() -> None:
    core = welcomed()
    transaction = core.begin()
    core.tick()
    assert core.take_frame() is None
    core.tick()
    frame = core.take_frame()
    assert frame is not None
    assert [(begin.txn, begin.timeout) for begin in frame.begins] == [(transaction.txn, None)]
    core.tick()
    assert core.take_frame() is None


def test_transaction_with_a_timeout_is_announced_at_once() -> None:
    core = welcomed()
    sequence = ProducerSequence("n", 1, 1)
    core.begin(timeout=2.0, sequence=sequence)
    frame = core.take_frame()
    assert frame is not None
    assert [(begin.timeout, begin.sequence) for begin in frame.begins] == [(2.0, sequence)]


def test_sender_waits_for_credits() -> None:
    core = welcomed()
    core.receive(ServerFrame(credits=100))
    transaction = registered(core)
    assert core.has_room
    core.send("a", rows(b"x" * 100), transaction)
    assert not core.has_room
    core.wait_for_room("w")
    assert core.take_results() == []
    core.receive(ServerFrame(acknowledged=1))
    core.take_frame()
    core.receive(ServerFrame(acknowledged=2))
    assert core.take_results() == [("w", None)]


def test_no_transaction_begins_at_a_draining_service() -> None:
    core = welcomed()
    core.receive(ServerFrame(draining=True))
    assert not core.ids
    core.wait_to_begin("w")
    assert core.take_frame() is None
    core.lost()
    core.hello()
    core.receive(ServerFrame(welcome=Welcome("s", 0, 1, 1000)))
    frame = core.take_frame()
    assert frame is not None
    core.receive(ServerFrame(answers=((frame.leases[0].request, Leased(100, 10)),)))
    assert core.take_results() == [("w", None)]


def test_request_to_a_stopped_coordinator_is_sent_to_the_next_one() -> None:
    core = welcomed()
    transaction = core.begin()
    core.transactions.end(transaction, EndPlan(True, "w"))
    frame = core.take_frame()
    assert frame is not None
    core.receive(ServerFrame(answers=((frame.commits[0].request, CoordinatorStopped("gone")),)))
    assert isinstance(core.broken, CoordinatorStopped)
    assert core.take_results() == []
    core.hello()
    assert core.broken is None
    core.receive(ServerFrame(welcome=Welcome("s", 0, 2, 1000, ((transaction.txn, State.OPEN),))))
    again = core.take_frame()
    assert again is not None
    assert again.commits == frame.commits


def test_giving_up_fails_all_waiters() -> None:
    core = welcomed()
    asked, planned = registered(core), core.begin()
    core.transactions.end(asked, EndPlan(True, "asked"))
    core.receive(ServerFrame(acknowledged=1))
    core.take_frame()
    core.send("a", rows(b"v"), planned)
    core.transactions.end(planned, EndPlan(True, "planned"))
    core.send("a", rows(b"v"), None, "ordinary")
    core.requests.ask("queries", Query(next(core.requests.numbers), asked.txn), "query")
    core.requests.ask("open_names", NamedRequest(next(core.requests.numbers), "n"), "name")
    core.wait_for_room("room")
    core.give_up(ServiceUnavailable("nobody there"))
    told = {waiter: type(result) for waiter, result in core.take_results() if waiter is not None}
    assert told == {
        "asked": OutcomeUnknown,
        "planned": TransactionAborted,
        "ordinary": ServiceUnavailable,
        "query": ServiceUnavailable,
        "name": ServiceUnavailable,
        "room": ServiceUnavailable,
    }
    hello = core.hello().hello
    assert hello is not None
    assert hello.open == ()


def test_commit_that_was_never_sent_has_aborted_when_the_client_gives_up() -> None:
    core = welcomed()
    sent, unsent = core.begin(), core.begin()
    core.transactions.end(sent, EndPlan(True, "sent"))
    core.take_frame()
    core.lost()
    core.transactions.end(unsent, EndPlan(True, "unsent"))
    core.hello()
    states = ((sent.txn, State.OPEN), (unsent.txn, State.OPEN))
    core.receive(ServerFrame(welcome=Welcome("s", 0, 2, 1000, states)))  # both are in the next frame
    core.give_up(ServiceUnavailable("nobody there"))
    told = {waiter: type(result) for waiter, result in core.take_results() if waiter is not None}
    assert told == {"sent": OutcomeUnknown, "unsent": TransactionAborted}


def test_answers_to_unknown_requests_are_ignored() -> None:
    core = welcomed()
    core.receive(
        ServerFrame(answers=((99, NameOpened(1, 0)),), acknowledged=7, failures=(Failure(9, MessageTooLarge("x")),))
    )
    assert core.take_results() == []


@pytest.mark.parametrize("is_taken", [False, True])
def test_commit_can_be_withdrawn_until_it_is_sent(is_taken: bool) -> None:
    core = welcomed()
    transaction = core.begin()
    core.transactions.end(transaction, EndPlan(True, "w"))
    if is_taken:
        core.take_frame()
    assert core.transactions.withdraw_commit(transaction) is not is_taken
    frame = core.take_frame()
    if is_taken:
        assert frame is None
    else:
        assert frame is not None
        assert (frame.commits, [abort.txn for abort in frame.aborts]) == ((), [transaction.txn])


def test_transactions_that_ended_during_a_disconnect_fail_before_their_sends() -> None:
    core = welcomed()
    ended, forgotten, alive = core.begin(), core.begin(), core.begin()
    core.lost()
    core.hello()
    error = OutcomeForgotten(forgotten.txn)
    states = ((ended.txn, State.ABORTED), (forgotten.txn, error), (alive.txn, State.OPEN))
    core.receive(ServerFrame(welcome=Welcome("s", 0, 2, 1000, states)))
    assert isinstance(ended.failure, TransactionAborted)
    assert forgotten.failure is error
    assert alive.failure is None


def test_commit_sent_over_an_older_connection_cannot_be_withdrawn() -> None:
    core = welcomed()
    transaction = core.begin()
    core.transactions.end(transaction, EndPlan(True, "w"))
    core.take_frame()
    core.lost()
    core.hello()
    core.receive(ServerFrame(welcome=Welcome("s", 0, 2, 1000, ((transaction.txn, State.OPEN),))))
    assert not core.transactions.withdraw_commit(transaction)


def test_only_ordinary_records_are_sent_before_their_topic_is_registered() -> None:
    core = welcomed()
    transaction = core.begin()
    core.send("a", rows(b"later"), transaction)
    core.transactions.send_all_early()
    core.send("a", rows(b"now"), None, "w")
    frame = core.take_frame()
    assert frame is not None
    assert [message.value for send in frame.sends for message in send.batch] == [b"now"]
    core.receive(ServerFrame(answers=((frame.registers[0].request, Done()),)))
    frame = core.take_frame()
    assert frame is not None
    assert [message.value for send in frame.sends for message in send.batch] == [b"later"]


def test_fenced_producer_gets_fenced_although_its_sends_failed() -> None:
    core = welcomed()
    registered(core)
    transaction = core.begin(sequence=ProducerSequence("n", 1, 1))
    core.send("a", rows(b"v"), transaction)
    core.transactions.end(transaction, EndPlan(True, "w"))
    frame = core.take_frame()
    assert frame is not None
    failures = (Failure(2, TransactionAborted(transaction.txn, "it had ended before"), transaction.txn),)
    answers = ((frame.commits[0].request, ProducerFenced("stop")),)
    core.receive(ServerFrame(acknowledged=2, failures=failures, answers=answers))
    ((_, result),) = core.take_results()
    assert isinstance(result, ProducerFenced)
