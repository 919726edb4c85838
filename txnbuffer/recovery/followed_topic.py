"""A topic that its owner follows: its log, its snapshots and when they are due, and dropping trimmed segments

A snapshot is due after enough changes, after enough time with any message, or when a replay from the last snapshot
would take longer than the recovery target. The replay time is estimated from the measured replay rate of the topic.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, Self

from broker_io.batch import PlacedBatch
from broker_io.environment import Clock
from broker_io.port import READ_SECONDS, Broker, Ledger, existing
from broker_io.position import NO_INDEX, Position
from snapshots.errors import SnapshotDamaged
from snapshots.format import EPOCH_PROPERTY, KIND_PROPERTY, MUTATIONS, SEGMENT, VERSION_PROPERTY, EntryKey, Stored
from snapshots.scan import TopicEntries
from snapshots.writer import SnapshotPlan, SnapshotWriter
from txnbuffer.buffer.state import BufferSegment, Effect, Suppressed, TransactionEnded
from txnbuffer.follow import SequencedFollower
from txnbuffer.mutations.index import IndexState
from txnbuffer.recovery.codec import (
    UNKNOWN_LEDGER,
    BufferSegmentPayload,
    EncodedSegment,
    MutationsPayload,
    TopicState,
    decode_segment,
    encode_state,
)
from txnbuffer.recovery.restore import LoadedTopic, version_of
from txnbuffer.streams.failover import FailoverLog

ASSUMED_REPLAY_RATE = 200_000.0
"""Messages per second of a replay, until the rate is measured."""

_WEIGHT = 0.2
"""Weight of a new measurement of the replay rate."""


@dataclass(frozen=True, slots=True)
class SnapshotPolicy:
    """`changes`: ended transactions and suppressed ranges; times in milliseconds, `recovery_target` in seconds."""

    changes: int = 1_000
    interval_ms: int = 5_000
    recovery_target: float = 1.0


DEFAULT_POLICY = SnapshotPolicy()


@dataclass(slots=True)
class SnapshotDue:
    """Messages and changes of a topic since its last durable snapshot. Times are monotonic seconds."""

    policy: SnapshotPolicy
    since: float
    changes: int = 0
    messages: int = 0
    replay_rate: float = ASSUMED_REPLAY_RATE

    def applied(self, messages: int, changes: int) -> None:
        self.messages += messages
        self.changes += changes

    def measured(self, messages: int, seconds: float) -> None:
        """Record that a replay of `messages` took `seconds`; replays that are too short to measure are ignored."""
        if messages < 1_000 or seconds <= 0:
            return
        self.replay_rate += _WEIGHT * (messages / seconds - self.replay_rate)

    def due(self, now: float, *, unstored: bool = False) -> bool:
        """Whether a snapshot is due; `unstored`: something else than messages has changed."""
        if self.changes >= self.policy.changes:
            return True
        if self.messages / self.replay_rate >= self.policy.recovery_target:
            return True
        return (self.messages > 0 or unstored) and (now - self.since) * 1000 >= self.policy.interval_ms

    def written(self, now: float, messages: int, changes: int) -> None:
        """Record that a snapshot of `messages` and `changes` is durable; a failed snapshot changes no counts."""
        self.since = now
        self.messages -= messages
        self.changes -= changes


class LogTail:
    """The messages of a log after `start`, in order, kept to apply them to a newer snapshot."""

    def __init__(self, start: Position) -> None:
        self.start = start
        self.bytes = 0
        self._batches: list[PlacedBatch] = []

    def add(self, placed: PlacedBatch) -> None:
        self._batches.append(placed)
        self.bytes += placed.messages.weight

    def after(self, position: Position) -> list[PlacedBatch] | None:
        """The messages after one of these, or after the start; None if it is neither."""
        rest = [one.take(slice(one.positions.search(position, right=True), None)) for one in self._batches]
        kept = [one for one in rest if len(one)]
        here = sum(one.positions.search(position, right=True) - one.positions.search(position) for one in self._batches)
        return kept if here == 1 or position == self.start else None


class CapturedSnapshot(NamedTuple):
    """The next snapshot of one topic, and how many messages and changes it covers."""

    followed: FollowedTopic
    plan: SnapshotPlan
    state: TopicState
    messages: int
    changes: int


class FollowedTopic(SequencedFollower):
    """Follows one topic from the position where it was restored.

    `failover`: the versions of its history. `index`: the mutation snapshots for the next snapshot, none beyond what is
    numbered. `cursors`: name of each durable cursor → seqno up to which its owner has everything; to
    be replaced, not changed, since another thread may be writing it. `tail`: gets what is applied, if it is not None.
    """

    def __init__(
        self, broker: Broker, restored: LoadedTopic, writer: SnapshotWriter, policy: SnapshotPolicy, clock: Clock
    ) -> None:
        super().__init__(
            broker,
            restored.topic,
            restored.buffer,
            restored.resume,
            decided_after=restored.sequenced,
            sequencer=restored.sequencer,
        )
        self.keeps_sealed = True
        if self.buffer.applied is None:
            self.open()  # an open reader continues when the cluster replaces the ledger of an empty log
        self.writer = writer
        self.due = SnapshotDue(policy, clock.monotonic())
        self.origin_ledger = restored.origin_ledger
        self.generations: list[int] = []
        if restored.snapshot is not None:
            self.generations.append(restored.snapshot.state.resume_ledger)
        self._clock = clock
        self._following = (self.buffer.applied, restored.following_ledger)
        self.failover: FailoverLog = restored.failover
        self.index: IndexState = restored.index.state
        self.cursors: Mapping[str, int] = restored.cursors
        self._stored = None if restored.snapshot is None else restored.snapshot.state
        self.tail: LogTail | None = None

    @classmethod
    def restored(
        cls,
        broker: Broker,
        restored: LoadedTopic,
        entries: TopicEntries,
        max_entry_bytes: int,
        policy: SnapshotPolicy,
        clock: Clock,
    ) -> Self:
        """A topic that continues its snapshot; `entries`: all that it has in the snapshot topic, valid or not."""
        writer = SnapshotWriter(restored.topic, restored.incarnation, max_entry_bytes)
        writer.found(entries)
        if restored.snapshot is not None:
            writer.adopt(restored.snapshot.end)
            segments, mutations = (writer.chains[kind] for kind in (SEGMENT, MUTATIONS))
            stored = restored.snapshot.end.chains
            segments.adopt(stored[SEGMENT], {} if restored.rewrite else restored.snapshot.digests)
            segments.add(map(BufferSegmentPayload, restored.rewrite))
            mutations.adopt(stored[MUTATIONS], restored.index.digests)
        if restored.index.after is not None:
            writer.chains[MUTATIONS].restart(restored.index.after)
        return cls(broker, restored, writer, policy, clock)

    def catch_up(self, end: Position | None = None, timeout: float | None = None) -> list[Effect]:
        """Apply and number everything up to `end`, by default the current end of the log, and measure the rate.

        Raises as `replay`.
        """
        started, messages = self._clock.monotonic(), self.due.messages
        effects = self.replay(end, timeout=timeout)
        if self.due.messages > messages:
            self.due.measured(self.due.messages - messages, self._clock.monotonic() - started)
        self.sequence_all()
        return effects

    def apply(self, placed: PlacedBatch) -> list[Effect]:
        effects = super().apply(placed)
        if self.tail is not None:
            self.tail.add(placed)
        changes = 0
        for effect in effects:
            changes += isinstance(effect, (TransactionEnded, Suppressed))
        self.due.applied(len(placed.publish_times), changes)
        return effects

    def taken_over(self, owner: str) -> None:
        """Begin a version of the topic's history: `owner` continues after what is numbered."""
        uuid = version_of(self.topic, self.writer.incarnation, owner)
        self.failover = self.failover.taken_over(uuid, self.numbered.next_seqno - 1)

    def state(self) -> TopicState:
        """The current state. Sealed segments have to be taken first."""
        following = self._following_ledger()
        if following != UNKNOWN_LEDGER:
            self.continued_in(following)
        return TopicState(
            self.buffer.snapshot_state(),
            self.numbered.snapshot_state(),
            self.origin_ledger,
            following,
            self.failover.versions,
            self.index.unsealed,
            tuple(sorted(self.cursors.items())),
        )

    def _following_ledger(self) -> int:
        """The ledger in which the log continues; UNKNOWN_LEDGER if unknown. A known one never changes."""
        applied = self.buffer.applied
        if applied is not None and (self._following[0] != applied or self._following[1] == UNKNOWN_LEDGER):
            self._following = (applied, _following(applied, self._broker.ledgers(self.topic)))
        return self._following[1]

    def capture(self, epoch: int) -> CapturedSnapshot:
        """Plan a snapshot of the current state, and count what it covers."""
        self.writer.chains[SEGMENT].add(map(BufferSegmentPayload, self.buffer.segments.take_sealed()))
        mutations = self.writer.chains[MUTATIONS]
        mutations.drop_to(self.index.first)
        planned = mutations.next + len(mutations.waiting)
        mutations.add(MutationsPayload(one) for one in self.index.segments[max(planned - self.index.first, 0) :])
        state = self.state()
        plan = self.writer.plan(epoch, encode_state(state))
        return CapturedSnapshot(self, plan, state, self.due.messages, self.due.changes)

    def written(self, state: TopicState, messages: int, changes: int) -> None:
        """A snapshot is durable; `messages` and `changes`: how many it covers since the one before."""
        self._stored = state
        self.generations = [*self.generations[-1:], state.resume_ledger]
        self.due.written(self._clock.monotonic(), messages, changes)

    @property
    def unstored(self) -> bool:
        """Whether the last durable snapshot lacks messages, seqnos, mutation snapshots or positions of cursors."""
        stored = self._stored
        if stored is None or self.due.messages or stored.sequencer.next_seqno != self.numbered.next_seqno:
            return True
        return stored.unsealed_index is not self.index.unsealed or dict(stored.cursors) != {**self.cursors}

    def snapshot_due(self, now: float) -> bool:
        return self.due.due(now, unstored=self.unstored)

    def floor(self) -> int:
        """The lowest ledger needed by the last two snapshots and by readers of undecided messages."""
        return min([self.state().resume_ledger, *self.generations])


