"""Dropping parts whose ledgers are gone."""

from __future__ import annotations

import itertools

from broker_io.port import Broker
from broker_io.position import Position
from snapshots.envelope import EPOCH_PROPERTY, KIND_PROPERTY, VERSION_PROPERTY, Stored
from snapshots.errors import SnapshotDamaged
from snapshots.keys import EntryKey, KeyKind, part_key
from txnbuffer.recovery.parts import PartEntry, decode_part
from txnbuffer.recovery.tailing import Tail


def drop_parts(broker: Broker, snapshot_topic: str, tail: Tail, first_ledger: int) -> bool:
    """All ledgers below one are gone: let buffer and next snapshot forget the parts that only they needed.

    Each dropped part is read again first, for its ids stand nowhere else. True if there were any. Raises
    SnapshotDamaged if one can't be read; then nothing was dropped.
    """
    tail.numbering.sequencer.trim(first_ledger)
    writer, summaries = tail.writer, tail.buffer.parts.summaries
    if writer.waiting:
        return False  # not all parts are durable yet; the next snapshot comes back to this
    expired = itertools.takewhile(lambda summary: summary.last_ledger < first_ledger, summaries)
    numbers = [summary.number for summary in expired if summary.number in writer.chain]
    places = writer.live_parts
    entries = [read_part(broker, snapshot_topic, tail.topic, number, places.get(number)) for number in numbers]
    for number, entry in zip(tail.buffer.trim(first_ledger), entries, strict=True):
        tail.buffer.forget(entry.part)
        writer.drop_to(number + 1)
    return bool(entries)


def read_part(broker: Broker, snapshot_topic: str, topic: str, number: int, at: Position | None) -> PartEntry:
    """One part entry from where it stands in the snapshot topic."""
    key = EntryKey(topic, KeyKind.PART, number)
    if at is None:
        raise SnapshotDamaged(topic, str(key), "it is missing, though the end entry names it")
    with broker.reader(snapshot_topic, at, compacted=True) as reader:  # raw it may be trimmed behind a compaction
        placed = reader.read(limit=1, timeout=30.0)
    if placed is None or placed.positions.first != at or placed.messages.keys[0] != part_key(topic, number):
        raise SnapshotDamaged(topic, str(key), f"it does not stand at {at} of {snapshot_topic} any more")
    _, value, properties, _ = placed.messages[0]
    names = (VERSION_PROPERTY, KIND_PROPERTY, EPOCH_PROPERTY)
    version, kind, epoch = (properties.get(name, "") for name in names)
    return decode_part(topic, number, Stored(at, version, kind, int(epoch or -1), value))
