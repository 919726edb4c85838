"""The effect executor: executes the coordinator's effects and reports their results to it."""

from __future__ import annotations

from functools import partial

from pyroaring import BitMap64

from broker_io.batch import Batch
from broker_io.errors import Error, TopicNotFound
from txnbuffer.buffer.state import Damage, Effect, EpochRaised, Suppressed, TransactionEnded
from txnbuffer.coordinator.coordinator import Coordinator
from txnbuffer.coordinator.messages import (
    AppendDecisions,
    AppendMarker,
    AwaitApplied,
    CheckCounts,
    RegisterTopic,
    SessionResults,
    StopAnswering,
    WriteEpochMarker,
)
from txnbuffer.errors import CoordinatorStopped
from txnbuffer.model import Outcome, TxnId
from txnbuffer.protocol import marker_batch
from txnbuffer.service.cluster.remote_shards import RemoteTopics, ShardMessages
from txnbuffer.service.loop import Loop
from txnbuffer.service.topics.appends import AppendPart, Appends, ServiceTopic
from txnbuffer.service.topics.requests import Sends
from txnbuffer.service.topics.topics import Topics
from txnbuffer.service.topics.visible import VisibleCommits

MAX_WAITING = 100
"""With this many queued messages for a topic, no more of its transactions are queried."""


