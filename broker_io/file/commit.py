"""From appends that wait to blocks that are written: small ones merged, huge ones split."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from broker_io.batch import Batch, Blobs, Labels, PropertyColumn
from broker_io.block import EncodedBlock, encode_block
from broker_io.errors import InvalidMessage, MessageTooLarge
from broker_io.file.manifest import LedgerEntry, TopicEntry
from broker_io.file.segment import Segment
from broker_io.port import MAX_PROPERTIES
from broker_io.position import Positions

BLOCK_BYTES = 1024 * 1024
"""What a block is filled up to; one message may be more."""
MAX_BLOCK_MESSAGES = 65_536

NUMBER_DIGITS = 20
"""What a property that is a number takes at most."""


@dataclass(slots=True, eq=False)
class Topic:
    """A topic of the engine: what readers may see, what the manifest says of it."""

    entry: TopicEntry
    durable: TopicEntry
    segment: Segment
    removed: bool = False


@dataclass(slots=True, eq=False)
class Append:
    """A batch that waits to be written; `size` is about its bytes."""

    topic: Topic
    batch: Batch
    size: int
    future: Future[Positions]


class Commit(NamedTuple):
    """What one flush does to one topic: blocks from where the open ledger ends, the ledger after it, answers."""

    topic: Topic
    blocks: list[EncodedBlock]
    after: LedgerEntry
    answers: list[tuple[Append, Positions]]


def check_batch(batch: Batch, limit: int) -> int:
    """About the bytes of a batch. Raises MessageTooLarge or InvalidMessage; nothing of it was appended then."""
    count = len(batch)
    lengths = {len(batch.keys), *(len(column) for column in batch.properties.values())}
    if batch.event_times is not None:
        lengths.add(len(batch.event_times))
    if lengths != {count}:
        raise InvalidMessage(
            f"a batch whose columns have different lengths ({sorted(lengths | {count})}): make them one"
        )
    if len(batch.properties) > MAX_PROPERTIES:
        raise InvalidMessage(f"a batch with {len(batch.properties)} different properties: use at most {MAX_PROPERTIES}")
    largest, total = 0, 0
    for name, column in batch.properties.items():
        longest, size = _measure_property(name, column, count)
        largest += longest
        total += size
    for blobs in (batch.keys, batch.values):
        longest, size = _measure(blobs)
        largest += longest
        total += size + 4 * count
    if largest > limit:
        _check_sizes(batch, limit)
    return total


def _measure(blobs: Blobs) -> tuple[int, int]:
    """Bytes of the longest string and of all. Raises InvalidMessage if the offsets lie."""
    offsets = blobs.offsets
    first, last = int(offsets[0]), int(offsets[-1])
    shortest = longest = last - first
    if len(offsets) > 2:
        lengths = offsets[1:] - offsets[:-1]
        shortest, longest = int(lengths.min()), int(lengths.max())
    if first < 0 or shortest < 0 or last > len(blobs.data):
        raise InvalidMessage("a batch whose offsets do not fit its bytes: make them ascend from 0 to the length")
    return longest, last - first


def _measure_property(name: str, column: PropertyColumn, count: int) -> tuple[int, int]:
    """At least the bytes of the longest name with text, about those of all. Raises InvalidMessage for no Unicode."""
    labels = column.values if isinstance(column, Labels) else ()
    try:
        sizes = [len(label.encode()) for label in labels]
        named = len(name.encode())
    except UnicodeEncodeError as error:
        raise InvalidMessage(f"property {name!r} holds text that is no Unicode ({error.reason}): mend it") from None
    if isinstance(column, Labels):
        return named + max(sizes, default=0), named + sum(sizes) + 4 * count
    return named + NUMBER_DIGITS, named + 8 * count


def _check_sizes(batch: Batch, limit: int) -> None:
    sizes = batch.sizes()
    index = int(np.argmax(sizes > limit))
    if sizes[index] > limit:
        raise MessageTooLarge(
            f"message {index} of the batch has {sizes[index]} bytes, more than the limit of {limit}: "
            "split it, or raise the limit of message bytes; nothing of the batch was appended"
        )


def build_commit(topic: Topic, appends: list[Append], now_ms: int, seed: int, compress: bool) -> Commit:
    """The blocks for all that waits on one topic."""
    ledger = topic.entry.ledgers[-1]
    time_ms = max(now_ms, ledger.last_time)
    answers = _answers(appends, ledger)
    blocks: list[EncodedBlock] = []
    first, place = ledger.entries, topic.entry.place(ledger)
    for batch in _in_block_sizes(appends):
        blocks.append(
            encode_block(batch, first_entry=first, publish_time=time_ms, seed=seed, place=place, compress=compress)
        )
        first += len(batch)
    size = sum(block.length for block in blocks)
    return Commit(topic, blocks, ledger.grown(first - ledger.entries, size, time_ms, time_ms), answers)


def _answers(appends: list[Append], ledger: LedgerEntry) -> list[tuple[Append, Positions]]:
    counts = [len(append.batch) for append in appends]
    run = Positions.run(ledger.ledger, ledger.entries, sum(counts))
    starts = itertools.accumulate(counts, initial=0)
    return [
        (append, run.take(slice(start, start + count)))
        for append, count, start in zip(appends, counts, starts, strict=False)
    ]


def _in_block_sizes(appends: list[Append]) -> Iterator[Batch]:
    group: list[Batch] = []
    size, names = 0, set[str]()
    for append in appends:
        named = names.union(append.batch.properties)
        if group and (size + append.size > BLOCK_BYTES or len(named) > MAX_PROPERTIES):
            yield Batch.concat(group)
            group, size, named = [], 0, set(append.batch.properties)
        if append.size > 2 * BLOCK_BYTES:
            yield from split(append.batch)
            continue
        group.append(append.batch)
        size += append.size
        names = named
    if group:
        yield Batch.concat(group)


def split(batch: Batch) -> Iterator[Batch]:
    """A batch in pieces of about a block each."""
    ends = batch.keys.offsets[1:].astype(np.int64) + batch.values.offsets[1:]
    start, base = 0, int(batch.keys.offsets[0]) + int(batch.values.offsets[0])
    while start < len(batch):
        stop = max(start + 1, int(np.searchsorted(ends, base + BLOCK_BYTES, side="right")))
        stop = min(stop, start + MAX_BLOCK_MESSAGES)
        yield batch.take(slice(start, stop))
        start, base = stop, int(ends[stop - 1])
