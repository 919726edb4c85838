"""The writer of snapshots: it plans a snapshot without any I/O, then writes it in commit order.

Order of writes, each step acknowledged before the next one begins:
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
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from broker_io.batch import Message
from broker_io.position import Position
from snapshots.errors import SnapshotError
from snapshots.format import (
    END,
    OVERFLOW,
    SEGMENT,
    EndEntry,
    SegmentPayload,
    chain_start,
    decode_end,
    digest,
    end_key,
    gone,
    message,
    overflow_key,
    segment_key,
)
from snapshots.owner import SnapshotOwnership
from snapshots.scan import TopicEntries

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
        pieces = self._pieces(state)
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
        return SnapshotPlan(first, end, list(self._tombstones(entry)), entry, numbers, chain)

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
        tombstones = [gone(segment_key(self.topic, number), epoch) for number in sorted(self.live_segments)]
        tombstones += [gone(overflow_key(self.topic, number), epoch) for number in sorted(self.live_overflow)]
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
        self.live_overflow = set() if plan.entry.deleted else set(plan.entry.overflow_numbers)

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

    def _pieces(self, state: bytes) -> list[bytes]:
        room = self._room()
        if len(state) <= room:
            return []
        return [state[start : start + room] for start in range(0, len(state), room)]

    def _tombstones(self, entry: EndEntry) -> Iterator[Message]:
        for number in sorted(self.live_segments):
            if number not in entry.segments:
                yield gone(segment_key(self.topic, number), entry.epoch)
        for number in sorted(self.live_overflow):
            if number not in entry.overflow_numbers:
                yield gone(overflow_key(self.topic, number), entry.epoch)


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
