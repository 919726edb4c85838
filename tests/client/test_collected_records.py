"""The core of a client: small transactions collect their records until they commit; what sends them early."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
from client.core_setup import register, registered, rows, taken, welcomed

from broker_io.batch import Batch, Message
from broker_io.errors import InvalidTopicName
from txnbuffer.client.path.record_path import EndPlan, OpenTransaction
from txnbuffer.client.session.session_core import SessionCore
from txnbuffer.client.session.session_requests import COLLECT_BYTES
from txnbuffer.coordinator.messages import PARTICIPANT, ProducerSequence, State
from txnbuffer.errors import OutcomeForgotten, ServiceUnavailable, TransactionAborted
from txnbuffer.model import Outcome
from txnbuffer.rpc.frames import ClientFrame, ServerFrame, Welcome


def ready_core() -> SessionCore:
    """A core with the registered topic "a" and no open transaction."""
    core = welcomed()
    transaction = registered(core)
    core.transactions.end(transaction, EndPlan(True, None))
    core.receive(ServerFrame(acknowledged=1, answers=((taken(core).commits[0].request, Outcome.COMMIT),)))
    core.take_results()
    assert core.take_frame() is None
    return core


def collecting(core: SessionCore, value: bytes = b"v", sequence: ProducerSequence | None = None) -> OpenTransaction:
    transaction = core.begin(sequence=sequence)
    core.send("a", rows(value), transaction)
    return transaction


def sent(frame: ClientFrame) -> list[bytes | None]:
    return [message.value for send in frame.sends for message in send.batch]


def numbers(frame: ClientFrame) -> list[str]:
    return [message.properties["tb.seq"] for send in frame.sends for message in send.batch]


def test_small_transaction_is_sent_in_one_frame_when_it_commits() -> None:
    core = ready_core()
    transaction = collecting(core, b"1")
    core.send("a", rows(b"2", b"3"), transaction)
    assert not core.has_frame
    assert core.take_frame() is None
    core.transactions.end(transaction, EndPlan(True, "w"))
    frame = taken(core)
    assert (sent(frame), numbers(frame), frame.begins) == ([b"1", b"2", b"3"], ["1", "2", "3"], ())
    assert [(commit.txn, commit.topics, commit.records) for commit in frame.commits] == [
        (transaction.txn, ("a",), (3,))
    ]


def test_new_topic_is_registered_at_the_first_send() -> None:
    core = welcomed()
    transaction = collecting(core)
    frame = taken(core)
    assert ([name for _, name in frame.registers], frame.sends) == (["a"], ())
    register(core, frame)
    assert core.take_frame() is None
    core.transactions.end(transaction, EndPlan(True, "w"))
    assert sent(taken(core)) == [b"v"]


def more_than_the_limit(core: SessionCore, transaction: OpenTransaction) -> None:
    core.send("a", rows(bytes(COLLECT_BYTES)), transaction)


def a_whole_tick(core: SessionCore, transaction: OpenTransaction) -> None:
    core.tick()
    assert core.take_frame() is None
    core.tick()


def an_ordinary_record(core: SessionCore, transaction: OpenTransaction) -> None:
    core.send("a", rows(b"ordinary"), None, "sent")


def a_caller_without_room(core: SessionCore, transaction: OpenTransaction) -> None:
    core.wait_for_room("w")


def the_end_of_a_branch(core: SessionCore, transaction: OpenTransaction) -> None:
    core.transactions.end(transaction, EndPlan(False, "w", ready=True))


def a_batch(core: SessionCore, transaction: OpenTransaction) -> None:
    core.send_batch("a", Batch.of([Message(None, b"batch")]), transaction, 0)


EARLY = [
    (more_than_the_limit, [b"v", bytes(COLLECT_BYTES)]),
    (a_whole_tick, [b"v"]),
    (an_ordinary_record, [b"v", b"ordinary"]),
    (a_caller_without_room, [b"v"]),
    (the_end_of_a_branch, [b"v"]),
    (a_batch, [b"v", b"batch"]),
]


@pytest.mark.parametrize(("cause", "expected"), EARLY, ids=lambda one: getattr(one, "__name__", ""))
def test_collected_records_are_sent_early(
    cause: Callable[[SessionCore, OpenTransaction], None], expected: list[bytes]
) -> None:
    core = ready_core()
    transaction = collecting(core)
    cause(core, transaction)
    frame = taken(core)
    assert sent(frame) == expected
    assert (frame.commits, frame.queries) == ((), ())
    if not transaction.ending:
        core.send("a", rows(b"later"), transaction)
        assert sent(taken(core)) == [b"later"]


def test_branch_reports_that_it_is_complete_once_its_records_are_durable() -> None:
    core = ready_core()
    transaction = collecting(core)
    the_end_of_a_branch(core, transaction)
    assert taken(core).queries == ()
    core.receive(ServerFrame(acknowledged=2))
    assert [query.txn for query in taken(core).queries] == [transaction.txn]


def test_ordinary_record_sends_all_of_the_transactions_on_its_topic_and_no_others() -> None:
    core = ready_core()
    core.transactions.end(registered(core, "b"), EndPlan(False, None))
    first, other = collecting(core, b"1"), core.begin()
    core.send("b", rows(b"2"), first)
    core.send("b", rows(b"3"), other)
    core.send("a", rows(b"ordinary"), None, "w")
    frame = taken(core)
    by_topic = {send.topic: [message.value for message in send.batch] for send in frame.sends}
    assert by_topic == {"a": [b"ordinary"], "b": [b"2"]}
    assert [send.topic for send in frame.sends].count("a") == 2
    assert sent(frame).index(b"1") < sent(frame).index(b"ordinary")


def test_collected_bytes_use_room_until_they_are_acknowledged() -> None:
    core = ready_core()
    core.receive(ServerFrame(credits=1000))
    before = core.room
    transaction = collecting(core, b"x" * 100)
    used = before - core.room
    assert used > 100
    core.transactions.end(transaction, EndPlan(True, "w"))
    frame = taken(core)
    assert core.room == before - used
    core.receive(ServerFrame(acknowledged=2, answers=((frame.commits[0].request, Outcome.COMMIT),)))
    assert core.room == before


def test_transactions_that_collect_do_not_wait_for_one_another() -> None:
    core = ready_core()
    core.receive(ServerFrame(credits=300))
    first, second = collecting(core, b"x" * 100), collecting(core, b"y" * 100)
    assert not core.has_room
    core.wait_for_room("w")
    assert sent(taken(core)) == [b"x" * 100, b"y" * 100]
    core.receive(ServerFrame(acknowledged=2))
    assert core.take_results() == [("w", None)]
    for transaction in (first, second):
        core.transactions.end(transaction, EndPlan(True, "w"))
    assert len(taken(core).commits) == 2


def test_aborted_transaction_leaves_nothing() -> None:
    core = ready_core()
    before = core.room
    transaction = collecting(core)
    core.transactions.end(transaction, EndPlan(False, "w"))
    frame = taken(core)
    assert frame.sends == ()
    assert [(abort.txn, abort.topics) for abort in frame.aborts] == [(transaction.txn, ())]
    assert core.room == before


def test_abort_after_early_sends_names_the_topics() -> None:
    core = ready_core()
    transaction = collecting(core)
    more_than_the_limit(core, transaction)
    taken(core)
    core.transactions.end(transaction, EndPlan(False, "w"))
    assert core.take_frame() is None
    core.receive(ServerFrame(acknowledged=2))
    assert [abort.topics for abort in taken(core).aborts] == [("a",)]


def test_failed_transaction_drops_its_records() -> None:
    core = ready_core()
    before = core.room
    transaction = collecting(core)
    core.transactions.fail(transaction, TransactionAborted(transaction.txn, "no"))
    assert core.room == before
    core.tick()
    core.tick()
    assert taken(core).sends == ()
    core.transactions.end(transaction, EndPlan(True, "w"))
    assert core.take_results() == [("w", transaction.failure)]
    frame = taken(core)
    assert (frame.sends, frame.commits, [abort.topics for abort in frame.aborts]) == ((), (), [()])


def steps(call: Callable[[], None]) -> int:
    """How many steps of the interpreter a call takes."""
    counted = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal counted
        frame.f_trace_opcodes = True
        counted += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return counted


@pytest.mark.parametrize("what", ["ordinary", "transactional"])
def test_a_send_does_not_take_longer_while_other_topics_have_collected_records(what: str) -> None:
    core = ready_core()
    transaction = core.begin() if what == "transactional" else None
    core.send("b", rows(b"first"), transaction, "w")
    if transaction is not None:
        register(core, taken(core))
    before = steps(lambda: core.send("b", rows(b"v"), transaction, "w"))
    for _ in range(20):
        collecting(core)
    assert steps(lambda: core.send("b", rows(b"v"), transaction, "w")) <= before + 5


def test_refused_registration_fails_transactions_that_collect() -> None:
    core = welcomed()
    transaction = collecting(core)
    error = InvalidTopicName("no")
    core.receive(ServerFrame(answers=((taken(core).registers[0].request, error),)))
    assert transaction.failure is error


def test_topic_that_is_deleted_meanwhile_is_registered_again_before_the_commit() -> None:
    core = ready_core()
    transaction = collecting(core)
    core.topic_deleted("a")
    core.transactions.end(transaction, EndPlan(True, "w"))
    frame = taken(core)
    assert ([name for _, name in frame.registers], frame.sends) == (["a"], ())
    register(core, frame)
    frame = taken(core)
    assert (sent(frame), len(frame.commits)) == ([b"v"], 1)


@pytest.mark.parametrize("state", [State.OPEN, State.ABORTED, "forgotten"])
def test_state_of_a_transaction_that_collects_is_asked_for_after_a_lost_connection(state: State | str) -> None:
    core = ready_core()
    transaction = collecting(core)
    core.lost()
    hello = core.hello().hello
    assert hello is not None
    assert hello.open == (transaction.txn,)
    found = OutcomeForgotten(transaction.txn) if isinstance(state, str) else state
    core.receive(ServerFrame(welcome=Welcome("s", 0, 2, 1000, ((transaction.txn, found),))))
    core.transactions.end(transaction, EndPlan(True, "w"))
    frame = taken(core)
    if state is State.OPEN:
        assert (sent(frame), [commit.txn for commit in frame.commits]) == ([b"v"], [transaction.txn])
    else:
        assert (frame.sends, frame.commits) == ((), ())
        assert core.take_results() == [("w", transaction.failure)]


def test_collected_records_of_a_client_that_gives_up_are_dropped() -> None:
    core = ready_core()
    before = core.room
    collecting(core)
    core.give_up(ServiceUnavailable("nobody there"))
    assert core.room == before
    assert core.transactions.ids() == ()


def test_numbered_transaction_is_announced_only_if_it_is_sent_early() -> None:
    core = ready_core()
    first, second = ProducerSequence("n", 1, 1), ProducerSequence("m", 1, 1)
    early, whole = collecting(core, b"early", first), collecting(core, b"whole", second)
    assert core.take_frame() is None
    more_than_the_limit(core, early)
    frame = taken(core)
    assert [(begin.txn, begin.sequence) for begin in frame.begins] == [(early.txn, first)]
    core.transactions.end(whole, EndPlan(True, "w"))
    frame = taken(core)
    assert (frame.begins, [commit.sequence for commit in frame.commits]) == ((), [second])


def test_branch_is_announced_at_once() -> None:
    core = ready_core()
    core.begin(sequence=ProducerSequence("n", 1, PARTICIPANT))
    assert len(taken(core).begins) == 1


def test_commit_that_is_withdrawn_sends_its_records_before_the_abort() -> None:
    core = ready_core()
    transaction = collecting(core)
    core.transactions.end(transaction, EndPlan(True, "w"))
    assert core.transactions.withdraw_commit(transaction)
    frame = taken(core)
    assert (sent(frame), frame.commits, frame.aborts) == ([b"v"], (), ())
    core.receive(ServerFrame(acknowledged=2))
    assert [abort.topics for abort in taken(core).aborts] == [("a",)]


def test_transaction_that_is_not_committed_counts_as_uncommitted() -> None:
    core = ready_core()
    transaction = collecting(core)
    assert core.transactions.uncommitted() == [transaction]
    assert transaction.counts == {"a": 1}


def test_ordinary_record_comes_after_all_that_was_sent_before() -> None:
    core = ready_core()
    transaction = core.begin()
    values = [b"1" * COLLECT_BYTES, b"2"]
    for value in values:  # which exceed what is collected
        core.send("a", rows(value), transaction)
    core.send("a", rows(b"3"), None, "w")
    core.send("a", rows(b"4"), transaction)
    core.send("a", rows(b"5"), None, "w")
    assert sent(taken(core)) == [*values, b"3", b"4", b"5"]
