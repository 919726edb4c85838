"""The block codec: round trips, gathering, damage, versions, and the golden files that pin the format."""

import struct
from collections.abc import Sequence
from itertools import accumulate

import google_crc32c
import numpy as np
import pytest
import xxhash
from golden_files import committed
from hypothesis import given
from hypothesis import strategies as st

from broker_io import block as codec
from broker_io.batch import Batch, Blobs, Labels, Message
from broker_io.block import (
    BadBlock,
    RawBlock,
    absent_values,
    decode_blocks,
    decode_foreign_block,
    decode_hashes,
    decode_keys,
    encode_block,
    hash_keys,
    open_block,
    parse_header,
)
from broker_io.errors import UnsupportedFormat

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
NUMBERS = st.integers(-(10**17), 10**17).map(str)
MESSAGES = st.builds(
    Message,
    st.none() | st.binary(max_size=8),
    st.none() | st.binary(max_size=20),
    st.dictionaries(st.sampled_from(["a", "tb.seq", "größe"]), TEXT | NUMBERS, max_size=3),
    st.sampled_from([0, 0, 1_700_000_000_000]),
)
RUNS = st.lists(st.lists(MESSAGES, min_size=1, max_size=12), min_size=1, max_size=6)

PLAIN = [Message(b"k%d" % number, b"value %d" % number) for number in range(5)]
MIXED = [
    Message(b"a", b"1", {"tb.v": "1", "tb.seq": "1"}, 1_700_000_000_000),
    Message(None, b"", {"tb.v": "1", "tb.seq": "2"}),
    Message(b"", None, {"tb.seq": "3", "größe": "ü"}),
    Message(b"\x00\xff", b"x" * 50, {"tb.v": "1"}, 1_700_000_000_001),
]


def opened(data: bytes, at: int = 0, *, values: bool = True) -> RawBlock:
    return open_block(data, at, parse_header(data, at), values=values)


def encoded(messages: Sequence[Message], first_entry: int = 0, *, compress: bool = False) -> bytes:
    block = encode_block(
        Batch.of(messages), first_entry=first_entry, publish_time=1_700_000_000_000, seed=7, place=9, compress=compress
    )
    data = b"".join(block.chunks)
    assert len(data) == block.length
    return data


@given(RUNS, st.booleans())
def test_blocks_round_trip(runs: list[list[Message]], compress: bool) -> None:
    data = b""
    first = 10
    for run in runs:
        data += encoded(run, first, compress=compress)
        first += len(run) + 3
    blocks, at = [], 0
    while at < len(data):
        blocks.append(opened(data, at))
        at += blocks[-1].header.length
    assert [len(run) for run in runs] == [block.header.rows for block in blocks]
    decoded = decode_blocks(blocks)
    assert [*decoded.messages] == [message for run in runs for message in run]
    entries, first = [], 10
    for run in runs:
        entries += range(first, first + len(run))
        first += len(run) + 3
    assert decoded.entries.tolist() == entries
    assert set(decoded.publish_times.tolist()) == {1_700_000_000_000}


@given(st.lists(MESSAGES, min_size=1, max_size=20), st.data())
def test_gaps_and_publish_times_are_kept(messages: list[Message], data: st.DataObject) -> None:
    count = len(messages)
    steps = data.draw(st.lists(st.integers(1, 1000), min_size=count, max_size=count))
    entries = np.cumsum(steps).astype(np.int64)
    times = np.array(data.draw(st.lists(st.integers(0, 2**50), min_size=count, max_size=count)), np.int64)
    block = encode_block(
        Batch.of(messages), first_entry=int(entries[0]), publish_time=5, entries=entries, publish_times=times
    )
    raw = opened(b"".join(block.chunks))
    dense = opened(encoded(messages, int(entries[-1]) + 1))
    decoded = decode_blocks([raw, dense])
    assert raw.header.span == entries[-1] - entries[0] + 1
    assert decoded.entries.tolist() == [*entries.tolist(), *range(entries[-1] + 1, entries[-1] + 1 + count)]
    assert decoded.publish_times[:count].tolist() == times.tolist()
    assert [*decoded.messages] == messages * 2


@given(st.lists(MESSAGES, min_size=1, max_size=20))
def test_key_columns_need_no_values(messages: list[Message]) -> None:
    data = encoded(messages)
    raw = opened(data[: -parse_header(data).values_size or len(data)], values=False)
    assert decode_keys([raw], [len(messages)]).to_list() == [message.key for message in messages]
    assert absent_values([raw], [raw.header.rows]).tolist() == [message.value is None for message in messages]
    keys = Blobs.of([message.key for message in messages])
    if any(message.key is not None for message in messages):
        assert decode_hashes([raw]).tolist() == np.frombuffer(hash_keys(keys, 7), ">u8")[::2].tolist()
    else:
        assert not decode_hashes([raw]).any()


def test_hash_depends_on_the_secret_only() -> None:
    keys = Blobs.of([b"a", b"b", None, b"a"])
    one, two = hash_keys(keys, 1), hash_keys(keys, 2)
    assert one != two
    assert one[:16] == one[48:] != one[16:32]
    assert one[32:48] == bytes(16)


