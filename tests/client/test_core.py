"""The core of a client against a model of a service: connections break anywhere, and still all is true.

Every waiter is told exactly once; what is told is what happened; what committed stands in the log once,
whole and in order.
"""

from __future__ import annotations

import random
from collections import deque
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from session_model import CLOSED, POISON, ModelConnection, SessionModel

from broker_io.errors import InvalidTopicName, MessageTooLarge
from txnbuffer.client.core import IDLE_TICKS, SessionCore
from txnbuffer.client.outbox import OpenTransaction, Rows
from txnbuffer.client.sending import MAX_UNDER_WAY
from txnbuffer.client.transactions import Plan
from txnbuffer.coordinator.messages import Done, Leased, NameOpened, Naming
from txnbuffer.coordinator.states import State
from txnbuffer.errors import (
    CoordinatorStopped,
    OutcomeForgotten,
    OutcomeUnknown,
    SendUnknown,
    ServiceUnavailable,
    TooManyTransactions,
    TransactionAborted,
    UnregisteredTopic,
)
from txnbuffer.frames import ClientFrame, Failure, ServerFrame, Welcome
from txnbuffer.model import Outcome, TxnId


def rows(*values: bytes) -> Rows:
    return Rows([b"k"] * len(values), list(values), None, None, sum(map(len, values)) + len(values))


class Waiter:
    """Takes one result."""

    def __init__(self, what: str, subject: Any) -> None:
        self.what = what
        self.subject = subject
        self.results: list[Any] = []


