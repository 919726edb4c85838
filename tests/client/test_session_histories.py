"""The core of a client against a model of a service: connections break anywhere, and still all is true.

Every waiter is told exactly once; what is told is what happened; what committed stands in the log once,
whole and in order.
"""

from __future__ import annotations

import random
from collections import deque
from typing import Any, ClassVar

from client.session_model import CLOSED, POISON, ModelConnection, SessionModel
from hypothesis import given
from hypothesis import strategies as st

from broker_io.errors import InvalidTopicName, MessageTooLarge
from txnbuffer.client.path.record_path import MAX_IN_FLIGHT, EndPlan, OpenTransaction, ServicePath
from txnbuffer.client.path.send_columns import SendColumns
from txnbuffer.client.session.session_core import SessionCore
from txnbuffer.client.session.session_requests import COLLECT_BYTES
from txnbuffer.errors import SendUnknown, TransactionAborted
from txnbuffer.model import Outcome, TxnId
from txnbuffer.rpc.frames import ClientFrame, Query, ServerFrame


def rows(*values: bytes) -> SendColumns:
    return SendColumns([b"k"] * len(values), list(values), None, None, sum(map(len, values)) + len(values))


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
        self.core = SessionCore(ServicePath())
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
            assert sum(1 for frame in self.to_service if frame.sends) <= MAX_IN_FLIGHT
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
        expected = self.core.has_frame
        if self.connection is not None and (frame := self.core.take_frame()) is not None:
            assert expected
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
        if not self.core.ids:
            self.wait("ids", self.core.wait_to_begin)
            return
        transaction = self.core.begin(self.random.choice([None, 5.0]))
        assert transaction.txn not in self.sent, "an id was used twice"
        self.open.append(transaction)
        self.sent[transaction.txn] = []
        self.send()

    def send(self) -> None:
        if usable := [one for one in self.open if one.failure is None]:
            transaction, topic = self.random.choice(usable), self.random.choice("aab")
            values = [self.value() for _ in range(self.random.choice([1, 1, 3]))]
            self.core.send(topic, rows(*values), transaction)
            self.sent[transaction.txn] += [(topic, value) for value in values]

    def send_what_is_refused(self) -> None:
        if usable := [one for one in self.open if one.failure is None]:
            transaction, topic = self.random.choice(usable), self.random.choice([CLOSED, "a"])
            self.core.send(topic, rows(POISON), transaction)
            self.sent[transaction.txn].append((topic, POISON))

    def send_ordinary(self) -> None:
        topic, value = self.random.choice("ab"), self.value()
        self.wait("ordinary", lambda waiter: self.core.send(topic, rows(value), None, waiter), (topic, value))

    def commit(self) -> None:
        if self.open:
            transaction = self.open.pop(self.random.randrange(len(self.open)))
            self.wait(
                "commit", lambda waiter: self.core.transactions.end(transaction, EndPlan(True, waiter)), transaction
            )

    def abort(self) -> None:
        if self.open:
            transaction = self.open.pop(self.random.randrange(len(self.open)))
            self.wait(
                "abort", lambda waiter: self.core.transactions.end(transaction, EndPlan(False, waiter)), transaction
            )

    def cancel(self) -> None:
        """Nobody waits for one of the commits any more."""
        commits = [one for one in self.waiters if one.what == "commit" and not one.results]
        if commits:
            waiter = self.random.choice(commits)
            self.waiters.remove(waiter)
            if self.core.transactions.withdraw_commit(waiter.subject):
                self.waiters.append(Waiter("withdrawn", waiter.subject))
                self.waiters[-1].results.append(None)
            self.tell()

    def expire(self) -> None:
        if self.open:
            self.model.expire(self.random.choice(self.open).txn)

    def query(self) -> None:
        if self.sent:
            txn = self.random.choice(list(self.sent))
            requests = self.core.requests
            self.wait("query", lambda waiter: requests.ask("queries", Query(next(requests.numbers), txn), waiter))

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
        padding = bytes(COLLECT_BYTES // 2) if self.random.random() < 0.1 else b""
        return b"v%d" % self.counter + padding


@given(st.integers(0, 2**32))
def test_results_match_the_log_over_random_histories(seed: int) -> None:
    History(seed).run()


def test_histories_cover_commits_and_reconnects() -> None:
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
