"""The commit of pending appends: they become blocks. Small appends are merged, huge ones are split."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from broker_io.batch import Batch
from broker_io.block import EncodedBlock, encode_block
from broker_io.file.layout import LedgerEntry, TopicEntry
from broker_io.file.segment import Segment
from broker_io.port import MAX_PROPERTIES
from broker_io.position import Positions

BLOCK_BYTES = 1024 * 1024
"""Target size of a block; one message may be larger."""
MAX_BLOCK_MESSAGES = 65_536
CELL_BYTES = 8
"""Bytes of a message in a column of properties, at most, even if it lacks the property."""


@dataclass(slots=True, eq=False)
class FileTopic:
    """A topic of the engine: `entry` is what readers may see, `durable` what the manifest has."""

    entry: TopicEntry
    durable: TopicEntry
    segment: Segment
    removed: bool = False


@dataclass(slots=True, eq=False)
class PendingBatch:
    """A batch to be written; `size` is about its bytes. `reserved`: it may use the reserve below the watermark."""

    topic: FileTopic
    batch: Batch
    size: int
    future: Future[Positions]
    reserved: bool = False


class LedgerCommit(NamedTuple):
    """The commit of one topic in a flush: blocks for the end of the open ledger, the ledger after it, positions."""

    topic: FileTopic
    blocks: list[EncodedBlock]
    after: LedgerEntry
    answers: list[tuple[PendingBatch, Positions]]


def build_commit(topic: FileTopic, appends: list[PendingBatch], now_ms: int, seed: int, compress: bool) -> LedgerCommit:
    """The blocks for all pending appends of one topic."""
    ledger = topic.entry.ledgers[-1]
    time_ms = max(now_ms, ledger.last_time)
    blocks: list[EncodedBlock] = []
    count, size, place = 0, 0, topic.entry.place(ledger)
    for batch in _in_block_sizes(appends):
        first = ledger.entries + count
        blocks.append(
            encode_block(batch, first_entry=first, publish_time=time_ms, seed=seed, place=place, compress=compress)
        )
        count += len(batch)
        size += blocks[-1].length
    positions = Positions.consecutive(ledger.ledger, ledger.entries, count, time_ms)
    answers: list[tuple[PendingBatch, Positions]] = []
    start = 0
    for append in appends:
        stop = start + len(append.batch)
        answers.append((append, positions.take(slice(start, stop))))
        start = stop
    return LedgerCommit(topic, blocks, ledger.grown(count, size, time_ms, time_ms), answers)


def _in_block_sizes(appends: list[PendingBatch]) -> Iterator[Batch]:
    group: list[Batch] = []
    size, rows, names = 0, 0, set[str]()
    for append in appends:
        count = len(append.batch)
        named = names.union(append.batch.properties)
        if group:
            # Earlier batches get cells for properties that only this one has, and this one for those it lacks.
            wider = (len(named) - len(names)) * rows + (len(named) - len(append.batch.properties)) * count
            if size + append.size + CELL_BYTES * wider > BLOCK_BYTES or len(named) > MAX_PROPERTIES:
                yield Batch.concat(group)
                group, size, rows, named = [], 0, 0, set(append.batch.properties)
            else:
                size += CELL_BYTES * wider
        if append.size > 2 * BLOCK_BYTES:
            yield from split(append.batch)
            names = set()
            continue
        group.append(append.batch)
        size, rows = size + append.size, rows + count
        names = named
    if group:
        yield Batch.concat(group)


def split(batch: Batch) -> Iterator[Batch]:
    """A batch in slices of about a block each."""
    ends = batch.keys.offsets[1:].astype(np.int64) + batch.values.offsets[1:]
    start, base = 0, int(batch.keys.offsets[0]) + int(batch.values.offsets[0])
    while start < len(batch):
        stop = max(start + 1, int(np.searchsorted(ends, base + BLOCK_BYTES, side="right")))
        stop = min(stop, start + MAX_BLOCK_MESSAGES)
        yield batch.take(slice(start, stop))
        start, base = stop, int(ends[stop - 1])
