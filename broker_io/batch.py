"""Messages as columns: the form of appends, reads, blocks and record sets.

A `Batch` holds n messages as columns of length n; `Message` is one row of it. Rows are for the edge
(a test, a tool, a single send); everything else moves whole columns, because Python is slow per message.
"""

from __future__ import annotations

import itertools
import operator
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias, overload

import numpy as np
from numpy.typing import NDArray

from broker_io.errors import InvalidMessage
from broker_io.position import Int64s, Position, Positions

Which: TypeAlias = "NDArray[np.bool_] | NDArray[np.intp] | slice"
"""A choice of rows: a mask, a column of row numbers, or a slice."""

ABSENT = -1
ROW_BYTES = 64
"""Approximate memory of a message in addition to its key, value and properties."""
NO_TIME = 0


class Message(NamedTuple):
    """One message: optional key, optional value (None: the key is deleted), properties, event time.

    `event_time` is in milliseconds since 1970, or 0 for none.
    """

    key: bytes | None = None
    value: bytes | None = b""
    properties: Mapping[str, str] = {}
    event_time: int = NO_TIME


@dataclass(slots=True, eq=False)
class Blobs(Sequence["bytes | None"]):
    """A column of byte strings, each of which may be absent.

    `data[offsets[i]:offsets[i + 1]]` is the i-th string; `absent` is a mask, or None if all are present.
    """

    data: bytes | memoryview
    offsets: NDArray[np.int32]
    absent: NDArray[np.bool_] | None

    @classmethod
    def of(cls, values: Sequence[bytes | None]) -> Blobs:
        absent: NDArray[np.bool_] | None = None
        present: Sequence[Any] = values
        if None in values:
            absent = np.array([value is None for value in values], np.bool_)
            present = [value or b"" for value in values]
        offsets = np.fromiter(itertools.accumulate(map(len, present), initial=0), np.int32, len(values) + 1)
        return cls(b"".join(present), offsets, absent)

    @classmethod
    def none(cls, count: int) -> Blobs:
        """A column in which every string is absent."""
        return cls(b"", np.zeros(count + 1, np.int32), np.ones(count, np.bool_))

    @classmethod
    def concat(cls, columns: Sequence[Blobs]) -> Blobs:
        rows = 0
        for column in columns:
            rows += len(column.offsets) - 1
        data: list[bytes | memoryview] = []
        offsets = np.zeros(rows + 1, np.int32)
        absent: NDArray[np.bool_] | None = None
        at = base = 0
        for column in columns:
            first, last = column.offsets.item(0), column.offsets.item(-1)
            stop = at + len(column.offsets) - 1
            data.append(column.data[first:last])
            offsets[at + 1 : stop + 1] = column.offsets[1:] + (base - first)
            if column.absent is not None:
                if absent is None:
                    absent = np.zeros(rows, np.bool_)
                absent[at:stop] = column.absent
            at, base = stop, base + last - first
        return cls(b"".join(data), offsets, absent)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @overload
    def __getitem__(self, index: int) -> bytes | None: ...

    @overload
    def __getitem__(self, index: slice) -> Blobs: ...

    def __getitem__(self, index: int | slice) -> bytes | Blobs | None:
        if isinstance(index, slice):
            return self.take(index)
        if self.absent is not None and self.absent[index]:
            return None
        return bytes(self.data[int(self.offsets[index]) : int(self.offsets[index + 1])])

    def __iter__(self) -> Iterator[bytes | None]:
        return iter(self.to_list())

    def to_list(self) -> list[bytes | None]:
        data, offsets = bytes(self.data), self.offsets.tolist()
        strings: list[bytes | None] = [data[a:b] for a, b in itertools.pairwise(offsets)]
        if self.absent is not None:
            for index in self.absent.nonzero()[0].tolist():
                strings[index] = None
        return strings

    def lengths(self) -> NDArray[np.int32]:
        return np.diff(self.offsets)

    def absent_mask(self) -> NDArray[np.bool_]:
        return self.absent if self.absent is not None else np.zeros(len(self), np.bool_)

    def take(self, which: Which) -> Blobs:
        if isinstance(which, slice):
            start, stop, step = which.indices(len(self))
            if step == 1:
                stop = max(start, stop)
                return Blobs(
                    self.data, self.offsets[start : stop + 1], None if self.absent is None else self.absent[start:stop]
                )
            which = np.array(range(start, stop, step), np.intp)
        rows = which.nonzero()[0] if which.dtype == np.bool_ else which
        begins, ends = self.offsets[rows], self.offsets[rows + 1]
        offsets = np.zeros(len(rows) + 1, np.int32)
        np.add.accumulate(ends - begins, out=offsets[1:])
        gaps = rows[1:] - rows[:-1] != 1  # consecutive rows are copied as one
        starts, stops = [*begins[:1].tolist(), *begins[1:][gaps].tolist()], ends[:-1][gaps].tolist()
        stops += ends[-1:].tolist()
        data = b"".join([self.data[a:b] for a, b in zip(starts, stops, strict=True)])
        return Blobs(data, offsets, None if self.absent is None else self.absent[rows])

    def packed(self) -> Blobs:
        """The same column with nothing but its strings in `data`."""
        first, last = int(self.offsets[0]), int(self.offsets[-1])
        if first == 0 and last == len(self.data):
            return self
        return Blobs(self.data[first:last], self.offsets - np.int32(first), self.absent)


