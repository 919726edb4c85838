"""The journal: records in order, torn tails and damage distinguished, its golden file."""

import struct

import google_crc32c
import pytest
from golden_files import committed

from broker_io.batch import Batch, Message
from broker_io.block import EncodedBlock, encode_block
from broker_io.errors import Damaged, StorageError, UnsupportedFormat
from broker_io.file import journal_v1
from broker_io.file.journal_v1 import FILE_HEAD_BYTES, Placed, read_journal, read_operations
from broker_io.file.operations import AppendBlocks

MARK = b"\x01mark\x02\x03\x04"
PATH = "/log/journal-5"


def with_crc(head: bytes) -> bytes:
    return head + google_crc32c.value(head).to_bytes(4, "little")


def encode_file_head(number: int, mark: bytes) -> bytes:
    return with_crc(struct.pack("<7sBQ8s4x", b"TXJOURN", journal_v1.VERSION, number, mark))


def encode_record(mark: bytes, sequence: int, blocks: list[tuple[Placed, EncodedBlock]]) -> list[bytes]:
    table = b"".join([struct.pack("<QQQQQ", *where) for where, _ in blocks])
    length = 40 + len(table) + sum([where.length for where, _ in blocks])
    head = struct.pack("<8sQQII4x", mark, sequence, length, len(blocks), google_crc32c.value(table))
    return [with_crc(head) + table, *[chunk for _, made in blocks for chunk in made.chunks]]


def block(number: int) -> EncodedBlock:
    batch = Batch.of([Message(b"k%d" % number, b"v" * (number * 7 % 30))])
    return encode_block(batch, first_entry=number, publish_time=1_700_000_000_000 + number)


def placed(number: int) -> tuple[Placed, EncodedBlock]:
    made = block(number)
    return Placed(number % 3, 1, 0, number * 1000, made.length), made


RECORDS = [[placed(1)], [placed(2), placed(3)], [placed(4)]]
ALL = [where for record in RECORDS for where, _ in record]


def journal(records: list[list[tuple[Placed, EncodedBlock]]] = RECORDS) -> tuple[bytes, list[int]]:
    """A journal and the offset where each record ends."""
    data = encode_file_head(5, MARK)
    ends = []
    for number, record in enumerate(records):
        data += b"".join(encode_record(MARK, number + 1, record))
        ends.append(len(data))
    return data, ends


def test_golden() -> None:
    data = committed("broker_io/journal-v1.bin", journal()[0])
    replay = read_journal(data, 5, PATH)
    assert [found.placed for found in replay.blocks] == ALL
    assert [found.data for found in replay.blocks] == [
        b"".join(made.chunks) for record in RECORDS for _, made in record
    ]
    assert (replay.end, replay.size) == (len(data), len(data))


def test_truncated_journal_has_all_whole_records() -> None:
    data, ends = journal()
    for size in range(FILE_HEAD_BYTES, len(data)):
        replay = read_journal(data[:size], 5, PATH)
        whole = [end for end in ends if end <= size]
        assert replay.end == (whole[-1] if whole else FILE_HEAD_BYTES)
        assert replay.size == size
        assert [found.placed for found in replay.blocks] == [
            where for record in RECORDS[: len(whole)] for where, _ in record
        ]


def test_without_its_head_it_is_damaged() -> None:
    data, _ = journal()
    for size in range(FILE_HEAD_BYTES):
        with pytest.raises(Damaged, match="journal-5"):
            read_journal(data[:size], 5, PATH)
    with pytest.raises(Damaged, match="not journal 6"):
        read_journal(data, 6, PATH)


def test_flipped_bit_is_damage_except_in_the_last_record() -> None:
    data, ends = journal()
    for bit in range(len(data) * 8):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        if bit // 8 < ends[-2]:
            # Two bytes of padding after a block may change without harm.
            try:
                replay = read_journal(bytes(flipped), 5, PATH)
            except StorageError:
                continue
            assert [found.placed for found in replay.blocks] == ALL
        else:
            replay = read_journal(bytes(flipped), 5, PATH)
            assert [found.placed for found in replay.blocks] in (ALL, ALL[:-1])


def test_damage_in_the_middle_is_found_without_the_head_of_the_record() -> None:
    data, ends = journal()
    for start, end in ((ends[0], ends[0] + 40), (ends[0] + 20, ends[1]), (FILE_HEAD_BYTES, ends[1])):
        with pytest.raises(Damaged, match=f"offset {FILE_HEAD_BYTES if start < ends[0] else ends[0]}"):
            read_journal(data[:start] + bytes(end - start) + data[end:], 5, PATH)


def test_a_missing_record_is_damage() -> None:
    data, ends = journal()
    with pytest.raises(Damaged):
        read_journal(data[: ends[0]] + data[ends[1] :], 5, PATH)


def test_repeated_record_is_ignored() -> None:
    data, ends = journal()
    replay = read_journal(data + data[ends[1] :], 5, PATH)
    assert [found.placed for found in replay.blocks] == ALL


def test_journal_in_a_message_is_not_parsed() -> None:
    """Else a message could make a torn tail look like damage."""
    inner = encode_file_head(5, b"guessed!") + b"".join(encode_record(b"guessed!", 99, RECORDS[0]))
    made = encode_block(Batch.of([Message(None, inner)]), first_entry=0, publish_time=0)
    data, ends = journal([RECORDS[0], [(Placed(1, 1, 0, 0, made.length), made)]])
    replay = read_journal(data[:-1], 5, PATH)
    assert replay.end == ends[0]


def test_a_newer_version_is_named() -> None:
    head = bytearray(encode_file_head(5, MARK))
    head[7] = 2
    head[28:32] = google_crc32c.value(bytes(head[:28])).to_bytes(4, "little")
    with pytest.raises(UnsupportedFormat, match="version 2"):
        read_journal(bytes(head), 5, PATH)


def test_its_blocks_are_appends() -> None:
    data, _ = journal()
    operations, torn = read_operations(data[:-1], 5, PATH)
    assert torn == len(data) - 1 - journal(RECORDS[:2])[1][-1]
    numbers = [(operation.topic, operation.number, operation.manifest) for operation in operations]
    assert numbers == [(1, 1, 0), (2, 1, 0), (0, 0, 0)]
    assert [operation.body for operation in operations] == [
        AppendBlocks(1, 0, where.offset, where.length, [b"".join(made.chunks)])
        for record in RECORDS[:2] for where, made in record
    ]  # fmt: skip
