"""The coordinator: a pure state machine that turns events of clients, logs and buffers into effects

It uses no clock, socket or file. Each method call is one event; `now` is in seconds since 1970, and never goes back.
After each call, `take_effects` returns what to do next; effects for one receiver keep their order, and their results
are events again. Call `tick` about once a second. No request is answered before its result is durable.

It runs in one thread. Once `stopped` is set it does nothing more: another owner reads the log and continues.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from functools import partial

from pyroaring import BitMap64

from broker_io.errors import Error
from txnbuffer.coordinator.completion import TransactionCompletion
from txnbuffer.coordinator.core import Core
from txnbuffer.coordinator.groups import ConsumerGroups
from txnbuffer.coordinator.history import History
from txnbuffer.coordinator.messages import (
    Begin,
    Commit,
    CoordinatorConfig,
    Done,
    Effect,
    GroupHeartbeat,
    SessionResults,
    State,
)
from txnbuffer.coordinator.producers import NamedProducers
from txnbuffer.coordinator.requests import CommitRequests, Registration, TransactionRequests
from txnbuffer.coordinator.retention import OutcomeRetention
from txnbuffer.coordinator.sessions import Ongoing, Sessions
from txnbuffer.coordinator.takeover import TakeOver
from txnbuffer.coordinator.transaction import Session, TransactionState
from txnbuffer.errors import TIME_UP, ProducerFenced, UnknownSession
from txnbuffer.model import Outcome, TxnId

NOTHING_STORED: frozenset[int] = frozenset()


class Coordinator:
    """The owner of a shard in an epoch; `history` is the decision log up to this owner's `owner` entry."""

    def __init__(self, shard: int, epoch: int, config: CoordinatorConfig, history: History, now: float) -> None:
        self.shard = shard
        self.epoch = epoch
        self.config = config
        self._core = core = Core(
            shard, epoch, config, history, lambda *durable: self._completion.group_durable(*durable), now
        )
        self._producers = NamedProducers(core, history.names)
        self.consumer_groups = ConsumerGroups(core, history.consumers)
        """Do not change them."""
        self._retention = OutcomeRetention(core, self._producers, self.consumer_groups, history)
        next_id = history.next_id(epoch)
        self._sessions = Sessions(core, next_id, lambda *of: self._completion.abort(*of), self._retention.leased)
        self._completion = TransactionCompletion(
            core, self._sessions, self._producers, self.consumer_groups, self._retention
        )
        self._takeover = TakeOver(core, self._sessions, self._completion, self._retention, history)
        horizon = self._takeover.horizon
        self._commits = CommitRequests(core, self._sessions, self._producers, self._completion, horizon)
        self._requests = TransactionRequests(core, self._sessions, self._producers, self._completion, self._takeover)
        self._registration = Registration(core)
        self.write_refusals = self._sessions.write_refusals
        self.outstanding_of = self._sessions.outstanding_of
        """How many leased ids have not ended, by the tag of their principal. Do not change it."""
        self.has_ended = core.progress.has_ended
        """Whether a transaction (`least`) has ended and all its markers are durable."""
        self.marker_failed = core.markers.failed
        self.epoch_marker = core.markers.epoch_marker

    @property
    def stopped(self) -> str | None:
        """Why this coordinator has stopped; None while it runs."""
        return self._core.stopped

    @property
    def ready(self) -> bool:
        """Whether the takeover is complete: requests about ids that older owners leased are executed."""
        return self._takeover.ready

    @property
    def low_water_mark(self) -> int:
        """The durable low-water mark: buffers have to query the outcome of ongoing transactions at or below it."""
        return self._core.progress.low_water_mark

    def transactions(self) -> Iterator[TransactionState]:
        """All transactions that have begun and are not settled. Do not change them."""
        return iter(self._core.live.values())

    def transaction(self, txn: TxnId) -> TransactionState | None:
        """One of `transactions`, or None."""
        return self._core.live.get(txn.least) if txn.most == self._core.shard else None

    def ends_by(self, txn: TxnId) -> float | None:
        """When an open transaction is aborted at the latest, in seconds since 1970; None if that is not known here."""
        known = self.transaction(txn)
        if known is None or known.state is not State.OPEN:
            return None
        away = None if known.session is None or known.finished else known.session.disconnected_since
        return known.deadline if away is None else min(known.deadline, away + self.config.session_timeout)

    def sessions(self) -> Iterator[Session]:
        """The sessions that are connected, or may still reconnect. Do not change them."""
        return iter(self._sessions.by_name.values())

    def topics(self) -> Set[str]:
        """The registered topics."""
        return self._core.topics.keys()

    def ended_among(self, ids: Iterable[int]) -> list[int]:
        """Those of these ids (`least`) of which `has_ended` is true."""
        progress = self._core.progress
        mark, settled = progress.low_water_mark, progress.settled
        return [least for least in ids if least <= mark or least in settled]

    def take_effects(self) -> list[Effect]:
        """What the caller has to do now."""
        core = self._core
        if core.stopped is None:
            if not self._takeover.ready:
                self._takeover.advance()
            if self._commits.checks:
                self._commits.ask_counts()
        if core.stopped is None:
            if core.journal.queued:
                core.effects.append(core.journal.take())
            if core.markers.waiting:
                core.effects += core.markers.take()
        if core.answers:
            answers, core.answers = core.answers, {}
            core.effects += [SessionResults(session, tuple(items)) for session, items in answers.items()]
        effects, core.effects = core.effects, []
        return effects

    # Sessions

    def open_session(self, session: str, request: int, claims: Sequence[TxnId], now: float) -> None:
        """A client connects or reconnects; `claims` are its open transactions. Answered with SessionOpened.

        All other open transactions of the session are aborted. Ids that it leased before may not be used for new
        transactions.
        """
        if self._enter(now):
            known = self._sessions.connect(session)
            known.block = None
            action = partial(self._requests.open, known, request, tuple(claims), self._sessions.highest_id)
            self._takeover.execute(action, wait=bool(claims or self._sessions.blocks(known)))

    def session_disconnected(self, session: str, now: float) -> None:
        if self._enter(now):
            self._sessions.disconnect(session)
            self.consumer_groups.session_away(session)

    def close_session(self, session: str, request: int, now: float) -> None:
        """A client closes its session: its open transactions are aborted."""
        known = self._session(session, request, now)
        if known is not None:
            self._sessions.remove(known)
            self.consumer_groups.session_closed(session)
            action = partial(self._sessions.keep_only, known, (), self._sessions.highest_id, "its session was closed")
            self._takeover.execute(action, wait=bool(self._sessions.blocks(known)))
            self._core.answer(session, request, Done())

    def end_gone_sessions(self, ongoing: Ongoing, now: float) -> None:
        """End the sessions of clients that are gone. Call it when an owner begins, and when it no longer serves any.

        These are the clients in its own or an older owner's process, and those that were away for too long. `ongoing`:
        the transactions that are ongoing in the buffers, and their topics; those of these clients abort.
        """
        if self._enter(now) and (gone := self._sessions.gone()):
            for known in gone:
                self.consumer_groups.session_closed(known.name)
            self._takeover.execute(partial(self._sessions.end, gone, ongoing), wait=True)

    def lease(self, session: str, request: int, count: int, now: float) -> None:
        """Lease transaction ids. Answered with Leased, or TooManyTransactions."""
        known = self._session(session, request, now)
        if known is not None:
            self._sessions.lease(known, request, count)

    def return_ids(self, session: str, request: int, blocks: Sequence[tuple[int, int]], now: float) -> None:
        """The client returns leased ids that it will not use, as first ids and sizes; answered only if refused."""
        known = self._session(session, request, now)
        if known is not None:
            self._when_served(min(blocks)[0], partial(self._sessions.return_ids, known, blocks))

    # Topics

    def register_topic(self, session: str, request: int, topic: str, now: float) -> None:
        """Register a topic before its first transactional record. Answered with Done when its snapshot is durable."""
        if self._session(session, request, now) is not None:
            self._registration.register(session, request, topic)

    def register_for_shard(self, request: int, topic: str, now: float) -> None:
        """Register a topic for another shard's coordinator. Answered like `register_topic`."""
        if self._enter(now):
            self._registration.register("", request, topic)

    def topic_snapshotted(self, topic: str, now: float) -> None:
        """The owner of a topic, which may be another shard, follows the topic."""
        if self._enter(now):
            self._completion.topic_resumed(topic)
            self._takeover.topic_resumed(topic)
            self._registration.snapshotted(topic)

    def registration_failed(self, topic: str, why: str, now: float, *, final: bool = False) -> None:
        if self._enter(now):
            self._registration.failed(topic, why, final=final)

    def topic_stopped(self, topic: str, why: Error, now: float) -> None:
        """The owner's buffer of a topic has stopped: requests that wait for it get the error."""
        if self._enter(now):
            self._registration.failed(topic, str(why))
            self._completion.topic_stopped(topic, why)

    def topic_resumed(self, topic: str, now: float) -> None:
        """A topic of another shard that had stopped accepts markers again."""
        if self._enter(now):
            self._completion.topic_resumed(topic)

    def topic_missing(self, topic: str, now: float) -> None:
        """The topic was deleted or re-created: nothing commits there until it is registered again.

        Call `topic_recreated` or `topic_deleted` next; transactions that committed there before wait for that.
        """
        if self._enter(now):
            self._registration.topic_missing(topic)

    def topic_recreated(self, topic: str, ongoing: Set[TxnId], now: float) -> None:
        """A missing topic is followed again, with these ongoing transactions.

        All other transactions that committed there have their marker in it, or were lost with the old topic.
        """
        if self._enter(now):
            self._completion.topic_recreated(topic, ongoing)

    def topic_deleted(self, topic: str, now: float) -> None:
        """The topic and its messages are gone."""
        if self._enter(now):
            self._core.markers.forget_topic(topic)
            self._takeover.awaited_markers.discard(topic)
            self._completion.topic_deleted(topic)
            self._registration.topic_deleted(topic)

    def prove_ownership(self, request: int, now: float) -> None:
        """Answered with Done once the decision log proves that it had no newer owner at the time of the request."""
        if self._enter(now):
            self._core.journal.prove_ownership(lambda: self._core.answer("", request, Done()))

    # Transactions

    def begin_many(self, session: str, begins: Sequence[Begin], now: float) -> None:
        """A session announces transactions; answered only if refused."""
        for begin in begins:
            known = self._session(session, begin.request, now)
            if known is not None:
                self._when_served(begin.txn.least, partial(self._requests.begin, known, begin))

    def commit_many(
        self, session: str, commits: Sequence[Commit], now: float, stored: Set[int] = NOTHING_STORED
    ) -> None:
        """Commit transactions whose records were sent. Answered with a durable COMMIT, or with an error.

        `stored`: those (by `least`) whose records, as many as the commit says, are in the logs already, or in the same
        atomic append as what this call adds. The records of the others are counted by the buffers.
        """
        if not commits:
            return
        known = self._session(session, commits[0].request, now)
        if known is None:
            for commit in commits[1:]:
                self._session(session, commit.request, now)
        elif self._takeover.ready:
            self._commits.commit_many(known, commits, stored)
        else:
            for commit in commits:
                oldest = min([commit.txn, *commit.losers, *(branch.txn for branch in commit.winners)])
                self._when_served(oldest.least, partial(self._commits.commit_many, known, (commit,)))

    def counts_checked(self, topic: str, accepted: Iterable[tuple[int, int]], now: float) -> None:
        """The result of CheckCounts: how many records of each transaction (`least`) the topic has accepted."""
        if self._enter(now):
            self._commits.counts_checked(topic, accepted)

    def abort(
        self, session: str, request: int, txn: TxnId, topics: Sequence[str], now: float, *, operator: bool = False
    ) -> None:
        """Abort a transaction; after its commit this is a query. Answered with the durable outcome.

        `topics` are all topics that the client may have written to. An operator may abort transactions of any session,
        and names no topics.
        """
        if self._enter(now) and (operator or self._session(session, request, now) is not None):
            action = partial(self._requests.abort, session, request, txn, tuple(topics), operator)
            self._when_served(txn.least, action)

    def query(self, session: str, request: int, txn: TxnId, now: float) -> None:
        """Answered with the durable outcome, or with the state of a transaction that has none yet."""
        if self._enter(now):
            self._when_served(txn.least, lambda: self._requests.query(session, request, txn))

    # Names and groups

    def open_name(self, session: str, request: int, name: str, now: float) -> None:
        """Make the session the holder of a producer name. Answered with NameOpened."""
        if (known := self._unless_repeated(session, request, now)) is not None:
            self._fence_attempts(name)
            self._producers.open(known, request, name)

    def delete_name(self, session: str, request: int, name: str, now: float, *, over: int = 0) -> None:
        """Delete a producer name. Answered with Done.

        For `remember` seconds its numbers up to `over` still count as finished.
        """
        if self._enter(now):
            self._fence_attempts(name)
            for transaction in self._producers.participants(name):
                if transaction.state is State.OPEN:
                    self._completion.abort(transaction, f"the name {name!r} was deleted")
            self._producers.delete(session, request, name, over)

    def join_group(self, session: str, request: int, group: str, now: float) -> None:
        """Start a new generation of a consumer group, without members. Answered with Joined."""
        if (known := self._unless_repeated(session, request, now)) is not None:
            self.consumer_groups.join(known, request, group)

    def forget_group(self, request: int, group: str, topic: str | None, now: float) -> None:
        """Delete a group's positions on a topic, or on all topics; an operator's request. Answered with Done."""
        if self._enter(now):
            self.consumer_groups.forget(request, group, topic)

    def heartbeat(self, session: str, heartbeat: GroupHeartbeat, now: float) -> None:
        """A member of a consumer group joins, stays, or leaves. Answered with MemberAssignments."""
        if self._session(session, heartbeat.request, now) is not None:
            self.consumer_groups.heartbeat(session, heartbeat.request, heartbeat)

    # Events of logs and buffers

    def decisions_durable(self, token: int, now: float) -> None:
        if self._enter(now):
            self._core.journal.durable(token)

    def decisions_failed(self, reason: str) -> None:
        """An append to the decision log failed or may have failed: the next owner reads whether it is there."""
        self._core.stop(f"the decision log could not be written: {reason}")

    def marker_durable(self, token: int, now: float) -> None:
        if self._enter(now):
            self._completion.marker_durable(token)

    def markers_applied(self, topic: str, ends: Sequence[tuple[TxnId, Outcome]], now: float) -> None:
        """The owner's buffer of a topic has applied markers, with these ends of transactions.

        A recovered buffer also reports the ends of those `transactions` that are one-phase in its topic.
        """
        if self._enter(now):
            self._completion.markers_applied(topic, ends)

    def epoch_marker_applied(self, topic: str, committed: BitMap64, aborted: BitMap64, now: float) -> None:
        """The result of WriteEpochMarker: the ids above the low-water mark that had ended in the topic."""
        if self._enter(now):
            self._takeover.epoch_marker_applied(topic, committed, aborted)

    def query_outcomes(self, topic: str, txns: Iterable[TxnId], now: float) -> None:
        """A buffer's owner queries ongoing transactions: after recovery, every few seconds, and when the low-water
        mark passes one.
        """
        if self._enter(now):
            self._requests.answer_buffer(topic, txns)

    def newer_epoch_seen(self, epoch: int, where: str) -> None:
        """The epoch of an owner of this shard was read in a topic or log: stop if it is newer."""
        if epoch > self._core.epoch:
            self._core.stop(f"epoch {epoch} was seen on {where}, this owner has {self._core.epoch}")

    def tick(self, now: float) -> None:
        """Time passes: apply timeouts, raise the low-water mark, trim the log, retry failed markers."""
        if not self._enter(now):
            return
        for transaction in self._core.overdue():
            if transaction.state is State.OPEN:
                self._completion.abort(transaction, TIME_UP)
        self._commits.tick()
        self._completion.tick()
        if self._takeover.ready:
            self._sessions.tick()
        self.consumer_groups.tick()
        self._core.markers.retry(self._completion.marker_wanted)
        self._retention.tick()

    def _enter(self, now: float) -> bool:
        if self._core.stopped is not None:
            return False
        if now > self._core.now:
            self._core.now = self._core.journal.now = now
        return True

    def _session(self, session: str, request: int, now: float) -> Session | None:
        if not self._enter(now):
            return None
        known = self._sessions.by_name.get(session)
        if known is None or known.disconnected_since is not None:
            text = f"session {session!r} is not open here: open it, and name its open transactions"
            self._core.answer(session, request, UnknownSession(text))
            return None
        return known

    def _unless_repeated(self, session: str, request: int, now: float) -> Session | None:
        """As `_session`; None also for a request that the session repeats, which is answered again."""
        known = self._session(session, request, now)
        return None if known is None or self._core.answer_again(known, request) else known

    def _when_served(self, least: int, action: Callable[[], None]) -> None:
        """Execute a request about an id: at once, or after the takeover if an older owner leased the id."""
        self._takeover.execute(action, wait=self._takeover.must_wait(least))

    def _fence_attempts(self, name: str) -> None:
        for transaction in self._producers.attempts(name):
            if transaction.state is State.OPEN:
                refusal = ProducerFenced(f"{name!r} was opened by another producer; stop this one")
                self._completion.abort(transaction, "its name was opened again", refusal=refusal)