class History:
    """One history from one seed; weighted so that most transactions commit, many of them over a broken connection."""

    STEPS = 120
    WEIGHTS: ClassVar = {
        "begin": 8,
        "send": 14,
        "send_ordinary": 3,
        "send_what_is_refused": 1,
        "commit": 7,
        "abort": 1,
        "cancel": 1,
        "expire": 1,
        "query": 1,
        "tick": 2,
        "flush": 16,
        "arrive_at_service": 16,
        "arrive_at_client": 16,
        "all_arrives": 2,
        "reconnect": 4,
    }

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.model = SessionModel()
        self.core = SessionCore()
        self.connection: ModelConnection | None = None
        self.to_service: deque[ClientFrame] = deque()
        self.to_client: deque[ServerFrame] = deque()
        self.waiters: list[Waiter] = []
        self.open: list[OpenTransaction] = []
        self.sent: dict[TxnId, list[tuple[str, bytes]]] = {}
        self.counter = 0

    def run(self) -> None:
        self.reconnect()
        self.all_arrives()
        steps, weights = list(self.WEIGHTS), list(self.WEIGHTS.values())
        for step in self.random.choices(steps, weights, k=self.STEPS):
            getattr(self, step)()
            assert sum(1 for frame in self.to_service if frame.sends) <= MAX_UNDER_WAY
        self.finish()

    # The connection

    def reconnect(self) -> None:
        """All that is on its way is lost; sometimes the client is on its own for a while."""
        self.to_service.clear()
        self.to_client.clear()
        self.core.lost()
        self.connection = None
        if self.random.random() < 0.8 or not self.waiters:
            self.connection = self.model.connect()
            self.to_service.append(self.core.hello())
        self.tell()

    def flush(self) -> None:
        if self.connection is not None and (frame := self.core.take_frame()) is not None:
            self.to_service.append(frame)

    def arrive_at_service(self) -> None:
        if self.to_service and self.connection is not None:
            self.to_client.append(self.connection.take(self.to_service.popleft()))

    def arrive_at_client(self) -> None:
        if self.to_client:
            self.core.receive(self.to_client.popleft())
        self.tell()

    def all_arrives(self) -> None:
        if self.connection is None:
            self.connection = self.model.connect()
            self.to_service.append(self.core.hello())
        for _ in range(20):
            self.flush()
            self.arrive_at_service()
            self.arrive_at_client()

    # The application

    def begin(self) -> None:
        if not self.core.can_begin:
            self.wait("ids", self.core.wait_to_begin)
            return
        transaction = self.core.begin(self.random.choice([None, 5.0]))
        assert transaction.txn not in self.sent, "an id was used twice"
        self.open.append(transaction)
        self.sent[transaction.txn] = []
        self.send()

    def send(self) -> None:
        if self.open:
            transaction, topic = self.random.choice(self.open), self.random.choice("aab")
            values = [self.value() for _ in range(self.random.choice([1, 1, 3]))]
            self.core.send(topic, rows(*values), transaction)
            self.sent[transaction.txn] += [(topic, value) for value in values]

    def send_what_is_refused(self) -> None:
        if self.open:
            transaction, topic = self.random.choice(self.open), self.random.choice([CLOSED, "a"])
            self.core.send(topic, rows(POISON), transaction)
            self.sent[transaction.txn].append((topic, POISON))

    def send_ordinary(self) -> None:
        topic, value = self.random.choice("ab"), self.value()
        self.wait("ordinary", lambda waiter: self.core.send(topic, rows(value), None, waiter), (topic, value))

    def commit(self) -> None:
        if self.open:
            transaction = self.open.pop(self.random.randrange(len(self.open)))
            self.wait("commit", lambda waiter: self.core.end(transaction, Plan(True, waiter)), transaction)

    def abort(self) -> None:
        if self.open:
            transaction = self.open.pop(self.random.randrange(len(self.open)))
            self.wait("abort", lambda waiter: self.core.end(transaction, Plan(False, waiter)), transaction)

    def cancel(self) -> None:
        """Nobody waits for one of the commits any more."""
        commits = [one for one in self.waiters if one.what == "commit" and not one.results]
        if commits:
            waiter = self.random.choice(commits)
            self.waiters.remove(waiter)
            if self.core.withdraw_commit(waiter.subject):
                self.waiters.append(Waiter("withdrawn", waiter.subject))
                self.waiters[-1].results.append(None)
            self.tell()

    def expire(self) -> None:
        if self.open:
            self.model.expire(self.random.choice(self.open).txn)

    def query(self) -> None:
        if self.sent:
            txn = self.random.choice(list(self.sent))
            self.wait("query", lambda waiter: self.core.query(txn, waiter))

    def tick(self) -> None:
        self.core.tick()

    # What must hold

    def finish(self) -> None:
        self.all_arrives()
        while self.open:
            self.commit()
        for _ in range(5):
            self.all_arrives()
        assert self.core.take_frame() is None
        assert not self.core.under_way
        for waiter in self.waiters:
            assert len(waiter.results) == 1, f"{waiter.what} was told {waiter.results}"
            self.check_told(waiter)
        for topic in ("a", "b"):
            self.check_topic(topic)

    def check_told(self, waiter: Waiter) -> None:
        told, subject = waiter.results[0], waiter.subject
        if waiter.what == "ordinary":
            topic, value = subject
            assert told is None or isinstance(told, SendUnknown)
            assert told is not None or (None, 0, value) in self.model.logs[topic]
        elif isinstance(subject, OpenTransaction):
            outcome = self.model.ended[subject.txn]
            if waiter.what == "commit":
                assert (told is Outcome.COMMIT) == (outcome is Outcome.COMMIT), (told, outcome)
                refused = [topic for topic, value in self.sent[subject.txn] if value == POISON]
                assert not refused or isinstance(told, (TransactionAborted, MessageTooLarge, InvalidTopicName))
            else:
                assert outcome is Outcome.ABORT

    def check_topic(self, topic: str) -> None:
        log = self.model.committed(topic)
        for txn, sent in self.sent.items():
            mine = [value for text, _, value in log if text == str(txn)]
            committed = self.model.ended.get(txn) is Outcome.COMMIT
            assert mine == ([value for name, value in sent if name == topic] if committed else [])
        ordinary = [value for text, _, value in log if text is None]
        assert len(ordinary) == len(set(ordinary)), "an ordinary send was repeated"

    def wait(self, what: str, put: Any, subject: Any = None) -> None:
        waiter = Waiter(what, subject)
        self.waiters.append(waiter)
        put(waiter)
        self.tell()

    def tell(self) -> None:
        for waiter, result in self.core.take_results():
            if waiter is not None:
                waiter.results.append(result)

    def value(self) -> bytes:
        self.counter += 1
        return b"v%d" % self.counter


@given(st.integers(0, 2**32))
def test_all_that_is_told_is_true_whatever_breaks(seed: int) -> None:
    History(seed).run()


