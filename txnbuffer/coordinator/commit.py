"""Commit requests: validated, their records counted, then decided"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from snapshots.shards import shard_of
from txnbuffer.coordinator.completion import TransactionCompletion
from txnbuffer.coordinator.core import Core
from txnbuffer.coordinator.messages import CheckCounts, Commit, ProducerSequence, State
from txnbuffer.coordinator.producers import NamedProducers
from txnbuffer.coordinator.sessions import Sessions
from txnbuffer.coordinator.transaction import Block, Session, TransactionState
from txnbuffer.errors import Error, ForeignTransaction, InvalidRequest, ProducerFenced, UnregisteredTopic
from txnbuffer.model import Outcome, TxnId


class CommitRequests:
    """Executes the commit requests of sessions.

    Older owners leased the ids up to `horizon`. Branches among those are known only because commits name them.
    """

    def __init__(
        self, core: Core, sessions: Sessions, producers: NamedProducers, completion: TransactionCompletion, horizon: int
    ) -> None:
        self._core = core
        self._sessions = sessions
        self._producers = producers
        self._completion = completion
        self._horizon = horizon
        self._checks: dict[str, list[int]] = {}
        self._under_check: deque[tuple[float, list[int]]] = deque()

    def commit_many(self, session: Session, commits: Sequence[Commit]) -> None:
        core, name = self._core, session.name
        for commit in commits:
            if commit.sequence is not None and (fenced := self._fenced(commit, commit.sequence)) is not None:
                core.answer(name, commit.request, fenced)
                continue
            transaction = self._find(session, commit)
            if transaction is None:
                continue
            request = commit.request
            if transaction.state is not State.OPEN or transaction.plan is not None:
                transaction.wait(name, request, commit=True)
                self._completion.answer_if_due(transaction)
            elif (error := self._invalid(transaction, commit)) is not None:
                core.answer(name, request, error)
            else:
                transaction.waiters = [(name, request, True)]
                transaction.plan = commit
                transaction.topics, transaction.records = commit.topics, commit.records
                if self._link_branches(transaction, commit):
                    self._check_counts(transaction, commit)

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
                stopped = self._completion.why_stopped(topic)
                self._completion.abort(transaction, reason if stopped is None else str(stopped))
            else:
                transaction.checks -= 1
                if not transaction.checks:
                    self._completion.commit(transaction, transaction.plan)

    def take_checks(self) -> list[CheckCounts]:
        """The counts that the buffers have to report now."""
        if not self._checks:
            return []
        checks, self._checks = self._checks, {}
        deadline = self._core.now + self._core.config.transaction_timeout
        self._under_check += [(deadline, least) for least in checks.values()]
        return [CheckCounts(topic, tuple(least)) for topic, least in checks.items()]

    def tick(self) -> None:
        """Abort transactions whose records were not counted in time."""
        core = self._core
        while self._under_check and self._under_check[0][0] <= core.now:
            for least in self._under_check.popleft()[1]:
                member = core.live.get(least)
                if member is not None and member.state is State.OPEN and member.checks:
                    self._completion.abort(member, "its records could not be counted in time")

    def _find(self, session: Session, commit: Commit) -> TransactionState | None:
        core, sessions = self._core, self._sessions
        most, least = txn = commit.txn
        block = session.block
        if block is not None and block.first <= least <= block.last and most == core.shard:
            fresh = least not in core.live and not core.progress.has_ended(least)
            if fresh and sessions.retirement(least) is None:  # the usual case: the commit is its first request
                transaction = core.live[least] = TransactionState(txn, session, block)
                return transaction
        return sessions.find(session.name, commit.request, txn, commit=True)

    def _fenced(self, commit: Commit, sequence: ProducerSequence) -> Error | None:
        """The refusal of a commit whose attempt has ended because another producer opened the name; None otherwise."""
        least = commit.txn.least
        if least in self._core.live or self._core.outcomes.find(least) is not Outcome.ABORT:
            return None
        refusal = self._producers.refusal(sequence)
        return refusal if isinstance(refusal, ProducerFenced) else None

    def _check_counts(self, transaction: TransactionState, commit: Commit) -> None:
        if self._core.config.verify_counts:
            self._ask_counts(transaction, transaction)
            for branch in transaction.branches or ():
                self._ask_counts(transaction, branch)
        if not transaction.checks:
            self._completion.commit(transaction, commit)

    def _ask_counts(self, transaction: TransactionState, member: TransactionState) -> None:
        for topic in member.topics:
            transaction.checks += 1
            asked = self._checks.get(topic)
            if asked is None:
                self._checks[topic] = [member.txn.least]
            else:
                asked.append(member.txn.least)

    # Validation

    def _invalid(self, transaction: TransactionState, commit: Commit) -> Error | None:
        error = self._invalid_counts(commit.txn, commit.topics, commit.records)
        if error is None and transaction.parent is not None:
            text = (
                f"transaction {commit.txn} is a branch of {transaction.parent.txn}: commit that one, and name it there"
            )
            error = InvalidRequest(text)
        if error is None and transaction.participant_of is not None:
            text = f"transaction {commit.txn} is a participant of a number: commit the number, and name it as a winner"
            error = InvalidRequest(text)
        if error is None and (commit.winners or commit.losers):
            error = self._invalid_branches(transaction, commit)
        if error is None and (commit.sequence is not None or transaction.name is not None):
            error = self._invalid_name(transaction, commit)
        if error is None and commit.positions:
            places = {(position.group, position.topic) for position in commit.positions}
            if len(places) < len(commit.positions):
                error = InvalidRequest(f"commit of {commit.txn} moves a group twice on one topic: give one position")
            error = error or self._invalid_groups(commit)
        return error

    def _invalid_groups(self, commit: Commit) -> Error | None:
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
            if other is not transaction and other.plan is not None and other.state is State.OPEN:
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
        branch = self._core.live.get(txn.least)
        if branch is not None:
            ours = branch.parent is transaction or (branch.parent is None and branch.session is transaction.session)
            ours = ours or (sequence is not None and branch.parent is None and branch.participant_of == sequence[:2])
            if (ours and branch.plan is None and not branch.branches) or branch.state is not State.OPEN:
                return None
        elif self._core.progress.has_ended(txn.least) or self._is_ours(transaction, self._sessions.locate(txn.least)):
            return None
        return ForeignTransaction(f"{txn} is not a branch of {transaction.txn}: begin it as one")

    def _is_ours(self, transaction: TransactionState, block: Block | None) -> bool:
        return block is not None and (block.session is transaction.session or block.last <= self._horizon)

    def _link_branches(self, transaction: TransactionState, commit: Commit) -> bool:
        """Link all branches that the commit names. False: a winner has ended already, so the commit is aborted."""
        for txn in commit.losers:
            branch = self._open_branch(txn)
            if branch is not None:
                link(transaction, branch)
        for winner in commit.winners:
            branch = self._open_branch(winner.txn)
            if branch is None:
                self._completion.abort(transaction, f"its branch {winner.txn} had ended")
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

    def _open_branch(self, txn: TxnId) -> TransactionState | None:
        """A branch that is still open; None if it has ended or is ending."""
        branch = self._core.live.get(txn.least)
        if branch is not None:
            return branch if branch.state is State.OPEN else None
        if self._core.progress.has_ended(txn.least) or self._sessions.retirement(txn.least) is not None:
            return None
        block = self._sessions.locate(txn.least)
        return self._sessions.start(txn, block, self._core.config.transaction_timeout)


def link(parent: TransactionState, branch: TransactionState) -> None:
    """Make one transaction a branch of another, with which it ends."""
    if branch.parent is None:
        branch.parent = parent
        if parent.branches is None:
            parent.branches = []
        parent.branches.append(branch)
