"""Topics with transactions: each is tailed by its owner before the first transactional record stands there.

What the owner of a buffer is told about transactions that are ongoing there.

The answer is the outcome, as a marker; an ABORT marker only where the ABORT is durable, or a COMMIT is that
does not name the topic, or the transaction is settled: then whatever marker it had stands in the topic, and
comes first. Open and undecided ones are left alone, but watched from then on. Nothing is said twice, nor what a marker
says that is on its way: a buffer that stands still for long goes on asking.
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
        """Topics that the decision log still has as registered."""

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
        """`final`: asking again does not help."""
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
        """A transaction of which this is the first word: a client that died may have left it."""
        block = self._sessions.locate(txn.least)
        transaction = self._sessions.start(txn, block, self._core.config.transaction_timeout)
        if block is None:
            self._sessions.used_unleased.add(txn.least)
            self._completion.abort(transaction, "nobody leased its id", (topic,))
