"""The core of a client: topics that are registered anew, and topics that do not wait for one another."""

from __future__ import annotations

from core_setup import register, registered, rows, taken, welcomed

from txnbuffer.client.open_transactions import EndPlan
from txnbuffer.client.outbox import OpenTransaction
from txnbuffer.client.session_core import MAX_IN_FLIGHT, SessionCore
from txnbuffer.errors import Fenced, TransactionAborted, UnregisteredTopic
from txnbuffer.rpc.frames import Failure, ServerFrame, Welcome


def another(core: SessionCore, topic: str, value: bytes = b"v") -> OpenTransaction:
    transaction = core.begin()
    core.send(topic, rows(value), transaction)
    return transaction


def test_commit_with_an_unregistered_topic_aborts_and_the_next_registers_it() -> None:
    core = welcomed()
    transaction = registered(core)
    core.end(transaction, EndPlan(True, "w"))
    core.receive(ServerFrame(acknowledged=1))
    ((number, *_),) = taken(core).commits
    core.receive(ServerFrame(answers=((number, UnregisteredTopic("who?")),)))
    ((waiter, result),) = core.take_results()
    assert waiter == "w"
    assert isinstance(result, TransactionAborted)
    assert [abort.txn for abort in taken(core).aborts] == [transaction.txn]
    another(core, "a")
    frame = taken(core)
    assert [name for _, name in frame.registers] == ["a"]
    assert frame.sends == ()


def test_waiting_records_register_an_unregistered_topic_again() -> None:
    core = welcomed(pipelined=True)
    registered(core)
    for _ in range(MAX_IN_FLIGHT - 1):
        another(core, "a")
        assert len(taken(core).sends) == 1
    waiting = another(core, "a")
    assert core.take_frame() is None
    core.receive(ServerFrame(settled=(1,), failures=(Failure(1, Fenced("held")),)))
    frame = taken(core)
    assert [name for _, name in frame.registers] == ["a"]
    register(core, frame)
    assert len(taken(core).sends) == 1
    assert waiting.failure is None


def test_pipelined_topics_do_not_wait_for_one_another() -> None:
    core = welcomed(pipelined=True)
    registered(core, "stalls")
    for _ in range(2 * MAX_IN_FLIGHT):
        another(core, "stalls")
        core.take_frame()
    first = registered(core, "flows")
    number = 1 + MAX_IN_FLIGHT
    core.end(first, EndPlan(True, "w"))
    assert core.take_frame() is None
    core.receive(ServerFrame(settled=(number,)))
    assert [commit.txn for commit in taken(core).commits] == [first.txn]
    another(core, "flows")
    assert [send.topic for send in taken(core).sends] == ["flows"]


def test_records_waiting_for_a_topic_are_sent_over_a_new_connection() -> None:
    core = welcomed(pipelined=True)
    registered(core)
    for _ in range(MAX_IN_FLIGHT):
        another(core, "a")
        core.take_frame()
    core.hello()
    core.receive(ServerFrame(welcome=Welcome("s", 0, 1, 1000), credits=10_000))
    sent = [len(send.batch) for send in taken(core).sends]
    assert sent == [1] * MAX_IN_FLIGHT
    core.receive(ServerFrame(settled=(1,)))
    assert [len(send.batch) for send in taken(core).sends] == [1]