@dataclass(frozen=True, slots=True, eq=False)
class Labels:
    """A property with few different texts: `values[codes[i]]`, absent where the code is -1."""

    codes: NDArray[np.int32]
    values: tuple[str, ...]

    @classmethod
    def constant(cls, value: str, count: int) -> Labels:
        return cls(np.zeros(count, np.int32), (value,))

    @classmethod
    def of(cls, texts: Iterable[str | None]) -> Labels:
        seen: dict[str, int] = {}
        codes = [ABSENT if text is None else seen.setdefault(text, len(seen)) for text in texts]
        return cls(np.array(codes, np.int32), tuple(seen))

    def __len__(self) -> int:
        return len(self.codes)

    def get(self, index: int) -> str | None:
        code = int(self.codes[index])
        return None if code == ABSENT else self.values[code]

    def to_list(self) -> list[str | None]:
        table: tuple[str | None, ...] = (*self.values, None)
        return [*map(table.__getitem__, self.codes.tolist())]

    def take(self, which: Which) -> Labels:
        return Labels(self.codes[which], self.values)

    def fitted(self) -> Labels:
        """Equal labels whose table has only the texts of these rows: a slice has all texts of the whole."""
        codes, renamed = np.unique(self.codes, return_inverse=True)
        absent = int(len(codes) > 0 and codes[0] < 0)
        values = map(self.values.__getitem__, codes[absent:].tolist())
        return Labels((renamed - absent).astype(np.int32), tuple(values))


@dataclass(frozen=True, slots=True, eq=False)
class Numbers:
    """A property whose texts are all canonical integers; `present` is a mask, or None if all are present."""

    values: Int64s
    present: NDArray[np.bool_] | None = None

    def __len__(self) -> int:
        return len(self.values)

    def get(self, index: int) -> str | None:
        return None if self.present is not None and not self.present[index] else str(self.values[index])

    def to_list(self) -> list[str | None]:
        texts: list[str | None] = [*map(str, self.values.tolist())]
        if self.present is not None:
            for index in (~self.present).nonzero()[0].tolist():
                texts[index] = None
        return texts

    def take(self, which: Which) -> Numbers:
        return Numbers(self.values[which], None if self.present is None else self.present[which])


PropertyColumn: TypeAlias = Labels | Numbers
"""One property over all rows of a batch: text, or absent."""


def property_column(texts: Sequence[str | None]) -> PropertyColumn:
    """The smaller of the two forms of a property: numbers if they differ from row to row, else labels."""
    present: Sequence[Any] = texts
    if None in texts:
        present = [text for text in texts if text is not None]
    if len(set(present)) * 2 > len(present) and all(map(_plain_number, present)):
        if len(present) == len(texts):
            return Numbers(np.fromiter(map(int, present), np.int64, len(present)))
        values = np.array([0 if text is None else int(text) for text in texts], np.int64)
        return Numbers(values, np.array([text is not None for text in texts], np.bool_))
    return Labels.of(texts)


def as_numbers(column: PropertyColumn) -> Numbers | None:
    """The same column as numbers; None if a text of it is not a canonical integer."""
    if isinstance(column, Numbers):
        return column
    if not all(map(_plain_number, column.values)):
        return None
    table = np.array([*map(int, column.values), 0], np.int64)
    present = column.codes >= 0
    return Numbers(table[column.codes], None if np.logical_and.reduce(present) else present)


