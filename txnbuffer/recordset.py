"""Record sets: many records in one message

The value of a record set is one block (`broker_io.block`) of its n records: their keys, values, event times and own
properties, without key hashes. Readers ignore the entry numbers and publish times in the block. The keys and the values
may be compressed; each are at most 64 MiB uncompressed. The message has no key. Its properties are `tb.v`, `tb.records`
= n and, for records of a transaction, `tb.txn` and `tb.seq` (of the first record), as in `txnbuffer.protocol`. The
records have the positions `(ledger, entry, 0 ... n - 1)`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from broker_io.batch import Batch, Labels, Message, PlacedBatch
from broker_io.block import HEADER_BYTES, BadBlock, check_columns, decode_blocks, encode_block, open_block, parse_header
from broker_io.errors import UnsupportedFormat
from broker_io.position import NO_INDEX, Position, Positions
from txnbuffer.errors import UndecodableRecordSet
from txnbuffer.model import MAX_LEAST, PROTOCOL_VERSION, TxnId
from txnbuffer.protocol import (
    MARKER,
    MAX_SET_RECORDS,
    RECORDS,
    REMOVED,
    SEQ,
    TXN,
    VERSION,
    ids,
    number,
    numbers,
    present,
    transactional,
)

SET_BYTES = 1024 * 1024
"""Maximum bytes of a record set, unless it has only one record."""
SET_ROOM = 512
"""Maximum bytes of the message of a set, without its records."""
PROPERTY_ROOM = 32
"""Maximum bytes of a property, without its name and text."""
MOST_BYTES = 64 * 1024 * 1024
TOGETHER, TOGETHER_BYTES = 65_536, 32 * 1024 * 1024
"""Maximum records and bytes of the sets that are unpacked together; a single set may have more."""
TOGETHER_CELLS = 16 * 1024 * 1024
"""The same as a limit of records times columns, if no two sets have a property in common."""


class BatchSlice(NamedTuple):
    """`size` consecutive records: all of one transaction, with consecutive seqs, or all ordinary."""

    txn: TxnId | None
    first_seq: int
    size: int


def pack_all(records: Batch, parts: Iterable[BatchSlice], most_bytes: int = SET_BYTES) -> Batch:
    """Pack the records, which consist of these parts in order, into record sets; return the messages.

    A set has at most `most_bytes` bytes, unless it has only one record.
    """
    room = PROPERTY_ROOM * (1 + len(records.properties))
    ends = np.cumsum(records.sizes() + room)
    sets: list[Message] = []
    start = 0
    for txn, first_seq, size in parts:
        first, stop = start, start + size
        while start < stop:
            base = 0 if start == 0 else int(ends[start - 1])
            end = int(np.searchsorted(ends, base + most_bytes - SET_ROOM, side="right"))
            end = min(max(end, start + 1), stop)
            members = _slim(records.take(slice(start, end)))
            sets.append(pack(members, txn, first_seq + start - first, compress=True))
            start = end
    return Batch.of(sets)


def pack(batch: Batch, txn: TxnId | None = None, first_seq: int = 1, *, compress: bool = False) -> Message:
    """Return a record set, as a message, of all records of a batch that is not empty. `txn` None: they are ordinary."""
    block = encode_block(batch, first_entry=0, publish_time=0, compress=compress, hashed=False)
    properties = {VERSION: str(PROTOCOL_VERSION), RECORDS: str(len(batch))}
    if txn is not None:
        properties |= {TXN: str(txn), SEQ: str(first_seq)}
    return Message(None, b"".join(block.chunks), properties)


def unpack(position: Position, message: Message) -> Batch:
    """Return the records of a set, with the transaction's properties if any. Raises UndecodableRecordSet."""
    try:
        value = message.value or b""
        header = parse_header(value)
        if max(header.keys_raw, header.values_raw) > MOST_BYTES:
            raise BadBlock(f"keys of {header.keys_raw} and values of {header.values_raw} bytes exceed {MOST_BYTES}")
        batch = decode_blocks([open_block(value, 0, header)]).messages
        check_columns(batch)
    except (BadBlock, UnsupportedFormat) as error:
        raise UndecodableRecordSet(f"the record set at {position} cannot be decoded: {error}") from None
    count = number(message.properties.get(RECORDS, ""), MAX_SET_RECORDS)
    if len(batch) != count or len(value) != header.length:
        raise UndecodableRecordSet(
            f"the record set at {position} has {len(batch)} records in {len(value)} bytes "
            f"instead of {count} in {header.length}"
        )
    most, least = (column[0] for column in ids([message.properties.get(TXN, "")]))
    seq = number(message.properties.get(SEQ, ""), MAX_LEAST)
    return transactional(batch, TxnId(int(most), int(least)), seq) if least > 0 and seq > 0 else batch


