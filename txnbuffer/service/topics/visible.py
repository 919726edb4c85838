"""Commits whose clients wait until readers get their records, which an older open transaction may delay.

The coordinator answers such a commit once the buffers of its topics have applied it. The answer is kept here while a
transaction is open that began in one of these topics before the last record of the commit. Branches are committed by
jobs, which write the next batch meanwhile: that must not wait for transactions of others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from broker_io.position import Position
from txnbuffer.buffer.buffer import TransactionBuffer
from txnbuffer.buffer.state import OpenTxn
from txnbuffer.coordinator.messages import Commit, Result, SessionResults
from txnbuffer.errors import NotVisible
from txnbuffer.model import Outcome, TxnId
from txnbuffer.service.topics.topics import Topics

Request = tuple[str, int]
"""A session, and the number of its request."""
Part = tuple[TxnId, str]
"""A transaction in a topic."""


class WaitingCommit(NamedTuple):
    """A transaction whose client waits, its topics, and when its client stops waiting."""

    txn: TxnId
    parts: tuple[Part, ...]
    deadline: float


@dataclass(eq=False)
class VisibleCommits:
    """`answer` sends results to a session; `timeout`: seconds that a client waits at most."""

    _topics: Topics
    _answer: Callable[[SessionResults], None]
    _now: Callable[[], float]
    _timeout: float
    _asked: dict[Request, WaitingCommit] = field(default_factory=dict)
    _committed: dict[Request, WaitingCommit] = field(default_factory=dict)
    _parts: set[Part] = field(default_factory=set)
    """The parts of all waiting commits."""
    _lasts: dict[Part, Position] = field(default_factory=dict)
    """The last record of those that have ended."""
    _blocked: dict[Part, list[Request]] = field(default_factory=dict)
    """The commits that wait for the end of an older transaction in a topic."""
    due: list[Request] = field(default_factory=list)
    """Those that may be visible by now."""

    def expect(self, session: str, commits: Iterable[Commit]) -> None:
        """Remember the commits whose client waits; one with branches waits for its markers only."""
        for commit in commits:
            if commit.wait_visible and not commit.winners:
                parts = [(commit.txn, topic) for topic in commit.topics]
                deadline = self._now() + self._timeout
                self._asked[session, commit.request] = WaitingCommit(commit.txn, tuple(parts), deadline)
                self._parts.update(parts)

    def applied(self, topic: str, ended: Iterable[OpenTxn]) -> None:
        """These transactions have ended in the buffer of a topic."""
        if self._asked or self._committed:
            for entry in ended:
                part = (entry.txn, topic)
                if part in self._parts and entry.last is not None:
                    self._lasts[part] = entry.last
                self.due += self._blocked.pop(part, ())

    def checked(self, results: SessionResults) -> SessionResults:
        """The results to send now: without commits that are not visible yet."""
        if not self._asked:
            return results
        session, answers = results
        return SessionResults(session, tuple([pair for pair in answers if not self._is_kept(session, *pair)]))

    def _is_kept(self, session: str, request: int, result: Result) -> bool:
        waiting = self._asked.pop((session, request), None)
        if waiting is None:
            return False
        if result is not Outcome.COMMIT:
            self._forget(waiting)
            return False
        self._committed[session, request] = waiting
        self.due.append((session, request))
        return True

    def release(self) -> None:
        """Answer the commits that are visible by now."""
        due, self.due = self.due, []
        for request in due:
            self._check(request)

    def tick(self) -> None:
        """Every second: answer those whose client has waited long enough, or whose topic has stopped."""
        for request in [*self._committed]:
            self._check(request)

    def _check(self, request: Request) -> None:
        if (waiting := self._committed.get(request)) is None:
            return
        result: Result = Outcome.COMMIT
        if (obstacle := self._obstacle(waiting)) is not None:
            topic, blocking, why = obstacle
            if blocking is not None and self._now() < waiting.deadline:
                requests = self._blocked.setdefault((blocking, topic), [])
                if request not in requests:
                    requests.append(request)
                return
            result = NotVisible(waiting.txn, topic, why)
        del self._committed[request]
        self._forget(waiting)
        self._answer(SessionResults(request[0], ((request[1], result),)))

    @property
    def idle(self) -> bool:
        """Whether no client waits."""
        return not (self._asked or self._committed or self._parts or self._lasts)

    def disconnected(self, session: str) -> None:
        """Forget the requests of a session; it repeats them when it connects again."""
        for waiting_ones in (self._asked, self._committed):
            for key in [key for key in waiting_ones if key[0] == session]:
                self._forget(waiting_ones.pop(key))

    def _forget(self, waiting: WaitingCommit) -> None:
        for part in waiting.parts:
            self._lasts.pop(part, None)
            self._parts.discard(part)

    def _obstacle(self, waiting: WaitingCommit) -> tuple[str, TxnId | None, str] | None:
        """A topic where readers do not get the commit yet, the transaction that they wait for, and why in words."""
        for txn, name in waiting.parts:
            topic = self._topics.get(name)
            if topic is None or topic.missing:
                continue  # of another shard, or deleted
            if topic.followed is None:
                return name, None, f"it has stopped ({topic.problem})"
            if (blocking := blocking_transaction(topic.followed.buffer, self._lasts.get((txn, name)))) is not None:
                why = f"the older transaction {blocking} is still open there, and readers stop before it"
                return name, blocking, why
        return None


def blocking_transaction(buffer: TransactionBuffer, last: Position | None) -> TxnId | None:
    """The oldest open transaction before which readers stop, if they don't get the record at `last` then.

    None for `last`: the last record that the buffer has applied.
    """
    oldest, last = buffer.ongoing.oldest(), last or buffer.applied
    return None if oldest is None or last is None or oldest.first > last else oldest.txn
