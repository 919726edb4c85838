"""First and last positions, and the position that belongs to a time."""

from __future__ import annotations

import numpy as np

from broker_io.block import RawBlock
from broker_io.file import layout
from broker_io.file.manifest import LedgerEntry, TopicEntry
from broker_io.file.reader import FileReader
from broker_io.file.segment import Found, headers, read_block, sound_index
from broker_io.file.source import Source
from broker_io.gather import block_entries, block_publish_times
from broker_io.position import EARLIEST, Position


def first_position(source: Source, topic: TopicEntry) -> Position | None:
    """Position of the first message that still exists."""
    with FileReader(source, topic, EARLIEST, inclusive=True) as reader:
        batch = reader.read(limit=1)
    return None if batch is None else batch.positions.first


def last_position(topic: TopicEntry) -> Position | None:
    """Position of the last message that was ever appended, whether it still exists or not."""
    for ledger in reversed(topic.ledgers):
        if ledger.entries:
            return Position(ledger.ledger, ledger.entries - 1)
    return Position(topic.floor[0], topic.floor[1] - 1) if topic.floor[1] else None


def position_at(source: Source, topic: TopicEntry, time_ms: int) -> Position | None:
    """Position of the first message published at or after a time. Raises Damaged, or OSError."""
    filled = [ledger for ledger in topic.ledgers if ledger.bytes]
    older = [index for index, ledger in enumerate(filled) if ledger.first_time < time_ms]
    for ledger in filled[older[-1] if older else 0 :]:
        entry = _entry_at(source, topic, ledger, time_ms)
        if entry is not None:
            return Position(ledger.ledger, entry)
    return None


def _entry_at(source: Source, topic: TopicEntry, ledger: LedgerEntry, time_ms: int) -> int | None:
    disk = source.environment.disk
    path = layout.segment_path(source.directory, topic.number, ledger.ledger, ledger.generation)
    file = source.segment(topic, ledger)
    try:
        known = sound_index(disk, file, path, ledger.bytes, time_ms=time_ms).before_time(time_ms)
        older: Found | None = None
        for found in headers(file, path, 0 if known is None else known.offset, ledger.bytes, topic.place(ledger)):
            if found.header.publish_time >= time_ms:
                inside = None if older is None else _within(read_block(file, path, older, values=False), time_ms)
                return found.header.first_entry if inside is None else inside
            older = found
        return None if older is None else _within(read_block(file, path, older, values=False), time_ms)
    finally:
        file.close()


def _within(block: RawBlock, time_ms: int) -> int | None:
    """The first entry of a block that was published at or after a time."""
    late = np.flatnonzero(block_publish_times(block) >= time_ms)
    return int(block_entries(block)[late[0]]) if len(late) else None
