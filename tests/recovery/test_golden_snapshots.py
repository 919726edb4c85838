"""The bytes of every kind of entry, committed: what this release writes and what it reads."""

import io
from dataclasses import replace

import fastavro
import numpy as np
import pytest
from golden_files import GOLDEN, committed
from pyroaring import BitMap64

from broker_io.position import Position, Positions
from snapshots.errors import SnapshotError
from snapshots.format import (
    MUTATIONS,
    BadRecord,
    ChainRange,
    EndEntry,
    Stored,
    chain_start,
    digest,
    no_segments,
    owner_message,
    record,
    schema,
)
from snapshots.format import SEGMENT as PART
from txnbuffer.buffer.state import (
    BufferSegment,
    BufferState,
    CoordinatorColumns,
    Counters,
    Damage,
    Items,
    OngoingColumns,
    SegmentColumns,
)
from txnbuffer.buffer.visibility import SequencerState
from txnbuffer.model import TxnId
from txnbuffer.mutations.index import IndexColumns, IndexSegment
from txnbuffer.recovery.codec import (
    EncodedSegment,
    MutationsPayload,
    TopicState,
    decode_mutations,
    decode_segment,
    decode_state,
    encode_segment,
    encode_state,
)
from txnbuffer.streams.failover import Version

T = "orders"


def longs(*values):
    return np.array(values, np.int64)


ITEMS = Items.of(
    aborts=[(TxnId(0, 9), Position(3, 5)), (TxnId(0, 3), Position(3, 5)), (TxnId(2, 700), Position(4, 0))],
    ranges=[(Position(3, 6), Position(3, 900)), (Position(4, 1, 0), Position(4, 1, 99))],
)
SEGMENT = EncodedSegment(T, 7, chain_start(T, "incarnation-1"), BufferSegment(1, ITEMS))
STATE = TopicState(
    BufferState(
        segment_size=5,
        applied=Position(5, 77),
        max_read=Position(4, 12, 3),
        first_ledger=3,
        ongoing=OngoingColumns(
            longs(0, 0),
            longs(20, 21),
            Positions.consecutive(5, 1, 2),
            Positions.consecutive(5, 0, 2),
            longs(4, 1),
            longs(3, 1),
        ),
        coordinators=CoordinatorColumns(
            longs(0, 2),
            longs(8, 0),
            longs(7, 7),
            (BitMap64([9, 10, 11]).serialize(), BitMap64().serialize()),
            (BitMap64([12]).serialize(), BitMap64([700]).serialize()),
        ),
        segments=SegmentColumns(1, longs(4), longs(3), longs(2)),
        unsealed=ITEMS,
        counters=Counters(1, 2, 3, 4, 1),
        damage=(Damage(TxnId(0, 10), Position(4, 12), 5, 4),),
    ),
    SequencerState(Position(4, 12), 1234, longs(3, 4), longs(1000, 1200)),
    origin_ledger=1,
    following_ledger=6,
)
C = b"c" * 16
NONE = {PART: ChainRange(1, 1, C, C), MUTATIONS: ChainRange(1, 1, C, C)}
TWO = (digest(b"1"), digest(b"2"))
CHAINED = {
    PART: ChainRange(1, 2, SEGMENT.chain_before, digest(b"after")),
    MUTATIONS: ChainRange(4, 9, digest(b"m3"), digest(b"m8")),
}
ENDS = {
    "spilled": EndEntry(T, "incarnation-1", 7, 3, CHAINED, 3, TWO),
    "": EndEntry(T, "i", 7, 1, NONE, state=encode_state(STATE)),
    "deleted": EndEntry(T, "i", 7, 9, NONE, 4, deleted=True),
}


def by_avro(name, data, package="txnbuffer.recovery"):
    parsed = fastavro.parse_schema(dict(schema(name, package)))
    return fastavro.schemaless_reader(io.BytesIO(data), parsed, None)


STREAMED = replace(
    STATE,
    versions=(Version(2**48 - 1, 1200), Version(7, 0)),
    unsealed_index=IndexColumns(
        longs(1000, 1101),
        longs(1100, 1233),
        Positions.consecutive(3, 4, 2),
        Positions.consecutive(4, 11, 2),
        longs(60, 1),
    ),
)


def test_owner():
    made = owner_message(7)
    data = committed("snapshots/owner-1.bin", made.value)
    assert record("owner-1", "snapshots").decode(data) == {"epoch": 7} == by_avro("owner-1", data, "snapshots")
    assert made.key == b"__owner"
    assert made.properties == {"tb.v": "1", "tb.kind": "owner", "tb.epoch": "7"}


def test_segment():
    data = committed("snapshots/part-1.bin", encode_segment(SEGMENT))
    entry = decode_segment(T, 1, Stored(Position(1, 0), "1", "part", 7, data))
    assert plain(entry.segment.items) == plain(ITEMS)
    assert entry.chain_after == data[-16:] == digest(data[:-16])
    avro = by_avro("part-1", data)
    assert np.cumsum(avro["least"]).tolist() == [9, 3, 700]
    assert (avro["aborts"], avro["ranges"], avro["low_entry"], avro["high_batch"]) == (3, 2, 5, 99)


