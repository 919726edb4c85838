"""Segments and their sparse index: iteration over blocks, seeking, and an index that is only a hint."""

from itertools import accumulate

import pytest
from golden_files import committed
from hypothesis import given
from hypothesis import strategies as st

from broker_io.batch import Batch, Message
from broker_io.block import EncodedBlock, encode_block
from broker_io.errors import Damaged
from broker_io.filelog.log import segment as index_module
from broker_io.filelog.log.layout import LedgerEntry
from broker_io.filelog.log.segment import (
    ENTRY_BYTES,
    BlockIndexEntry,
    Segment,
    SparseIndex,
    complete_index,
    decode_index,
    encode_index,
    headers,
    verified_index,
    whole_blocks,
)
from broker_io.testing import SimulatedDisk

PATH = "/log/1-0.log"
INDEX = "/log/1-0.index"
SOME = [
    BlockIndexEntry(0, 0, 1_700_000_000_000),
    BlockIndexEntry(700, 65_600, 1_700_000_000_500),
    BlockIndexEntry(9000, 200_000, 2**41),
]


def blocks(count: int, *, size: int = 100, place: int = 3) -> list[EncodedBlock]:
    """Blocks of two messages each, a second apart."""
    batch = Batch.of([Message(b"k", b"v" * size)] * 2)
    return [
        encode_block(batch, first_entry=2 * number, publish_time=1000 * number, place=place) for number in range(count)
    ]


def write(segment: Segment, offset: int, made: list[EncodedBlock]) -> None:
    ends = accumulate((block.length for block in made), initial=offset)
    segment.write(offset, [chunk for block in made for chunk in block.chunks], [*zip(ends, made, strict=False)])


def disk_with(made: list[EncodedBlock]) -> tuple[SimulatedDisk, int]:
    disk = SimulatedDisk()
    disk.make_directory("/log")
    disk.open(PATH, write=True, create=True)
    segment = Segment(disk, PATH, 0)
    write(segment, 0, made)
    segment.save_index()
    segment.close()
    return disk, sum(block.length for block in made)


@pytest.fixture(autouse=True)
def short_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_module, "STEP_BYTES", 1000)


def test_golden_index() -> None:
    data = committed("broker_io/index.bin", encode_index(SOME))
    assert decode_index(data, 1 << 30) == SOME


