"""Who may write to a transaction: its session, while it is open."""

from __future__ import annotations

from txnbuffer.coordinator.core import Core
from txnbuffer.coordinator.sessions import Sessions
from txnbuffer.coordinator.states import State
from txnbuffer.errors import Error, ForeignTransaction, InvalidRequest, TransactionAborted, UnknownTransaction
from txnbuffer.model import Outcome, TxnId


class Writing:
    def __init__(self, core: Core, sessions: Sessions) -> None:
        self._core = core
        self._sessions = sessions

    def refusal(self, name: str, txn: TxnId) -> Error | None:
        """Why a session may not write to a transaction; None if it may."""
        core, least = self._core, txn.least
        if txn.most != core.shard:
            return ForeignTransaction(
                f"transaction {txn} is of coordinator {txn.most}, this is {core.shard}: ask that one"
            )
        transaction = core.live.get(least)
        if transaction is not None:
            if transaction.session is None or transaction.session.name != name:
                return _foreign(txn)
            if transaction.state is State.OPEN and transaction.plan is None:
                return None
            if transaction.state in (State.ABORTING, State.ABORTED):
                return transaction.refusal or TransactionAborted(txn, transaction.reason or "it had ended before")
            return _ended(txn)
        if core.progress.has_ended(least):
            if core.outcomes.find(least) is Outcome.ABORT:
                return TransactionAborted(txn, core.why_aborted(txn))
            return _ended(txn)
        block = self._sessions.locate(least)
        if block is None:
            return UnknownTransaction(f"transaction {txn} was never leased: begin transactions with ids of a lease")
        if block.session.name != name:
            return _foreign(txn)
        if self._sessions.retirement(least) is not None:
            return TransactionAborted(txn, "its id was given back")
        return None


def _foreign(txn: TxnId) -> Error:
    return ForeignTransaction(f"transaction {txn} belongs to another session: write with the one that leased it")


def _ended(txn: TxnId) -> Error:
    return InvalidRequest(f"transaction {txn} has ended or is about to: begin another one")
