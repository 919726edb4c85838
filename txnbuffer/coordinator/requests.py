"""Requests about transactions other than commits: reconnect, begin, abort, query"""

from __future__ import annotations

from txnbuffer.coordinator.commit import link
from txnbuffer.coordinator.completion import TransactionCompletion
from txnbuffer.coordinator.core import Core, never_leased
from txnbuffer.coordinator.messages import ENDED_STATE, FINISHED_PARTICIPANT, TERMINAL, Begin, SessionOpened, State
from txnbuffer.coordinator.producers import NamedProducers
from txnbuffer.coordinator.sessions import Sessions
from txnbuffer.coordinator.transaction import Session, TransactionState
from txnbuffer.errors import ForeignTransaction, InvalidRequest, OutcomeForgotten
from txnbuffer.model import TxnId


class TransactionRequests:
    """Executes the requests of sessions; `CommitRequests` has the commits."""

    def __init__(
        self, core: Core, sessions: Sessions, producers: NamedProducers, completion: TransactionCompletion
    ) -> None:
        self._core = core
        self._sessions = sessions
        self._producers = producers
        self._completion = completion

    def open(self, session: Session, request: int, claims: tuple[TxnId, ...], up_to: int) -> None:
        """Adopt a session's open transactions, and abort all its others with ids up to `up_to`."""
        states = tuple((txn, self._claim(session, txn)) for txn in claims)
        claimed = [txn.least for txn in claims if txn.most == self._core.shard]
        self._sessions.keep_only(session, claimed, up_to, "its client did not name it when it reconnected")
        self._core.answer(session.name, request, SessionOpened(self._core.epoch, states))

    def begin(self, session: Session, begin: Begin) -> None:
        """Start a transaction's timeout, and link it to its parent and its producer name."""
        core, config = self._core, self._core.config
        timeout = config.transaction_timeout if begin.timeout is None else begin.timeout
        if not 0 < timeout <= config.max_transaction_timeout:
            most = f"{config.max_transaction_timeout:g} s"
            text = f"the timeout of transaction {begin.txn} must be above 0 and at most {most}, got {timeout:g}"
            core.answer(session.name, begin.request, InvalidRequest(text))
            return
        transaction = self._sessions.find(session.name, begin.request, begin.txn, commit=True)
        if transaction is None:
            return
        if transaction.state is not State.OPEN:
            transaction.wait(session.name, begin.request, commit=True)
            self._completion.answer_if_due(transaction)
            return
        if (
            begin.sequence is not None
            and begin.sequence.epoch == FINISHED_PARTICIPANT
            and transaction.participant_of is not None
        ):
            transaction.finished = True  # its timeout keeps running
            return
        core.watch(transaction, core.now + timeout)
        if begin.parent is not None:
            self._join(transaction, begin.parent)
        if begin.sequence is not None and transaction.state is State.OPEN:
            refusal = self._producers.refusal(begin.sequence)
            if refusal is None and begin.sequence.is_participant:
                self._producers.add_participant(begin.sequence, transaction)
            elif refusal is None:
                self._producers.add_attempt(begin.sequence, transaction)
            else:
                transaction.wait(session.name, begin.request, commit=True)
                self._completion.abort(transaction, str(refusal), refusal=refusal)

    def abort(self, name: str, request: int, txn: TxnId, topics: tuple[str, ...], operator: bool) -> None:
        """Abort an open transaction; for any other, answer with the outcome once it is durable."""
        transaction = self._core.live.get(txn.least) if operator else None
        if transaction is None or txn.most != self._core.shard:
            transaction = self._sessions.find(name, request, txn, commit=False, operator=operator)
        if transaction is None:
            return
        transaction.wait(name, request, commit=False)
        if transaction.state is State.OPEN and (operator or transaction.plan is None):
            known = tuple(topic for topic in dict.fromkeys(topics) if topic in self._core.topics)
            reason = "an operator aborted it" if operator else "its client aborted it"
            self._completion.abort(transaction, reason, known, by_marker=not operator)
            if not operator and transaction.finished and (transaction.session and transaction.session.name) != name:
                self._abandon(transaction)
        else:
            self._completion.answer_if_due(transaction)

    def _abandon(self, aborted: TransactionState) -> None:
        """A session that aborts another one's participant abandons the number: abort all its open participants."""
        for other in (
            self._producers.participants(aborted.participant_of[0]) if aborted.participant_of is not None else ()
        ):
            if other.participant_of == aborted.participant_of and other.state is State.OPEN and other.parent is None:
                self._completion.abort(other, "its number was abandoned")

    def query(self, name: str, request: int, txn: TxnId) -> None:
        """Answer with a transaction's outcome, or with its state."""
        core, least = self._core, txn.least
        transaction = core.live.get(least)
        if txn.most != core.shard:
            text = f"transaction {txn} belongs to coordinator {txn.most}, this is {core.shard}: send the request there"
            core.answer(name, request, ForeignTransaction(text))
        elif transaction is not None:
            if transaction.state in TERMINAL:
                transaction.wait(name, request, commit=False)
                self._completion.answer_if_due(transaction)
            else:
                core.answer(name, request, transaction.state)
        elif core.progress.has_ended(least):
            core.answer_ended((name, request, False), txn)
        elif self._sessions.retirement(least) is not None:
            core.answer(name, request, State.ABORTING)
        elif self._sessions.locate(least) is not None:
            core.answer(name, request, State.OPEN)
        else:
            core.answer(name, request, never_leased(txn))

    def _claim(self, session: Session, txn: TxnId) -> State | ForeignTransaction | OutcomeForgotten:
        """The state of a transaction that a session claims as its own; an unknown one is adopted."""
        core, sessions = self._core, self._sessions
        transaction = core.live.get(txn.least)
        block = sessions.locate(txn.least)
        ended = core.progress.has_ended(txn.least) and not core.was_skipped(txn.least)
        if txn.most != core.shard or (transaction is None and block is None and not ended):
            return ForeignTransaction(f"transaction {txn} was never leased by this coordinator")
        if transaction is not None:
            return transaction.state
        if core.progress.has_ended(txn.least):
            outcome = core.outcomes.find(txn.least)
            return OutcomeForgotten(txn) if outcome is None else ENDED_STATE[outcome]
        if sessions.retirement(txn.least) is not None:
            return State.ABORTING
        if block is None or block.session is not session:
            return ForeignTransaction(f"transaction {txn} belongs to another session")
        return sessions.start(txn, block, core.config.transaction_timeout).state

    def _join(self, branch: TransactionState, txn: TxnId) -> None:
        """Make a transaction a branch; abort it at once if its parent has ended or is ending."""
        core = self._core
        parent = core.live.get(txn.least)
        if parent is None and not core.progress.has_ended(txn.least):
            block = self._sessions.locate(txn.least)
            if block is not None and self._sessions.retirement(txn.least) is None:
                parent = self._sessions.start(txn, block, core.config.transaction_timeout)
        usable = parent is not None and parent is not branch and parent.parent is None and not branch.branches
        if parent is not None and usable and parent.state is State.OPEN and parent.plan is None:
            link(parent, branch)
        else:
            self._completion.abort(branch, f"its transaction {txn} is not open")
