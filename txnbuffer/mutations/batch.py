"""Mutations as columns: queued by the manager, returned by cursors and by backfills."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from broker_io.batch import NO_TIME, Batch, Blobs, Labels, Message, Numbers, PropertyColumn, Which
from broker_io.position import Int64s, Position, Positions
from txnbuffer.protocol import used

BATCH_BYTES = 1600
"""Bytes of the objects around the columns of one batch."""

PROPERTY_BYTES = 400
TEXT_BYTES = 56


class Mutation(NamedTuple):
    """One visible record with its seqno. `key` None: no key; `value` None: the key is deleted.

    Times are in milliseconds since 1970; event time 0: none.
    """

    seqno: int
    position: Position
    key: bytes | None
    value: bytes | None
    properties: Mapping[str, str] = {}
    event_time: int = NO_TIME
    publish_time: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class MutationBatch:
    """n mutations of one topic in log order, as columns of length n; iterate it for single ones.

    `seqnos` int64[n], ascending; `publish_times` int64[n] in milliseconds. `removed` bool[n]: those that compaction has
    emptied, which only have a seqno; None: none.
    """

    seqnos: Int64s
    positions: Positions
    publish_times: Int64s
    messages: Batch
    removed: NDArray[np.bool_] | None = None

    @classmethod
    def of(cls, mutations: Iterable[Mutation]) -> MutationBatch:
        rows = list(mutations)
        return cls(
            np.array([row.seqno for row in rows], np.int64),
            Positions.of([row.position for row in rows]),
            np.array([row.publish_time for row in rows], np.int64),
            Batch.of([Message(row.key, row.value, row.properties, row.event_time) for row in rows]),
        )

    @classmethod
    def concat(cls, batches: Sequence[MutationBatch]) -> MutationBatch:
        if len(batches) == 1:
            return batches[0]
        return cls(
            np.concatenate([batch.seqnos for batch in batches]),
            Positions.concat([batch.positions for batch in batches]),
            np.concatenate([batch.publish_times for batch in batches]),
            Batch.concat([batch.messages for batch in batches]),
            _concat_removed(batches),
        )

    def __len__(self) -> int:
        return len(self.seqnos)

    def __iter__(self) -> Iterator[Mutation]:
        rows = zip(self.seqnos.tolist(), self.positions, self.messages, self.publish_times.tolist(), strict=True)
        for seqno, position, (key, value, properties, event_time), publish_time in rows:
            yield Mutation(seqno, position, key, value, properties, event_time, publish_time)

    @property
    def first(self) -> int:
        """The first seqno."""
        return int(self.seqnos[0])

    @property
    def last(self) -> int:
        """The last seqno."""
        return int(self.seqnos[-1])

    def dense(self) -> bool:
        """Whether no seqno between the first and the last is missing."""
        return self.last - self.first + 1 == len(self) and bool((self.seqnos[1:] - self.seqnos[:-1] == 1).all())

    def take(self, which: Which) -> MutationBatch:
        return MutationBatch(
            self.seqnos[which],
            self.positions.take(which),
            self.publish_times[which],
            self.messages.take(which),
            None if self.removed is None else self.removed[which],
        )

    def present(self) -> MutationBatch:
        """Without those that compaction has emptied."""
        return self if self.removed is None else replace(self.take(~self.removed), removed=None)

    def owned(self) -> MutationBatch:
        """A copy of the mutations that keeps no larger buffer alive."""
        messages = self.messages
        properties = {name: _owned_property(column) for name, column in messages.properties.items()}
        times = messages.event_times
        return MutationBatch(
            _owned(self.seqnos),
            Positions(_owned(self.positions.ledgers), _owned(self.positions.entries), _owned(self.positions.indexes)),
            _owned(self.publish_times),
            Batch(
                _owned_blobs(messages.keys),
                _owned_blobs(messages.values),
                properties,
                None if times is None else _owned(times),
            ),
            self.removed,
        )

    def nbytes(self) -> int:
        """Bytes of memory of these columns if they are `owned`."""
        messages = self.messages
        total = BATCH_BYTES + self.seqnos.nbytes + self.publish_times.nbytes
        total += 3 * self.positions.entries.nbytes + _blob_bytes(messages.keys) + _blob_bytes(messages.values)
        if messages.event_times is not None:
            total += messages.event_times.nbytes
        return total + sum(_property_bytes(column) for column in messages.properties.values())

    def fitting(self, start: int, limit: int, max_bytes: int) -> int:
        """The number of rows from `start` on, at most `limit`, with at most `max_bytes` bytes of keys and values."""
        keys, values = self.messages.keys.offsets, self.messages.values.offsets
        ends = keys[start + 1 : start + limit + 1].astype(np.int64) + values[start + 1 : start + limit + 1]
        room = max_bytes + int(keys[start]) + int(values[start])
        return int(np.searchsorted(ends, room, side="right"))

    def parts(self, max_bytes: int) -> Iterator[MutationBatch]:
        """Slices with at most `max_bytes` bytes of keys and values; a larger mutation is a slice of its own."""
        if self.payload() <= max_bytes:
            yield self
            return
        start = 0
        while start < len(self):
            stop = start + max(1, self.fitting(start, len(self) - start, max_bytes))
            yield self.take(slice(start, stop))
            start = stop

    def payload(self) -> int:
        """Bytes of keys and values."""
        keys, values = self.messages.keys.offsets, self.messages.values.offsets
        return int(keys[-1]) - int(keys[0]) + int(values[-1]) - int(values[0])


def _concat_removed(batches: Sequence[MutationBatch]) -> NDArray[np.bool_] | None:
    if all(batch.removed is None for batch in batches):
        return None
    return np.concatenate(
        [np.zeros(len(batch), np.bool_) if batch.removed is None else batch.removed for batch in batches]
    )


def _owned(column: Int64s) -> Int64s:
    return column if column.flags.owndata else column.copy()


def _owned_blobs(blobs: Blobs) -> Blobs:
    packed = blobs.packed()
    if packed is blobs and isinstance(blobs.data, bytes) and blobs.offsets.flags.owndata:
        return blobs
    offsets = packed.offsets if packed.offsets.flags.owndata else packed.offsets.copy()
    return Blobs(bytes(packed.data), offsets, None if packed.absent is None else packed.absent.copy())


def _owned_property(column: PropertyColumn) -> PropertyColumn:
    if isinstance(column, Labels):
        small = used(column)
        return Labels(small.codes if small.codes.flags.owndata else small.codes.copy(), small.values)
    return Numbers(_owned(column.values), None if column.present is None else column.present.copy())


def _blob_bytes(blobs: Blobs) -> int:
    return len(blobs.data) + blobs.offsets.nbytes + (0 if blobs.absent is None else blobs.absent.nbytes)


def _property_bytes(column: PropertyColumn) -> int:
    if isinstance(column, Labels):
        return PROPERTY_BYTES + column.codes.nbytes + sum(TEXT_BYTES + len(text) for text in column.values)
    if isinstance(column, Numbers):
        return PROPERTY_BYTES + column.values.nbytes + (0 if column.present is None else column.present.nbytes)
    raise TypeError(f"{type(column).__name__} is not a property column of mutations")