def test_index_ends_at_the_first_invalid_entry() -> None:
    data = encode_index(SOME)
    for bit in range(len(data) * 8):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        assert decode_index(bytes(flipped), 1 << 30) == SOME[: bit // 8 // ENTRY_BYTES]
    for size in range(len(data)):
        assert decode_index(data[:size], 1 << 30) == SOME[: size // ENTRY_BYTES]
    assert decode_index(data, 200_000) == SOME[:2]
    assert decode_index(encode_index(SOME[::-1]), 1 << 30) == SOME[2:]


def test_headers_are_iterated_and_damage_is_named() -> None:
    made = blocks(20)
    disk, end = disk_with(made)
    file = disk.open(PATH)
    found = [*headers(file, PATH, 0, end, 3)]
    assert [one.header.first_entry for one in found] == [*range(0, 40, 2)]
    assert [one.offset for one in found] == [made[0].length * number for number in range(20)]
    with pytest.raises(Damaged, match=f"offset {made[0].length * 19}"):
        [*headers(file, PATH, 0, end - 1, 3)]
    with pytest.raises(Damaged, match="another file"):
        [*headers(file, PATH, 0, end, 4)]
    disk.flip(PATH, made[0].length * 5 * 8 + 3)
    with pytest.raises(Damaged, match=f"{PATH}, offset {made[0].length * 5}"):
        [*headers(file, PATH, 0, end, 3)]


def test_whole_blocks_end_where_one_is_torn_or_does_not_follow() -> None:
    made = blocks(4)
    disk, end = disk_with(made)
    file, length = disk.open(PATH), made[0].length

    def found(start: int, end: int, next_entry: int, place: int) -> tuple[int, int, bool]:
        ledger = LedgerEntry(1, entries=next_entry, bytes=start)
        after, torn = whole_blocks(file, ledger, end, place, contents=True)
        return after.bytes, after.entries, torn is None

    assert found(0, end, 0, 3) == (end, 8, True)
    assert found(length, end, 2, 3) == (end, 8, True)
    assert found(0, end, 1, 3) == (0, 1, False)
    assert found(0, end, 0, 4) == (0, 0, False)
    assert found(0, end - 1, 0, 3) == (end - length, 6, False)
    disk.flip(PATH, (3 * length - 20) * 8)
    assert found(0, end, 0, 3) == (2 * length, 4, False)


@given(st.integers(1, 60), st.data())
def test_valid_index_leads_to_the_right_block(count: int, data: st.DataObject) -> None:
    made = blocks(count)
    disk, end = disk_with(made)
    harm = data.draw(st.sampled_from(["none", "missing", "cut", "flipped", "lying"]))
    entries = decode_index(disk.content(INDEX), end)
    if harm == "missing":
        disk.remove(INDEX)
    elif harm == "cut":
        disk.put(INDEX, disk.content(INDEX)[: data.draw(st.integers(0, len(entries) * ENTRY_BYTES))])
    elif harm == "flipped":
        disk.flip(INDEX, data.draw(st.integers(0, len(entries) * ENTRY_BYTES * 8 - 1)))
    elif harm == "lying":
        which = data.draw(st.integers(0, len(entries) - 1))
        entries[which] = entries[which]._replace(offset=entries[which].offset + data.draw(st.integers(1, 50)))
        disk.put(INDEX, encode_index(entries))
    entry = data.draw(st.integers(0, 2 * count - 1))
    time_ms = data.draw(st.integers(0, 1000 * count + 5))
    file = disk.open(PATH)
    known = verified_index(disk, file, PATH, end, entry).at_entry(entry)
    assert known is not None
    assert known.offset == made[0].length * (known.first_entry // 2)
    assert entry - 2 * (1000 // made[0].length + 2) < known.first_entry <= entry
    before = verified_index(disk, file, PATH, end, time_ms=time_ms).before_time(time_ms)
    assert (before is None) == (time_ms == 0)
    if before is not None:
        assert before.publish_time < time_ms
        assert before.offset == made[0].length * (before.first_entry // 2)


def test_an_index_is_written_as_the_segment_grows_and_completed_when_it_is_opened_again() -> None:
    made = blocks(600)
    length = made[0].length
    disk = SimulatedDisk()
    disk.make_directory("/log")
    disk.open(PATH, write=True, create=True)
    segment = Segment(disk, PATH, 0)
    for number in range(300):
        write(segment, number * length, made[number : number + 1])
    written = decode_index(disk.content(INDEX), 300 * length)
    assert len(written) >= 16
    segment.close()

    disk.put(INDEX, disk.content(INDEX)[: 3 * ENTRY_BYTES + 7])
    again = Segment(disk, PATH, 300 * length)
    for number in range(300, 600):
        write(again, number * length, made[number : number + 1])
    again.save_index()
    again.sync()
    entries = decode_index(disk.content(INDEX), 600 * length)
    whole = SparseIndex()
    complete_index(whole, disk.open(PATH), PATH, 600 * length)
    assert encode_index(entries) == disk.content(INDEX)
    assert len(entries) == len(whole)
    assert all(entry.offset // length == entry.first_entry // 2 for entry in entries)


def test_segment_syncs_its_writes_even_after_it_was_closed() -> None:
    disk, _ = disk_with(blocks(2))
    segment = Segment(disk, PATH, 0)
    segment.sync()
    assert [operation.kind for operation in disk.history].count("sync") == 0
    write(segment, 0, blocks(1))
    segment.close()
    segment.sync()
    segment.sync()
    assert [operation.kind for operation in disk.history].count("sync") == 1