def expand(placed: PlacedBatch) -> PlacedBatch:
    """Return the messages with each record set replaced by its records, at their own positions.

    Other messages do not change. Raises UndecodableRecordSet with the position.
    """
    sets = set_rows(placed)
    if not len(sets):
        return placed
    pieces: list[PlacedBatch] = []
    done = 0
    for row in sets.tolist():
        if done < row:
            pieces.append(placed.take(slice(done, row)))
        pieces.append(_expanded(placed, row))
        done = row + 1
    if done < len(placed):
        pieces.append(placed.take(slice(done, len(placed))))
    return PlacedBatch.concat(pieces)


def batch_slices(placed: PlacedBatch, limit: int = TOGETHER) -> Iterator[PlacedBatch]:
    """Yield the messages in order, in slices of at most `limit` records that can be unpacked together."""
    while (count := rows_within(placed, limit)) < len(placed):
        yield placed.take(slice(count))
        placed = placed.take(slice(count, None))
    if len(placed):
        yield placed


def rows_within(placed: PlacedBatch, limit: int) -> int:
    """Return how many of the first messages can be unpacked together into at most `limit` records; at least 1."""
    properties = placed.messages.properties
    if RECORDS not in properties:
        return min(len(placed), limit)
    sizes = np.maximum(numbers(properties[RECORDS], len(placed), MAX_SET_RECORDS), 1)
    count = min(max(int(np.searchsorted(np.cumsum(sizes), limit, side="right")), 1), len(placed))
    return _rows_within_memory(placed.take(slice(count)))


def _rows_within_memory(placed: PlacedBatch) -> int:
    """Return the same for the limits of memory: a compressed set may unpack to thousands of times its bytes."""
    values = placed.messages.values
    size = columns = records = 0
    for row in set_rows(placed).tolist():
        with contextlib.suppress(BadBlock, UnsupportedFormat):  # unpacking raises them
            header = parse_header(bytes(values.data[(at := int(values.offsets[row])) : at + HEADER_BYTES]))
            size += int(header.keys_raw + header.values_raw)
            columns += header.sections
            records += header.rows
        if size > TOGETHER_BYTES or columns * records > TOGETHER_CELLS:
            return max(int(row), 1)
    return len(placed)


def set_rows(placed: PlacedBatch) -> NDArray[np.intp]:
    """Return the rows of a batch that are record sets, and not emptied."""
    properties = placed.messages.properties
    if RECORDS not in properties:
        return np.zeros(0, np.intp)
    count = len(placed)
    sound = (numbers(properties[RECORDS], count, MAX_SET_RECORDS) > 0) & (placed.positions.indexes == NO_INDEX)
    return np.flatnonzero(sound & ~without_content(placed))


def without_content(placed: PlacedBatch) -> NDArray[np.bool_]:
    """Return bool[n]: which messages are markers or emptied, so that they have no record to show."""
    properties, count = placed.messages.properties, len(placed)
    return present(properties.get(MARKER), count) | present(properties.get(REMOVED), count)


def _slim(records: Batch) -> Batch:
    """Return the records without properties and texts that none of them has."""
    properties = {
        name: column.fitted() if isinstance(column, Labels) else column
        for name, column in records.properties.items()
        if present(column, len(records)).any()
    }
    return Batch(records.keys, records.values, properties, records.event_times)


def _expanded(placed: PlacedBatch, row: int) -> PlacedBatch:
    ledger, entry, _ = place = placed.positions[row]
    records = unpack(place, placed.messages[row])
    count = len(records)
    positions = Positions(np.full(count, ledger), np.full(count, entry), np.arange(count, dtype=np.int64))
    return PlacedBatch(positions, np.full(count, placed.publish_times[row]), records)
