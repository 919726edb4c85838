"""A simulated world for coordinators: a fenced decision log, topic logs, owners with real transaction buffers.

Tests decide when an append is written, when it is acknowledged, and when an owner reads a topic. `Owner.settle` runs
all pending steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import md5

from pyroaring import BitMap64

from broker_io.batch import Batch, Message, PlacedBatch
from broker_io.position import Position, Positions
from txnbuffer.buffer.buffer import TransactionBuffer
from txnbuffer.buffer.state import Damage, EpochRaised, TransactionEnded
from txnbuffer.buffer.visibility import visible_counts
from txnbuffer.coordinator.coordinator import Coordinator
from txnbuffer.coordinator.decisions import Owner as OwnerEntry
from txnbuffer.coordinator.decisions import decode
from txnbuffer.coordinator.history import History
from txnbuffer.coordinator.messages import (
    AppendDecisions,
    AppendMarker,
    CheckCounts,
    CoordinatorConfig,
    RegisterTopic,
    Result,
    SessionResults,
    StopAnswering,
    WriteEpochMarker,
)
from txnbuffer.coordinator.takeover import Acquisition
from txnbuffer.model import Outcome, TxnId
from txnbuffer.protocol import encode_marker

SHARD = 0


class TopicLog:
    """One topic: messages at positions (1, 0), (1, 1) …"""

    def __init__(self, name: str) -> None:
        self.name = name
        self.messages: list[Message] = []

    def append(self, message: Message) -> int:
        self.messages.append(message)
        return len(self.messages) - 1

    def placed(self, first: int, end: int) -> PlacedBatch:
        batch = Batch.of(self.messages[first:end])
        positions = Positions.consecutive(1, first, len(batch))
        return PlacedBatch(positions, positions.entries * 0, batch)


@dataclass
class World:
    """`writer` is the owner that may append to the decision log; appends of fenced owners fail."""

    topics: dict[str, TopicLog] = field(default_factory=dict)
    decisions: list[Message] = field(default_factory=list)
    writer: Owner | None = None
    now: float = 1_000_000.0
    late: list[tuple[str, TxnId, int, bytes]] = field(default_factory=list)
    names_opened: list[tuple[int, int]] = field(default_factory=list)
    joined: list[tuple[int, Position | None]] = field(default_factory=list)
    already_committed: list[int] = field(default_factory=list)

    def topic(self, name: str) -> TopicLog:
        return self.topics.setdefault(name, TopicLog(name))

    def compacted(self) -> list[Message]:
        """The decision log after compaction."""
        newest = {message.key: at for at, message in enumerate(self.decisions)}
        kept = sorted(at for at in newest.values() if self.decisions[at].value is not None)
        return [self.decisions[at] for at in kept]

    def record(self, topic: str, txn: TxnId | None, seq: int, value: bytes = b"") -> None:
        properties = {} if txn is None else {"tb.v": "1", "tb.txn": str(txn), "tb.seq": str(seq)}
        self.topic(topic).append(Message(None, value, properties))

    def take_over(
        self, config: CoordinatorConfig | None = None, *, name: str = "owner", compact: bool = False
    ) -> Owner:
        """A new owner, which fences the log, writes its entry and reads the whole log."""
        seen = max((entry.epoch for entry in map(decode, self.decisions) if isinstance(entry, OwnerEntry)), default=0)
        drawn = md5(f"{name}{seen}".encode()).hexdigest()
        before = History.read(self.decisions)
        last = before.highest_id if seen else None  # as on an embedded log
        acquisition = Acquisition(name, seen + 1, owner_id=drawn, known=before.owners, last=last)
        self.decisions.append(acquisition.entry())
        assert acquisition.read(seen, before.owners, last)
        messages = self.compacted() if compact else self.decisions
        owner = Owner(self, acquisition.epoch, config or CoordinatorConfig(), History.read(messages))
        self.writer = owner
        return owner

    def read(self, topic: str) -> Reading:
        """What a new reader at the beginning sees now."""
        return Reading(self.topic(topic))


class Reading:
    """`values`: values of visible records. `ongoing`: transactions that block the reader."""

    def __init__(self, log: TopicLog) -> None:
        buffer = TransactionBuffer()
        self.damage: list[Damage] = []
        self.outcomes: dict[TxnId, Outcome] = {}
        self.values: list[bytes] = []
        placed = log.placed(0, len(log.messages))
        for effect in buffer.apply_batch(placed):
            if isinstance(effect, Damage):
                self.damage.append(effect)
            elif isinstance(effect, TransactionEnded):
                self.outcomes[effect.txn] = effect.outcome
        self.ongoing = [*buffer.ongoing]
        last = buffer.max_read_position
        if last is not None and len(placed):
            for seen, message in zip((visible_counts(placed, buffer) > 0).tolist(), log.messages, strict=True):
                if seen and "tb.marker" not in message.properties:
                    self.values.append(message.value or b"")


class Owner:
    """One process: a coordinator, and the buffers of all topics that it follows.

    `appends`, `markers`: not written yet; `acks`: written, not acknowledged yet.
    """

    def __init__(self, world: World, epoch: int, config: CoordinatorConfig, history: History) -> None:
        self.world = world
        self.coordinator = Coordinator(SHARD, epoch, config, history, world.now)
        self.buffers: dict[str, TransactionBuffer] = {}
        self.read: dict[str, int] = {}
        self.appends: deque[AppendDecisions] = deque()
        self.acks: deque[int] = deque()
        self.markers: list[AppendMarker] = []
        self.marker_acks: list[int] = []
        self.checks: list[CheckCounts] = []
        self.registrations: list[str] = []
        self.epoch_markers: list[WriteEpochMarker] = []
        self.epoch_marker_ends: dict[str, int] = {}
        self.answers: dict[tuple[str, int], Result] = {}
        self.stopped: str | None = None
        self.crashed = False
        self.requests = 0
        for topic in history.topics:
            self.tail(topic)
        self.take()

    def tail(self, topic: str) -> None:
        if topic not in self.buffers:
            self.world.topic(topic)
            self.buffers[topic] = TransactionBuffer()
            self.read[topic] = 0

    def take(self) -> None:
        """Queue the coordinator's effects as pending steps."""
        for effect in self.coordinator.take_effects():
            match effect:
                case AppendDecisions():
                    self.appends.append(effect)
                case AppendMarker():
                    self.markers.append(effect)
                case CheckCounts():
                    self.checks.append(effect)
                case RegisterTopic(topic=topic):
                    self.registrations.append(topic)
                case WriteEpochMarker():
                    self.epoch_markers.append(effect)
                case SessionResults(session=session, answers=answers):
                    for request, result in answers:
                        assert (session, request) not in self.answers, "answered twice"
                        self.answers[session, request] = result
                case StopAnswering(reason=reason):
                    self.stopped = reason

    def crash(self) -> None:
        """Drop all pending appends."""
        self.crashed = True
        self.stopped = "it crashed"

    # Single steps

    def land_append(self) -> None:
        """Write the oldest append to the decision log, or fail it if the owner is fenced."""
        append = self.appends.popleft()
        if self.world.writer is not self:
            self.appends.clear()
            self.coordinator.decisions_failed("fenced")
        else:
            self.world.decisions += append.messages
            self.acks.append(append.token)
        self.take()

    def acknowledge_append(self) -> None:
        self.coordinator.decisions_durable(self.acks.popleft(), self.world.now)
        self.take()

    def land_marker(self, which: int = 0) -> None:
        marker = self.markers.pop(which)
        self.world.topic(marker.topic).append(encode_marker(marker.marker))
        self.marker_acks.append(marker.token)

    def lose_marker(self, which: int = 0) -> None:
        """Fail the append of a marker without writing it."""
        self.coordinator.marker_failed(self.markers.pop(which).token)

    def acknowledge_marker(self, which: int = 0, *, lost: bool = False) -> None:
        token = self.marker_acks.pop(which)
        if lost:
            self.coordinator.marker_failed(token)
        else:
            self.coordinator.marker_durable(token, self.world.now)
        self.take()

    def land_epoch_marker(self, which: int = 0) -> None:
        epoch_marker = self.epoch_markers.pop(which)
        self.epoch_marker_ends[epoch_marker.topic] = self.world.topic(epoch_marker.topic).append(
            encode_marker(epoch_marker.marker)
        )

    def pump(self, topic: str, limit: int | None = None) -> None:
        """Apply the rest of a topic, or up to `limit` messages."""
        log, first = self.world.topic(topic), self.read[topic]
        end = len(log.messages) if limit is None else min(len(log.messages), first + limit)
        if end > first:
            self.read[topic] = end
            buffer = self.buffers[topic]
            effects = buffer.apply_batch(log.placed(first, end))
            ends = [(one.txn, one.outcome) for one in effects if isinstance(one, TransactionEnded)]
            for effect in effects:
                if isinstance(effect, EpochRaised) and effect.coordinator == SHARD:
                    self.coordinator.newer_epoch_seen(effect.epoch, topic)
            self.coordinator.markers_applied(topic, ends, self.world.now)
            if topic in self.epoch_marker_ends and end > self.epoch_marker_ends[topic]:
                del self.epoch_marker_ends[topic]
                state = buffer.coordinators.get(SHARD)
                committed = state.committed if state else BitMap64()
                aborted = state.aborted if state else BitMap64()
                self.coordinator.epoch_marker_applied(topic, committed, aborted, self.world.now)
            self.take()

    def count(self, which: int = 0) -> None:
        """Read the topic to its end and answer a check of record counts."""
        check = self.checks.pop(which)
        self.pump(check.topic)
        ongoing = self.buffers[check.topic].ongoing
        found = [(least, ongoing.get(TxnId(SHARD, least))) for least in check.least]
        counts = [(least, 0 if entry is None else entry.accepted) for least, entry in found]
        self.coordinator.counts_checked(check.topic, counts, self.world.now)
        self.take()

    def snapshot(self, which: int = 0) -> None:
        topic = self.registrations.pop(which)
        self.tail(topic)
        self.coordinator.topic_snapshotted(topic, self.world.now)
        self.take()

    def query_outcomes(self, topic: str) -> None:
        """Query all ongoing transactions of a topic."""
        self.coordinator.query_outcomes(topic, [*self.buffers[topic].ongoing], self.world.now)
        self.take()

    def tick(self, seconds: float = 0.0) -> None:
        self.world.now += seconds
        self.coordinator.tick(self.world.now)
        self.take()

    # Many steps

    def settle(self) -> None:
        """Run steps until none is pending."""
        self.take()
        busy = True
        while busy and not self.stopped:
            busy = False
            while self.registrations:
                self.snapshot()
                busy = True
            while self.epoch_markers:
                self.land_epoch_marker()
                busy = True
            while self.appends:
                self.land_append()
                busy = True
            while self.acks:
                self.acknowledge_append()
                busy = True
            while self.markers:
                self.land_marker()
                busy = True
            while self.marker_acks:
                self.acknowledge_marker()
                busy = True
            for topic in list(self.buffers):
                if self.read[topic] < len(self.world.topic(topic).messages):
                    self.pump(topic)
                    busy = True
            while self.checks:
                self.count()
                busy = True

    def age(self, seconds: float, step: float = 1.0) -> None:
        """Let time pass in steps, with `settle` after each."""
        end = self.world.now + seconds
        while self.world.now < end:
            self.tick(step)
            self.settle()

    # Requests of a client with immediate answers

    def request(self) -> int:
        self.requests += 1
        return self.requests

    def heard(self, session: str, request: int) -> Result | None:
        return self.answers.get((session, request))

    def open(self, session: str, *claims: TxnId) -> int:
        request = self.request()
        self.coordinator.open_session(session, request, claims, self.world.now)
        return request

    def client(self, session: str, topics: Iterable[str] = ("a", "b"), ids: int = 10) -> int:
        """Open a session, register topics, lease ids; the first id."""
        self.open(session)
        for topic in topics:
            self.coordinator.register_topic(session, self.request(), topic, self.world.now)
        request = self.request()
        self.coordinator.lease(session, request, ids, self.world.now)
        self.settle()
        leased = self.answers[session, request]
        assert isinstance(leased, tuple), leased
        return int(leased[0])


def position(entry: int) -> Position:
    return Position(1, entry)