def test_histories_reach_what_matters() -> None:
    """What the test above covers: of 100 histories most commit something, over connections that break."""
    committed = aborted = unknown = 0
    for seed in range(100):
        history = History(seed)
        history.run()
        told = [one.results[0] for one in history.waiters if one.what in ("commit", "ordinary")]
        committed += told.count(Outcome.COMMIT)
        aborted += sum(isinstance(one, TransactionAborted) for one in told)
        unknown += sum(isinstance(one, SendUnknown) for one in told)
    assert committed > 200
    assert aborted > 20
    assert unknown > 20


# Single cases


def welcomed(ids: int = 64) -> SessionCore:
    """A core that is connected and has leased ids."""
    core = SessionCore()
    core.hello()
    core.receive(ServerFrame(welcome=Welcome("s", 0, 1, 1000), credits=10_000))
    frame = core.take_frame()
    assert frame is not None
    core.receive(ServerFrame(answers=((frame.leases[0].request, Leased(1, ids)),)))
    core.take_frame()
    return core


def registered(core: SessionCore, topic: str = "a") -> OpenTransaction:
    """A transaction with one record, that was sent."""
    transaction = core.begin()
    core.send(topic, rows(b"v"), transaction)
    frame = core.take_frame()
    assert frame is not None
    assert frame.sends == ()
    core.receive(ServerFrame(answers=tuple((request, Done()) for request, _ in frame.registers)))
    frame = core.take_frame()
    assert frame is not None
    assert [send.topic for send in frame.sends] == [topic]
    return transaction


def test_a_commit_waits_for_its_sends() -> None:
    core = welcomed()
    transaction = registered(core)
    core.end(transaction, Plan(True, "w"))
    assert core.take_frame() is None
    core.receive(ServerFrame(acknowledged=1))
    frame = core.take_frame()
    assert frame is not None
    assert [(commit.txn, commit.topics, commit.records) for commit in frame.commits] == [(TxnId(0, 1), ("a",), (1,))]


def test_a_failed_send_leaves_abort_as_the_only_end() -> None:
    core = welcomed()
    transaction = registered(core)
    core.end(transaction, Plan(True, "w"))
    core.receive(ServerFrame(acknowledged=1, failures=(Failure(1, MessageTooLarge("no"), transaction.txn),)))
    ((waiter, result),) = core.take_results()
    assert waiter == "w"
    assert isinstance(result, MessageTooLarge)
    frame = core.take_frame()
    assert frame is not None
    assert (frame.commits, [abort.txn for abort in frame.aborts]) == ((), [transaction.txn])


def test_a_failure_of_another_transaction_in_the_same_send_does_no_harm() -> None:
    core = welcomed()
    first = registered(core)
    second, third = core.begin(), core.begin()
    core.send("a", rows(b"2"), second)
    core.send("a", rows(b"3"), third)
    frame = core.take_frame()
    assert frame is not None
    assert len(frame.sends) == 1
    core.receive(ServerFrame(acknowledged=2, failures=(Failure(2, MessageTooLarge("no"), third.txn),)))
    assert [one.failure is None for one in (first, second, third)] == [True, True, False]


def test_what_the_service_lost_is_an_abort_that_says_run_again() -> None:
    core = welcomed()
    transaction = registered(core)
    core.receive(ServerFrame(acknowledged=1, failures=(Failure(1, UnregisteredTopic("who?"), transaction.txn),)))
    assert isinstance(transaction.failure, TransactionAborted)
    again = core.begin()
    core.send("a", rows(b"v"), again)
    frame = core.take_frame()
    assert frame is not None
    assert [name for _, name in frame.registers] == ["a"]


def test_a_commit_whose_answer_was_lost_is_asked_again() -> None:
    core = welcomed()
    transaction = registered(core)
    core.end(transaction, Plan(True, "w"))
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
    core.take_frame()
    core.receive(ServerFrame(acknowledged=1))
    core.lost()
    core.hello()
    core.receive(ServerFrame(welcome=Welcome("s", 0, 2, 1000, ((transaction.txn, State.OPEN),))))
    frame = core.take_frame()
    assert frame is not None
    (send,) = frame.sends
    assert [(message.value, message.properties["tb.seq"]) for message in send.batch] == [(b"w", "2")]


