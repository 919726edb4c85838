"""What operations make of a log: the plan of a change of structure for the engine, and all of it for offline readers

The engine of a log applies the operations after the mark of its manifest; readers of a log without an owner compute
what it will have then. Both use one plan, which only computes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

from broker_io.block import Header
from broker_io.errors import StorageError
from broker_io.filelog.log.layout import LedgerEntry, Manifest, PreparedFile, TopicEntry, empty_topic
from broker_io.filelog.log.numbers import Change, NumberedOperation, ObjectNumbers
from broker_io.filelog.log.operations import (
    AppendBlocks,
    BeginEpoch,
    DeleteTopic,
    MakeTopic,
    PrepareFiles,
    RollTopic,
    SetPolicy,
    SwapFiles,
    TrimTopic,
    blocks_of,
)

SegmentKey: TypeAlias = tuple[int, int, int]
"""Topic, ledger and generation."""


class SegmentPatch(NamedTuple):
    """Bytes for an offset of a segment."""

    offset: int
    data: bytes


# --- one topic ---


def changed_topic(entry: TopicEntry | None, operation: NumberedOperation) -> TopicEntry | None:
    """A topic after one of its operations; None: there is no such topic, or none any more.

    Raises StorageError if the operation does not follow from the state, and as `blocks_of`.
    """
    _, topic, number, _, body = operation
    if isinstance(body, MakeTopic):
        if entry is not None:
            raise StorageError(f"topic {topic} is created twice by the journal: copy the log from the other member")
        return empty_topic(topic, body.name, bytes.fromhex(body.incarnation), body.ledger)._replace(operations=number)
    if entry is None or isinstance(body, DeleteTopic):
        return None
    return _CHANGES[type(body)](entry, body)._replace(operations=number or entry.operations)


def _rolled(entry: TopicEntry, body: RollTopic) -> TopicEntry:
    last = entry.ledgers[-1].ledger
    if body.ledger <= last:
        raise StorageError(f"topic {entry.number}: ledger {body.ledger} follows {last}: copy the log")
    opened = LedgerEntry(body.ledger, first_time=body.time, last_time=body.time)
    return entry._replace(ledgers=(*entry.ledgers, opened))


def _trimmed(entry: TopicEntry, body: TrimTopic) -> TopicEntry:
    left = tuple([ledger for ledger in entry.ledgers if ledger.ledger > body.ledger])
    if not left:
        raise StorageError(f"topic {entry.number}: its open ledger is trimmed: copy the log")
    return entry._replace(floor=(body.ledger, body.entry), ledgers=left)


def _swapped(entry: TopicEntry, swap: SwapFiles) -> TopicEntry:
    new = {ledger.ledger: ledger for ledger in swap.ledgers}
    if not new.keys() <= {ledger.ledger for ledger in entry.ledgers[:-1]}:
        raise StorageError(f"topic {entry.number}: ledgers {sorted(new)} are not all closed ones: copy the log")
    ledgers = tuple([new.get(ledger.ledger, ledger) for ledger in entry.ledgers])
    state = entry.compaction._replace(cleaned=swap.cleaned, purged=swap.purged)
    return entry._replace(ledgers=ledgers, compaction=state)


def grown_ledger(entry: TopicEntry, append: AppendBlocks) -> tuple[LedgerEntry, list[tuple[int, Header]]]:
    """The open ledger of a topic with the blocks of an append, and these as `blocks_of` returns them."""
    ledger = entry.ledgers[-1]
    place = entry.place(ledger)
    blocks = list(blocks_of(append))
    for offset, header in blocks:
        found = (append.ledger, append.generation, offset, header.first_entry, header.place)
        if found != (ledger.ledger, ledger.generation, ledger.bytes, ledger.entries, place):
            raise StorageError(f"topic {entry.number}: a block for {found[:4]} does not follow {ledger}: copy the log")
        ledger = ledger.grown(header.span, header.length, header.publish_time, header.publish_time)
    return ledger, blocks


_CHANGES: dict[type, Callable[[TopicEntry, Any], TopicEntry]] = {
    AppendBlocks: lambda entry, body: entry.with_open(grown_ledger(entry, body)[0]),
    RollTopic: _rolled,
    TrimTopic: _trimmed,
    SetPolicy: lambda entry, body: entry._replace(compaction=entry.compaction._replace(policy=body.policy)),
    PrepareFiles: lambda entry, _: entry,
    SwapFiles: _swapped,
}


# --- the log ---


class LogPlan:
    """What operations after a mark change, of a log whose manifest and topics may have some of them already.

    The manifest has the structure operations up to `structures`; they only count for a topic that lacks them. A topic
    has the operations that its number counts, and a topic that is missing was deleted.

    `topics` are those that change, None for one that is deleted; `patches` the bytes that their segments lack, or may
    lack. `opened` are the ledgers whose files have to be made, `dropped` those whose files nothing needs any more, and
    `unprepared` prepared files that will never be swapped in. `pair` is that of the manifest.
    """

    def __init__(self, manifest: Manifest, current: Callable[[int], TopicEntry | None]) -> None:
        self._current = current
        self._numbers = ObjectNumbers({}, manifest.pair.structures)
        self.topics: dict[int, TopicEntry | None] = {}
        self.patches: defaultdict[SegmentKey, list[SegmentPatch]] = defaultdict(list)
        self.opened: list[tuple[TopicEntry, LedgerEntry]] = []
        self.dropped: list[tuple[TopicEntry, LedgerEntry]] = []
        self.unprepared: list[PreparedFile] = []
        self.next_topic, self.next_ledger, self.pair = manifest.next_topic, manifest.next_ledger, manifest.pair

    def add(self, operation: NumberedOperation) -> None:
        """Add the next operation. Raises StorageError if it does not follow from the state, and as `changed_topic`."""
        change, topic, number, structure, body = operation
        if topic >= self.next_topic and change is not Change.MAKE:
            raise StorageError(f"topic {topic} was never made: copy the log")
        before = self.topics[topic] if topic in self.topics else self._current(topic)
        known = before.operations if before is not None else 0
        stored = 0 < structure <= self._numbers.manifest
        if (stored or change is Change.APPEND) and (before is None or number <= known):
            return
        self._numbers.topics[topic] = known
        self._numbers.note(operation._replace(manifest=0) if stored else operation)
        if before is not None and stored:
            self.topics[topic] = before._replace(operations=number)
            return
        if topic:
            self.topics[topic] = after = changed_topic(before, operation)
            if before is not None:
                self._note_files(before, after, body)
            if after is not None and isinstance(body, MakeTopic | RollTopic):
                self.opened.append((after, after.ledgers[-1]))
        if structure:
            self._prepare(operation)
        self.next_topic = max(self.next_topic, topic + 1)
        if isinstance(body, DeleteTopic | BeginEpoch):
            self.next_ledger = max(self.next_ledger, body.next_ledger)

    def _note_files(self, before: TopicEntry, after: TopicEntry | None, body: object) -> None:
        """Note what an operation of a topic does to its segments."""
        if isinstance(body, AppendBlocks):
            data = b"".join(body.chunks)
            self.patches[before.number, body.ledger, body.generation].append(SegmentPatch(body.offset, data))
            return
        needed = {ledger[:2] for ledger in after.ledgers} if after is not None else set()
        self.dropped += [(before, ledger) for ledger in before.ledgers if ledger[:2] not in needed]
        if after is None:
            self.opened = [(entry, ledger) for entry, ledger in self.opened if entry.number != before.number]

    def _prepare(self, operation: NumberedOperation) -> None:
        """Note the files that a compaction has prepared; those of a former epoch are never swapped in."""
        change, topic, _, number, body = operation
        left = self.pair.prepared
        if isinstance(body, PrepareFiles):
            left += tuple([PreparedFile(number, topic, *file) for file in body.files])
        elif isinstance(body, SwapFiles):
            left = tuple([file for file in left if file.number != body.prepared])
        elif change is Change.EPOCH:
            left = ()
        elif change is Change.DELETE:
            left = tuple([file for file in left if file.topic != topic])
        if change is not Change.SWAP:
            self.unprepared += [file for file in self.pair.prepared if file not in left]
        self.pair = self.pair._replace(structures=number, prepared=left)

    def durable(self, topic: int, stored: TopicEntry) -> TopicEntry | None:
        """What the manifest has of a topic: its appends as before, unless its open ledger is another one."""
        after = self.topics.get(topic, stored)
        if after is None or after is stored or topic in {entry.number for entry, _ in self.opened}:
            return after
        return after.with_open(stored.ledgers[-1])._replace(operations=stored.operations)


def planned(
    manifest: Manifest, current: Callable[[int], TopicEntry | None], operations: Sequence[NumberedOperation]
) -> LogPlan:
    """The plan of operations; `current` gives the present state of a topic. Raises as `LogPlan.add`."""
    plan = LogPlan(manifest, current)
    for operation in operations:
        plan.add(operation)
    return plan


def redo(
    manifest: Manifest, operations: Sequence[NumberedOperation]
) -> tuple[Manifest, dict[SegmentKey, list[SegmentPatch]]]:
    """The manifest after operations, whose mark stays, and what they write to segments. Raises as `LogPlan.add`."""
    topics = {topic.number: topic for topic in manifest.topics}
    plan = planned(manifest, topics.get, operations)
    left = tuple([topic for topic in (topics | plan.topics).values() if topic is not None])
    after = manifest._replace(topics=left, next_topic=plan.next_topic, next_ledger=plan.next_ledger, pair=plan.pair)
    return after, plan.patches
