"""Decoding a batch of a topic's log into what the buffer folds: slices of records, markers, undecodable records.

The properties are read as whole columns. Only a message that is neither an ordinary nor a valid transactional record
is decoded as a row. A few messages are cheaper to decode row by row.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from broker_io.batch import Message, PlacedBatch
from broker_io.position import NO_INDEX, Position, Positions
from txnbuffer.errors import ProtocolStopped, UndecodableMarker, UnsupportedProtocol
from txnbuffer.model import MAX_LEAST, PROTOCOL_VERSION, Marker, RecordSlice, TxnId, Undecodable
from txnbuffer.protocol import (
    ABSENT,
    MARKER,
    MARKER_TEXT,
    MAX_SET_RECORDS,
    RECORDS,
    SEQ,
    TXN,
    VERSION,
    decode_marker,
    number,
    numbers,
    present,
    texts_equal,
    transaction_codes,
)

FEW_ROWS = 8
"""With fewer messages, reading rows costs less than reading columns."""


class PlacedMarker(NamedTuple):
    """A marker and its position."""

    position: Position
    marker: Marker


Item: TypeAlias = RecordSlice | PlacedMarker | Undecodable | ProtocolStopped
"""What a log consists of. A `ProtocolStopped` comes last: nothing after it can be read."""


def decode(placed: PlacedBatch) -> list[Item]:
    """The items of a batch in log order; if the topic stops, the last one is the error.

    A slice has consecutive rows: of one transaction with consecutive seqs, or ordinary ones. A record
    set is a slice of its own; its positions are `(ledger, entry, 0 … n - 1)`.
    """
    return decode_rows(placed) if len(placed) < FEW_ROWS else decode_columns(placed)


def decode_rows(placed: PlacedBatch) -> list[Item]:
    """`decode`, row by row."""
    items: list[Item] = []
    joinable = False
    for position, _, message in placed:
        item = _row(position, message)
        single = isinstance(item, RecordSlice) and RECORDS not in message.properties
        last = items[-1] if items else None
        if (
            joinable
            and single
            and isinstance(last, RecordSlice)
            and isinstance(item, RecordSlice)
            and _follows(last, item)
        ):
            items[-1] = last._replace(last=item.last, size=last.size + 1)
        else:
            items.append(item)
        if isinstance(item, ProtocolStopped):
            break
        joinable = single
    return items


def decode_columns(placed: PlacedBatch) -> list[Item]:
    """`decode`, by columns."""
    properties = placed.messages.properties
    count = len(placed)
    if not any(name in properties for name in (VERSION, TXN, SEQ, RECORDS, MARKER)):
        return [RecordSlice(None, placed.positions.first, placed.positions.last, 0, count)] if count else []
    codes, table = transaction_codes(properties.get(TXN), count)
    most, least = table.most[codes], table.least[codes]
    seqs = numbers(properties.get(SEQ), count, MAX_LEAST)
    sizes = numbers(properties.get(RECORDS), count, MAX_SET_RECORDS)
    version = properties.get(VERSION)
    current = texts_equal(version, count, str(PROTOCOL_VERSION))
    sets = (sizes > 0) & (placed.positions.indexes == NO_INDEX)

    plain = (least == ABSENT) & (seqs == ABSENT)
    sound = (least > 0) & (seqs > 0) & (seqs - 1 <= MAX_LEAST - np.maximum(sizes, 1))
    records = (sets & current & (plain | sound)) | ((sizes == ABSENT) & (plain | (sound & current)))
    odd = ~records | present(properties.get(MARKER), count) | (present(version, count) & ~current)

    starts = _starts(odd | sets, sound, most, least, seqs)
    lasts = np.append(starts[1:], count) - 1
    size = np.where(sets[starts], sizes[starts], lasts - starts + 1)
    runs = _runs(placed.positions, starts, lasts, sets[starts], size, TxnColumns(most, least, seqs))
    return _with_odd(placed, starts, odd[starts], runs) if odd.any() else [*runs]


class TxnColumns(NamedTuple):
    """Transaction and seq of each row; `least` is positive if the row has a transaction."""

    most: NDArray[np.int64]
    least: NDArray[np.int64]
    seqs: NDArray[np.int64]


def _starts(
    alone: NDArray[np.bool_],
    sound: NDArray[np.bool_],
    most: NDArray[np.int64],
    least: NDArray[np.int64],
    seqs: NDArray[np.int64],
) -> NDArray[np.intp]:
    """Rows at which a slice begins; a row that is `alone` is a slice of its own."""
    begins = np.ones(len(alone), np.bool_)
    follows = (most[1:] == most[:-1]) & (least[1:] == least[:-1]) & (~sound[1:] | (seqs[1:] - 1 == seqs[:-1]))
    begins[1:] = alone[1:] | alone[:-1] | ~follows
    return np.flatnonzero(begins)


def _runs(
    positions: Positions,
    starts: NDArray[np.intp],
    ends: NDArray[np.intp],
    sets: NDArray[np.bool_],
    sizes: NDArray[np.int64],
    txns: TxnColumns,
) -> list[RecordSlice]:
    first = positions.take(starts)
    last = positions.take(ends)
    if sets.any():
        first = Positions(first.ledgers, first.entries, np.where(sets, 0, first.indexes))
        last = Positions(last.ledgers, last.entries, np.where(sets, sizes - 1, last.indexes))
    firsts = [*first]
    lasts = firsts if sizes.max(initial=0) == 1 else [*last]
    least = txns.least[starts]
    ids: list[TxnId | None] = [*map(TxnId._make, zip(txns.most[starts].tolist(), least.tolist(), strict=True))]
    for row in np.flatnonzero(least < 0).tolist():
        ids[row] = None
    seqs = np.maximum(txns.seqs[starts], 0).tolist()
    return [*map(RecordSlice._make, zip(ids, firsts, lasts, seqs, sizes.tolist(), strict=True))]


def _with_odd(
    placed: PlacedBatch, starts: NDArray[np.intp], odd: NDArray[np.bool_], runs: list[RecordSlice]
) -> list[Item]:
    items: list[Item] = [*runs]
    for at in np.flatnonzero(odd).tolist():
        row = int(starts[at])
        items[at] = item = _row(placed.positions[row], placed.messages[row])
        if isinstance(item, ProtocolStopped):
            return items[: at + 1]
    return items


def _follows(run: RecordSlice, item: RecordSlice) -> bool:
    return run.txn == item.txn and (run.txn is None or item.first_seq == run.last_seq + 1)


def _row(position: Position, message: Message) -> Item:
    properties = message.properties
    version = properties.get(VERSION)
    if version is not None and version != str(PROTOCOL_VERSION):
        return UnsupportedProtocol(position, repr(version[:40]))
    if MARKER in properties:
        return _marker(position, message)
    first = last = position
    size, refused = 1, None
    if RECORDS in properties:
        size = number(properties[RECORDS], MAX_SET_RECORDS)
        if size > 0 and position.batch == NO_INDEX:
            first, last = position._replace(batch=0), position._replace(batch=size - 1)
        else:
            refused = f"{_quoted(message, RECORDS)} at batch index {position.batch}"
    if TXN not in properties and SEQ not in properties:
        if refused is None and RECORDS in properties and version is None:
            refused = f"{RECORDS} without {VERSION}"
        return Undecodable(first, last, refused) if refused else RecordSlice(None, first, last, 0, size)
    return _transactional(message, first, last, size, refused)


def _transactional(message: Message, first: Position, last: Position, size: int, refused: str | None) -> Item:
    properties = message.properties
    if refused is None and VERSION not in properties:
        refused = f"{TXN} without {VERSION}"
    seq = number(properties.get(SEQ, ""), MAX_LEAST)
    if refused is None and not 1 <= seq <= MAX_LEAST - size + 1:
        refused = _quoted(message, SEQ)
    try:
        txn = TxnId.parse(properties.get(TXN, ""))
    except ValueError:
        return Undecodable(first, last, refused or _quoted(message, TXN))
    return Undecodable(first, last, refused) if refused else RecordSlice(txn, first, last, seq, size)


def _marker(position: Position, message: Message) -> PlacedMarker | UndecodableMarker:
    try:
        if message.properties[MARKER] != MARKER_TEXT:
            raise ValueError(_quoted(message, MARKER))
        if VERSION not in message.properties:
            raise ValueError(f"{MARKER} without {VERSION}")
        return PlacedMarker(position, decode_marker(message.value))
    except ValueError as error:
        return UndecodableMarker(position, str(error))


def _quoted(message: Message, name: str) -> str:
    text = message.properties.get(name)
    return f"no {name}" if text is None else f"{name}={text[:40]!r}"