class EffectExecutor:
    """Executes the coordinator's effects on topics, the decision log and connections.

    `committed`, `aborted`, `suppressed`, `damaged`: counters since the start of the process. `obstacle`: why
    nothing can be decided any more, if no other service has taken over: the decision log was deleted.
    """

    def __init__(
        self,
        loop: Loop,
        coordinator: Coordinator,
        topics: Topics,
        appends: Appends,
        sends: Sends,
        decisions: ServiceTopic,
    ) -> None:
        self.committed = self.aborted = self.suppressed = self.damaged = 0
        self.remote_topics = RemoteTopics(loop, topics.broker, coordinator, appends)
        self.shard_messages = ShardMessages(loop, coordinator, topics, self.remote_topics, appends)
        self.visible = VisibleCommits(topics, loop.answer, loop.now, coordinator.config.visible_timeout)
        self.obstacle: TopicNotFound | None = None
        self._loop = loop
        self._now = loop.now
        self._coordinator = coordinator
        self._topics = topics
        self._appends = appends
        self._sends = sends
        self._decisions = decisions

    def remote_writers(self) -> list[ServiceTopic]:
        """Return the topics of other shards to which this shard writes."""
        return [*self.remote_topics.by_name.values(), *self.shard_messages.inboxes.values()]

    def remote_problems(self) -> dict[str, Error | None]:
        """Return the errors that block messages to topics of other shards, by description."""
        return {f"writing to {topic.name}": topic.write_problem for topic in self.remote_writers()}

    def execute(self) -> None:
        """Execute the coordinator's effects until none is left."""
        while effects := self._coordinator.take_effects():
            for effect in effects:
                match effect:
                    case SessionResults():
                        self._loop.answer(self.visible.checked(effect))
                    case CheckCounts(topic, least):
                        self._check_counts(topic, least)
                    case AppendMarker():
                        self._append_marker(effect)
                    case AppendDecisions():
                        self._append_decisions(effect)
                    case RegisterTopic(topic, session):
                        self._register_topic(topic, session)
                    case AwaitApplied(least, topics):
                        self._await_applied(least, topics)
                    case WriteEpochMarker():
                        self._write_epoch_marker(effect)
                    case StopAnswering(reason):
                        self._stop(reason)
                        return
        if self.visible.due or self.shard_messages.queued:
            self._send_waiting()

    def _send_waiting(self) -> None:
        """Send what waits for this: answers of visible commits, and messages to other shards."""
        self.visible.release()
        if self.shard_messages.queued:
            self.shard_messages.send()

    def applied(self, topic: ServiceTopic, effects: list[Effect]) -> None:
        """Report the effects of what a topic's buffer has applied."""
        if topic.followed is not None:
            self.visible.applied(topic.name, topic.followed.buffer.ended)
        ends = []
        for effect in effects:
            match effect:
                case TransactionEnded(txn, outcome):
                    ends.append((txn, outcome))
                    if outcome is Outcome.COMMIT:
                        self.committed += 1
                    else:
                        self.aborted += 1
                case Suppressed():
                    self.suppressed += effect.size
                case Damage():
                    self.damaged += 1
                case EpochRaised(coordinator, epoch) if coordinator == self._coordinator.shard:
                    self._coordinator.newer_epoch_seen(epoch, f"topic {topic.name}")
        if ends:
            self._coordinator.markers_applied(topic.name, ends, self._now())
            if topic.name in self.shard_messages.awaited:
                self.shard_messages.applied(topic.name, (txn for txn, _ in ends))
        if topic.reports:
            topic.report_applied()
        if topic.checks:
            waiting, topic.checks = topic.checks, {}
            self._report_counts(topic.name, tuple(waiting))

    def tick(self) -> None:
        """Every second: query again, and close idle writers."""
        self.ask_again()
        self.visible.tick()
        self.shard_messages.tick()
        self.remote_topics.tick()

    def ask(self) -> None:
        """Query the coordinators for all ongoing transactions."""
        now = self._now()
        for topic in self._topics.by_name.values():
            if topic.followed is not None and len(topic.followed.buffer.ongoing):
                self._ask(topic, [*topic.followed.buffer.ongoing], now)

    def ask_again(self) -> None:
        """Query transactions that were ongoing at the last call too, unless their markers can't be written now."""
        now = self._now()
        for topic in self._topics.by_name.values():
            if topic.followed is None:
                continue
            buffer, up_to = topic.followed.buffer, topic.asked_up_to
            oldest = buffer.ongoing.oldest()
            blocked_by = None if oldest is None or oldest.first == buffer.applied else oldest.txn
            if blocked_by != topic.blocked_by:
                topic.blocked_by, topic.blocked_since = blocked_by, now
            topic.asked_up_to = buffer.applied
            if up_to is not None and len(topic.waiting) < MAX_WAITING and len(buffer.ongoing):
                older = [entry.txn for entry in buffer.ongoing.began_by(up_to)]
                self._ask(topic, older, now)

    def _ask(self, topic: ServiceTopic, txns: list[TxnId], now: float) -> None:
        """Query ongoing transactions, except those whose marker is in the log and not read yet."""
        if marked := {txn for txn in txns if self._has_marker(topic, txn)}:
            txns = [txn for txn in txns if txn not in marked]
            if new := marked - topic.awaiting_markers:
                topic.awaiting_markers |= new
                self._topics.when_read(topic, partial(self._recheck, topic, new))
        self._coordinator.query_outcomes(topic.name, txns, now)
        self.shard_messages.ask(topic.name, txns)

    def _has_marker(self, topic: ServiceTopic, txn: TxnId) -> bool:
        """Whether the marker of a transaction is in the log of a topic, if it needs one."""
        if txn.most != self._coordinator.shard:
            return False
        known = self._coordinator.transaction(txn)
        if known is None:
            return self._coordinator.has_ended(txn.least)
        return topic.name in known.topics and known.unfinished is not None and topic.name not in known.unfinished

    def _recheck(self, topic: ServiceTopic, txns: set[TxnId]) -> None:
        """Query again: the buffer has read all markers, so a transaction that is still ongoing lacks one."""
        topic.awaiting_markers -= txns
        if topic.followed is not None:
            ongoing = topic.followed.buffer.ongoing
            self._coordinator.query_outcomes(
                topic.name, [txn for txn in txns if ongoing.get(txn) is not None], self._now()
            )

    def _register_topic(self, name: str, session: str) -> None:
        if self._topics.shard.owns(name):
            self._loop.run(self._topics.register(name, session=session))
        else:
            self.shard_messages.register(name)

    def _await_applied(self, least: int, topics: tuple[str, ...]) -> None:
        for topic in topics:
            if not self._topics.shard.owns(topic):
                self.shard_messages.await_applied(topic, least)

    def _check_counts(self, name: str, least: tuple[int, ...]) -> None:
        topic = self._topics.get(name)
        report = partial(self._report_counts, name, least)
        if topic is None or topic.followed is None:
            report()
        else:
            self._topics.when_read(topic, report)

    def _report_counts(self, name: str, least: tuple[int, ...]) -> None:
        """Report how many records of each transaction the topic's buffer has applied; 0 if it has none."""
        topic = self._topics.get(name)
        if topic is None or topic.followed is None:
            self._coordinator.counts_checked(name, [(one, 0) for one in least], self._now())
            return
        shard, ongoing, sends = self._coordinator.shard, topic.followed.buffer.ongoing, self._sends
        counted = []
        for one in least:
            entry = ongoing.get(TxnId(shard, one))
            highest, accepted = (0, 0) if entry is None else (entry.highest, entry.accepted)
            if sends.under_way(topic, one, highest):
                topic.checks[one] = None
            else:
                counted.append((one, accepted))
        self._coordinator.counts_checked(name, counted, self._now())

    def _append_marker(self, effect: AppendMarker) -> None:
        token, name, marker = effect
        topic = self._topics.get(name) if self._topics.shard.owns(name) else self.remote_topics.topic(name)
        if topic is None or topic.missing:
            self._coordinator.marker_failed(token)
            self._topics.look_up(name)
            return
        batch, coordinator = marker_batch(marker), self._coordinator
        part = AppendPart(
            batch,
            batch.weight,
            lambda: coordinator.marker_durable(token, self._now()),
            lambda _: coordinator.marker_failed(token),
        )
        self._appends.add(topic, part)

    def stopped(self, topic: ServiceTopic, problem: Error) -> None:
        """Handle a stopped topic; the problem may be temporary, or another topic may have its name by now."""
        if not isinstance(problem, TopicNotFound):
            self._coordinator.topic_stopped(topic.name, problem, self._now())
        if topic.missing:
            self._coordinator.topic_missing(topic.name, self._now())
            self.shard_messages.missing(topic.name)
            self._topics.look_up(topic.name)

    def _stop(self, reason: str) -> None:
        self._loop.fail(self.obstacle or self._appends.failure or CoordinatorStopped(reason))

    def _append_decisions(self, effect: AppendDecisions) -> None:
        batch, coordinator = Batch.of(effect.messages), self._coordinator
        part = AppendPart(
            batch,
            batch.weight,
            lambda: coordinator.decisions_durable(effect.token, self._now()),
            self._decisions_failed,
        )
        self._appends.add(self._decisions, part)

    def _decisions_failed(self, error: Error) -> None:
        self.obstacle = error if isinstance(error, TopicNotFound) else None
        self._coordinator.decisions_failed(str(error))

    def _write_epoch_marker(self, effect: WriteEpochMarker) -> None:
        name, marker = effect
        topic = self._topics.get(name)
        if topic is None:
            self._coordinator.topic_deleted(name, self._now())
        elif topic.followed is not None:
            batch = marker_batch(marker)
            part = AppendPart(
                batch,
                batch.weight,
                partial(self._epoch_marker_durable, topic),
                lambda error: self._stop(f"writing an epoch marker failed: {error}"),
            )
            self._appends.add(topic, part)

    def _epoch_marker_durable(self, topic: ServiceTopic) -> None:
        if topic.followed is None:
            return
        state = topic.followed.buffer.coordinators.get(self._coordinator.shard)
        committed, aborted = (BitMap64(), BitMap64()) if state is None else (state.committed, state.aborted)
        self._coordinator.epoch_marker_applied(topic.name, committed.copy(), aborted.copy(), self._now())