def _following(applied: Position | None, ledgers: list[Ledger]) -> int:
    for ledger, following in itertools.pairwise(ledgers):
        if applied is not None and ledger.ledger == applied.ledger:
            # The index of a record in a set does not show whether it is the last one.
            whole = ledger.closed and ledger.entries == applied.entry + 1 and applied.batch == NO_INDEX
            return following.ledger if whole and following.lasting else UNKNOWN_LEDGER
    return UNKNOWN_LEDGER


def drop_segments(broker: Broker, snapshot_topic: str, followed: FollowedTopic, first_ledger: int) -> bool:
    """Drop the segments that only ledgers below `first_ledger` needed, from the buffer and the next snapshot.

    Each is read from the snapshot topic first, since only its entry has its ids. Return whether there were any.
    Raises SnapshotDamaged if one can't be read; then nothing is dropped.
    """
    followed.numbered.trim(first_ledger)
    followed.index = followed.index.trimmed(followed.numbered.oldest(first_ledger))
    chain, summaries = followed.writer.chains[SEGMENT], followed.buffer.segments.summaries
    if chain.waiting:
        return False  # not all segments are durable yet; they are dropped after the next snapshot
    expired = itertools.takewhile(lambda summary: summary.last_ledger < first_ledger, summaries)
    numbers = [summary.number for summary in expired if summary.number in chain.digests]
    entries = [
        read_segment(broker, snapshot_topic, followed.topic, number, chain.live.get(number)) for number in numbers
    ]
    for number, entry in zip(followed.buffer.trim(first_ledger), entries, strict=True):
        followed.buffer.forget(entry.segment)
        chain.drop_to(number + 1)
    return bool(entries)


def read_segment(
    broker: Broker, snapshot_topic: str, topic: str, number: int, at: Position | None
) -> EncodedSegment[BufferSegment]:
    """Read one segment entry at its position in the snapshot topic."""
    key = EntryKey(topic, SEGMENT, number)
    if at is None:
        raise SnapshotDamaged(topic, str(key), "it is missing, but the end entry names it")
    with broker.reader(snapshot_topic, at, compacted=True) as reader:  # the raw log may be trimmed after a compaction
        placed = existing(reader.read(limit=1, timeout=READ_SECONDS), snapshot_topic, at)
    if placed.positions.first != at or placed.messages.keys[0] != key.to_bytes():
        raise SnapshotDamaged(topic, str(key), f"it is not at {at} of {snapshot_topic} any more")
    _, value, properties, _ = placed.messages[0]
    names = (VERSION_PROPERTY, KIND_PROPERTY, EPOCH_PROPERTY)
    version, kind, epoch = (properties.get(name, "") for name in names)
    return decode_segment(topic, number, Stored(at, version, kind, int(epoch or -1), value))
