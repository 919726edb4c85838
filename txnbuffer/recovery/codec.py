"""The stored formats of a topic's state: `state-1` in an end entry, and the sealed segments `part-1`, `mutations-1`.

`state-1` is the state of one topic between two messages, except its sealed segments: the transaction buffer
(`txnbuffer.buffer.state`), the position of the sequencer, the first seqno of each ledger, and the following ledger. The
latter is the ledger in which the log continues, stored if the ledger of the applied position is closed and wholly
applied; it proves that no message is missing between the two.

For change streams it has the failover log, newest version first (`failover_uuid`: six bytes each, big-endian), the
mutation snapshots that are not sealed yet, ascending (seqnos and positions of the first and last mutation of each, and
their count), and the durable cursors by name, each with the seqno up to which its owner has everything. Entries of
earlier releases lack these; then the topic has the one version that its incarnation gives.

A sealed segment of mutation snapshots is the entry `T-m1`, `T-m2`, … of schema `mutations-1`: the same columns of the
mutation snapshots that follow those of the segment before, with topic, number, epoch and chain digests as below. Sealed
and unsealed mutation snapshots together are all that the log still holds, except where nobody read the topic.

A sealed segment of the buffer is the entry `T-1`, `T-2`, … of schema `part-1`; the format calls it a *part*. It has
aborted transactions with the positions of their markers, and ranges of suppressed positions, each in log order; its
topic, number, epoch, the first and last position of its items, and the chain digest before it. It ends with the digest
of all bytes before, which is the chain digest after it. Once an end entry names a segment, it is never written again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from broker_io.position import Int64s, Position, Positions
from snapshots.errors import SnapshotDamaged
from snapshots.format import (
    MAX_LONG_BYTES,
    MUTATIONS,
    SEGMENT,
    BadRecord,
    EntryKey,
    Stored,
    axes_of,
    checked,
    get_columns,
    get_position,
    put_columns,
    put_position,
    reaches,
    record,
    sealed,
    unsealed,
)
from txnbuffer.buffer.state import (
    BufferSegment,
    BufferState,
    CoordinatorColumns,
    Counters,
    Damage,
    Items,
    OngoingColumns,
    SegmentColumns,
    bitmap_of_bytes,
)
from txnbuffer.buffer.visibility import SequencerState
from txnbuffer.model import TxnId
from txnbuffer.mutations.index import EMPTY_COLUMNS, IndexColumns, IndexSegment
from txnbuffer.streams.failover import Version

REST_BYTES = 2048
"""Bytes of an entry without its items: key, properties, the topic's name, ends of columns."""
ITEM_BYTES = 6 * MAX_LONG_BYTES


def segment_items(limit: int) -> int:
    """The number of items, whatever they are, that fit into an entry of at most `limit` bytes."""
    return (limit - REST_BYTES) // ITEM_BYTES


S = TypeVar("S", BufferSegment, IndexSegment)


@dataclass(frozen=True, slots=True, eq=False)
class EncodedSegment(Generic[S]):
    """One segment entry; `chain_after` is empty until it is encoded."""

    topic: str
    epoch: int
    chain_before: bytes
    segment: S
    chain_after: bytes = b""


def put_items(prefix: str, items: Items) -> dict[str, Any]:
    columns: dict[str, Int64s | Positions] = {
        f"{prefix}most": items.most,
        f"{prefix}least": items.least,
        f"{prefix}marker": items.markers,
        f"{prefix}first": items.firsts,
        f"{prefix}last": items.lasts,
    }
    return {f"{prefix}aborts": len(items.least), f"{prefix}ranges": len(items.firsts), **put_columns(columns)}


def get_items(values: Mapping[str, Any], prefix: str) -> Items:
    return Items(
        *get_columns(values, values[f"{prefix}aborts"], prefix, "most", "least", "marker"),
        *get_columns(values, values[f"{prefix}ranges"], prefix, "first", "last"),
    )


