"""The effect executor: executes the coordinator's effects and reports their results to it."""

from __future__ import annotations

from functools import partial

from pyroaring import BitMap64

from broker_io.errors import DiskWatermark, Error, TopicNotFound
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
from txnbuffer.model import TxnId
from txnbuffer.protocol import encode_marker
from txnbuffer.service.appends import Appends, MessagesPart, Sends
from txnbuffer.service.loop import Loop
from txnbuffer.service.mode import Mode
from txnbuffer.service.registration import TopicRegistrar
from txnbuffer.service.remote_shards import RemoteTopics, ShardMessages
from txnbuffer.service.topic import ServiceTopic, Topics

MAX_WAITING = 100
"""With this many queued messages for a topic, no more of its transactions are queried."""


class Counts:
    """Counters since the start of the process."""

    def __init__(self) -> None:
        self.committed = self.aborted = self.suppressed = self.damaged = 0


class EffectExecutor:
    """Executes the coordinator's effects on topics, the decision log and connections.

    `deleted` is the error that says that the decision log was deleted; nothing can be decided after it.
    """

    def __init__(
        self,
        loop: Loop,
        coordinator: Coordinator,
        topics: Topics,
        appends: Appends,
        sends: Sends,
        decisions: ServiceTopic,
        registrar: TopicRegistrar,
        mode: Mode,
    ) -> None:
        self.counts = Counts()
        self.record_counts = mode.record_counts(self.count)
        self.marker_checks = mode.record_counts(self.recheck)
        self.missing_topics = mode.missing_topics(topics, registrar.reregister)
        self.remote_topics = RemoteTopics(loop, topics.broker, coordinator, appends)
        self.shard_messages = ShardMessages(loop, coordinator, topics, self.remote_topics, appends)
        self.deleted: TopicNotFound | None = None
        self._refused_epoch_markers: list[WriteEpochMarker] = []
        self._coordinator = coordinator
        self._topics = topics
        self._appends = appends
        self._sends = sends
        self._decisions = decisions
        self._mode = mode
        self._now = loop.now
        self._answers = loop.answer
        self._register = registrar.register
        self._fail = loop.fail

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
                        self._answers(effect)
                    case CheckCounts(topic, least):
                        self._ask_counts(topic, least)
                    case AppendMarker():
                        self._append_marker(effect)
                    case AppendDecisions():
                        self._append_decisions(effect)
                    case RegisterTopic(topic):
                        self._register_topic(topic)
                    case AwaitApplied():
                        self._await_applied(effect)
                    case WriteEpochMarker():
                        self._write_epoch_marker(effect)
                    case StopAnswering(reason):
                        self._stop(reason)
                        return
        self.shard_messages.send()

    def applied(self, topic: ServiceTopic, effects: list[Effect]) -> None:
        """Report the effects of what a topic's buffer has applied."""
        ends = []
        for effect in effects:
            match effect:
                case TransactionEnded(txn, outcome):
                    ends.append((txn, outcome))
                case Suppressed():
                    self.counts.suppressed += effect.size
                case Damage():
                    self.counts.damaged += 1
                case EpochRaised(coordinator, epoch) if coordinator == self._coordinator.shard:
                    self._coordinator.newer_epoch_seen(epoch, f"topic {topic.name}")
        if ends:
            committed = sum(outcome for _, outcome in ends)
            self.counts.committed += committed
            self.counts.aborted += len(ends) - committed
            self._coordinator.markers_applied(topic.name, ends, self._now())
            self.shard_messages.applied(topic.name, (txn for txn, _ in ends))
        self.marker_checks.applied(topic)
        self.record_counts.applied(topic)
        if topic.checks:
            waiting, topic.checks = topic.checks, {}
            self._check_counts(topic.name, tuple(waiting))

    def tick(self) -> None:
        """Every second: query again, retry markers that a nearly full disk rejected, and close idle writers."""
        self.ask_again()
        refused, self._refused_epoch_markers = self._refused_epoch_markers, []
        for marker in refused:
            self._write_epoch_marker(marker)
        self.shard_messages.tick()
        self.remote_topics.tick()

    def ask(self) -> None:
        """Query the coordinators for all ongoing transactions."""
        now = self._now()
        for topic in self._topics.by_name.values():
            if topic.followed is not None and len(topic.followed.buffer.ongoing):
                self._ask(topic, [entry.txn for entry in topic.followed.buffer.ongoing], now)

    def ask_again(self) -> None:
        """Query transactions that were ongoing at the last call too, unless their markers can't be written now."""
        now = self._now()
        for topic in self._topics.by_name.values():
            if topic.followed is None:
                continue
            buffer, up_to = topic.followed.buffer, topic.asked_up_to
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
                self.marker_checks.ask(topic, tuple(txn.least for txn in new))
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

    def recheck(self, topic: ServiceTopic, least: tuple[int, ...]) -> None:
        """Query again: the buffer has read all markers, so a transaction that is still ongoing lacks one."""
        txns = [TxnId(self._coordinator.shard, one) for one in least]
        topic.awaiting_markers.difference_update(txns)
        if topic.followed is not None:
            ongoing = topic.followed.buffer.ongoing
            self._coordinator.query_outcomes(
                topic.name, [txn for txn in txns if ongoing.get(txn) is not None], self._now()
            )

    def _register_topic(self, name: str) -> None:
        if self._topics.shard.owns(name):
            self._register(name)
        else:
            self.shard_messages.register(name)

    def _await_applied(self, effect: AwaitApplied) -> None:
        for topic in effect.topics:
            if not self._topics.shard.owns(topic):
                self.shard_messages.await_applied(topic, effect.least)

    def _ask_counts(self, name: str, least: tuple[int, ...]) -> None:
        topic = self._topics.get(name)
        if topic is None or topic.followed is None:
            self._check_counts(name, least)
        else:
            self.record_counts.ask(topic, least)

    def count(self, topic: ServiceTopic, least: tuple[int, ...]) -> None:
        """Report how many records of each transaction a topic's buffer has applied."""
        self._check_counts(topic.name, least)

    def _check_counts(self, name: str, least: tuple[int, ...]) -> None:
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
            self.missing_topics.missing(name)
            return
        acknowledged = partial(self._marker_durable, token)
        failed = partial(self._marker_failed, token)
        self._appends.add(topic, MessagesPart([encode_marker(marker)], acknowledged, failed))
        topic.open_writer()

    def topic_stopped(self, topic: ServiceTopic) -> None:
        """Handle a stopped topic; the problem may be temporary, or another topic may have its name by now."""
        if topic.problem is None:
            return
        self._mode.stopped(topic, topic.problem)
        if not isinstance(topic.problem, TopicNotFound):
            self._coordinator.topic_stopped(topic.name, topic.problem, self._now())
        if topic.missing:
            self._coordinator.topic_missing(topic.name, self._now())
            self.shard_messages.missing(topic.name)
            self.missing_topics.missing(topic.name)

    def _stop(self, reason: str) -> None:
        self._fail(self.deleted or CoordinatorStopped(reason))

    def _marker_durable(self, token: int) -> None:
        self._coordinator.marker_durable(token, self._now())

    def _marker_failed(self, token: int, error: Error) -> None:
        self._coordinator.marker_failed(token)

    def _append_decisions(self, effect: AppendDecisions) -> None:
        acknowledged = partial(self._decisions_durable, effect.token)
        self._appends.add(self._decisions, MessagesPart(effect.messages, acknowledged, self._decisions_failed))

    def _decisions_durable(self, token: int) -> None:
        self._coordinator.decisions_durable(token, self._now())

    def _decisions_failed(self, error: Error) -> None:
        self.deleted = error if isinstance(error, TopicNotFound) else None
        self._coordinator.decisions_failed(str(error))

    def _write_epoch_marker(self, effect: WriteEpochMarker) -> None:
        name, marker = effect
        topic = self._topics.get(name)
        if topic is None:
            self._coordinator.topic_deleted(name, self._now())
        elif topic.followed is not None:
            acknowledged = partial(self._epoch_marker_durable, topic)
            failed = partial(self._epoch_marker_failed, effect)
            self._appends.add(topic, MessagesPart([encode_marker(marker)], acknowledged, failed))

    def _epoch_marker_durable(self, topic: ServiceTopic) -> None:
        if topic.followed is None:
            return
        state = topic.followed.buffer.coordinators.get(self._coordinator.shard)
        committed, aborted = (BitMap64(), BitMap64()) if state is None else (state.committed, state.aborted)
        self._coordinator.epoch_marker_applied(topic.name, committed.copy(), aborted.copy(), self._now())

    def _epoch_marker_failed(self, effect: WriteEpochMarker, error: Error) -> None:
        if isinstance(error, DiskWatermark):
            self._refused_epoch_markers.append(effect)
            return
        self._stop(f"writing an epoch marker failed: {error}")