def test_ordinary_records_on_their_way_are_not_sent_again() -> None:
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


def test_ids_of_an_older_connection_are_not_used() -> None:
    core = welcomed()
    assert core.begin().txn == TxnId(0, 1)
    core.lost()
    assert not core.can_begin
    core.hello()
    core.receive(ServerFrame(welcome=Welcome("s", 0, 2, 1000)))
    assert not core.can_begin


def test_a_lease_that_is_refused_is_asked_for_in_smaller_pieces() -> None:
    core = SessionCore()
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


def test_unused_ids_are_given_back_when_idle() -> None:
    core = welcomed(ids=40)
    core.end(core.begin(), Plan(True, "w"))
    frame = core.take_frame()
    assert frame is not None
    core.receive(ServerFrame(answers=((frame.commits[0].request, Outcome.COMMIT),)))
    for _ in range(IDLE_TICKS):
        core.tick()
        assert core.take_frame() is None
    core.tick()
    frame = core.take_frame()
    assert frame is not None
    assert frame.returned == ((2, 39),)
    assert not core.can_begin


def test_a_transaction_is_announced_once_it_is_open_for_a_while() -> None:
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


def test_a_name_and_a_timeout_are_announced_at_once() -> None:
    core = welcomed()
    naming = Naming("n", 1, 1)
    core.begin(timeout=2.0, naming=naming)
    frame = core.take_frame()
    assert frame is not None
    assert [(begin.timeout, begin.naming) for begin in frame.begins] == [(2.0, naming)]


def test_credits_stop_and_start_again() -> None:
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


def test_a_draining_service_begins_nothing() -> None:
    core = welcomed()
    core.receive(ServerFrame(draining=True))
    assert not core.can_begin
    core.wait_to_begin("w")
    assert core.take_frame() is None
    core.lost()
    core.hello()
    core.receive(ServerFrame(welcome=Welcome("s", 0, 1, 1000)))
    frame = core.take_frame()
    assert frame is not None
    core.receive(ServerFrame(answers=((frame.leases[0].request, Leased(100, 10)),)))
    assert core.take_results() == [("w", None)]


def test_a_stopped_coordinator_keeps_the_request_for_the_next_one() -> None:
    core = welcomed()
    transaction = core.begin()
    core.end(transaction, Plan(True, "w"))
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


def test_giving_up_tells_everybody() -> None:
    core = welcomed()
    asked, planned = registered(core), core.begin()
    core.end(asked, Plan(True, "asked"))
    core.receive(ServerFrame(acknowledged=1))
    core.take_frame()
    core.send("a", rows(b"v"), planned)
    core.end(planned, Plan(True, "planned"))
    core.send("a", rows(b"v"), None, "ordinary")
    core.query(asked.txn, "query")
    core.ask("open_names", "n", "name")
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
    assert not core.under_way
    hello = core.hello().hello
    assert hello is not None
    assert hello.open == ()


def test_answers_to_what_nobody_asked_are_nothing() -> None:
    core = welcomed()
    core.receive(
        ServerFrame(answers=((99, NameOpened(1, 0)),), acknowledged=7, failures=(Failure(9, MessageTooLarge("x")),))
    )
    assert core.take_results() == []


@pytest.mark.parametrize("taken", [False, True])
def test_a_commit_can_be_withdrawn_until_it_is_on_its_way(taken: bool) -> None:
    core = welcomed()
    transaction = core.begin()
    core.end(transaction, Plan(True, "w"))
    if taken:
        core.take_frame()
    assert core.withdraw_commit(transaction) is not taken
    frame = core.take_frame()
    if taken:
        assert frame is None
    else:
        assert frame is not None
        assert (frame.commits, [abort.txn for abort in frame.aborts]) == ((), [transaction.txn])


def test_what_ended_while_the_connection_was_lost_is_told_before_anything_is_sent() -> None:
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


def test_a_commit_that_went_out_over_an_older_connection_can_not_be_withdrawn() -> None:
    core = welcomed()
    transaction = core.begin()
    core.end(transaction, Plan(True, "w"))
    core.take_frame()
    core.lost()
    core.hello()
    core.receive(ServerFrame(welcome=Welcome("s", 0, 2, 1000, ((transaction.txn, State.OPEN),))))
    assert not core.withdraw_commit(transaction)
