"""The log protocol: how the messages of a topic express transactions, and its properties as columns of a batch.

A message is an *ordinary record*, a *transactional record*, a *record set* or a *marker*. Its properties say which.
They are texts; integers are decimal:

- `tb.v`        version of this protocol, `1`. Every message with one of the other properties has it. A message
                with another version, or one that cannot be read, stops the topic.
- `tb.txn`      `most:least`, the transaction id of a record.
- `tb.seq`      1, 2, ...: the number of the record within its transaction and topic. Of a record set: the
                number of its first record.
- `tb.records`  n, from 1 to 2^31 - 1: the message is a record set, and its value is a block of n records (see
                `txnbuffer.recordset`). The records have the positions `(ledger, entry, 0 ... n - 1)` and
                consecutive seqs. A record set is never in a batch of the broker.
- `tb.marker`   `1`: the message is a marker. Readers ignore its other properties, except `tb.v`.
- `tb.removed`  `1`: compaction has emptied the record, or record set. Its key, its value and the properties of the
                application are gone. It counts as before, with its transaction, seq and seqno, but no reader shows it.
                It needs no `tb.v`.

A record without `tb.txn` and `tb.seq` is ordinary. A record with properties that contradict these rules (`tb.v`,
`tb.txn`, `tb.seq` or `tb.records` is missing or cannot be read) is *undecodable*: it is counted and never visible.

The value of a marker is one Avro record of `MARKER_SCHEMA`, without the schema. Its fields, in order:

- `coordinator` long: the `most` of all its transactions.
- `epoch` long: epoch of the owner that wrote the marker, >= 0.
- `low_water_mark` long: every transaction of the coordinator up to it has ended, >= 0; 0: unknown.
- `decided` boolean, the byte 1 or 0: true: the outcomes are in the decision log; false: this marker is the decision
  (one-phase commit).
- `least` array of longs: the `least` of the ended transactions, each as the difference from its predecessor, the first
  from 0.
- `outcomes` bytes: one byte for each of these transactions, 0 ABORT, 1 COMMIT.
- `records` array of longs: for each of them the number of records that this topic must have.

A number has at most 64 bits. A marker without transactions is an epoch marker. A marker has no key. A marker that
breaks one of these rules cannot be decoded and stops the topic.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from broker_io.batch import Batch, Blobs, Labels, Message, Numbers, PropertyColumn
from txnbuffer import avro
from txnbuffer.model import MAX_LEAST, PROTOCOL_VERSION, Marker, Outcome, TxnId, as_marker_item, as_txn_id

RESERVED = "tb."
"""Property names with this prefix belong to the protocol; applications cannot use them."""
VERSION = "tb.v"
TXN = "tb.txn"
SEQ = "tb.seq"
RECORDS = "tb.records"
MARKER = "tb.marker"
REMOVED = "tb.removed"

MARKER_TEXT = "1"
MAX_SET_RECORDS = 2**31 - 1

MARKER_SCHEMA = {
    "type": "record",
    "name": "Marker",
    "namespace": "txnbuffer",
    "fields": [
        {"name": "coordinator", "type": "long"},
        {"name": "epoch", "type": "long"},
        {"name": "low_water_mark", "type": "long"},
        {"name": "decided", "type": "boolean"},
        {"name": "least", "type": {"type": "array", "items": "long"}},
        {"name": "outcomes", "type": "bytes"},
        {"name": "records", "type": {"type": "array", "items": "long"}},
    ],
}

_SCHEMA = avro.stored_schema(MARKER_SCHEMA)
_VERSION_TEXT = str(PROTOCOL_VERSION)
_MARKER_PROPERTIES = {VERSION: _VERSION_TEXT, MARKER: MARKER_TEXT}
_MARKER_COLUMNS = Batch.of([Message(None, b"", _MARKER_PROPERTIES)]).properties
_NO_KEY = Blobs.none(1)
_TOO_LONG = re.compile(rb"[\x80-\xff]{9}[\x02-\xff]")
"""A number of more than 64 bits, of which the Avro decoder would drop the highest. No other field has these bytes."""
_OUTCOMES = (Outcome.ABORT, Outcome.COMMIT)


def encode_marker(marker: Marker) -> Message:
    """Return the message of a marker."""
    return Message(None, _marker_value(marker), _MARKER_PROPERTIES)


def marker_batch(marker: Marker) -> Batch:
    """Return a batch of the message of a marker."""
    value = _marker_value(marker)
    return Batch(_NO_KEY, Blobs(value, np.array((0, len(value)), np.int32), None), _MARKER_COLUMNS)


def _marker_value(marker: Marker) -> bytes:
    differences: list[int] = []
    outcomes: list[Outcome] = []
    records: list[int] = []
    before = 0
    for txn, outcome, expected in marker.items:
        differences.append(txn.least - before)
        outcomes.append(outcome)
        records.append(expected)
        before = txn.least
    return avro.encode(
        _SCHEMA,
        {
            "coordinator": marker.coordinator,
            "epoch": marker.epoch,
            "low_water_mark": marker.low_water_mark,
            "decided": marker.decided,
            "least": differences,
            "outcomes": bytes(outcomes),
            "records": records,
        },
    )


def decode_marker(payload: bytes | None) -> Marker:
    """Return the marker of a message with this value. Raises ValueError."""
    if payload is None:
        raise ValueError("it has no value")
    if _TOO_LONG.search(payload):
        raise ValueError("a number has more than 64 bits")
    columns = avro.decode(_SCHEMA, payload)
    least = list(itertools.accumulate(columns["least"]))
    outcomes, records, most = columns["outcomes"], columns["records"], columns["coordinator"]
    if not len(least) == len(outcomes) == len(records):
        raise ValueError(f"its columns have {len(least)}, {len(outcomes)} and {len(records)} items, not equally many")
    if least and not 1 <= min(least) <= max(least) <= MAX_LEAST:
        raise ValueError(f"a transaction id is out of range: {min(least)} to {max(least)}, not within 1 to {MAX_LEAST}")
    if max(outcomes, default=0) > 1:
        raise ValueError(f"{max(outcomes)} is not an outcome, which is 0 or 1")
    txns = map(as_txn_id, zip(itertools.repeat(most), least))
    items = map(as_marker_item, zip(txns, map(_OUTCOMES.__getitem__, outcomes), records, strict=True))
    return Marker(most, columns["epoch"], columns["low_water_mark"], columns["decided"], tuple(items))


def transactional(batch: Batch, txn: TxnId, first_seq: int) -> Batch:
    """Return the records with the properties of records `first_seq`, `first_seq + 1`, ... of a transaction."""
    count = len(batch)
    added: dict[str, PropertyColumn] = {
        VERSION: Labels.constant(str(PROTOCOL_VERSION), count),
        TXN: Labels.constant(str(txn), count),
        SEQ: Numbers(np.arange(first_seq, first_seq + count, dtype=np.int64)),
    }
    return replace(batch, properties={**batch.properties, **added})


ABSENT = -1
UNREADABLE = -2

_DIGITS_OF_63_BITS = 19
_PLAIN_IDS = re.compile(r"(?:[0-9]{1,18}:[0-9]{1,18}\n)*")


def numbers(column: PropertyColumn | None, count: int, limit: int) -> NDArray[np.int64]:
    """Return int64[count]: the texts as numbers from 1 to `limit`; ABSENT without a text, UNREADABLE for any other."""
    if column is None:
        return np.full(count, ABSENT, np.int64)
    if isinstance(column, Numbers):
        values = column.values.copy()
        values[(values < 1) | (values > limit)] = UNREADABLE
        if column.present is not None:
            values[~column.present] = ABSENT
        return values
    table = np.full(len(column.values) + 1, ABSENT, np.int64)
    table[:-1] = [number(text, limit) for text in column.values]
    return table[column.codes]


def number(text: str, limit: int) -> int:
    """Return a text as a number from 1 to `limit`; UNREADABLE if it is not one."""
    if not (text.isascii() and text.isdigit() and len(text) <= _DIGITS_OF_63_BITS):
        return UNREADABLE
    value = int(text)
    return value if 1 <= value <= limit else UNREADABLE


def transaction_codes(column: PropertyColumn | None, count: int) -> tuple[NDArray[np.int32], IdTable]:
    """Return int32[count], the row of each text in a table of the distinct ids (-1, the last row, without a text)."""
    if column is None:
        labels = Labels(np.full(count, -1, np.int32), ())
    elif isinstance(column, Numbers):  # a number has no colon
        labels = Labels(np.where(present(column, count), 0, -1).astype(np.int32), ("",))
    else:
        labels = used(column)
    return labels.codes, ids(labels.values)


SentSlice = tuple[TxnId, int, int, int]
"""Records of one transaction with consecutive seqs: its id, their first row and number, and the seq of the first."""
FEW_ROWS = 8
"""With fewer messages, reading rows costs less than reading columns."""


def sent_slices(properties: Mapping[str, PropertyColumn], count: int) -> Sequence[SentSlice] | None:
    """Return the slices of records that all have `tb.v`, `tb.txn` and `tb.seq`; None if one of them is invalid."""
    columns = properties[TXN], properties[SEQ], properties[VERSION]
    return _slices_of_rows(*columns) if count < FEW_ROWS else _slices_of_columns(*columns)


def _slices_of_rows(txns: PropertyColumn, seqs: PropertyColumn, versions: PropertyColumn) -> list[SentSlice] | None:
    slices: list[SentSlice] = []
    before: str | None = None
    texts = zip(txns.to_list(), seqs.to_list(), versions.to_list(), strict=True)
    for row, (text, seq_text, version) in enumerate(texts):
        seq = number(seq_text or "", MAX_LEAST)
        if seq < 1 or text is None or version != _VERSION_TEXT:
            return None
        if text == before and seq == slices[-1][3] + row - slices[-1][1]:
            txn, start, size, first = slices[-1]
            slices[-1] = txn, start, size + 1, first
            continue
        try:
            slices.append((TxnId.parse(text), row, 1, seq))
        except ValueError:
            return None
        before = text
    return slices


def _slices_of_columns(txns: PropertyColumn, seqs: PropertyColumn, versions: PropertyColumn) -> list[SentSlice] | None:
    count = len(txns)
    codes, table = transaction_codes(txns, count)
    numbered = numbers(seqs, count, MAX_LEAST)
    current = texts_equal(versions, count, _VERSION_TEXT)
    if not current.all() or int(numbered.min()) < 1 or int(codes.min()) < 0 or int(table.least[codes].min()) < 1:
        return None
    begins = np.ones(count, np.bool_)
    begins[1:] = (codes[1:] != codes[:-1]) | (numbered[1:] != numbered[:-1] + 1)
    starts = np.flatnonzero(begins)
    rows = codes[starts]
    ids = map(as_txn_id, zip(table.most[rows].tolist(), table.least[rows].tolist(), strict=True))
    sizes = np.diff(starts, append=count).tolist()
    return [*zip(ids, starts.tolist(), sizes, numbered[starts].tolist(), strict=True)]


class IdTable(NamedTuple):
    """Two int64[k + 1]: most and least of k texts, both UNREADABLE if a text is not an id. The last row is ABSENT."""

    most: NDArray[np.int64]
    least: NDArray[np.int64]


def ids(texts: Sequence[str]) -> IdTable:
    """Return the table of k texts."""
    lines = "\n".join(texts)
    if _PLAIN_IDS.fullmatch(lines + "\n") and lines.count(":") == len(texts):
        rows = np.array([*map(int, lines.replace(":", "\n").split("\n")), ABSENT, ABSENT], np.int64).reshape(-1, 2)
        rows[rows[:, 1] == 0] = UNREADABLE
    else:
        rows = np.array([*map(_pair, texts), (ABSENT, ABSENT)], np.int64)
    return IdTable(rows[:, 0], rows[:, 1])


def present(column: PropertyColumn | None, count: int) -> NDArray[np.bool_]:
    """Return bool[count]: which rows have a text."""
    if column is None:
        return np.zeros(count, np.bool_)
    if isinstance(column, Numbers):
        return ~np.zeros(count, np.bool_) if column.present is None else column.present
    return column.codes >= 0


def removed_rows(messages: Batch) -> NDArray[np.bool_] | None:
    """Return bool[n]: which records compaction has emptied; None if it has emptied none."""
    if REMOVED not in messages.properties:
        return None
    removed = present(messages.properties[REMOVED], len(messages))
    return removed if removed.any() else None


COPY_NAMES = ("ORIGIN_MESSAGE_ID", "REAL_TOPIC")
"""Properties that the dead-letter and retry producers of Pulsar's clients add to copies of messages."""


