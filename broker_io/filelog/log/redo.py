"""What operations make of a log: the plan of a change of structure for the engine, and all of it for offline readers

The engine of a log applies the operations after the mark of its manifest; readers of a log without an owner compute
what it will have then. Both functions only compute.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

from broker_io.filelog.log.layout import LedgerEntry, Manifest, PairEntry, PreparedFile, TopicEntry
from broker_io.filelog.log.numbers import Change, NumberedOperation
from broker_io.filelog.log.operations import (
    AppendBlocks,
    BeginEpoch,
    DeleteTopic,
    changed,
    changed_prepared,
    changed_topic,
    dropped,
    opened,
)

SegmentKey: TypeAlias = tuple[int, int, int]
"""Topic, ledger and generation."""


class SegmentPatch(NamedTuple):
    """Bytes for an offset of a segment."""

    offset: int
    data: bytes


class RedoneLog(NamedTuple):
    """The manifest as it will be, and the bytes that the segments lack, or may lack."""

    manifest: Manifest
    patches: dict[SegmentKey, list[SegmentPatch]]


def redo(manifest: Manifest, operations: Sequence[NumberedOperation]) -> RedoneLog:
    """The log after operations, some of which it may have already. Raises as `changed`."""
    after = changed(manifest, operations)
    known = {topic.number: topic.operations for topic in manifest.topics}
    left = {topic.number for topic in after.topics}
    patches: defaultdict[SegmentKey, list[SegmentPatch]] = defaultdict(list)
    for operation in operations:
        body = operation.body
        is_new = operation.topic in left and operation.number > known.get(operation.topic, 0)
        if is_new and isinstance(body, AppendBlocks):
            data = b"".join(body.chunks)
            patches[operation.topic, body.ledger, body.generation].append(SegmentPatch(body.offset, data))
    return RedoneLog(after, patches)


class StructurePlan(NamedTuple):
    """What some structure operations change; `topics` are those that they change, None for one that they delete.

    `opened` are the ledgers whose files have to be made, `dropped` those whose files nothing needs any more, and
    `unprepared` prepared files that will never be swapped in. `pair` is that of the manifest.
    """

    topics: dict[int, TopicEntry | None]
    opened: list[tuple[TopicEntry, LedgerEntry]]
    dropped: list[tuple[TopicEntry, LedgerEntry]]
    unprepared: list[PreparedFile]
    next_topic: int
    next_ledger: int
    pair: PairEntry | None

    def durable(self, topic: int, stored: TopicEntry) -> TopicEntry | None:
        """What the manifest has of a topic: its appends as before, unless its open ledger is another one."""
        after = self.topics.get(topic, stored)
        if after is None or after is stored or topic in {entry.number for entry, _ in self.opened}:
            return after
        return after.with_open(stored.ledgers[-1])._replace(operations=stored.operations)


def planned(
    manifest: Manifest, current: Callable[[int], TopicEntry | None], operations: Sequence[NumberedOperation]
) -> StructurePlan:
    """The plan of structure operations. Those that the manifest has already only count for their topics.

    Raises StorageError if one does not follow from the state, and as `changed_topic`.
    """
    pair = manifest.pair
    structures = pair.structures if pair is not None else 0
    prepared = pair.prepared if pair is not None else ()
    topics: dict[int, TopicEntry | None] = {}
    made: list[tuple[TopicEntry, LedgerEntry]] = []
    gone: list[tuple[TopicEntry, LedgerEntry]] = []
    lost: list[PreparedFile] = []
    next_topic, next_ledger = manifest.next_topic, manifest.next_ledger
    for operation in operations:
        change, number, body = operation.change, operation.topic, operation.body
        before = topics[number] if number in topics else current(number)
        if operation.manifest and operation.manifest <= structures:
            if before is not None and before.operations < operation.number:
                topics[number] = before._replace(operations=operation.number)
            continue
        if change is not Change.EPOCH:
            after = topics[number] = changed_topic(before, operation)
            if after is not None and (ledger := opened(before, after)) is not None:
                made.append((after, ledger))
            if before is not None:
                gone += [(before, ledger) for ledger in dropped(before, after)]
        left = changed_prepared(prepared, operation)
        if change is not Change.SWAP:
            lost += [file for file in prepared if file not in left]
        structures, prepared = operation.manifest, left
        next_topic = max(next_topic, number + 1)
        if isinstance(body, DeleteTopic | BeginEpoch):
            next_ledger = max(next_ledger, body.next_ledger)
    if pair is not None:
        pair = pair._replace(structures=structures, prepared=prepared)
    made = [(entry, ledger) for entry, ledger in made if topics[entry.number] is not None]
    return StructurePlan(topics, made, gone, lost, next_topic, next_ledger, pair)
