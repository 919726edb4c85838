"""What the owner of a buffer is told about transactions that are ongoing there.

The answer is the outcome, as a marker; an ABORT marker only where the ABORT is durable, or a COMMIT is that
does not name the topic, or the transaction is settled: then whatever marker it had stands in the topic, and
comes first. Open and undecided ones are left alone, but watched from then on. Nothing is said twice, nor what a marker
says that is on its way: a buffer that stands still for long goes on asking.
"""

from __future__ import annotations

from collections.abc import Iterable

from txnbuffer.coordinator.core import Core
from txnbuffer.coordinator.ending import Ending
from txnbuffer.coordinator.sessions import Sessions
from txnbuffer.coordinator.states import TERMINAL, State
from txnbuffer.coordinator.takeover import TakeOver
from txnbuffer.coordinator.transaction import Transaction
from txnbuffer.model import MarkerItem, Outcome, TxnId


class Asking:
    def __init__(self, core: Core, sessions: Sessions, ending: Ending, takeover: TakeOver) -> None:
        self._core = core
        self._sessions = sessions
        self._ending = ending
        self._takeover = takeover

    def ask(self, topic: str, txns: Iterable[TxnId]) -> None:
        core = self._core
        for txn in txns:
            if txn.most != core.shard:
                continue
            transaction = core.live.get(txn.least)
            if transaction is not None:
                self._tell(topic, transaction)
            elif core.progress.has_ended(txn.least):
                core.markers.tell(topic, MarkerItem(txn, Outcome.ABORT, 0))
            elif not self._takeover.waits(txn.least) and self._sessions.retirement(txn.least) is None:
                self._watch(topic, txn)

    def _tell(self, topic: str, transaction: Transaction) -> None:
        if transaction.one_phase or transaction.state not in TERMINAL or topic in (transaction.unfinished or ()):
            return
        item = MarkerItem(transaction.txn, Outcome.ABORT, 0)
        if transaction.state is State.COMMITTED and topic in transaction.topics:
            records = transaction.records[transaction.topics.index(topic)]
            item = MarkerItem(transaction.txn, Outcome.COMMIT, records)
        self._core.markers.tell(topic, item)

    def _watch(self, topic: str, txn: TxnId) -> None:
        """A transaction of which this is the first word: a client that died may have left it."""
        block = self._sessions.locate(txn.least)
        transaction = self._sessions.start(txn, block, self._core.config.transaction_timeout)
        if block is None:
            self._sessions.taken.add(txn.least)
            self._ending.abort(transaction, "nobody leased its id", (topic,))
