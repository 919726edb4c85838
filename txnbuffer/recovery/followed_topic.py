"""A topic followed by its owner: buffer, sequencing, snapshots, and dropping segments whose ledgers are trimmed.

The sequencer is fed with the messages that the buffer applies. If too many of them stay undecided, it reads them from
the log again.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Mapping
from typing import NamedTuple

from broker_io.batch import PlacedBatch
from broker_io.environment import Clock
from broker_io.errors import StorageError
from broker_io.port import Broker, Ledger, Reader
from broker_io.position import NO_INDEX, Position
from snapshots.errors import SnapshotDamaged
from snapshots.format import EPOCH_PROPERTY, KIND_PROPERTY, VERSION_PROPERTY, EntryKey, KeyKind, Stored, segment_key
from snapshots.policy import SnapshotDue, SnapshotPolicy
from snapshots.records import reaches
from snapshots.writer import SnapshotPlan, SnapshotWriter
from txnbuffer.buffer.buffer import TransactionBuffer
from txnbuffer.buffer.state import Effect, Suppressed, TransactionEnded
from txnbuffer.buffer.visibility import Sequenced, Sequencer
from txnbuffer.mutations.index import IndexColumns
from txnbuffer.recovery.codec import (
    UNKNOWN_LEDGER,
    BufferSegmentPayload,
    EncodedSegment,
    TopicState,
    decode_segment,
    encode_state,
)
from txnbuffer.recovery.restore import Restored, version_of
from txnbuffer.streams.failover import FailoverLog

OnSequenced = Callable[[PlacedBatch, Sequenced], None]

HELD_BYTES = 8 * 1024 * 1024
"""Approximate limit on the bytes of undecided messages in memory for a topic; more are read from the log again."""

STEP_MESSAGES = 4096
"""Approximate limit on the messages that one step reads again."""


class TopicSequencer:
    """Assigns seqnos after `sequenced` (exclusive), in step with a buffer that was applied up to `resume`.

    `lagging`: messages to sequence are read from the log again. `on_sequenced` is called with sequenced messages.
    """

    def __init__(
        self,
        broker: Broker,
        topic: str,
        buffer: TransactionBuffer,
        sequencer: Sequencer,
        *,
        sequenced: Position,
        resume: Position,
    ) -> None:
        self.sequencer = sequencer
        self.held_limit = HELD_BYTES
        self.on_sequenced: OnSequenced | None = None
        self._broker = broker
        self._topic = topic
        self._buffer = buffer
        self._sequenced = sequenced
        self.lagging = sequenced != resume
        self._reader: Reader | None = None
        self._held: deque[PlacedBatch] = deque()
        self._held_bytes = 0

    @property
    def has_backlog(self) -> bool:
        """Whether decided messages have to be read from the log again to be sequenced."""
        limit = self._buffer.max_read_position
        return self.lagging and limit is not None and not reaches(self._sequenced, limit)

    def applied(self, placed: PlacedBatch) -> None:
        """The buffer has applied these messages, the next of the log."""
        if not self.lagging:
            self._held.append(placed)
            self._held_bytes += _weight(placed)
            if self._held_bytes > self.held_limit:
                self.advance()
                self.lagging = self._held_bytes > self.held_limit
            if self.lagging:
                self._held.clear()
                self._held_bytes = 0

    def continued_in(self, ledger: int) -> None:
        """The log continues in this ledger after all applied messages; once these are sequenced, sequence from there.

        Then the ledger before may be trimmed, however long later messages stay undecided.
        """
        if self.sequencer.position is not None and reaches(self.sequencer.position, self._buffer.applied):
            self._sequenced = self.sequencer.position = max(self._sequenced, Position(ledger, -1))

    def advance(self) -> None:
        """Sequence all that is decided by now."""
        while self.step():
            pass

    def step(self) -> bool:
        """Sequence a bounded amount of what is decided by now; return False if nothing was left to do."""
        if self.lagging:
            return self._read()
        while self._held:
            placed = self._held[0]
            if self._sequence(placed) < len(placed):
                return False
            self._held.popleft()
            self._held_bytes -= _weight(placed)
        return False

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def _sequence(self, placed: PlacedBatch) -> int:
        """Sequence the decided messages of a batch; return how many of its messages are sequenced by now."""
        sequenced = self.sequencer.advance(placed, self._buffer)
        if self.on_sequenced is not None and sequenced.stop > sequenced.start:
            self.on_sequenced(placed, sequenced)
        at = self.sequencer.position
        if at is None:
            return 0
        self._sequenced = max(self._sequenced, at)
        return placed.positions.search(at, right=True)

    def _read(self) -> bool:
        """Sequence one batch of the log after the last seqno; return False if nothing more is decided there."""
        limit = self._buffer.max_read_position
        if limit is None or reaches(self._sequenced, limit):
            self.lagging = not reaches(self._sequenced, self._buffer.applied)
            if not self.lagging:
                self.close()
            return False
        if self._reader is None:
            self._reader = self._broker.reader(self._topic, self._sequenced, inclusive=False)
        placed = self._reader.read(limit=STEP_MESSAGES)
        if placed is None:
            return False
        if self._sequence(placed) < len(placed):
            self.close()  # the rest of the batch is read again once it is decided
            return False
        return True


def _weight(placed: PlacedBatch) -> int:
    return len(placed.messages.values.data) + len(placed.messages.keys.data) + 64 * len(placed)


REPLAY_TIMEOUT = 30.0
"""Seconds within which a message before the end of the log must be read."""


class CapturedSnapshot(NamedTuple):
    """The next snapshot of one topic, and how many messages and changes it covers."""

    followed: FollowedTopic
    plan: SnapshotPlan
    state: TopicState
    messages: int
    changes: int


class FollowedTopic:
    """Follows one topic from the position where it was restored.

    `failover`: the versions of its history. `index`: positions of mutations for the next snapshot; it must not go
    beyond what is sequenced. `cursors`: name of each durable cursor → seqno up to which its owner has everything; to
    be replaced, not changed, since another thread may be writing it.
    """

    def __init__(
        self, broker: Broker, restored: Restored, writer: SnapshotWriter, policy: SnapshotPolicy, clock: Clock
    ) -> None:
        self.topic = restored.topic
        self.writer = writer
        self.buffer: TransactionBuffer = restored.buffer
        self.due = SnapshotDue(policy, clock.monotonic())
        self.origin_ledger = restored.origin_ledger
        self.generations: list[int] = []
        if restored.snapshot is not None:
            self.generations.append(restored.snapshot.state.resume_ledger)
        self._broker = broker
        self._clock = clock
        self._following = (self.buffer.applied, restored.following_ledger)
        self._reader: Reader | None = broker.reader(self.topic, restored.resume, inclusive=False)
        self._resume = restored.resume
        self.sequencing = TopicSequencer(
            broker,
            self.topic,
            self.buffer,
            restored.sequencer,
            sequenced=restored.sequenced,
            resume=restored.resume,
        )
        self.failover: FailoverLog = restored.failover
        self.index: IndexColumns = restored.index
        self.cursors: Mapping[str, int] = restored.cursors

    def replay(self) -> list[Effect]:
        """Apply everything up to the current end of the log; nothing is visible before. Raises as `read`."""
        end = self._broker.last_position(self.topic)
        effects: list[Effect] = []
        if end is not None and end > self.at:
            self.buffer.replay_until(end)
            started, messages = self._clock.monotonic(), self.due.messages
            while self.buffer.replaying:
                found = self.read(REPLAY_TIMEOUT)
                if found is None:
                    raise StorageError(
                        f"topic {self.topic}: the log ends at {end}, but nothing came after {self.at} within "
                        f"{REPLAY_TIMEOUT:.0f} s: check the broker, and that the log does not end with native Pulsar "
                        "transactions, and start again"
                    )
                effects += found
            self.due.measured(self.due.messages - messages, self._clock.monotonic() - started)
        self.sequencing.advance()
        return effects

    def taken_over(self, owner: str) -> None:
        """Begin a version of the topic's history: `owner` continues after what is sequenced."""
        uuid = version_of(self.topic, self.writer.incarnation, owner)
        self.failover = self.failover.taken_over(uuid, self.sequencing.sequencer.next_seqno - 1)

    def read(self, timeout: float = 0.0) -> list[Effect] | None:
        """Apply the next messages; return None if none came in `timeout` seconds.

        Raises ProtocolStopped, PositionTrimmed, Damaged: then the topic can't be followed any further.
        """
        if self._reader is None:
            raise AssertionError(f"the reader of topic {self.topic} was given away")
        placed = self._reader.read(timeout=timeout)
        return None if placed is None else self.apply(placed)

    def apply(self, placed: PlacedBatch) -> list[Effect]:
        """Apply messages that follow the applied ones, for an owner that knows what it appends. Raises as `read`."""
        effects = self.buffer.apply_batch(placed)
        self.sequencing.applied(placed)
        self.due.applied(len(placed), sum(isinstance(effect, TransactionEnded | Suppressed) for effect in effects))
        return effects

    @property
    def at(self) -> Position:
        """The position after which to continue reading: everything up to it is applied."""
        applied = self.buffer.applied
        return self._resume if applied is None else max(applied, self._resume)

    def state(self) -> TopicState:
        """The current state. Sealed segments have to be taken first."""
        following = self._following_ledger()
        if following != UNKNOWN_LEDGER:
            self.sequencing.continued_in(following)
        return TopicState(
            self.buffer.snapshot_state(),
            self.sequencing.sequencer.snapshot_state(),
            self.origin_ledger,
            following,
            self.failover.versions,
            self.index,
            tuple(sorted(self.cursors.items())),
        )

    def _following_ledger(self) -> int:
        """The ledger in which the log continues; UNKNOWN_LEDGER if unknown. A known one never changes."""
        applied = self.buffer.applied
        if applied is not None and (self._following[0] != applied or self._following[1] == UNKNOWN_LEDGER):
            self._following = (applied, _following(applied, self._broker.ledgers(self.topic)))
        return self._following[1]

    def plan(self, epoch: int) -> tuple[SnapshotPlan, TopicState]:
        """Plan a snapshot of the current state."""
        self.writer.add(map(BufferSegmentPayload, self.buffer.take_sealed()))
        state = self.state()
        return self.writer.plan(epoch, encode_state(state)), state

    def capture(self, epoch: int) -> CapturedSnapshot:
        """Plan a snapshot, and count what it covers."""
        return CapturedSnapshot(self, *self.plan(epoch), self.due.messages, self.due.changes)

    def written(self, state: TopicState, messages: int, changes: int) -> None:
        """A snapshot is durable; `messages` and `changes`: how many it covers since the one before."""
        self.generations = [*self.generations[-1:], state.resume_ledger]
        self.due.written(self._clock.monotonic(), messages, changes)

    def floor(self) -> int:
        """The lowest ledger needed by the last two snapshots and by readers of undecided messages."""
        return min([self.state().resume_ledger, *self.generations])

    def take_reader(self) -> Reader:
        """Hand over the reader, which continues after `at`: from now on the caller passes messages to `apply`."""
        reader, self._reader = self._reader, None
        if reader is None:
            raise AssertionError(f"the reader of topic {self.topic} was given away")
        return reader

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()
        self.sequencing.close()


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
    followed.sequencing.sequencer.trim(first_ledger)
    writer, summaries = followed.writer, followed.buffer.segments.summaries
    if writer.waiting:
        return False  # not all segments are durable yet; they are dropped after the next snapshot
    expired = itertools.takewhile(lambda summary: summary.last_ledger < first_ledger, summaries)
    numbers = [summary.number for summary in expired if summary.number in writer.chain]
    places = writer.live_segments
    entries = [read_segment(broker, snapshot_topic, followed.topic, number, places.get(number)) for number in numbers]
    for number, entry in zip(followed.buffer.trim(first_ledger), entries, strict=True):
        followed.buffer.forget(entry.segment)
        writer.drop_to(number + 1)
    return bool(entries)


def read_segment(broker: Broker, snapshot_topic: str, topic: str, number: int, at: Position | None) -> EncodedSegment:
    """Read one segment entry at its position in the snapshot topic."""
    key = EntryKey(topic, KeyKind.SEGMENT, number)
    if at is None:
        raise SnapshotDamaged(topic, str(key), "it is missing, but the end entry names it")
    with broker.reader(snapshot_topic, at, compacted=True) as reader:  # the raw log may be trimmed after a compaction
        placed = reader.read(limit=1, timeout=30.0)
    if placed is None or placed.positions.first != at or placed.messages.keys[0] != segment_key(topic, number):
        raise SnapshotDamaged(topic, str(key), f"it is not at {at} of {snapshot_topic} any more")
    _, value, properties, _ = placed.messages[0]
    names = (VERSION_PROPERTY, KIND_PROPERTY, EPOCH_PROPERTY)
    version, kind, epoch = (properties.get(name, "") for name in names)
    return decode_segment(topic, number, Stored(at, version, kind, int(epoch or -1), value))