def encode_segment(entry: EncodedSegment[BufferSegment]) -> bytes:
    """The value of a segment entry; its last 16 bytes are the chain digest after it."""
    items = entry.segment.items
    values = {
        "topic": entry.topic,
        "number": entry.segment.number,
        "epoch": entry.epoch,
        **put_position("low", items.first),
        **put_position("high", items.last),
        "chain_before": entry.chain_before,
        **put_items("", items),
    }
    return sealed(record("part-1", __package__), values, "chain_after")


class BufferSegmentPayload(NamedTuple):
    """A sealed segment for the writer of snapshots."""

    segment: BufferSegment

    @property
    def number(self) -> int:
        return self.segment.number

    def encode(self, topic: str, epoch: int, chain_before: bytes) -> bytes:
        return encode_segment(EncodedSegment(topic, epoch, chain_before, self.segment))


def _decode(data: bytes) -> tuple[EncodedSegment[BufferSegment], Position | None, Position | None]:
    values = unsealed(record("part-1", __package__), data)
    segment = BufferSegment(values["number"], get_items(values, ""))
    entry = EncodedSegment(values["topic"], values["epoch"], values["chain_before"], segment, values["chain_after"])
    return entry, get_position(values, "low"), get_position(values, "high")


def decode_segment(topic: str, number: int, stored: Stored) -> EncodedSegment[BufferSegment]:
    """The segment entry of that number. Raises SnapshotDamaged and UnsupportedSnapshot."""
    key = EntryKey(topic, SEGMENT, number)
    entry, low, high = checked(key, stored, _decode)
    if (entry.topic, entry.segment.number) != (topic, number):
        raise SnapshotDamaged(topic, str(key), f"it is segment {entry.segment.number} of topic {entry.topic}")
    items: Items = entry.segment.items
    if not len(items) or (low, high) != (items.first, items.last) or entry.epoch != stored.epoch:
        raise SnapshotDamaged(topic, str(key), "its head and its items contradict each other")
    return entry


class MutationsPayload(NamedTuple):
    """A sealed segment of mutation snapshots for the writer of snapshots."""

    segment: IndexSegment

    @property
    def number(self) -> int:
        return self.segment.number

    def encode(self, topic: str, epoch: int, chain_before: bytes) -> bytes:
        columns = self.segment.columns()
        values = {
            "topic": topic,
            "number": self.number,
            "epoch": epoch,
            "chain_before": chain_before,
            "snapshots": len(columns),
            **put_columns(_index_columns("", columns)),
        }
        return sealed(record("mutations-1", __package__), values, "chain_after")


def _index_columns(prefix: str, columns: IndexColumns) -> dict[str, Int64s | Positions]:
    return {
        f"{prefix}start": columns.starts,
        f"{prefix}end": columns.ends,
        f"{prefix}first": columns.firsts,
        f"{prefix}last": columns.lasts,
        f"{prefix}count": columns.rows,
    }


def _get_index(values: Mapping[str, Any], count: int, prefix: str) -> IndexColumns:
    """Raises BadRecord if they are not ascending mutation snapshots."""
    index = IndexColumns(*get_columns(values, count, prefix, "start", "end", "first", "last", "count"))
    try:
        index.check()
    except ValueError as error:
        raise BadRecord(str(error)) from error
    return index


def _decode_mutations(data: bytes) -> EncodedSegment[IndexSegment]:
    values = unsealed(record("mutations-1", __package__), data)
    if values["snapshots"] < 1:
        raise BadRecord("it has no mutation snapshots")
    segment = IndexSegment(values["number"], _get_index(values, values["snapshots"], ""))
    return EncodedSegment(values["topic"], values["epoch"], values["chain_before"], segment, values["chain_after"])


def decode_mutations(topic: str, number: int, stored: Stored) -> EncodedSegment[IndexSegment]:
    """The segment of mutation snapshots of that number. Raises SnapshotDamaged and UnsupportedSnapshot."""
    key = EntryKey(topic, MUTATIONS, number)
    entry = checked(key, stored, _decode_mutations)
    if (entry.topic, entry.segment.number) != (topic, number):
        raise SnapshotDamaged(topic, str(key), f"it is segment m{entry.segment.number} of topic {entry.topic}")
    if entry.epoch != stored.epoch:
        raise SnapshotDamaged(topic, str(key), f"its epoch is {entry.epoch}, but {stored.epoch} in its properties")
    return entry