@pytest.mark.parametrize("compress", [False, True])
def test_every_flipped_bit_is_detected(compress: bool) -> None:
    messages = MIXED + PLAIN * 5
    data = encoded(messages, compress=compress)
    for bit in range(len(data) * 8):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        try:
            raw = open_block(bytes(flipped), 0, parse_header(bytes(flipped), 0, 9))
        except BadBlock:
            continue
        assert [*decode_blocks([raw]).messages] == messages, "only padding may change"


def test_truncated_block_is_rejected() -> None:
    data = encoded(MIXED)
    padding = -parse_header(data).values_size % 8
    for size in range(len(data) - padding):
        with pytest.raises(BadBlock):
            opened(data[:size])


def test_a_block_of_another_file_is_refused() -> None:
    data = encoded(MIXED)
    assert parse_header(data, 0, 9) == parse_header(data)
    with pytest.raises(BadBlock, match="another file"):
        parse_header(data, 0, 8)


def test_blocks_are_aligned() -> None:
    for size in range(20):
        for compress in (False, True):
            assert len(encoded([Message(b"k", b"v" * size)], compress=compress)) % 8 == 0


def test_compression_is_used_only_where_it_helps() -> None:
    long = [Message(b"key%d" % number, b"the same value" * 5) for number in range(100)]
    assert len(encoded(long, compress=True)) < len(encoded(long)) / 3
    assert parse_header(encoded([Message(None, b"")], compress=True)).flags == 0


def resealed(data: bytes, **changes: int) -> bytes:
    """A block with other header bytes (by offset), or another keys part, and valid checksums."""
    changed = bytearray(data)
    for offset, value in changes.items():
        changed[int(offset[1:])] = value
    keys_size = int.from_bytes(changed[32:36], "little")
    changed[48:52] = google_crc32c.value(bytes(changed[64 : 64 + keys_size])).to_bytes(4, "little")
    changed[60:64] = google_crc32c.value(bytes(changed[:60])).to_bytes(4, "little")
    return bytes(changed)


def test_a_newer_version_or_flag_is_named() -> None:
    with pytest.raises(UnsupportedFormat, match=r"version 2.*upgrade"):
        parse_header(resealed(encoded(PLAIN), b4=2))
    with pytest.raises(UnsupportedFormat, match="flags 4"):
        parse_header(resealed(encoded(PLAIN), b5=4))


def test_unknown_section_is_skipped_only_if_marked_so() -> None:
    data = encoded([Message(None, b"v", {}, 5)])
    tags = [struct.unpack_from("<HHI", data, 64 + 8 * number)[0] for number in range(2)]
    assert tags == [codec.VALUE_OFFSETS, codec.EVENT_TIMES]
    unknown = resealed(data, b72=99)
    with pytest.raises(UnsupportedFormat, match="section 99"):
        opened(unknown)
    ignored = opened(resealed(unknown, b74=codec.IGNORABLE))
    assert [*decode_blocks([ignored]).messages] == [Message(None, b"v", {}, 0)]


@pytest.mark.parametrize("where", [64, 68, 72, 76])
def test_invalid_section_table_raises_bad_block(where: int) -> None:
    data = encoded(PLAIN)
    for value in range(256):
        changed = resealed(data, **{f"b{where}": value})
        try:
            messages = [*decode_blocks([opened(changed)]).messages]
        except (BadBlock, UnsupportedFormat):
            continue
        assert len(messages) == len(PLAIN)


@pytest.mark.parametrize(
    ("name", "messages", "entries"),
    [
        ("block-plain.bin", PLAIN, None),
        ("block-mixed.bin", MIXED, None),
        ("block-keyless.bin", [Message(None, b"one"), Message(None, b"two")], None),
        ("block-sparse.bin", PLAIN, [3, 4, 9, 12, 70]),
    ],
)
def test_golden(name: str, messages: list[Message], entries: list[int] | None) -> None:
    column = None if entries is None else np.array(entries, np.int64)
    block = encode_block(
        Batch.of(messages),
        first_entry=3,
        publish_time=1_700_000_000_000,
        seed=0x0123456789ABCDEF,
        place=0xCAFE,
        entries=column,
        publish_times=None if column is None else 1_700_000_000_000 + column - 3,
    )
    data = committed(f"broker_io/{name}", b"".join(block.chunks))
    decoded = decode_blocks([open_block(data, 0, parse_header(data, 0, 0xCAFE))])
    assert [*decoded.messages] == messages
    assert decoded.entries.tolist() == (entries or [*range(3, 3 + len(messages))])
    assert decoded.publish_times.tolist()[0] == 1_700_000_000_000