_plain_number = re.compile(r"0|[1-9][0-9]{0,17}|-[1-9][0-9]{0,16}").fullmatch
"""The match of a canonical integer of at most 18 characters, which is surely one of 64 bits; None for another text."""


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """n messages as columns of length n.

    Shapes: `keys`, `values` n strings; each property a column of n texts; `event_times` int64[n] in
    milliseconds, or None where no message has one.
    """

    keys: Blobs
    values: Blobs
    properties: Mapping[str, PropertyColumn] = field(default_factory=dict)
    event_times: Int64s | None = None

    @classmethod
    def of(cls, messages: Iterable[Message]) -> Batch:
        """Raises InvalidMessage for an event time that no log can store."""
        keys, values, properties, event_times = [*zip(*messages, strict=True)] or [()] * 4
        try:
            times = np.array(event_times, np.int64) if any(event_times) else None
        except OverflowError:
            beyond = next(time for time in event_times if not -(2**63) <= time < 2**63)
            raise InvalidMessage(f"event time {beyond} is out of range: give milliseconds since 1970") from None
        names = dict.fromkeys(itertools.chain.from_iterable(properties))
        return cls(
            Blobs.of(keys),
            Blobs.of(values),
            {name: property_column([row.get(name) for row in properties]) for name in names},
            times,
        )

    @classmethod
    def concat(cls, batches: Sequence[Batch]) -> Batch:
        if len(batches) == 1:
            return batches[0]
        columns: dict[str, list[PropertyColumn | None]] = {}
        timed = False
        counts: list[int] = []
        for at, batch in enumerate(batches):
            counts.append(len(batch.values.offsets) - 1)
            timed = timed or batch.event_times is not None
            for name, column in batch.properties.items():
                if name not in columns:
                    columns[name] = [None] * len(batches)
                columns[name][at] = column
        properties: dict[str, PropertyColumn] = {}
        for name, parts in columns.items():
            properties[name] = concat_columns(parts, counts)
        return cls(
            Blobs.concat([*map(_keys, batches)]),
            Blobs.concat([*map(_values, batches)]),
            properties,
            np.concatenate([batch.times() for batch in batches]) if timed else None,
        )

    def __len__(self) -> int:
        return len(self.values.offsets) - 1

    def __getitem__(self, index: int) -> Message:
        texts = ((name, column.get(index)) for name, column in self.properties.items())
        return Message(
            self.keys[index],
            self.values[index],
            {name: text for name, text in texts if text is not None},
            NO_TIME if self.event_times is None else int(self.event_times[index]),
        )

    def __iter__(self) -> Iterator[Message]:
        rows: list[dict[str, str]] = [{} for _ in range(len(self))]
        for name, column in self.properties.items():
            for row, text in zip(rows, column.to_list(), strict=True):
                if text is not None:
                    row[name] = text
        return map(Message, self.keys.to_list(), self.values.to_list(), rows, self.times().tolist())

    def times(self) -> Int64s:
        return np.zeros(len(self), np.int64) if self.event_times is None else self.event_times

    def take(self, which: Which) -> Batch:
        return Batch(
            self.keys.take(which),
            self.values.take(which),
            {name: column.take(which) for name, column in self.properties.items()},
            None if self.event_times is None else self.event_times[which],
        )

    @property
    def weight(self) -> int:
        """Approximate memory in bytes, without properties."""
        return len(self.keys.data) + len(self.values.data) + ROW_BYTES * (len(self.values.offsets) - 1)

    def sizes(self) -> Int64s:
        """Bytes of each message as the size limit counts them: key, value, and properties as UTF-8."""
        sizes = self.keys.lengths().astype(np.int64) + self.values.lengths()
        for name, column in self.properties.items():
            texts = _text_sizes(column)
            sizes += np.where(texts == ABSENT, 0, texts + len(name.encode()))
        return sizes


_keys, _values = operator.attrgetter("keys"), operator.attrgetter("values")

CELLS = 1024 * 1024
"""Property names times messages of a combined batch, at most: each name becomes a column of full length."""


