"""The log protocol: how the messages of a topic express transactions.

A message is an *ordinary record*, a *transactional record*, a *record set* or a *marker*. Its
properties say which. They are texts; integers are written in decimal:

- `tb.v`        version of this protocol, `1`. Every message that has one of the other properties has it. A
                message with another or an unreadable version stops the topic.
- `tb.txn`      `most:least`, the transaction of a record.
- `tb.seq`      1, 2, ...: the number of the record within its transaction and this topic. On a record
                set, that of its first record.
- `tb.records`  n, from 1 to 2^31 - 1: the message is a record set, its value a block of n records (see
                `txnbuffer.recordset`). The records have the positions `(ledger, entry, 0 ... n - 1)` and
                consecutive seqs. A record set is never a member of a batch of the broker.
- `tb.marker`   `1`: the message is a marker. Readers ignore its other properties, except `tb.v`.

A record without `tb.txn` and `tb.seq` is ordinary. A record whose properties contradict this (an
unreadable or missing `tb.txn`, `tb.seq`, `tb.records`, no `tb.v`) is *undecodable*: it is counted and never
visible.

The value of a marker is one Avro record without its schema, which is `MARKER_SCHEMA`. Its fields, in order:

- `coordinator` long: the `most` of all its transactions.
- `epoch` long: epoch of the owner that wrote the marker, >= 0.
- `low_water_mark` long: every transaction of the coordinator up to it has ended, >= 0; 0 if none is known to have.
- `decided` boolean: the outcomes are in the decision log; false: this marker is the decision (one-phase).
- `least` array of longs: the `least` of the ended transactions, each as the difference from its
  predecessor, the first from 0.
- `outcomes` bytes: one byte for each of them, 0 ABORT, 1 COMMIT.
- `records` array of longs: for each of them how many records this topic must hold.

A marker without items is an epoch marker. A marker has no key. A marker that breaks one of these rules can't be
decoded and stops the topic.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np

from broker_io.batch import Batch, Labels, Message, Numbers, PropertyColumn
from txnbuffer import avro
from txnbuffer.model import MAX_LEAST, PROTOCOL_VERSION, Marker, MarkerItem, Outcome, TxnId

RESERVED = "tb."
"""Properties whose names begin with this belong to the protocol; records of applications have none of them."""
VERSION = "tb.v"
TXN = "tb.txn"
SEQ = "tb.seq"
RECORDS = "tb.records"
MARKER = "tb.marker"

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

_SCHEMA = avro.schema(MARKER_SCHEMA)
_MARKER_PROPERTIES = {VERSION: str(PROTOCOL_VERSION), MARKER: MARKER_TEXT}
_OUTCOMES = (Outcome.ABORT, Outcome.COMMIT)


def encode_marker(marker: Marker) -> Message:
    """The message that carries a marker."""
    least = [item.txn.least for item in marker.items]
    payload = avro.encode(
        _SCHEMA,
        {
            "coordinator": marker.coordinator,
            "epoch": marker.epoch,
            "low_water_mark": marker.low_water_mark,
            "decided": marker.decided,
            "least": [after - before for before, after in itertools.pairwise([0, *least])],
            "outcomes": bytes([item.outcome for item in marker.items]),
            "records": [item.records for item in marker.items],
        },
    )
    return Message(None, payload, _MARKER_PROPERTIES)


def decode_marker(payload: bytes | None) -> Marker:
    """Decode the value of a marker. Raises ValueError that says what is wrong."""
    if payload is None:
        raise ValueError("it has no value")
    columns = avro.decode(_SCHEMA, payload)
    least = list(itertools.accumulate(columns["least"]))
    outcomes, records, most = columns["outcomes"], columns["records"], columns["coordinator"]
    if not len(least) == len(outcomes) == len(records):
        raise ValueError(f"its columns have {len(least)}, {len(outcomes)} and {len(records)} items, not equally many")
    if least and not 1 <= min(least) <= max(least) <= MAX_LEAST:
        raise ValueError(f"a transaction id is out of range: {min(least)} to {max(least)}, not within 1 to {MAX_LEAST}")
    if max(outcomes, default=0) > 1:
        raise ValueError(f"{max(outcomes)} is not an outcome, which is 0 or 1")
    txns = map(TxnId._make, zip(itertools.repeat(most), least))
    items = map(MarkerItem._make, zip(txns, map(_OUTCOMES.__getitem__, outcomes), records, strict=True))
    return Marker(most, columns["epoch"], columns["low_water_mark"], columns["decided"], tuple(items))


def transactional(batch: Batch, txn: TxnId, first_seq: int) -> Batch:
    """The same records as records `first_seq`, `first_seq + 1`, ... of a transaction."""
    count = len(batch)
    added: dict[str, PropertyColumn] = {
        VERSION: Labels.constant(str(PROTOCOL_VERSION), count),
        TXN: Labels.constant(str(txn), count),
        SEQ: Numbers(np.arange(first_seq, first_seq + count, dtype=np.int64)),
    }
    return replace(batch, properties={**batch.properties, **added})