UNKNOWN_LEDGER = -1

UUID_BYTES = 6


@dataclass(frozen=True, slots=True, eq=False)
class TopicState:
    """The state of a topic in its end entry.

    `origin_ledger` is the first ledger that existed when the topic was registered. `following_ledger` is the one
    in which the log continues after `buffer.applied` if the ledger of that position was closed and wholly
    applied (or if nothing was applied yet), else UNKNOWN_LEDGER. `versions`: the failover log, newest first, not
    checked. `unsealed_index`: the mutation snapshots after those of the sealed segments. `cursors`: names and seqnos
    of the durable cursors.
    """

    buffer: BufferState
    sequencer: SequencerState
    origin_ledger: int
    following_ledger: int = UNKNOWN_LEDGER
    versions: tuple[Version, ...] = ()
    unsealed_index: IndexColumns = EMPTY_COLUMNS
    cursors: tuple[tuple[str, int], ...] = ()

    @property
    def resume_ledger(self) -> int:
        """The lowest ledger that a recovery from here, or a reader of what is not decided yet, has to read."""
        applied, max_read, sequenced = self.buffer.applied, self.buffer.max_read, self.sequencer.position
        if applied is None or self.following_ledger != UNKNOWN_LEDGER:
            needed = [self.following_ledger]
        else:
            needed = [applied.ledger]
        for position in (max_read, sequenced):
            if not reaches(position, applied):
                needed.append(self.origin_ledger if position is None else position.ledger)
        return min(needed)


def encode_state(state: TopicState) -> bytes:
    sequencer = state.sequencer
    values = {
        "origin_ledger": state.origin_ledger,
        "following_ledger": state.following_ledger,
        **_put_buffer(state.buffer),
        **put_position("sequenced", sequencer.position),
        "next_seqno": sequencer.next_seqno,
        "seqno_ledger": sequencer.ledgers,
        "seqno_first": sequencer.first_seqnos,
        **_put_unsealed_index(state.unsealed_index),
        "failover_uuid": [version.uuid.to_bytes(UUID_BYTES, "big") for version in state.versions],
        "failover_seqno": np.array([version.seqno for version in state.versions], np.int64),
        "cursor_name": [name.encode() for name, _ in state.cursors],
        "cursor_seqno": np.array([seqno for _, seqno in state.cursors], np.int64),
    }
    return record("state-1", __package__).encode(values)


def decode_state(data: bytes) -> TopicState:
    """Read what `encode_state` wrote. Raises BadRecord."""
    values = record("state-1", __package__).decode(data)
    for one, other in (("seqno_ledger", "seqno_first"), ("failover_uuid", "failover_seqno")):
        if len(values[one]) != len(values[other]):
            raise BadRecord(f"{len(values[one])} rows of {one} for {len(values[other])} of {other}")
    uuids = [int.from_bytes(uuid, "big") for uuid in values["failover_uuid"]]
    return TopicState(
        _get_buffer(values),
        SequencerState(
            get_position(values, "sequenced"), values["next_seqno"], values["seqno_ledger"], values["seqno_first"]
        ),
        values["origin_ledger"],
        values["following_ledger"],
        tuple(map(Version, uuids, values["failover_seqno"].tolist())),
        _get_unsealed_index(values),
        _get_cursors(values),
    )