@dataclass(slots=True)
class Width:
    """The width of batches that are combined: only the last of them may take it above `CELLS`."""

    rows: int = 0
    names: set[str | bytes] = field(default_factory=set)

    def add(self, names: Iterable[str | bytes], rows: int = 1) -> None:
        """Count rows that have some of these properties."""
        self.names.update(names)
        self.rows += rows

    @property
    def full(self) -> bool:
        """Whether no more batches may be added."""
        return len(self.names) * self.rows >= CELLS


POWERS_OF_TEN = np.array([10**power for power in range(1, 20)], np.uint64)


def _text_sizes(column: PropertyColumn) -> Int64s:
    """Bytes of each text of a property, -1 where it is absent."""
    if isinstance(column, Numbers):
        magnitudes = np.abs(column.values).astype(np.uint64)  # right for -2**63 too, which has no positive
        sizes = 1 + np.searchsorted(POWERS_OF_TEN, magnitudes, side="right") + (column.values < 0)
        return sizes if column.present is None else np.where(column.present, sizes, ABSENT)
    return np.array([*(len(text.encode()) for text in column.values), ABSENT], np.int64)[column.codes]


def concat_columns(columns: Sequence[PropertyColumn | None], counts: Sequence[int]) -> PropertyColumn:
    """One property of consecutive batches of these lengths; None for batches without it."""
    if len(columns) == 1 and columns[0] is not None:
        return columns[0]
    if Numbers not in map(type, columns):
        return _concat_labels(columns, counts)
    values, present = np.zeros(sum(counts), np.int64), np.zeros(sum(counts), np.bool_)
    at = 0
    for column, count in zip(columns, counts, strict=True):
        numbers = as_numbers(column) if isinstance(column, Labels) else column
        if numbers is not None:
            values[at : at + count] = numbers.values
            present[at : at + count] = True if numbers.present is None else numbers.present
        elif column is not None:
            return _concat_labels(columns, counts)
        at += count
    return Numbers(values, None if np.logical_and.reduce(present) else present)


def _concat_labels(columns: Sequence[PropertyColumn | None], counts: Sequence[int]) -> Labels:
    seen: dict[str, int] = {}
    table: list[int] = []  # for each batch -1 for "absent", then the new numbers of its labels
    bases: list[int] = []
    codes: list[NDArray[np.int32]] = []
    for column, count in zip(columns, counts, strict=True):
        labels = Labels.of(column.to_list()) if isinstance(column, Numbers) else column
        table.append(ABSENT)
        bases.append(len(table))
        codes.append(np.zeros(count, np.int32) + ABSENT if labels is None else labels.codes)
        for value in () if labels is None else labels.values:
            code = seen.setdefault(value, len(seen))
            table.append(code)
    places = np.array(bases, np.int32).repeat(counts) + np.concatenate(codes)
    return Labels(np.array(table, np.int32)[places], tuple(seen))


class PlacedMessage(NamedTuple):
    """One message with its position in a log; `publish_time` is in milliseconds since 1970."""

    position: Position
    publish_time: int
    message: Message


@dataclass(frozen=True, slots=True, eq=False)
class PlacedBatch:
    """n messages of one ledger of a log, in log order, with their positions.

    `positions` and `publish_times` (int64[n], milliseconds) are columns of the same length as `messages`.
    """

    positions: Positions
    publish_times: Int64s
    messages: Batch

    @classmethod
    def concat(cls, batches: Sequence[PlacedBatch]) -> PlacedBatch:
        """The messages of consecutive batches, at least one."""
        if len(batches) == 1:
            return batches[0]
        return cls(
            Positions.concat([batch.positions for batch in batches]),
            np.concatenate([batch.publish_times for batch in batches]),
            Batch.concat([batch.messages for batch in batches]),
        )

    def __len__(self) -> int:
        return len(self.publish_times)

    def __iter__(self) -> Iterator[PlacedMessage]:
        return map(PlacedMessage, self.positions, self.publish_times.tolist(), self.messages)

    def split(self, count: int) -> tuple[PlacedBatch, PlacedBatch | None]:
        """The first `count` messages, and the rest if there are more."""
        if len(self) <= count:
            return self, None
        return self.take(slice(0, count)), self.take(slice(count, None))

    def take(self, which: Which) -> PlacedBatch:
        return PlacedBatch(self.positions.take(which), self.publish_times[which], self.messages.take(which))