def without_copies(messages: Batch) -> Batch:
    """Return the messages of a topic that has had no transactions, where dead letters are ordinary records.

    Those producers copy all properties of a message, also the ones of its transaction.
    """
    copied = [name for name in (TXN, SEQ) if name in messages.properties]
    if not copied or set(COPY_NAMES).isdisjoint(messages.properties):
        return messages
    count = len(messages)
    marked = [present(messages.properties.get(name), count) for name in COPY_NAMES]
    kept = ~(marked[0] | marked[1])
    changed: dict[str, PropertyColumn] = {}
    for name in copied:
        column = messages.properties[name]
        if isinstance(column, Numbers):
            changed[name] = Numbers(column.values, present(column, count) & kept)
        else:
            changed[name] = Labels(np.where(kept, column.codes, -1).astype(np.int32), column.values)
    return replace(messages, properties={**messages.properties, **changed})


def any_transactional(messages: Batch) -> bool:
    """Return whether a message has a transaction id or is a marker with transactions, even one that cannot be read.

    The topic has no snapshot, so dead letters are ordinary records.
    """
    messages = without_copies(messages)
    txns, markers = (present(messages.properties.get(name), len(messages)) for name in (TXN, MARKER))
    return bool(txns.any()) or not all(is_epoch_marker(messages[row]) for row in np.flatnonzero(markers).tolist())


def is_epoch_marker(message: Message) -> bool:
    """Return whether a message is a marker without transactions."""
    try:
        return MARKER in message.properties and not decode_marker(message.value or b"").items
    except ValueError:
        return False


def texts_equal(column: PropertyColumn | None, count: int, text: str) -> NDArray[np.bool_]:
    """Return bool[count]: which rows have exactly this text, a decimal number."""
    if column is None:
        return np.zeros(count, np.bool_)
    if isinstance(column, Numbers):
        same: NDArray[np.bool_] = column.values == int(text)
        return same & present(column, count)
    table = np.array([*map(text.__eq__, column.values), False], np.bool_)
    return table[column.codes]


def used(labels: Labels) -> Labels:
    """Return equal labels whose table has at most one text per row; slices of a batch share the table of the batch."""
    return labels if len(labels.values) <= len(labels.codes) else labels.fitted()


def _pair(text: str) -> tuple[int, int]:
    try:
        return TxnId.parse(text)
    except ValueError:
        return UNREADABLE, UNREADABLE
