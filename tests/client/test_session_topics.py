"""The core of a client: topics that are registered anew, and topics that do not wait for one another."""

from __future__ import annotations

from client.core_setup import register, registered, rows, taken, welcomed

from broker_io.batch import Batch
from txnbuffer.client.path.record_path import MAX_IN_FLIGHT, EndPlan, OpenTransaction
from txnbuffer.client.path.writers import DirectPath, Settled, Writers
from txnbuffer.client.session.session_core import SessionCore
from txnbuffer.errors import Fenced, ServiceUnavailable, TransactionAborted, UnregisteredTopic
from txnbuffer.rpc.frames import ServerFrame, Welcome


def another(core: SessionCore, topic: str, value: bytes = b"v") -> OpenTransaction:
    transaction = core.begin()
    core.send(topic, rows(value), transaction)
    return transaction


def test_commit_with_an_unregistered_topic_aborts_and_the_next_registers_it() -> None:
    core = welcomed()
    transaction = registered(core)
    core.transactions.end(transaction, EndPlan(True, "w"))
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


class HeldWriters(Writers):
    """Writers that keep what they get: `appends`, a topic and a function that settles each."""

    def __init__(self) -> None:
        self.appends: list[tuple[str, Settled]] = []

    def append(self, name: str, batch: Batch, settled: Settled, *, creates: bool = False) -> None:
        self.appends.append((name, settled))

    @property
    def topics(self) -> list[str]:
        return [topic for topic, _ in self.appends]


def direct(writers: HeldWriters) -> SessionCore:
    return welcomed(path=DirectPath(writers, 1000, lambda: None))


def appended(core: SessionCore, topic: str) -> OpenTransaction:
    """A transaction with one record that was given to a writer of a topic that was not registered."""
    transaction = another(core, topic)
    register(core, taken(core))
    assert core.take_frame() is None
    return transaction


def test_failed_append_registers_the_topic_again_and_waiting_records_continue() -> None:
    writers = HeldWriters()
    core = direct(writers)
    appended(core, "a")
    for _ in range(MAX_IN_FLIGHT - 1):
        another(core, "a")
        assert core.take_frame() is None
    waiting = another(core, "a")
    assert core.take_frame() is None
    assert writers.topics == ["a"] * MAX_IN_FLIGHT
    writers.appends[0][1](Fenced("held"))
    frame = taken(core)
    assert [name for _, name in frame.registers] == ["a"]
    register(core, frame)
    assert core.take_frame() is None
    assert writers.topics == ["a"] * (MAX_IN_FLIGHT + 1)
    assert waiting.failure is None


def test_topics_of_a_cluster_do_not_wait_for_one_another() -> None:
    writers = HeldWriters()
    core = direct(writers)
    appended(core, "stalls")
    for _ in range(2 * MAX_IN_FLIGHT):
        another(core, "stalls")
        core.take_frame()
    first = appended(core, "flows")
    core.transactions.end(first, EndPlan(True, "w"))
    assert core.take_frame() is None
    assert writers.topics == ["stalls"] * MAX_IN_FLIGHT + ["flows"]
    writers.appends[-1][1](None)
    assert [commit.txn for commit in taken(core).commits] == [first.txn]
    another(core, "flows")
    assert core.take_frame() is None
    assert writers.topics[-1] == "flows"


def test_appends_in_flight_are_not_repeated_over_a_new_connection() -> None:
    writers = HeldWriters()
    core = direct(writers)
    first = appended(core, "a")
    for _ in range(MAX_IN_FLIGHT):
        another(core, "a")
        core.take_frame()
    core.hello()
    writers.appends[0][1](None)  # while there is no connection
    core.receive(ServerFrame(welcome=Welcome("s", 0, 1, 1000)))
    core.transactions.end(first, EndPlan(True, "w"))
    assert [commit.txn for commit in taken(core).commits] == [first.txn]
    assert writers.topics == ["a"] * (MAX_IN_FLIGHT + 1)


def test_commit_on_a_cluster_is_repeated_at_once_over_a_new_connection() -> None:
    writers = HeldWriters()
    core = direct(writers)
    transaction = appended(core, "a")
    core.transactions.end(transaction, EndPlan(True, "w"))
    assert core.take_frame() is None  # it waits for the record
    writers.appends[0][1](None)
    first = taken(core)
    core.hello()
    core.receive(ServerFrame(welcome=Welcome("s", 0, 1, 1000)))
    assert taken(core).commits == first.commits
    assert len(writers.appends) == 1


def test_result_of_an_append_that_was_given_up_changes_nothing() -> None:
    writers = HeldWriters()
    core = direct(writers)
    appended(core, "a")
    core.give_up(ServiceUnavailable("closed"))
    writers.appends[0][1](None)
    another(core, "a")
    assert core.take_frame() is None
    assert writers.topics == ["a", "a"]
    writers.appends[1][1](None)
    assert core._path.unacknowledged == 0
