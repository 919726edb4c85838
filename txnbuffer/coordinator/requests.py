"""Requests to the coordinator: of sessions about transactions and topics, and of buffers about outcomes"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, field
from operator import attrgetter

from snapshots.shards import shard_of
from txnbuffer.coordinator.completion import TransactionCompletion
from txnbuffer.coordinator.core import Core, never_leased
from txnbuffer.coordinator.decisions import RegisteredTopic
from txnbuffer.coordinator.messages import (
    ENDED_STATE,
    FINISHED_PARTICIPANT,
    TERMINAL,
    Begin,
    CheckCounts,
    Commit,
    Done,
    ProducerSequence,
    RegisterTopic,
    SessionOpened,
    State,
)
from txnbuffer.coordinator.producers import NamedProducers
from txnbuffer.coordinator.sessions import Sessions, of_another_principal
from txnbuffer.coordinator.takeover import TakeOver
from txnbuffer.coordinator.transaction import Block, IdStatus, Session, TransactionState, Waiter, principal_tag
from txnbuffer.errors import (
    Error,
    ForeignTransaction,
    InvalidRequest,
    OutcomeForgotten,
    ProducerFenced,
    RegistrationFailed,
    RegistrationRefused,
    UnregisteredTopic,
)
from txnbuffer.model import MarkerItem, Outcome, TxnId

ALONE = Commit(0, TxnId(0, 0), (), ())[5:]
"""The end of a commit without a name, branches and positions."""


@dataclass
class CommitRequests:
    """Executes the commit requests of sessions: validated, their records counted, then decided.

    Older owners leased the ids up to `horizon`. Branches among those are known only because commits name them.
    """

    _core: Core
    _sessions: Sessions
    _producers: NamedProducers
    _completion: TransactionCompletion
    _horizon: int
    checks: dict[str, list[int]] = field(default_factory=dict)
    """The records that are still to be counted: transactions by topic."""
    _under_check: deque[tuple[float, list[int]]] = field(default_factory=deque)

    def commit_many(self, session: Session, commits: Sequence[Commit], stored: Set[int] = frozenset()) -> None:
        """`stored` as for the coordinator."""
        core, name, sessions = self._core, session.name, self._sessions
        unused, valid = sessions.unused(session, map(attrgetter("txn"), commits)), set[tuple[object, ...]]()
        for commit in commits:
            if commit.sequence is not None and (fenced := self._fenced(commit, commit.sequence)) is not None:
                core.answer(name, commit.request, fenced)
                continue
            request, txn = commit.request, commit.txn
            if fresh := txn in unused and txn.least not in core.live:  # as is usual: the commit is its first request
                transaction = object.__new__(TransactionState)  # with the defaults of the class
                transaction.txn, transaction.session, transaction.block = txn, session, unused[txn]
                core.live[txn.least] = transaction
            elif (found := sessions.find(name, request, txn, commit=True)) is not None:
                transaction = found
            else:
                continue
            alone = fresh and commit[5:] == ALONE
            if transaction.state is not State.OPEN or transaction.plan is not None:
                transaction.wait(name, request, commit=True)
                self._completion.answer_if_due(transaction)
                continue
            counts = commit[2:4]
            error = None if counts in valid else self._invalid_counts(txn, *counts)
            if error is None and not alone:
                error = self._invalid(transaction, commit)
            if error is not None:
                if fresh:
                    core.watch(transaction, core.now + core.config.transaction_timeout)
                self._refuse(transaction, (name, request, True), commit.topics, error)
            else:
                valid.add(counts)
                transaction.waiters = [(name, request, True)]
                transaction.plan = commit
                transaction.topics, transaction.records = commit.topics, commit.records
                if alone and txn.least in stored:
                    self._completion.commit(transaction, commit)
                elif alone or self._link_branches(transaction, commit):
                    self._check_counts(transaction, commit, stored)

    def _refuse(self, transaction: TransactionState, waiter: Waiter, topics: tuple[str, ...], error: Error) -> None:
        """Answer an invalid commit, after which the client may send a valid one.

        If a topic is gone there is none: the transaction aborts, and the error is the answer once that is durable.
        """
        if isinstance(error, UnregisteredTopic) and transaction.parent is None and transaction.participant_of is None:
            transaction.waiters = [waiter]
            known = tuple([topic for topic in topics if topic in self._core.topics])
            self._completion.abort(transaction, str(error), known, by_marker=True, refusal=error)
        else:
            self._core.answer(*waiter[:2], error)

    def counts_checked(self, topic: str, accepted: Iterable[tuple[int, int]]) -> None:
        """How many records of each transaction the topic's buffer has accepted."""
        live = self._core.live
        for least, count in accepted:
            member = live.get(least)
            if member is None:
                continue
            transaction = member if member.parent is None else member.parent
            if transaction.plan is None or transaction.state is not State.OPEN:
                continue
            expected = member.records[member.topics.index(topic)]
            if count != expected:
                reason = f"{topic!r} has {count} records of {member.txn}, but its client sent {expected}"
                stopped = self._completion.stopped.get(topic)
                self._completion.abort(transaction, reason if stopped is None else str(stopped))
            else:
                transaction.checks -= 1
                if not transaction.checks:
                    self._completion.commit(transaction, transaction.plan)

    def ask_counts(self) -> None:
        """Add the counts that the buffers have to report now to the effects."""
        deadline = self._core.now + self._core.config.transaction_timeout
        for topic, least in self.checks.items():
            self._under_check.append((deadline, least))
            self._core.effects.append(CheckCounts(topic, tuple(least)))
        self.checks.clear()

    def tick(self) -> None:
        """Abort transactions whose records were not counted in time."""
        core = self._core
        while self._under_check and self._under_check[0][0] <= core.now:
            for least in self._under_check.popleft()[1]:
                member = core.live.get(least)
                if member is not None and member.state is State.OPEN and member.checks:
                    self._completion.abort(member, "its records could not be counted in time")

    def _fenced(self, commit: Commit, sequence: ProducerSequence) -> Error | None:
        """The refusal of a commit whose attempt has ended because another producer opened the name; None otherwise."""
        least = commit.txn.least
        if least in self._core.live or self._core.outcomes.find(least) is not Outcome.ABORT:
            return None
        refusal = self._producers.refusal(sequence)
        return refusal if isinstance(refusal, ProducerFenced) else None

    def _check_counts(self, transaction: TransactionState, commit: Commit, stored: Set[int]) -> None:
        for member in (transaction, *(transaction.branches or ())) if self._core.config.verify_counts else ():
            for topic in member.topics if member.txn.least not in stored else ():
                transaction.checks += 1
                self.checks.setdefault(topic, []).append(member.txn.least)
        if not transaction.checks:
            self._completion.commit(transaction, commit)

    # Validation

    def _invalid(self, transaction: TransactionState, commit: Commit) -> Error | None:
        error: Error | None = None
        if transaction.parent is not None:
            parent = transaction.parent.txn
            error = InvalidRequest(
                f"transaction {commit.txn} is a branch of {parent}: commit that one, and name it there"
            )
        if error is None and transaction.participant_of is not None:
            error = InvalidRequest(
                f"transaction {commit.txn} is a participant of a number: commit the number, and name it as a winner"
            )
        if error is None and (commit.winners or commit.losers):
            error = self._invalid_branches(transaction, commit)
        if error is None and (commit.sequence is not None or transaction.name is not None):
            error = self._invalid_name(transaction, commit)
        if error is None and commit.positions:
            error = self._invalid_positions(commit)
        return error

    def _invalid_positions(self, commit: Commit) -> Error | None:
        places = {(position.group, position.topic) for position in commit.positions}
        if len(places) < len(commit.positions):
            return InvalidRequest(f"commit of {commit.txn} moves a group twice on one topic: give one position")
        shards = self._core.config.shards
        for position in commit.positions if shards > 1 else ():
            owner = shard_of(position.group, shards)
            if owner != self._core.shard:
                return InvalidRequest(
                    f"commit of {commit.txn} moves group {position.group!r} of shard {owner}: commit it there"
                )
        return None

    def _invalid_counts(self, txn: TxnId, topics: tuple[str, ...], records: tuple[int, ...]) -> Error | None:
        if len(topics) != len(records) or (records and min(records) < 1) or len(set(topics)) != len(topics):
            return InvalidRequest(f"commit of {txn}: name each topic once, with its number of records, 1 or more")
        if len(topics) >= self._core.config.max_group:
            return InvalidRequest(
                f"commit of {txn} names {len(topics)} topics: name at most {self._core.config.max_group - 1}"
            )
        for topic in topics:
            if topic not in self._core.topics:
                return UnregisteredTopic(f"transaction {txn} wrote to {topic!r}: register it before the first record")
        return None

    def _invalid_name(self, transaction: TransactionState, commit: Commit) -> Error | None:
        sequence = commit.sequence
        if sequence is None or (transaction.name is not None and transaction.name != sequence.name):
            return InvalidRequest(
                f"transaction {commit.txn} was begun for producer {transaction.name!r}: commit it for that name"
            )
        if sequence.is_participant or sequence.number < 1:
            return InvalidRequest(
                f"producer {sequence.name!r}: open the name, and give a number of at least 1, got {sequence.number}"
            )
        for other in self._producers.attempts(sequence.name):
            if other is transaction or other.plan is None or other.plan.sequence is None or other.state in TERMINAL:
                continue
            if other.plan.sequence.epoch == sequence.epoch:  # those of other epochs are fenced, or decided before
                return InvalidRequest(f"another commit of {sequence.name!r} is under way: wait for its answer")
        self._producers.add_attempt(sequence, transaction)
        return None

    def _invalid_branches(self, transaction: TransactionState, commit: Commit) -> Error | None:
        winners = [branch.txn for branch in commit.winners]
        named = {commit.txn, *winners, *commit.losers}
        size = sum(len(branch.topics) for branch in commit.winners) + len(named)
        if size > self._core.config.max_group:
            return InvalidRequest(
                f"commit of {commit.txn} names {size} branches and topics, the limit is {self._core.config.max_group}: "
                "use fewer branches"
            )
        if len(named) < 1 + len(winners) + len(commit.losers):
            return InvalidRequest(f"commit of {commit.txn} names a branch twice: name it once, to commit or to abort")
        for branch in commit.winners:
            error = self._invalid_counts(*branch)
            if error is not None:
                return error
        for txn in named - {commit.txn}:
            if txn.most != self._core.shard:
                return ForeignTransaction(
                    f"branch {txn} belongs to another coordinator than {commit.txn}: begin it there"
                )
            error = self._invalid_branch(transaction, txn, commit.sequence)
            if error is not None:
                return error
        return None

    def _invalid_branch(
        self, transaction: TransactionState, txn: TxnId, sequence: ProducerSequence | None
    ) -> Error | None:
        """Why this transaction may not decide another one as its branch; None if it may."""
        branch = self._sessions.status(txn)
        if branch is IdStatus.ENDED:
            return None
        owner = self._sessions.owner(txn, branch)
        ours, same = owner is transaction.session, _same_principal(owner, transaction.session)
        if isinstance(branch, TransactionState):
            ours = ours or (sequence is not None and branch.participant_of == sequence[:2])
            ours = branch.parent is transaction or (branch.parent is None and ours)
            if (ours and same and branch.plan is None and not branch.branches) or branch.state is not State.OPEN:
                return None
        elif owner is not None and (ours or (same and txn.least <= self._horizon)):
            return None
        return ForeignTransaction(f"{txn} is not a branch of {transaction.txn}: begin it as one")

    def _link_branches(self, transaction: TransactionState, commit: Commit) -> bool:
        """Link all branches that the commit names. False: a winner has ended already, so the commit is aborted.

        A commit of the number with an unknown outcome may have ended it; then the answer is that the number committed.
        """
        for txn in commit.losers:
            branch = self._sessions.open_transaction(txn)
            if branch is not None:
                link(transaction, branch)
        for winner in commit.winners:
            branch = self._sessions.open_transaction(winner.txn)
            if branch is None:
                refusal = None if commit.sequence is None else self._producers.refusal(commit.sequence)
                self._completion.abort(transaction, f"its branch {winner.txn} had ended", refusal=refusal)
                return False
            link(transaction, branch)
            branch.topics, branch.records = winner.topics, winner.records
        if commit.sequence is not None:
            self._link_participants(transaction, commit.sequence)
        return True

    def _link_participants(self, transaction: TransactionState, sequence: ProducerSequence) -> None:
        """Link all open participants of numbers up to this one: they end with it."""
        for branch in self._producers.participants(sequence.name):
            if (
                branch.state is State.OPEN
                and branch.participant_of is not None
                and branch.participant_of[1] <= sequence.number
            ):
                link(transaction, branch)