def written_out(messages: Sequence[Message], first_entry: int, seed: int) -> bytes:
    """A block as the description of the format says, row by row."""

    def bitmap(flags: list[bool]) -> bytes:
        return bytes([sum(flag << bit for bit, flag in enumerate(flags[at : at + 8])) for at in range(0, count, 8)])

    def offsets(strings: list[bytes]) -> bytes:
        return struct.pack(f"<{count + 1}i", *accumulate(map(len, strings), initial=0))

    def padded(content: bytes) -> bytes:
        return content + bytes(-len(content) % 8)

    count = len(messages)
    keys, values = [message.key for message in messages], [message.value for message in messages]
    sections: list[tuple[int, bytes]] = []
    if any(key is not None for key in keys):
        digests = [bytes(16) if key is None else xxhash.xxh3_128_digest(key, seed) for key in keys]
        sections.append((1, b"".join(digests)))
        sections += [(2, bitmap([key is None for key in keys]))] * (None in keys)
        sections += [(3, offsets([key or b"" for key in keys])), (4, b"".join([key or b"" for key in keys]))]
    sections += [(5, bitmap([value is None for value in values]))] * (None in values)
    sections.append((6, offsets([value or b"" for value in values])))
    if any(message.event_time for message in messages):
        sections.append((7, struct.pack(f"<{count}q", *[message.event_time for message in messages])))
    for name, column in Batch.of(messages).properties.items():
        label = name.encode()
        if isinstance(column, Labels):
            texts = [text.encode() for text in column.values]
            head = struct.pack("<II", len(label), len(texts)) + struct.pack(f"<{len(texts)}I", *map(len, texts))
            sections.append((8, head + struct.pack(f"<{count}i", *column.codes.tolist()) + label + b"".join(texts)))
        else:
            sparse = column.present is not None
            mask = bitmap(column.present.tolist()) if column.present is not None else b""
            numbers = struct.pack(f"<{count}q", *column.values.tolist())
            sections.append((9, struct.pack("<II", len(label), sparse) + numbers + mask + label))
    part = b"".join([struct.pack("<HHI", tag, 0, len(content)) for tag, content in sections])
    part += b"".join([padded(content) for _, content in sections])
    stored = b"".join([value or b"" for value in values])
    head = struct.pack("<4sBBHIIQq", b"TXBK", 1, 0, len(sections), count, count, first_entry, 1_700_000_000_000)
    head += struct.pack("<6I", *(len(part), len(stored)) * 2, *map(google_crc32c.value, (part, stored)))
    head += struct.pack("<I", 9)
    return head + struct.pack("<I", google_crc32c.value(head)) + padded(part) + padded(stored)


@given(st.lists(MESSAGES, min_size=1, max_size=12), st.sampled_from([1, 1, 1, codec.FEW_ROWS]), st.integers(0, 2**60))
def test_blocks_of_few_and_of_many_rows_have_the_form_that_is_described(
    messages: list[Message], times: int, first_entry: int
) -> None:
    assert encoded(messages * times, first_entry) == written_out(messages * times, first_entry, 7)


def foreign(batch: Batch, **options: bool) -> bytes:
    return b"".join(encode_block(batch, first_entry=0, publish_time=0, **options).chunks)


LYING = {
    "label": Batch(Blobs.none(2), Blobs.none(2), {"p": Labels(np.array([0, 2], np.int32), ("a", "b"))}),
    "negative label": Batch(Blobs.none(2), Blobs.none(2), {"p": Labels(np.array([-2, 0], np.int32), ("a", "b"))}),
    "values": Batch(Blobs.none(2), Blobs(b"abc", np.array([0, 5, 3], np.int32), None)),
    "keys": Batch(Blobs(b"abc", np.array([0, 5, 3], np.int32), None), Blobs.none(2)),
    "times": Batch(Blobs.none(2), Blobs.none(2), {}, np.array([1, 2, 3], np.int64)),
    "few times": Batch(Blobs.none(2), Blobs.none(2), {}, np.array([1], np.int64)),
}


@pytest.mark.parametrize("name", LYING)
def test_foreign_block_with_invalid_columns_is_rejected(name: str) -> None:
    data = foreign(LYING[name])
    with pytest.raises(BadBlock):
        decode_foreign_block(data)


def test_foreign_block_is_neither_decompressed_nor_read_beyond_its_end() -> None:
    batch = Batch.of([Message(b"k", b"v" * 100)] * 5)
    with pytest.raises(BadBlock, match="compressed"):
        decode_foreign_block(foreign(batch, compress=True))
    data = foreign(batch)
    for size in range(len(data)):
        with pytest.raises(BadBlock):
            decode_foreign_block(data[:size])
    more = bytearray(data)
    more[8:16] = struct.pack("<II", 10**9, 10**9)  # messages and span
    more[60:64] = google_crc32c.value(bytes(more[:60])).to_bytes(4, "little")
    with pytest.raises(BadBlock, match="1000000000 messages"):
        decode_foreign_block(bytes(more))


@given(RUNS)
def test_consecutive_foreign_blocks_round_trip(runs: list[list[Message]]) -> None:
    data, at, found = b"".join(foreign(Batch.of(run)) for run in runs), 0, []
    while at < len(data):
        decoded, at = decode_foreign_block(data, at)
        found.append([*decoded.messages])
    assert found == runs
