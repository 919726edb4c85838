"""Registration of topics, and outcome queries of their buffers

The owner of a topic follows it before its first transactional record.

A buffer queries the outcome of transactions that are ongoing in its topic. A marker is the answer: an ABORT marker if
the ABORT is durable, if a durable COMMIT does not name the topic, or if the transaction is settled; then the topic has
its marker already, which comes first. An undecided transaction gets no answer, but its timeout starts. Each answer is
given once, and none if the marker is already being written, since a slow buffer repeats its query.
"""

from __future__ import annotations

from collections.abc import Iterable

from txnbuffer.coordinator.completion import TransactionCompletion
from txnbuffer.coordinator.core import Core
from txnbuffer.coordinator.decisions import RegisteredTopic
from txnbuffer.coordinator.messages import TERMINAL, Done, RegisterTopic, State
from txnbuffer.coordinator.sessions import Sessions
from txnbuffer.coordinator.takeover import TakeOver
from txnbuffer.coordinator.transaction import TransactionState
from txnbuffer.errors import RegistrationFailed, RegistrationRefused
from txnbuffer.model import MarkerItem, Outcome, TxnId


class Registration:
    """A topic is registered when its first snapshot is durable, and then an entry of the decision log."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._waiters: dict[str, list[tuple[str, int]]] = {}
        self._missing: set[str] = set()
        """Missing topics that are still registered in the decision log."""

    def register(self, session: str, request: int, topic: str) -> None:
        core = self._core
        known = core.topics.get(topic)
        if known is not None and (known or not core.config.one_phase):
            core.answer(session, request, Done())
            return
        waiters = self._waiters.get(topic)
        if waiters is None:
            self._waiters[topic] = [(session, request)]
            core.effects.append(RegisterTopic(topic))
        else:
            waiters.append((session, request))

    def snapshotted(self, topic: str) -> None:
        one_phase = self._core.config.one_phase
        self._core.journal.put(RegisteredTopic(topic, one_phase), lambda: self._durable(topic, one_phase))

    def failed(self, topic: str, why: str, *, final: bool = False) -> None:
        """The registration failed. `final`: another attempt will fail too."""
        kind = RegistrationRefused if final else RegistrationFailed
        error = kind(f"topic {topic!r} could not be registered: {why}")
        for session, request in self._waiters.pop(topic, ()):
            self._core.answer(session, request, error)

    def topic_missing(self, topic: str) -> None:
        self._core.markers.forget_answers(topic)
        if self._core.topics.pop(topic, None) is not None:
            self._missing.add(topic)

    def topic_deleted(self, topic: str) -> None:
        self.topic_missing(topic)
        if topic in self._missing:
            self._missing.discard(topic)
            self._core.journal.forget([f"topic-{topic}"])

    def _durable(self, topic: str, one_phase: bool) -> None:
        self._missing.discard(topic)
        self._core.topics[topic] = one_phase
        for session, request in self._waiters.pop(topic, ()):
            self._core.answer(session, request, Done())


class OutcomeQueries:
    """Answers the outcome queries of buffers."""

    def __init__(self, core: Core, sessions: Sessions, completion: TransactionCompletion, takeover: TakeOver) -> None:
        self._core = core
        self._sessions = sessions
        self._completion = completion
        self._takeover = takeover

    def answer(self, topic: str, txns: Iterable[TxnId]) -> None:
        core = self._core
        for txn in txns:
            if txn.most != core.shard:
                continue
            transaction = core.live.get(txn.least)
            if transaction is not None:
                self._answer(topic, transaction)
            elif core.progress.has_ended(txn.least):
                core.markers.answer_query(topic, MarkerItem(txn, Outcome.ABORT, 0))
            elif not self._takeover.must_wait(txn.least) and self._sessions.retirement(txn.least) is None:
                self._watch(topic, txn)

    def _answer(self, topic: str, transaction: TransactionState) -> None:
        if transaction.one_phase or transaction.state not in TERMINAL or topic in (transaction.unfinished or ()):
            return
        item = MarkerItem(transaction.txn, Outcome.ABORT, 0)
        if transaction.state is State.COMMITTED and topic in transaction.topics:
            records = transaction.records[transaction.topics.index(topic)]
            item = MarkerItem(transaction.txn, Outcome.COMMIT, records)
        self._core.markers.answer_query(topic, item)

    def _watch(self, topic: str, txn: TxnId) -> None:
        """Start the timeout of an unknown transaction: its client may have died before its first request."""
        block = self._sessions.locate(txn.least)
        transaction = self._sessions.start(txn, block, self._core.config.transaction_timeout)
        if block is None:
            self._sessions.used_unleased.add(txn.least)
            self._completion.abort(transaction, "its id was never leased", (topic,))