def _same_principal(one: Session | None, other: Session | None) -> bool:
    """Whether two sessions belong to one principal; those that are unknown belong to any."""
    return one is None or other is None or principal_tag(one.name) == principal_tag(other.name)


def link(parent: TransactionState, branch: TransactionState) -> None:
    """Make one transaction a branch of another, with which it ends."""
    if branch.parent is None:
        branch.parent = parent
        if parent.branches is None:
            parent.branches = []
        parent.branches.append(branch)


@dataclass
class TransactionRequests:
    """Executes the other requests about transactions: reconnect, begin, abort, query, and those of buffers."""

    _core: Core
    _sessions: Sessions
    _producers: NamedProducers
    _completion: TransactionCompletion
    _takeover: TakeOver

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
        name = aborted.participant_of[0] if aborted.participant_of is not None else ""
        for other in self._producers.participants(name):
            if other.participant_of == aborted.participant_of and other.state is State.OPEN and other.parent is None:
                self._completion.abort(other, "its number was abandoned")

    def query(self, name: str, request: int, txn: TxnId) -> None:
        """Answer with a transaction's outcome, or with its state."""
        core, status = self._core, self._sessions.status(txn)
        if status is IdStatus.ANOTHER_SHARD:
            core.answer(name, request, core.wrong_coordinator(txn))
        elif self._sessions.is_of_another_principal(name, txn, status):
            core.answer(name, request, of_another_principal(txn))
        elif isinstance(status, TransactionState):
            if status.state in TERMINAL:
                status.wait(name, request, commit=False)
                self._completion.answer_if_due(status)
            else:
                core.answer(name, request, status.state)
        elif status is IdStatus.ENDED:
            core.answer_ended((name, request, False), txn)
        elif status is IdStatus.UNLEASED:
            core.answer(name, request, never_leased(txn))
        else:
            core.answer(name, request, State.ABORTING if status is IdStatus.RETIRING else State.OPEN)

    def _claim(self, session: Session, txn: TxnId) -> State | ForeignTransaction | OutcomeForgotten:
        """The state of a transaction that a session claims as its own; an unknown one is adopted."""
        core, sessions = self._core, self._sessions
        status = sessions.status(txn)
        never = status in (IdStatus.ANOTHER_SHARD, IdStatus.UNLEASED)
        if never or (status is IdStatus.ENDED and core.was_skipped(txn.least)):
            return ForeignTransaction(f"transaction {txn} was never leased by this coordinator")
        if sessions.is_of_another_principal(session.name, txn, status):
            return of_another_principal(txn)
        if isinstance(status, TransactionState):
            return status.state
        if status is IdStatus.ENDED:
            outcome = core.outcomes.find(txn.least)
            return OutcomeForgotten(txn) if outcome is None else ENDED_STATE[outcome]
        if not isinstance(status, Block):
            return State.ABORTING
        if status.session is not session:
            return ForeignTransaction(f"transaction {txn} belongs to another session")
        return sessions.start(txn, status).state

    def _join(self, branch: TransactionState, txn: TxnId) -> None:
        """Make a transaction a branch; abort it at once if its parent has ended or is ending."""
        parent = self._sessions.open_transaction(txn)
        if (
            parent is None
            or parent is branch
            or parent.parent is not None
            or branch.branches
            or parent.plan is not None
            or not _same_principal(parent.session, branch.session)
        ):
            self._completion.abort(branch, f"its transaction {txn} is not open")
        else:
            link(parent, branch)

    # Of buffers

    def answer_buffer(self, topic: str, txns: Iterable[TxnId]) -> None:
        """Answer the outcome query of a buffer about transactions that are ongoing in its topic.

        A marker is the answer: an ABORT marker if the ABORT is durable, if a durable COMMIT does not name the topic, or
        if the transaction is settled; then the topic has its marker already, which comes first. An undecided
        transaction gets no answer, but its timeout starts. Each answer is given once, and none if the marker is already
        being written, since a slow buffer repeats its query.
        """
        for txn in txns:
            status = self._sessions.status(txn)
            if isinstance(status, TransactionState):
                self._answer_marker(topic, status)
            elif status is IdStatus.ENDED:
                self._core.markers.answer_query(topic, MarkerItem(txn, Outcome.ABORT, 0))
            elif isinstance(status, Block) or status is IdStatus.UNLEASED:
                self._watch(topic, txn)

    def _answer_marker(self, topic: str, transaction: TransactionState) -> None:
        if transaction.one_phase or transaction.state not in TERMINAL or topic in (transaction.unfinished or ()):
            return
        item = MarkerItem(transaction.txn, Outcome.ABORT, 0)
        if transaction.state is State.COMMITTED and topic in transaction.topics:
            records = transaction.records[transaction.topics.index(topic)]
            item = MarkerItem(transaction.txn, Outcome.COMMIT, records)
        self._core.markers.answer_query(topic, item)

    def _watch(self, topic: str, txn: TxnId) -> None:
        """Start the timeout of an unknown transaction: its client may have died before its first request."""
        if self._takeover.must_wait(txn.least):
            return
        block = self._sessions.locate(txn.least)
        transaction = self._sessions.start(txn, block)
        if block is None:
            self._sessions.used_unleased.add(txn.least)
            self._completion.abort(transaction, "its id was never leased", (topic,))


@dataclass
class Registration:
    """Registers topics. The owner of a topic follows it before its first transactional record.

    A topic is registered when its first snapshot is durable, and then an entry of the decision log.
    """

    _core: Core
    _waiters: dict[str, list[tuple[str, int]]] = field(default_factory=dict)
    _missing: set[str] = field(default_factory=set)
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
            core.effects.append(RegisterTopic(topic, session))
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