def test_state():
    data = committed("snapshots/state-1.bin", encode_state(STATE))
    back = decode_state(data)
    assert back.buffer.differences(STATE.buffer) == []
    assert (back.origin_ledger, back.following_ledger) == (1, 6)
    assert back.sequencer.position == Position(4, 12)
    assert back.sequencer.next_seqno == 1234
    assert back.sequencer.first_seqnos.tolist() == [1000, 1200]
    avro = by_avro("state-1", data)
    assert avro["coordinators"] == 2
    assert BitMap64.deserialize(avro["coordinator_committed"][0]) == BitMap64([9, 10, 11])


def test_state_of_a_streamed_topic():
    data = committed("snapshots/state-1-streamed.bin", encode_state(STREAMED))
    back = decode_state(data)
    assert back.versions == STREAMED.versions
    assert [*back.unsealed_index] == [*STREAMED.unsealed_index]
    avro = by_avro("state-1", data)
    assert avro["failover_uuid"] == [b"\xff" * 6, b"\0\0\0\0\0\7"]
    assert np.cumsum(avro["index_last_entry"]).tolist() == [11, 12]
    earlier = decode_state(committed("snapshots/state-1.bin", encode_state(STATE)))
    assert (earlier.versions, len(earlier.unsealed_index)) == ((), 0)


@pytest.mark.parametrize(
    "broken",
    [
        {"failover_seqno": longs(1)},
        {"index_count": longs(60)},
        {"index_start": longs(1000, 1050)},
    ],
    ids=["a version too many", "another length", "an overlap"],
)
def test_a_state_with_broken_history_is_refused(broken):
    codec = record("state-1", "txnbuffer.recovery")
    values = codec.decode(encode_state(STREAMED))
    with pytest.raises(BadRecord):
        decode_state(codec.encode(values | broken))


@pytest.mark.parametrize(("name", "end"), ENDS.items())
def test_end(name, end):
    data = committed(f"snapshots/end-2{name and '-'}{name}.bin", end.encode())
    assert EndEntry.decode(data) == end
    avro = by_avro("end-2", data, "snapshots")
    assert (avro["topic"], avro["state"], avro["digest"]) == (T, end.state, digest(data[:-16]))
    assert (avro["first_mutations"], avro["next_mutations"]) == end.chains[MUTATIONS][:2]


@pytest.mark.parametrize(("name", "end"), ENDS.items())
def test_an_end_of_version_1_is_still_read(name, end):
    data = (GOLDEN / f"snapshots/end-1{name and '-'}{name}.bin").read_bytes()
    none = no_segments(T, end.incarnation, MUTATIONS)
    assert EndEntry.decode(data, "1") == replace(end, chains={**end.chains, MUTATIONS: none})
    with pytest.raises(BadRecord):
        EndEntry.decode(data, "2")


def test_mutations():
    payload = MutationsPayload(IndexSegment(4, STREAMED.unsealed_index))
    data = committed("snapshots/mutations-1.bin", payload.encode(T, 7, digest(b"m3")))
    entry = decode_mutations(T, 4, Stored(Position(1, 0), "1", "mutations", 7, data))
    assert [*entry.segment.columns()] == [*STREAMED.unsealed_index]
    assert (entry.chain_before, entry.chain_after) == (digest(b"m3"), data[-16:])
    avro = by_avro("mutations-1", data)
    assert (avro["number"], avro["snapshots"], np.cumsum(avro["end"]).tolist()) == (4, 2, [1100, 1233])


@pytest.mark.parametrize(
    ("number", "changes", "match"),
    [
        (5, {}, "orders-m5.*it is segment m4 of topic orders"),
        (4, {"epoch": 6}, "its epoch is 7, but 6"),
        (4, {"kind": "part"}, "properties are not those of a mutations entry"),
        (4, {"value": None}, "properties are not those of a mutations entry"),
        (4, {"value": b"junk"}, "its digest is wrong"),
        (4, {"version": "2"}, "orders-m4"),
    ],
)
def test_a_wrong_entry_of_mutation_snapshots_is_refused_by_name(number, changes, match):
    data = MutationsPayload(IndexSegment(4, STREAMED.unsealed_index)).encode(T, 7, C)
    stored = Stored(Position(1, 0), "1", "mutations", 7, data)._replace(**changes)
    with pytest.raises(SnapshotError, match=match):
        decode_mutations(T, number, stored)


def plain(items):
    return [
        items.most.tolist(),
        items.least.tolist(),
        *([*positions] for positions in (items.markers, items.firsts, items.lasts)),
    ]


def test_columns_of_equal_numbers_are_short_and_segments_are_small():
    count = 8000
    rng = np.random.default_rng(1)
    least = np.cumsum(rng.integers(1, 20, count))
    markers = Positions(longs(*[4] * count), np.cumsum(rng.integers(1, 40, count)), longs(*[-1] * count))
    none = Positions.of([])
    value = encode_segment(
        EncodedSegment(T, 7, b"c" * 16, BufferSegment(1, Items(longs(*[0] * count), least, markers, none, none)))
    )
    assert len(value) <= 3 * count
    entry = decode_segment(T, 1, Stored(Position(1, 0), "1", "part", 7, value))
    assert plain(entry.segment.items)[1] == least.tolist()
    assert [*entry.segment.items.markers] == [*markers]