def _put_buffer(buffer: BufferState) -> dict[str, Any]:
    """Each group of columns follows its number of rows."""
    ongoing, coordinators, segments = buffer.ongoing, buffer.coordinators, buffer.segments
    damage = np.array([(*entry.txn, entry.expected, entry.accepted) for entry in buffer.damage], np.int64)
    most, least, expected, accepted = damage.reshape(-1, 4).T
    columns: dict[str, Int64s | Positions] = {
        "ongoing_most": ongoing.most,
        "ongoing_least": ongoing.least,
        "ongoing_first": ongoing.firsts,
        "ongoing_before": ongoing.befores,
        "ongoing_highest": ongoing.highest,
        "ongoing_accepted": ongoing.accepted,
        "coordinator_most": coordinators.most,
        "coordinator_low_water_mark": coordinators.low_water_marks,
        "coordinator_epoch": coordinators.epochs,
        "part_last_ledger": segments.last_ledgers,
        "part_aborts": segments.aborts,
        "part_ranges": segments.suppressed,
        "damage_most": most,
        "damage_least": least,
        "damage_at": Positions.of([entry.position for entry in buffer.damage]),
        "damage_expected": expected,
        "damage_accepted": accepted,
    }
    return {
        "part_size": buffer.segment_size,
        **put_position("applied", buffer.applied),
        **put_position("max_read", buffer.max_read),
        "first_ledger": buffer.first_ledger,
        "ongoing": len(ongoing),
        "coordinators": len(coordinators),
        "coordinator_committed": list(coordinators.committed),
        "coordinator_aborted": list(coordinators.aborted),
        "part_first": segments.first,
        "parts": len(segments),
        **put_items("tail_", buffer.unsealed),
        **buffer.counters._asdict(),
        "damage": len(buffer.damage),
        **put_columns(columns),
    }


def _get_buffer(values: Mapping[str, Any]) -> BufferState:
    count = values["coordinators"]
    committed, aborted = tuple(values["coordinator_committed"]), tuple(values["coordinator_aborted"])
    if not len(committed) == len(aborted) == count:
        raise BadRecord(f"{len(committed)} and {len(aborted)} bitmaps for {count} coordinators")
    try:
        [*map(bitmap_of_bytes, (*committed, *aborted))]
    except ValueError as error:
        raise BadRecord(str(error)) from None
    most, low_water_marks, epochs = get_columns(values, count, "coordinator_", "most", "low_water_mark", "epoch")
    damage = get_columns(values, values["damage"], "damage_", "most", "least", "at", "expected", "accepted")
    return BufferState(
        segment_size=values["part_size"],
        applied=get_position(values, "applied"),
        max_read=get_position(values, "max_read"),
        first_ledger=values["first_ledger"],
        ongoing=OngoingColumns(
            *get_columns(
                values, values["ongoing"], "ongoing_", "most", "least", "first", "before", "highest", "accepted"
            )
        ),
        coordinators=CoordinatorColumns(most, low_water_marks, epochs, committed, aborted),
        segments=SegmentColumns(
            values["part_first"], *get_columns(values, values["parts"], "part_", "last_ledger", "aborts", "ranges")
        ),
        unsealed=get_items(values, "tail_"),
        counters=Counters(**{name: values[name] for name in Counters._fields}),
        damage=tuple(
            Damage(TxnId(int(most), int(least)), position, int(expected), int(accepted))
            for most, least, position, expected, accepted in zip(*damage, strict=True)
        ),
    )


def _get_cursors(values: Mapping[str, Any]) -> tuple[tuple[str, int], ...]:
    names, seqnos = values["cursor_name"], values["cursor_seqno"].tolist()
    if len(names) != len(seqnos):
        raise BadRecord(f"{len(names)} durable cursors with {len(seqnos)} seqnos")
    try:
        return tuple(zip([name.decode() for name in names], seqnos, strict=True))
    except UnicodeDecodeError as error:
        raise BadRecord(f"the name of a durable cursor is not UTF-8 ({error})") from None


def _put_unsealed_index(index: IndexColumns) -> dict[str, Any]:
    """Columns at full length: the schema has no number of rows for them."""
    columns = {"index_start": index.starts, "index_end": index.ends, "index_count": index.rows}
    for end, places in (("first", index.firsts), ("last", index.lasts)):
        columns |= zip(axes_of(f"index_{end}"), (places.ledgers, places.entries, places.indexes), strict=True)
    return columns


def _get_unsealed_index(values: Mapping[str, Any]) -> IndexColumns:
    sizes = {len(column) for name, column in values.items() if name.startswith("index_")}
    if len(sizes) > 1:
        raise BadRecord("the columns of the index of mutation snapshots have different lengths")
    return _get_index(values, len(values["index_start"]), "index_")
