"""The writer of snapshots, and ownership of the snapshot topic: one writer at a time, whose entries all have its epoch.

A new owner opens the exclusive writer, which fences the one before; reads the topic up to its end for the last epoch;
writes a higher one under `__owner`; reads up to that entry, because an entry of the fenced owner may be in between; and
writes a higher epoch again if another owner's entry there has one as high. Only then does it write anything else.
`Fenced` at any append means that ownership is lost and that the fate of pending appends is unknown; a fenced owner
never fences back.

A snapshot is planned without any I/O, then written in commit order, each step acknowledged before the next one begins:
1. new segments, and the overflow of the new end entry;
2. the end entry, which names them: this is the commit;
3. tombstones for whatever the end entry no longer names.

So every end entry names only entries that exist, and those of an older one stay until the new one is durable. The state
of the writer changes only when the end entry is acknowledged: after a failure the same segments are planned again. What
a failed write left in the topic is found by reading it (`SnapshotOwnership.renew`, then `settle`), never assumed.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from broker_io.batch import Batch, Message
from broker_io.errors import Error, Fenced, StillHeld
from broker_io.port import Broker, Resource, Writer, open_or_make
from broker_io.position import Position
from snapshots.errors import OwnershipLost, SnapshotError
from snapshots.format import (
    END,
    OVERFLOW,
    SEGMENT,
    SNAPSHOT_TOPIC,
    EndEntry,
    SegmentPayload,
    chain_start,
    decode_end,
    digest,
    end_key,
    gone,
    message,
    overflow_key,
    owner_message,
    segment_key,
)
from snapshots.scan import Scan, SnapshotTable, TopicEntries

COMPACT_BYTES = 64 * 1024 * 1024
"""Bytes written to the snapshot topic after which it is compacted."""
RENEW_SECONDS = 5.0
"""Seconds to wait until a failed writer of this process is gone."""


class SnapshotOwnership(Resource):
    """The right to write the snapshot topic, until `lost`; created by `acquire`.

    `written` counts the bytes in the topic at the start, and those appended since the last compaction.
    """

    def __init__(self, broker: Broker, topic: str) -> None:
        self.topic = topic
        self.epoch = 0
        self.lost = False
        self.written = sum(ledger.bytes for ledger in broker.ledgers(topic))
        self._broker = broker
        self._writer: Writer = broker.writer(topic, exclusive=True)

    def append(self, messages: Sequence[Message]) -> list[Position]:
        """Write messages, wait until they are durable, and return their positions.

        Raises OwnershipLost and errors of the broker; the messages may or may not be in the topic then.
        """
        if self.lost:
            raise OwnershipLost(self.topic, self.epoch)
        if not messages:
            return []
        self.written += sum(len(message.value or b"") for message in messages)
        try:
            return list(self._writer.append(Batch.of(messages)).result())
        except Fenced as error:
            self.lost = True
            raise OwnershipLost(self.topic, self.epoch) from error

    def compact(self) -> str | None:
        """Compact the topic if enough was written to it; return the error text if that failed, else None."""
        if self.written < COMPACT_BYTES:
            return None
        self.written = 0
        try:
            self._broker.compact(self.topic)
        except Error as error:
            return f"{self.topic} could not be compacted: {error}"
        return None

    def renew(self) -> SnapshotTable:
        """Find out which failed writes are durable: those in the returned table, and no others.

        Raises OwnershipLost, without fencing anyone, if there is another owner.
        """
        with Scan(self._broker, self.topic) as running:
            running.read_to_end()
            if self.lost or running.table.epoch > self.epoch:
                self.lost = True
                raise OwnershipLost(self.topic, self.epoch)
            self._writer.close()
            try:  # another holder owns it, even if it has written nothing yet: a fenced owner never fences back
                self._writer = self._broker.writer(self.topic, exclusive=True, wait=RENEW_SECONDS)
            except StillHeld as error:
                self.lost = True
                raise OwnershipLost(self.topic, self.epoch) from error
            self._announce(running)
        return running.table

    def _announce(self, running: Scan) -> None:
        running.read_to_end()
        while True:
            epoch = running.table.epoch + 1
            known = running.table.position
            (own,) = self.append([owner_message(epoch)])
            # Only an acknowledged epoch belongs to this owner: another may have used one whose fate is unknown.
            self.epoch = epoch
            running.read_to(own)
            others = [other for at, other in running.table.owners if known < at < own]
            if max(others, default=0) < epoch:
                return

    def close(self) -> None:
        self._writer.close()


def acquire(broker: Broker, topic: str = SNAPSHOT_TOPIC) -> tuple[SnapshotOwnership, SnapshotTable]:
    """Take ownership of the snapshot topic, creating it if it is missing, and scan it.

    Raises OwnershipLost if another owner takes it at the same time and is later.
    """
    ownership = open_or_make(broker, topic, lambda: SnapshotOwnership(broker, topic))
    try:
        with Scan(broker, topic) as running:
            ownership._announce(running)
    except BaseException:
        ownership.close()
        raise
    return ownership, running.table


MAX_ENTRY_BYTES = 1024 * 1024
"""Maximum size of an entry in bytes, with key and properties."""

APPEND_BYTES = 8 * 1024 * 1024
"""Approximate size in bytes of a batch of entries."""

_FRAME_BYTES = 1024
"""Upper bound of the bytes of an end entry without its state and topic name."""


@dataclass(frozen=True, slots=True)
class SnapshotPlan:
    """One snapshot of one topic to be written. `numbers`: of the segments in `first`."""

    first: list[Message]
    end: Message
    tombstones: list[Message]
    entry: EndEntry
    numbers: list[int]
    chain: dict[int, bytes]


@dataclass(slots=True)
class SnapshotWriter:
    """The entries that one topic has in the snapshot topic, and those to be written next.

    `chain` has the chain digest after each segment that the last durable end entry names and that is still needed;
    `live_segments` and `live_overflow` have the numbers of all live entries, for segments with the position;
    `waiting` has the sealed segments that no durable end entry names yet.
    """

    topic: str
    incarnation: str
    max_entry_bytes: int = MAX_ENTRY_BYTES
    last: EndEntry | None = None
    last_id: int = 0
    first_segment: int = 1
    chain_first: bytes = b""
    chain: dict[int, bytes] = field(default_factory=dict)
    live_segments: dict[int, Position] = field(default_factory=dict)
    live_overflow: set[int] = field(default_factory=set)
    waiting: list[SegmentPayload] = field(default_factory=list)
    next_overflow: int = 1

    def __post_init__(self) -> None:
        self.chain_first = self.chain_first or chain_start(self.topic, self.incarnation)
        if self._room() < 1:
            raise ValueError(f"entries of {self.max_entry_bytes} bytes are too short for a snapshot of {self.topic}")

    def found(self, entries: TopicEntries) -> None:
        """Take over the id of the last snapshot and the numbers of all live entries, named by an end entry or not."""
        self.live_segments = {number: stored.position for number, stored in entries.segments.items()}
        self.live_overflow = set(entries.overflow)
        self.next_overflow = max([self.next_overflow, *(number + 1 for number in entries.overflow)])
        if entries.end is not None:
            with contextlib.suppress(SnapshotError):  # a damaged one is replaced
                self.last_id = decode_end(self.topic, entries.end).snapshot_id

    def adopt(self, end: EndEntry, chain: dict[int, bytes]) -> None:
        """Continue from a durable snapshot; `chain` has the digest after each of its segments."""
        self.last, self.chain = end, chain
        self.last_id = max(self.last_id, end.snapshot_id)
        self.first_segment, self.chain_first = end.first_segment, end.chain_first
        self.next_overflow = max(self.next_overflow, end.next_overflow)

    @property
    def next_segment(self) -> int:
        """The number of the next segment to be written, the first of `waiting` if there are any."""
        return self.first_segment + len(self.chain)

    def add(self, segments: Iterable[SegmentPayload]) -> None:
        """Add sealed segments, to be written with the next snapshot."""
        for segment in segments:
            expected = self.next_segment + len(self.waiting)
            if segment.number != expected:
                raise ValueError(f"topic {self.topic}: got segment {segment.number}, expected segment {expected}")
            self.waiting.append(segment)

    def drop_to(self, first_segment: int) -> None:
        """Drop segments below `first_segment` from the next snapshot; their keys are deleted once it is durable."""
        while self.first_segment < first_segment and self.first_segment in self.chain:
            self.chain_first = self.chain.pop(self.first_segment)
            self.first_segment += 1

    def plan(self, epoch: int, state: bytes) -> SnapshotPlan:
        """Plan the next snapshot; `state` is the state after all added segments."""
        chain = dict(self.chain)
        before = chain[self.next_segment - 1] if chain else self.chain_first
        first: list[Message] = []
        for segment in self.waiting:
            value = segment.encode(self.topic, epoch, before)
            before = chain[segment.number] = value[-len(before) :]
            first.append(message(segment_key(self.topic, segment.number), SEGMENT, epoch, value))
        room = self._room()
        pieces = [state[start : start + room] for start in range(0, len(state), room)] if len(state) > room else []
        for number, piece in enumerate(pieces, self.next_overflow):
            first.append(message(overflow_key(self.topic, number), OVERFLOW, epoch, piece))
        entry = EndEntry(
            topic=self.topic,
            incarnation=self.incarnation,
            epoch=epoch,
            snapshot_id=self.last_id + 1,
            first_segment=self.first_segment,
            next_segment=self.first_segment + len(chain),
            chain_first=self.chain_first,
            chain_next=before,
            next_overflow=self.next_overflow + len(pieces),
            overflow=tuple(map(digest, pieces)),
            state=b"" if pieces else state,
        )
        numbers = [segment.number for segment in self.waiting]
        end = message(end_key(self.topic), END, epoch, entry.encode())
        return SnapshotPlan(first, end, self._tombstones(entry), entry, numbers, chain)

    def plan_deletion(self, epoch: int, *, keep_end: bool) -> SnapshotPlan:
        """Plan the removal of every key: the end entry announces it first, and is deleted last unless `keep_end`."""
        entry = EndEntry(
            topic=self.topic,
            incarnation=self.incarnation,
            epoch=epoch,
            snapshot_id=self.last_id + 1,
            first_segment=1,
            next_segment=1,
            chain_first=self.chain_first,
            chain_next=self.chain_first,
            next_overflow=self.next_overflow,
            deleted=True,
        )
        tombstones = self._tombstones(entry)
        if not keep_end:
            tombstones.append(gone(end_key(self.topic), epoch))
        return SnapshotPlan([], message(end_key(self.topic), END, epoch, entry.encode()), tombstones, entry, [], {})

    def first_durable(self, plan: SnapshotPlan, positions: Sequence[Position]) -> None:
        """Record that segments and overflow of a plan are durable; no end entry names them yet."""
        self.live_segments.update(zip(plan.numbers, positions, strict=False))
        self.live_overflow.update(plan.entry.overflow_numbers)
        self.next_overflow = plan.entry.next_overflow

    def end_durable(self, plan: SnapshotPlan) -> None:
        """Record that the end entry of a plan is durable."""
        self.last = plan.entry
        self.last_id = plan.entry.snapshot_id
        self.chain = {number: after for number, after in plan.chain.items() if number >= self.first_segment}
        self.waiting = [segment for segment in self.waiting if segment.number not in plan.chain]

    def tombstones_durable(self, plan: SnapshotPlan) -> None:
        """Record that the tombstones of a plan are durable."""
        named = plan.entry.segments
        self.live_segments = {number: at for number, at in self.live_segments.items() if number in named}
        self.live_overflow = set(plan.entry.overflow_numbers)

    def settle(self, plan: SnapshotPlan, found: TopicEntries) -> bool:
        """After a failed write of `plan`, adopt the entries in the topic; return whether its end is one of them."""
        self.found(found)
        if plan.entry.deleted and found.end is None and found.end_deleted:
            return True
        if found.end is None or decode_end(self.topic, found.end) != plan.entry:
            return False
        self.end_durable(plan)
        return True

    def _room(self) -> int:
        """Bytes of state that fit into one entry."""
        names = 2 * len(self.topic.encode()) + len(self.incarnation.encode())
        return self.max_entry_bytes - _FRAME_BYTES - names

    def _tombstones(self, entry: EndEntry) -> list[Message]:
        """The deletions of all live keys that the entry does not name."""
        segments = [number for number in sorted(self.live_segments) if number not in entry.segments]
        overflow = [number for number in sorted(self.live_overflow) if number not in entry.overflow_numbers]
        keys = [segment_key(self.topic, number) for number in segments]
        keys += [overflow_key(self.topic, number) for number in overflow]
        return [gone(key, entry.epoch) for key in keys]


def commit(ownership: SnapshotOwnership, planned: Sequence[tuple[SnapshotWriter, SnapshotPlan]]) -> None:
    """Write the planned snapshots of several topics at once, step by step.

    Raises OwnershipLost and errors of the broker; the writers then know what is acknowledged, and `settle` finds out
    about the rest.
    """
    positions = iter(_append(ownership, [entry for _, plan in planned for entry in plan.first]))
    for writer, plan in planned:
        writer.first_durable(plan, list(itertools.islice(positions, len(plan.first))))
    _append(ownership, [plan.end for _, plan in planned])
    for writer, plan in planned:
        writer.end_durable(plan)
    _append(ownership, [entry for _, plan in planned for entry in plan.tombstones])
    for writer, plan in planned:
        writer.tombstones_durable(plan)


def _append(ownership: SnapshotOwnership, entries: list[Message]) -> list[Position]:
    positions: list[Position] = []
    run: list[Message] = []
    size = 0
    for entry in entries:
        run.append(entry)
        size += len(entry.value or b"")
        if size >= APPEND_BYTES:
            positions += ownership.append(run)
            run, size = [], 0
    return positions + ownership.append(run)
