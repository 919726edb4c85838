"""The writer of snapshots: it plans a snapshot without any I/O, then writes it in commit order.

Order of writes, each step acknowledged before the next one begins:
1. new parts, and the spills of the new end entry;
2. the end entry, which names them: this is the commit;
3. tombstones for whatever the end entry no longer names.

So every end entry names only entries that exist, and those of an older one stay until the new one is durable. The state
of the writer changes only when the end entry is acknowledged: after a failure the same parts are planned again. What a
failed write left in the topic is found by reading it (`SnapshotOwnership.renew`, then `settle`), never assumed.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from broker_io.batch import Message
from broker_io.position import Position
from snapshots.errors import SnapshotError
from snapshots.format import END, PART, SPILL, EndEntry, chain_start, decode_end, digest, gone, message
from snapshots.keys import end_key, part_key, spill_key
from snapshots.owner import SnapshotOwnership
from snapshots.scan import TopicEntries
from snapshots.segments import SegmentPayload

MAX_ENTRY_BYTES = 1024 * 1024
"""No entry is longer, key and properties included."""

APPEND_BYTES = 8 * 1024 * 1024
"""Entries are appended in batches of about this size."""

_FRAME_BYTES = 1024
"""Upper bound of the bytes of an end entry besides its state and topic name."""


@dataclass(frozen=True, slots=True)
class SnapshotPlan:
    """One snapshot of one topic to be written. `numbers` are those of the parts in `first`."""

    first: list[Message]
    end: Message
    tombstones: list[Message]
    entry: EndEntry
    numbers: list[int]
    chain: dict[int, bytes]


@dataclass(slots=True)
class SnapshotWriter:
    """The entries that one topic has in the snapshot topic, and those to be written next.

    `chain` has the chain digest after each part that the last durable end entry names and that is still needed;
    `live_parts` and `live_spills` are the numbers of all live entries, for parts with the position;
    `waiting` are sealed parts that no durable end entry names yet.
    """

    topic: str
    incarnation: str
    max_entry_bytes: int = MAX_ENTRY_BYTES
    last: EndEntry | None = None
    last_id: int = 0
    first_part: int = 1
    chain_first: bytes = b""
    chain: dict[int, bytes] = field(default_factory=dict)
    live_parts: dict[int, Position] = field(default_factory=dict)
    live_spills: set[int] = field(default_factory=set)
    waiting: list[SegmentPayload] = field(default_factory=list)
    next_spill: int = 1

    def __post_init__(self) -> None:
        self.chain_first = self.chain_first or chain_start(self.topic, self.incarnation)
        if self._room() < 1:
            raise ValueError(f"entries of {self.max_entry_bytes} bytes are too short for a snapshot of {self.topic}")

    def found(self, entries: TopicEntries) -> None:
        """Take over the id of the last snapshot and the numbers of all live entries, named by an end entry or not."""
        self.live_parts = {number: stored.position for number, stored in entries.parts.items()}
        self.live_spills = set(entries.spills)
        self.next_spill = max([self.next_spill, *(number + 1 for number in entries.spills)])
        if entries.end is not None:
            with contextlib.suppress(SnapshotError):  # a damaged one is replaced
                self.last_id = decode_end(self.topic, entries.end).snapshot_id

    def adopt(self, end: EndEntry, chain: dict[int, bytes]) -> None:
        """Continue from a durable snapshot; `chain` has the digest after each of its parts."""
        self.last, self.chain = end, chain
        self.last_id = max(self.last_id, end.snapshot_id)
        self.first_part, self.chain_first = end.first_part, end.chain_first
        self.next_spill = max(self.next_spill, end.next_spill)

    @property
    def next_part(self) -> int:
        """The number of the next part to be written, which is the first of `waiting` if there are any."""
        return self.first_part + len(self.chain)

    def add(self, parts: Iterable[SegmentPayload]) -> None:
        """Add sealed parts, to be written with the next snapshot."""
        for part in parts:
            expected = self.next_part + len(self.waiting)
            if part.number != expected:
                raise ValueError(f"topic {self.topic}: part {part.number} sealed where part {expected} is due")
            self.waiting.append(part)

    def drop_to(self, first_part: int) -> None:
        """Drop parts below `first_part` from the next snapshot; their keys are deleted once it is durable."""
        while self.first_part < first_part and self.first_part in self.chain:
            self.chain_first = self.chain.pop(self.first_part)
            self.first_part += 1

    def plan(self, epoch: int, state: bytes) -> SnapshotPlan:
        """Plan the next snapshot; `state` is the state after all added parts."""
        chain = dict(self.chain)
        before = chain[self.next_part - 1] if chain else self.chain_first
        first: list[Message] = []
        for part in self.waiting:
            value = part.encode(self.topic, epoch, before)
            before = chain[part.number] = value[-len(before) :]
            first.append(message(part_key(self.topic, part.number), PART, epoch, value))
        pieces = self._pieces(state)
        for number, piece in enumerate(pieces, self.next_spill):
            first.append(message(spill_key(self.topic, number), SPILL, epoch, piece))
        entry = EndEntry(
            topic=self.topic,
            incarnation=self.incarnation,
            epoch=epoch,
            snapshot_id=self.last_id + 1,
            first_part=self.first_part,
            next_part=self.first_part + len(chain),
            chain_first=self.chain_first,
            chain_next=before,
            next_spill=self.next_spill + len(pieces),
            spills=tuple(map(digest, pieces)),
            state=b"" if pieces else state,
        )
        numbers = [part.number for part in self.waiting]
        end = message(end_key(self.topic), END, epoch, entry.encode())
        return SnapshotPlan(first, end, list(self._tombstones(entry)), entry, numbers, chain)

    def plan_deletion(self, epoch: int, *, keep_end: bool) -> SnapshotPlan:
        """Plan the removal of every key: the end entry announces it first, and is deleted last unless `keep_end`."""
        entry = EndEntry(
            topic=self.topic,
            incarnation=self.incarnation,
            epoch=epoch,
            snapshot_id=self.last_id + 1,
            first_part=1,
            next_part=1,
            chain_first=self.chain_first,
            chain_next=self.chain_first,
            next_spill=self.next_spill,
            deleted=True,
        )
        tombstones = [gone(part_key(self.topic, number), epoch) for number in sorted(self.live_parts)]
        tombstones += [gone(spill_key(self.topic, number), epoch) for number in sorted(self.live_spills)]
        if not keep_end:
            tombstones.append(gone(end_key(self.topic), epoch))
        return SnapshotPlan([], message(end_key(self.topic), END, epoch, entry.encode()), tombstones, entry, [], {})

    def first_durable(self, plan: SnapshotPlan, positions: Sequence[Position]) -> None:
        """Note that the parts and spills of a plan are durable; no end entry names them yet."""
        self.live_parts.update(zip(plan.numbers, positions, strict=False))
        self.live_spills.update(plan.entry.spill_numbers)
        self.next_spill = plan.entry.next_spill

    def end_durable(self, plan: SnapshotPlan) -> None:
        """Note that the end entry of a plan is durable."""
        self.last = plan.entry
        self.last_id = plan.entry.snapshot_id
        self.chain = {number: after for number, after in plan.chain.items() if number >= self.first_part}
        self.waiting = [part for part in self.waiting if part.number not in plan.chain]

    def tombstones_durable(self, plan: SnapshotPlan) -> None:
        """Note that the tombstones of a plan are durable."""
        named = plan.entry.parts
        self.live_parts = {number: at for number, at in self.live_parts.items() if number in named}
        self.live_spills = set() if plan.entry.deleted else set(plan.entry.spill_numbers)

    def settle(self, plan: SnapshotPlan, found: TopicEntries) -> bool:
        """After a failed write of `plan`, take over the entries of the topic; true if the plan's end is among them."""
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
        for number in sorted(self.live_parts):
            if number not in entry.parts:
                yield gone(part_key(self.topic, number), entry.epoch)
        for number in sorted(self.live_spills):
            if number not in entry.spill_numbers:
                yield gone(spill_key(self.topic, number), entry.epoch)


def commit(ownership: SnapshotOwnership, planned: Sequence[tuple[SnapshotWriter, SnapshotPlan]]) -> None:
    """Write the planned snapshots of several topics at once, step by step.

    Raises OwnershipLost and errors of the broker; the writers then know what is durable, and `settle` finds out about
    the rest.
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
