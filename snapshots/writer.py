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
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from broker_io.batch import Batch, Message
from broker_io.errors import Error, Fenced, StillHeld
from broker_io.port import Broker, Resource, Writer, open_or_make
from broker_io.position import Position
from snapshots.errors import OwnershipLost, SnapshotError
from snapshots.format import (
    CHAINS,
    DIGEST_BYTES,
    END,
    OVERFLOW,
    RAW_END_VERSION,
    SNAPSHOT_TOPIC,
    VERSION_PROPERTY,
    ChainRange,
    EndEntry,
    EntryKey,
    SegmentPayload,
    chain_start,
    decode_end,
    digest,
    gone,
    message,
    no_segments,
    owner_message,
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
            self._check_newest(running)
            self._writer.close()
            try:  # another holder owns it, even if it has written nothing yet: a fenced owner never fences back
                self._writer = self._broker.writer(self.topic, exclusive=True, wait=RENEW_SECONDS)
            except StillHeld as error:
                self.lost = True
                raise OwnershipLost(self.topic, self.epoch) from error
            self._check_newest(running)  # the wait may have been long: owners may have come and gone
            self._announce(running)
        return running.table

    def _check_newest(self, running: Scan) -> None:
        """Raises OwnershipLost if there was another owner since this one."""
        running.read_to_end()
        if self.lost or running.table.epoch > self.epoch:
            self.lost = True
            raise OwnershipLost(self.topic, self.epoch)

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
    """One snapshot of one topic to be written.

    `keys`: of the entries in `first`. `digests`: by kind, the chain digest after each segment that the end names.
    """

    first: list[Message]
    end: Message
    tombstones: list[Message]
    entry: EndEntry
    keys: list[EntryKey]
    digests: dict[str, dict[int, bytes]]


@dataclass(slots=True)
class ChainWriter:
    """The segments of one kind that a topic has in the snapshot topic, and those to be written next.

    `digests` has the chain digest after each segment that the last durable end entry names and that is still needed;
    `before` is the one before the first of them, which is numbered `first`. `live` has the positions of all live
    segments by number; `waiting` the sealed ones that no durable end entry names yet.
    """

    kind: str
    before: bytes
    first: int = 1
    digests: dict[int, bytes] = field(default_factory=dict)
    live: dict[int, Position] = field(default_factory=dict)
    waiting: list[SegmentPayload] = field(default_factory=list)

    @property
    def next(self) -> int:
        """The number of the next segment to be written, the first of `waiting` if there are any."""
        return self.first + len(self.digests)

    def adopt(self, chain: ChainRange, digests: dict[int, bytes]) -> None:
        """Continue a durable chain; `digests` has the one after each of its segments, or none to write them again."""
        self.first, self.before, self.digests = chain.first, chain.before, digests

    def restart(self, chain: ChainRange) -> None:
        """Continue after a durable chain without its segments, which are deleted once the next snapshot is durable."""
        self.first, self.before, self.digests, self.waiting = chain.next, chain.after, {}, []

    def add(self, segments: Iterable[SegmentPayload]) -> None:
        """Add sealed segments, to be written with the next snapshot."""
        for segment in segments:
            expected = self.next + len(self.waiting)
            if segment.number != expected:
                raise ValueError(f"got {self.kind} segment {segment.number}, expected {expected}")
            self.waiting.append(segment)

    def drop_to(self, first: int) -> None:
        """Drop segments below `first` from the next snapshot; durable ones are deleted once it is durable."""
        while self.first < first and self.first in self.digests:
            self.before = self.digests.pop(self.first)
            self.first += 1
        if self.first < first:  # the others were never durable
            self.waiting = [segment for segment in self.waiting if segment.number >= first]
            self.first = first

    def encoded(self, topic: str, epoch: int) -> tuple[dict[EntryKey, bytes], dict[int, bytes]]:
        """The values of the waiting segments, and the chain digests after them and all before."""
        digests = dict(self.digests)
        after = digests[self.next - 1] if digests else self.before
        values: dict[EntryKey, bytes] = {}
        for segment in self.waiting:
            value = values[EntryKey(topic, self.kind, segment.number)] = segment.encode(topic, epoch, after)
            after = digests[segment.number] = value[-DIGEST_BYTES:]
        return values, digests

    def durable(self, digests: dict[int, bytes]) -> None:
        """Record that an end entry with these segments is durable."""
        self.waiting = [segment for segment in self.waiting if segment.number not in digests]
        self.before = digests.get(self.first - 1, self.before)
        self.digests = {number: after for number, after in digests.items() if number >= self.first}


@dataclass(slots=True)
class SnapshotWriter:
    """The entries that one topic has in the snapshot topic, and those to be written next.

    `last` is the last durable end entry, `live_overflow` has the numbers of all live overflow entries. `raw`: the next
    end entry is for readers that ask for the log as it is; `stored_raw`: the last one was.
    """

    topic: str
    incarnation: str
    max_entry_bytes: int = MAX_ENTRY_BYTES
    last: EndEntry | None = None
    last_id: int = 0
    chains: dict[str, ChainWriter] = field(default_factory=dict)
    live_overflow: set[int] = field(default_factory=set)
    next_overflow: int = 1
    raw: bool = False
    stored_raw: bool = False

    def __post_init__(self) -> None:
        self.chains = {kind: ChainWriter(kind, chain_start(self.topic, self.incarnation, kind)) for kind in CHAINS}
        if self._room() < 1:
            raise ValueError(f"entries of {self.max_entry_bytes} bytes are too short for a snapshot of {self.topic}")

    def found(self, entries: TopicEntries) -> None:
        """Take over the id of the last snapshot and the numbers of all live entries, named by an end entry or not."""
        for kind, chain in self.chains.items():
            chain.live = {number: stored.position for number, stored in entries.numbered[kind].items()}
        self.live_overflow = {*entries.numbered[OVERFLOW]}
        self.next_overflow = max([self.next_overflow, *(number + 1 for number in self.live_overflow)])
        if entries.end is not None:
            self.raw = self.stored_raw = entries.end.version == RAW_END_VERSION
            with contextlib.suppress(SnapshotError):  # a damaged one is replaced
                self.last_id = decode_end(self.topic, entries.end).snapshot_id

    def adopt(self, end: EndEntry) -> None:
        """Continue from a durable snapshot, whose chains are to be adopted one by one."""
        self.last = end
        self.last_id = max(self.last_id, end.snapshot_id)
        self.next_overflow = max(self.next_overflow, end.next_overflow)

    def plan(self, epoch: int, state: bytes) -> SnapshotPlan:
        """Plan the next snapshot; `state` is the state after all added segments."""
        values: dict[EntryKey, bytes] = {}
        digests: dict[str, dict[int, bytes]] = {}
        chains: dict[str, ChainRange] = {}
        for kind, chain in self.chains.items():
            more, known = chain.encoded(self.topic, epoch)
            values |= more
            digests[kind] = known
            first, last = chain.first, chain.first + len(known) - 1
            chains[kind] = ChainRange(first, last + 1, chain.before, known[last] if known else chain.before)
        room = self._room()
        pieces = [state[start : start + room] for start in range(0, len(state), room)] if len(state) > room else []
        for number, piece in enumerate(pieces, self.next_overflow):
            values[EntryKey(self.topic, OVERFLOW, number)] = piece
        entry = EndEntry(
            topic=self.topic,
            incarnation=self.incarnation,
            epoch=epoch,
            snapshot_id=self.last_id + 1,
            chains=chains,
            next_overflow=self.next_overflow + len(pieces),
            overflow=tuple(map(digest, pieces)),
            state=b"" if pieces else state,
        )
        first_entries = [message(key, epoch, value) for key, value in values.items()]
        end = message(EntryKey(self.topic, END), epoch, entry.encode(), raw=self.raw)
        tombstones = [gone(key, epoch) for key in self._live() if key.number not in entry.numbers(key.kind)]
        return SnapshotPlan(first_entries, end, tombstones, entry, [*values], digests)

    def plan_deletion(self, epoch: int, *, keep_end: bool) -> SnapshotPlan:
        """Plan the removal of every key: the end entry announces it first, and is deleted last unless `keep_end`."""
        end = EntryKey(self.topic, END)
        entry = EndEntry(
            topic=self.topic,
            incarnation=self.incarnation,
            epoch=epoch,
            snapshot_id=self.last_id + 1,
            chains={kind: no_segments(self.topic, self.incarnation, kind) for kind in CHAINS},
            next_overflow=self.next_overflow,
            deleted=True,
        )
        tombstones = [gone(key, epoch) for key in [*self._live(), *([] if keep_end else [end])]]
        nothing: dict[str, dict[int, bytes]] = {kind: {} for kind in CHAINS}
        return SnapshotPlan([], message(end, epoch, entry.encode(), raw=self.raw), tombstones, entry, [], nothing)

    def first_durable(self, plan: SnapshotPlan, positions: Sequence[Position]) -> None:
        """Record that segments and overflow of a plan are durable; no end entry names them yet."""
        for key, position in zip(plan.keys, positions, strict=True):
            if key.kind == OVERFLOW:
                self.live_overflow.add(key.number)
            else:
                self.chains[key.kind].live[key.number] = position
        self.next_overflow = plan.entry.next_overflow

    def end_durable(self, plan: SnapshotPlan) -> None:
        """Record that the end entry of a plan is durable."""
        self.last = plan.entry
        self.last_id = plan.entry.snapshot_id
        self.stored_raw = plan.end.properties[VERSION_PROPERTY] == RAW_END_VERSION
        for kind, chain in self.chains.items():
            chain.durable(plan.digests[kind])

    def tombstones_durable(self, plan: SnapshotPlan) -> None:
        """Record that the tombstones of a plan are durable."""
        for kind, chain in self.chains.items():
            named = plan.entry.numbers(kind)
            chain.live = {number: at for number, at in chain.live.items() if number in named}
        self.live_overflow &= {*plan.entry.overflow_numbers}

    def settle(self, plan: SnapshotPlan, found: TopicEntries) -> bool:
        """After a failed write of `plan`, adopt the entries in the topic; return whether its end is one of them."""
        self.found(found)
        if plan.entry.deleted and found.end is None and found.end_deleted:
            return True
        if found.end is None or decode_end(self.topic, found.end) != plan.entry:
            return False
        self.end_durable(plan)
        return True

    def _live(self) -> Iterator[EntryKey]:
        """The keys of all live entries but the end."""
        for kind, chain in self.chains.items():
            yield from (EntryKey(self.topic, kind, number) for number in sorted(chain.live))
        yield from (EntryKey(self.topic, OVERFLOW, number) for number in sorted(self.live_overflow))

    def _room(self) -> int:
        """Bytes of state that fit into one entry."""
        names = 2 * len(self.topic.encode()) + len(self.incarnation.encode())
        return self.max_entry_bytes - _FRAME_BYTES - names


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
