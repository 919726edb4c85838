"""Named producers: each name has one holder, and a last committed number

Opening a name raises its producer epoch, fences the former holder and aborts its attempts. A number at or below the
last committed one counts as committed. So a name has one commit at a time.

Several sessions may write for one number: each is a participant, with a transaction of its own. Opening the name does
not abort these. The commit of the number names the participants that win, and the other participants of numbers up to
it abort.

Numbers of a deleted name may still count as finished, as long as outcomes are remembered: no participant of them can
begin. So a late participant gets an error, instead of leaving a transaction open forever.
"""

from __future__ import annotations

from collections.abc import Callable

from txnbuffer.coordinator.core import Core
from txnbuffer.coordinator.decisions import Name
from txnbuffer.coordinator.history import NameState
from txnbuffer.coordinator.messages import Done, NameOpened, ProducerSequence, State
from txnbuffer.coordinator.transaction import Session, TransactionState
from txnbuffer.errors import AlreadyCommitted, Error, InvalidRequest, ProducerFenced


class NamedProducers:
    """The producer names of a coordinator.

    `committed` of a name includes what is on its way to the decision log: all later entries follow it there.
    """

    def __init__(self, core: Core, states: dict[str, NameState]) -> None:
        self._core = core
        self._states = states
        self._attempts: dict[str, dict[int, TransactionState]] = {}
        self._participants: dict[str, dict[int, TransactionState]] = {}
        self._deleted: dict[str, tuple[int, float]] = {}
        """Deleted names: the first group that can't mention the name any more, and the time until which it is kept."""
        for name, state in states.items():
            if state.deleted:
                self._note_deleted(name, state)

    def open(self, session: Session, request: int, name: str) -> None:
        """Make the session the holder; the caller has aborted the `attempts` of the former holder."""
        state = self._states.setdefault(name, NameState())
        state.epoch += 1
        state.deleted = False
        opened = NameOpened(state.epoch, state.committed)
        self._write(name, state, self._core.answer_when_durable(session, request, opened))

    def delete(self, session: str, request: int, name: str, over: int) -> None:
        """Delete the name and fence its holder; its numbers up to `over` count as finished."""
        state = self._states.get(name) or NameState(deleted=True)
        if state.deleted and state.committed == over:
            self._core.answer(session, request, Done())
            return
        self._states[name] = state
        state.epoch += 1
        state.committed = over
        state.deleted = True

        def deleted() -> None:
            self._note_deleted(name, state)
            self._core.answer(session, request, Done())

        self._write(name, state, deleted)

    def _note_deleted(self, name: str, state: NameState) -> None:
        core = self._core
        kept = core.now + core.config.remember if state.committed else core.now
        self._deleted[name] = core.journal.next_group, kept

    def attempts(self, name: str) -> list[TransactionState]:
        """The transactions of a name's holders that are not settled."""
        return list(self._attempts.get(name, {}).values())

    def add_attempt(self, sequence: ProducerSequence, transaction: TransactionState) -> None:
        transaction.name = sequence.name
        self._attempts.setdefault(sequence.name, {})[transaction.txn.least] = transaction

    def add_participant(self, sequence: ProducerSequence, transaction: TransactionState) -> None:
        """A participant of a number has begun its transaction."""
        transaction.participant_of = (sequence.name, sequence.number)
        self._participants.setdefault(sequence.name, {})[transaction.txn.least] = transaction

    def participants(self, name: str) -> list[TransactionState]:
        """The participants of all numbers of a name that are not settled."""
        return list(self._participants.get(name, {}).values())

    def settled(self, transaction: TransactionState) -> None:
        if transaction.name is not None:
            _remove(self._attempts, transaction.name, transaction)
        if transaction.participant_of is not None:
            _remove(self._participants, transaction.participant_of[0], transaction)

    def refusal(self, sequence: ProducerSequence) -> Error | None:
        """Refuse a number that is already committed (a duplicate), or a holder that was fenced; None: it may commit.

        For a participant: why it can't begin.
        """
        name, number, epoch = sequence
        state = self._states.get(name)
        if sequence.is_participant:
            return self._participant_refusal(sequence, state)
        if state is None or state.deleted or state.epoch != epoch:
            return ProducerFenced(f"{name!r} was opened by another producer after this one; stop this one")
        if number <= state.committed:
            return AlreadyCommitted(name, number, state.committed)
        return None

    def _participant_refusal(self, sequence: ProducerSequence, state: NameState | None) -> Error | None:
        name, number, _ = sequence
        if number < 1:
            return InvalidRequest(f"{name!r}: number must be at least 1, got {number}")
        if state is not None and number <= state.committed:
            if state.deleted:
                return ProducerFenced(
                    f"number {number} of {name!r} is finished and the name deleted: the transaction has already ended"
                )
            return AlreadyCommitted(name, number, state.committed)
        if any(other.plan is not None and other.state is State.OPEN for other in self.attempts(name)):
            return ProducerFenced(f"{name!r} is committing a number: the transaction has already ended")
        return None

    def commit(self, sequence: ProducerSequence, group: int) -> None:
        """A decision was taken, in this group of the log, that commits a number."""
        state = self._states[sequence.name]
        state.committed = sequence.number
        state.group = group

    def repeat(self, group: int, names: tuple[str, ...]) -> None:
        """Before a group is deleted from the log, write numbers that only it has to other entries."""
        for name in names:
            state = self._states.get(name)
            if state is not None and state.group == group:
                self._write(name, state)

    def forgettable(self, oldest_group: int) -> list[str]:
        """The keys of deleted names that no group from `oldest_group` on mentions."""
        keys = []
        for name, (group, kept) in list(self._deleted.items()):
            if group <= oldest_group and kept <= self._core.now:
                del self._deleted[name]
                if name in self._states and self._states[name].deleted:
                    del self._states[name]
                    keys.append(f"name-{name}")
        return keys

    def _write(self, name: str, state: NameState, on_durable: Callable[[], None] | None = None) -> None:
        state.group = 0
        self._core.journal.put(Name(name, state.epoch, state.committed, state.deleted), on_durable)


def _remove(known: dict[str, dict[int, TransactionState]], name: str, transaction: TransactionState) -> None:
    transactions = known.get(name, {})
    transactions.pop(transaction.txn.least, None)
    if not transactions:
        known.pop(name, None)
