"""The block: messages as columns, the one form in which they are stored and sent.

A block is a header of 64 bytes, a *keys part* and a *values part*. Each part is padded with zeros to a
multiple of 8 bytes, so that a block that starts at a multiple of 8 ends at one. The values part is the
concatenated bytes of all values; everything else about the messages is in the keys part, which can
therefore be read without touching a value. All numbers are little-endian. The header:

    offset  size
         0     4  magic `TXBK`
         4     1  version, 1; magic, version and the last checksum have the same offset in every version
         5     1  flags: 1 the keys part, 2 the values part is one zstd frame
         6     2  number of sections of the keys part
         8     4  number of messages, at least 1
        12     4  span: last entry number - first entry number + 1
        16     8  entry number of the first message
        24     8  publish time of the first message, milliseconds since 1970
        32     4  stored bytes of the keys part
        36     4  stored bytes of the values part
        40     4  bytes of the keys part once decompressed
        44     4  bytes of the values part once decompressed
        48     4  CRC32C of the stored keys part
        52     4  CRC32C of the stored values part
        56     4  place: a number that identifies the file of the block; 0 outside of files
        60     4  CRC32C of the 60 bytes before

The keys part starts with a table of 8 bytes per section: tag (2), flags (2; 1 = a reader that doesn't know
the tag skips it, otherwise it rejects the block) and length (4). The sections follow in that order, each
padded with zeros to a multiple of 8. With n messages:

    tag  section
      1  n key hashes of 16 bytes: XXH3-128, big-endian, seeded with the secret of the log; zeros for no key; left
         out in blocks that no log compacts
      2  bitmap of absent keys, first message in the lowest bit; left out if no key is absent
      3  n + 1 int32 offsets of the keys, the first 0
      4  the bytes of the keys
      5  bitmap of absent values, as in 2
      6  n + 1 int32 offsets of the values, the first 0
      7  n int64 event times, milliseconds, 0 for none; left out if no message has one
      8  a property as labels: bytes of its name (4), number k of labels (4), k label lengths in bytes (4
         each), n int32 label numbers (-1: the message hasn't got the property), name, labels in UTF-8
      9  a property as numbers: bytes of its name (4), 1 if a bitmap follows or 0 (4), n int64 values,
         bitmap of present ones, name
     10  n uint32 entry numbers less the first one; left out if they are consecutive
     11  n int64 publish times; left out if all are the header's

Sections 1 to 4 are left out if no message has a key; there is one section 8 or 9 per property.

Many small blocks are decoded in one numpy pass, a big one without copies. A numpy call costs microseconds whatever the
length. So the columns of many blocks are concatenated as bytes and then decoded in one call.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache, wraps
from operator import attrgetter
from typing import NamedTuple, ParamSpec, TypeAlias, TypeVar

import google_crc32c
import numpy as np
import xxhash
import zstandard
from numpy.typing import NDArray

from broker_io.batch import Batch, Blobs, Labels, Numbers, PropertyColumn, concat_columns
from broker_io.errors import UnsupportedFormat
from broker_io.position import Int64s, maker

MAGIC = b"TXBK"
VERSION = 1
HEADER_BYTES = 64
KEYS_ZSTD, VALUES_ZSTD = 1, 2
IGNORABLE = 1

HASHES, KEY_ABSENT, KEY_OFFSETS, KEYS, VALUE_ABSENT, VALUE_OFFSETS, EVENT_TIMES = range(1, 8)
LABELS, NUMBERS, ENTRIES, PUBLISH_TIMES = range(8, 12)
_KNOWN = frozenset(range(HASHES, PUBLISH_TIMES + 1))

_HEADER = struct.Struct("<4sBBHIIQqIIIIIII")
_CRC = struct.Struct("<I")
PAIR = struct.Struct("<II")
_SECTION = struct.Struct("<HHI")
_PADDING = tuple(bytes(size) for size in range(8))
_NO, _YES = b"\0", b"\1"
_DIGITS = bytes.maketrans(_NO + _YES, b"01")
FEW_ROWS = 256
"""Rows up to which a bitmap is made faster without numpy."""

Layout: TypeAlias = tuple[dict[int, slice], tuple[tuple[int, slice], ...]]
"""The location of each section of a keys part by its tag, and of each property section with its tag."""


class BadBlock(Exception):
    """Bytes that are not a complete block; the caller names the file or message they come from."""


class Header(NamedTuple):
    """The header of a block without magic and checksum; `length` is that of the whole block."""

    flags: int
    sections: int
    rows: int
    span: int
    first_entry: int
    publish_time: int
    keys_size: int
    values_size: int
    keys_raw: int
    values_raw: int
    keys_crc: int
    values_crc: int
    place: int
    length: int


class EncodedBlock(NamedTuple):
    """A block as consecutive chunks of bytes, `length` in total."""

    chunks: list[bytes]
    length: int
    rows: int
    first_entry: int
    publish_time: int


as_encoded = maker(EncodedBlock)


class RawBlock(NamedTuple):
    """A block with valid checksums: its keys part, the location of its sections, its values part."""

    header: Header
    part: bytes
    sections: dict[int, slice]
    properties: tuple[tuple[int, slice], ...]
    values: bytes


def hash_keys(keys: Blobs, seed: int) -> bytes:
    """16 bytes per key: XXH3-128 seeded with a 64-bit secret, zeros for an absent key."""
    data, bounds, digest = bytes(keys.data), keys.offsets.tolist(), xxhash.xxh3_128_digest
    if keys.absent is None:
        return b"".join([digest(data[start:end], seed) for start, end in itertools.pairwise(bounds)])
    hashes = [bytes(16)] * (len(bounds) - 1)
    for row in (~keys.absent).nonzero()[0].tolist():  # few keys may be left
        hashes[row] = digest(data[bounds[row] : bounds[row + 1]], seed)
    return b"".join(hashes)


# --- encoding ---


def encode_block(
    batch: Batch,
    *,
    first_entry: int,
    publish_time: int,
    seed: int = 0,
    place: int = 0,
    compress: bool = False,
    compress_keys: bool = False,
    hashed: bool = True,
    entries: Int64s | None = None,
    publish_times: Int64s | None = None,
) -> EncodedBlock:
    """One block of a whole batch of at least one message.

    `entries` (int64[n], ascending, the first equal to `first_entry`) is for messages with gaps between them,
    `publish_times` (int64[n]) for messages that were published at different times. `hashed` adds key hashes.
    `compress_keys` compresses the keys part, `compress` both parts.
    """
    column = batch.values.packed()
    count = len(column.offsets) - 1
    span = count if entries is None else int(entries[-1]) - first_entry + 1
    sections = _sections(batch, column, seed if hashed else None, None if span == count else entries, publish_times)
    table, pieces = list[bytes](), list[bytes]()
    for tag, content in sections:
        table.append(_SECTION.pack(tag, 0, len(content)))
        pieces += (content, _PADDING[-len(content) % 8])
    part, values = b"".join(table + pieces), bytes(column.data)
    flags, keys_raw, values_raw = 0, len(part), len(values)
    if compress or compress_keys:
        part, flags = _compressed(part, KEYS_ZSTD)
    if compress:
        values, more = _compressed(values, VALUES_ZSTD)
        flags |= more
    fields = _HEADER.pack(
        *(MAGIC, VERSION, flags, len(sections), count, span, first_entry, publish_time),
        *(len(part), len(values), keys_raw, values_raw),
        *(google_crc32c.value(part), google_crc32c.value(values), place),
    )
    head = fields + _CRC.pack(google_crc32c.value(fields))
    chunks = [head + part + _PADDING[-len(part) % 8], values + _PADDING[-len(values) % 8]]
    return as_encoded((chunks, len(chunks[0]) + len(chunks[1]), count, first_entry, publish_time))


def _compressed(part: bytes, flag: int) -> tuple[bytes, int]:
    """A part compressed, and its flag, if that makes it smaller; else as it is, and 0."""
    small = zstandard.ZstdCompressor(level=1).compress(part)
    return (small, flag) if len(small) < len(part) else (part, 0)


def _sections(
    batch: Batch, values: Blobs, seed: int | None, entries: Int64s | None, times: Int64s | None
) -> list[tuple[int, bytes]]:
    """Most blocks have few messages, so this calls no function of numpy that is written in Python."""
    sections: list[tuple[int, bytes]] = []
    keys = batch.keys.packed()
    without_key = b"" if keys.absent is None else keys.absent.tobytes()
    if not without_key or _NO in without_key:
        if seed is not None:
            sections.append((HASHES, hash_keys(keys, seed)))
        if _YES in without_key:
            sections.append((KEY_ABSENT, _bitmap(without_key)))
        sections.append((KEY_OFFSETS, keys.offsets.astype("<i4", copy=False).tobytes()))
        sections.append((KEYS, bytes(keys.data)))
    if values.absent is not None and _YES in (without_value := values.absent.tobytes()):
        sections.append((VALUE_ABSENT, _bitmap(without_value)))
    sections.append((VALUE_OFFSETS, values.offsets.astype("<i4", copy=False).tobytes()))
    if batch.event_times is not None and batch.event_times.any():
        sections.append((EVENT_TIMES, batch.event_times.astype("<i8", copy=False).tobytes()))
    _add_properties(sections, batch.properties)
    if entries is not None:
        sections.append((ENTRIES, (entries - entries[0]).astype("<u4").tobytes()))
    if times is not None:
        sections.append((PUBLISH_TIMES, times.astype("<i8", copy=False).tobytes()))
    return sections


def _add_properties(sections: list[tuple[int, bytes]], properties: Mapping[str, PropertyColumn]) -> None:
    for name, column in properties.items():
        encoded = name.encode()
        if isinstance(column, Numbers):
            mask = b"" if column.present is None else _bitmap(column.present.tobytes())
            head = PAIR.pack(len(encoded), 0 if column.present is None else 1)
            numbers = column.values.astype("<i8", copy=False).tobytes()
            sections.append((NUMBERS, b"".join((head, numbers, mask, encoded))))
        else:
            texts = [*map(str.encode, column.values)]
            head = struct.pack(f"<{2 + len(texts)}I", len(encoded), len(texts), *map(len, texts))
            codes = column.codes.astype("<i4", copy=False).tobytes()
            sections.append((LABELS, b"".join((head, codes, encoded, *texts))))


def _bitmap(flags: bytes) -> bytes:
    """A bit for each of the bytes 0 and 1, the first one in the lowest bit."""
    count = len(flags)
    if count > FEW_ROWS:
        return np.packbits(np.frombuffer(flags, np.bool_), bitorder="little").tobytes()
    return int(flags[::-1].translate(_DIGITS), 2).to_bytes((count + 7) // 8, "little")


# --- decoding ---


def parse_header(data: bytes, at: int = 0, place: int | None = None) -> Header:
    """The header at an offset, of a block that belongs to `place` unless that is None.

    Raises BadBlock, or UnsupportedFormat for a newer version.
    """
    head = data[at : at + HEADER_BYTES]
    if len(head) < HEADER_BYTES:
        raise BadBlock(f"a block header has {HEADER_BYTES} bytes, found {len(head)}")
    if head[:4] != MAGIC or google_crc32c.value(head[:60]) != int.from_bytes(head[60:], "little"):
        raise BadBlock("there is no valid block header here")
    _, version, flags, *fields = _HEADER.unpack_from(head)
    if version != VERSION or flags & ~(KEYS_ZSTD | VALUES_ZSTD):
        raise UnsupportedFormat(
            f"a block of format version {version} with flags {flags}; this release reads version {VERSION}: upgrade it"
        )
    rows, span, first_entry, keys_size, values_size = *fields[1:4], *fields[5:7]
    if not rows or first_entry + span > 2**63:
        raise BadBlock(f"a block of {rows} messages, {span} entries from {first_entry} on, is impossible")
    length = HEADER_BYTES + keys_size + (-keys_size % 8) + values_size + (-values_size % 8)
    if place is not None and fields[-1] != place:
        raise BadBlock("the block belongs to another file")
    return Header._make((flags, *fields, length))


def open_block(data: bytes, at: int, header: Header, *, values: bool = True) -> RawBlock:
    """The block at an offset with verified checksums; without `values` only its keys part is read.

    Raises BadBlock, or UnsupportedFormat for a section of a newer release.
    """
    part = _stored_keys(data, at, header)
    if header.flags & KEYS_ZSTD:
        part = _decompressed(part, header.keys_raw)
    if len(part) < header.sections * 8:
        raise BadBlock("the section table of a block does not fit it")
    sections, properties = _layout(part[: header.sections * 8], len(part))
    where = sections[VALUE_OFFSETS]
    if where.stop - where.start != 4 * header.rows + 4:
        raise BadBlock(f"a block of {header.rows} messages has offsets of another number of values")
    if not values:
        return RawBlock(header, part, sections, properties, b"")
    content = _stored_values(data, at, header)
    if header.flags & VALUES_ZSTD:
        content = _decompressed(content, header.values_raw)
    return RawBlock(header, part, sections, properties, content)


def check_block(data: bytes, at: int, header: Header) -> None:
    """Verify the checksums of a block as it is stored, without reading it. Raises BadBlock."""
    _stored_keys(data, at, header)
    _stored_values(data, at, header)


def move_block(data: bytes, at: int, header: Header, place: int) -> list[bytes]:
    """The chunks of a block for another file, as it is stored, once its checksums were verified. Raises BadBlock."""
    check_block(data, at, header)
    fields = data[at : at + HEADER_BYTES - 8] + _CRC.pack(place)
    return [fields + _CRC.pack(google_crc32c.value(fields)), data[at + HEADER_BYTES : at + header.length]]


def _stored_keys(data: bytes, at: int, header: Header) -> bytes:
    start = at + HEADER_BYTES
    part = data[start : start + header.keys_size]
    if len(part) < header.keys_size or google_crc32c.value(part) != header.keys_crc:
        raise BadBlock("the checksum of the keys part of a block is wrong")
    return part


def _stored_values(data: bytes, at: int, header: Header) -> bytes:
    start = at + HEADER_BYTES + header.keys_size + (-header.keys_size % 8)
    content = data[start : start + header.values_size]
    if len(content) < header.values_size or google_crc32c.value(content) != header.values_crc:
        raise BadBlock("the checksum of the values part of a block is wrong")
    return content


def _decompressed(content: bytes, size: int) -> bytes:
    try:
        declared = zstandard.frame_content_size(content)  # the library allocates so much at once
        if declared != size:
            raise BadBlock(f"a compressed part of a block holds {declared} bytes instead of {size}")
        raw: bytes = zstandard.ZstdDecompressor().decompress(content)
    except zstandard.ZstdError as error:
        raise BadBlock(f"a compressed part of a block can't be decompressed ({error})") from None
    return raw


@lru_cache(4096)
def _layout(table: bytes, size: int) -> Layout:
    """The location of the sections, cached: blocks of one message often have the same table."""
    sections: dict[int, slice] = {}
    properties: list[tuple[int, slice]] = []
    at = len(table)
    for tag, flags, length in _SECTION.iter_unpack(table):
        where = slice(at, at + length)
        at += length + (-length % 8)
        if tag in (LABELS, NUMBERS):
            properties.append((tag, where))
        elif tag in _KNOWN:
            sections[tag] = where
        elif not flags & IGNORABLE:
            raise UnsupportedFormat(f"a block with a section {tag}, which this release does not know: upgrade it")
    if at > size or VALUE_OFFSETS not in sections or (KEYS in sections) != (KEY_OFFSETS in sections):
        raise BadBlock("the section table of a block does not fit it")
    return sections, tuple(properties)


class Decoded(NamedTuple):
    """The messages of blocks, in order: entry numbers int64[n], publish times int64[n], columns of n."""

    entries: Int64s
    publish_times: Int64s
    messages: Batch


_ROWS, _FIRST_ENTRY = attrgetter("header.rows"), attrgetter("header.first_entry")
_PUBLISH_TIME, _VALUES = attrgetter("header.publish_time"), attrgetter("values")


P = ParamSpec("P")
R = TypeVar("R")


def _of_columns(decode: Callable[P, R]) -> Callable[P, R]:
    """Make a decoder of columns raise BadBlock for what numpy and struct raise if a column does not fit its block."""

    @wraps(decode)
    def decode_columns(*blocks: P.args, **options: P.kwargs) -> R:
        try:
            return decode(*blocks, **options)
        except (ValueError, IndexError, struct.error) as error:
            raise BadBlock(f"the columns of a block do not fit it ({error})") from None

    return decode_columns


@_of_columns
def decode_blocks(blocks: Sequence[RawBlock]) -> Decoded:
    """All messages of at least one block. Raises BadBlock if a column does not fit its block."""
    counts = [*map(_ROWS, blocks)]
    event_times: Int64s | None = None
    if any(EVENT_TIMES in block.sections for block in blocks):
        event_times = np.frombuffer(_section(blocks, EVENT_TIMES, 8), "<i8")
    values = _blobs(blocks, counts, VALUE_OFFSETS, VALUE_ABSENT, map(_VALUES, blocks))
    messages = Batch(decode_keys(blocks, counts), values, _properties(blocks, counts), event_times)
    return Decoded(decode_entries(blocks, counts), decode_publish_times(blocks, counts), messages)


@_of_columns
def decode_keys_parts(blocks: Sequence[RawBlock]) -> Decoded:
    """All messages of at least one block that was opened without values; they have none. Raises BadBlock."""
    counts = [*map(_ROWS, blocks)]
    messages = Batch(decode_keys(blocks, counts), Blobs.none(sum(counts)), _properties(blocks, counts))
    return Decoded(decode_entries(blocks, counts), decode_publish_times(blocks, counts), messages)


def decode_foreign_block(data: bytes, at: int = 0) -> tuple[Decoded, int]:
    """The messages of a block from an untrusted peer, and the offset of its end.

    A peer can compute a valid checksum of bad columns, so the columns are checked. Compressed blocks are rejected,
    because their decompressed size is unknown. Raises BadBlock, or UnsupportedFormat.
    """
    header = parse_header(data, at, 0)
    if not header.rows or header.flags:
        raise BadBlock("it is compressed" if header.flags else "it has no messages")
    end = at + header.length
    if end > len(data):
        raise BadBlock(f"it is cut off after {len(data) - at} of {header.length} bytes")
    decoded = decode_blocks([open_block(data, at, header)])
    check_columns(decoded.messages)
    return decoded, end


def check_columns(messages: Batch) -> None:
    """Raises BadBlock for columns that would otherwise fail only when they are used."""
    if messages.event_times is not None and len(messages.event_times) != len(messages):
        raise BadBlock("the number of its event times is not that of its messages")
    for blobs in (messages.keys, messages.values):
        if (np.diff(blobs.offsets) < 0).any():
            raise BadBlock("a string in it ends before it begins")
    for name, column in messages.properties.items():
        if isinstance(column, Labels) and not -1 <= column.codes.min() <= column.codes.max() < len(column.values):
            raise BadBlock(f"property {name!r} has a label number without a label")


@_of_columns
def decode_keys(blocks: Sequence[RawBlock], counts: list[int]) -> Blobs:
    """The keys of blocks with these numbers of messages. Raises BadBlock."""
    return _blobs(blocks, counts, KEY_OFFSETS, KEY_ABSENT, [_section(blocks, KEYS, 0)])


@_of_columns
def decode_hashes(blocks: Sequence[RawBlock]) -> NDArray[np.uint64]:
    """uint64[n]: the first halves of the key hashes of blocks; zeros where there is none. Raises BadBlock."""
    return np.frombuffer(_section(blocks, HASHES, 16), ">u8")[::2].astype(np.uint64)


@_of_columns
def absent_values(blocks: Sequence[RawBlock], counts: list[int]) -> NDArray[np.bool_]:
    """bool[n]: which messages of blocks with these numbers of messages have no value. Raises BadBlock."""
    return _absent(blocks, counts, VALUE_OFFSETS, VALUE_ABSENT)


@_of_columns
def decode_entries(blocks: Sequence[RawBlock], counts: list[int]) -> Int64s:
    """int64[n]: the entry numbers of blocks with these numbers of messages. Raises BadBlock."""
    first = blocks[0].header.first_entry
    if len(blocks) == 1 and ENTRIES not in blocks[0].sections:
        return np.arange(first, first + counts[0], dtype=np.int64)
    lengths = np.array(counts, np.int64)
    within = np.arange(int(lengths.sum()), dtype=np.int64) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    _fill_in(within, blocks, counts, ENTRIES, "<u4")
    return within + np.repeat(np.array([*map(_FIRST_ENTRY, blocks)], np.int64), lengths)


@_of_columns
def decode_publish_times(blocks: Sequence[RawBlock], counts: list[int]) -> Int64s:
    """int64[n]: the publish times of blocks with these numbers of messages. Raises BadBlock."""
    times = np.repeat(np.array([*map(_PUBLISH_TIME, blocks)], np.int64), counts)
    _fill_in(times, blocks, counts, PUBLISH_TIMES, "<i8")
    return times


def _fill_in(column: Int64s, blocks: Sequence[RawBlock], counts: list[int], tag: int, kind: str) -> None:
    """Replace the numbers of those blocks that have a section of them."""
    at = 0
    for block, count in zip(blocks, counts, strict=True):
        if tag in block.sections:
            column[at : at + count] = np.frombuffer(block.part[block.sections[tag]], kind)
        at += count


def _section(blocks: Sequence[RawBlock], tag: int, size: int, more: int = 0) -> bytes:
    """One section of all blocks, with `size` bytes for each message and `more`; zeros where a block lacks it."""
    pieces = []
    for block in blocks:
        where = block.sections.get(tag)
        pieces.append(bytes(size * (block.header.rows + more)) if where is None else block.part[where])
    return b"".join(pieces)


def _blobs(
    blocks: Sequence[RawBlock], counts: list[int], offsets_tag: int, absent_tag: int, strings: Iterable[bytes]
) -> Blobs:
    """One column of strings of all blocks, whose bytes are `strings` together."""
    data = b"".join(strings)
    offsets = np.frombuffer(_section(blocks, offsets_tag, 4, 1), "<i4").astype(np.int32, copy=False)
    if len(offsets) != sum(counts) + len(blocks):
        raise BadBlock("a column of offsets of a block does not fit it")
    if len(blocks) > 1:  # each block has one offset more than messages, and begins with 0
        inner = np.ones(len(offsets) - 1, np.bool_)
        inner[np.cumsum(np.array(counts[:-1], np.int64) + 1) - 1] = False
        lengths = np.diff(offsets)[inner]
        offsets = np.zeros(len(lengths) + 1, np.int32)
        np.cumsum(lengths, out=offsets[1:])
    if offsets[0] != 0 or offsets[-1] != len(data):
        raise BadBlock("the offsets of a block do not fit its bytes")
    absent: NDArray[np.bool_] | None = None
    if any(absent_tag in block.sections or offsets_tag not in block.sections for block in blocks):
        absent = _absent(blocks, counts, offsets_tag, absent_tag)
    return Blobs(data, offsets, absent)


def _absent(blocks: Sequence[RawBlock], counts: list[int], offsets_tag: int, tag: int) -> NDArray[np.bool_]:
    """The mask of absent strings of all blocks; all rows of a block without the column are absent."""
    masks: list[NDArray[np.bool_]] = []
    for block, count in zip(blocks, counts, strict=True):
        where = block.sections.get(tag)
        if where is not None:
            masks.append(_bits(block.part[where], count))
        else:
            masks.append(np.full(count, offsets_tag not in block.sections, np.bool_))
    return np.concatenate(masks)


def _bits(bitmap: bytes, count: int) -> NDArray[np.bool_]:
    return np.unpackbits(np.frombuffer(bitmap, np.uint8), count=count, bitorder="little").view(np.bool_)


# --- properties ---


def _properties(blocks: Sequence[RawBlock], counts: list[int]) -> dict[str, PropertyColumn]:
    found: dict[str, list[PropertyColumn | None]] = {}
    for index, block in enumerate(blocks):
        for tag, where in block.properties:
            read = _read_labels if tag == LABELS else _read_numbers
            name, column = read(block.part[where], counts[index])
            if name not in found:
                found[name] = [None] * len(blocks)
            found[name][index] = column
    return {name: concat_columns(columns, counts) for name, columns in found.items()}


def property_names(block: RawBlock) -> set[bytes]:
    """Names of properties in UTF-8, without those that can't be read: decoding reports them."""
    part, rows = block.part, block.header.rows
    names = set()
    for tag, where in block.properties:
        start = where.start
        try:
            size, more = PAIR.unpack_from(part, start)
        except struct.error:
            continue
        at = start + 8 + (4 * (more + rows) if tag == LABELS else 8 * rows + ((rows + 7) // 8 if more else 0))
        names.add(part[at : at + size])
    return names


def _read_labels(section: bytes, count: int) -> tuple[str, Labels]:
    name_size, labels = PAIR.unpack_from(section)
    sizes = struct.unpack_from(f"<{labels}I", section, 8)
    start = 8 + 4 * labels
    at = start + 4 * count
    codes = np.frombuffer(section, "<i4", count, start)
    end = at + name_size
    name, values = section[at:end].decode(), []
    for size in sizes:
        values.append(section[end : end + size].decode())
        end += size
    return name, Labels(codes.astype(np.int32, copy=False), tuple(values))


def _read_numbers(section: bytes, count: int) -> tuple[str, Numbers]:
    name_size, sparse = PAIR.unpack_from(section)
    values = np.frombuffer(section, "<i8", count, 8).astype(np.int64, copy=False)
    at = 8 + 8 * count
    present: NDArray[np.bool_] | None = None
    if sparse:
        bitmap = (count + 7) // 8
        present = _bits(section[at : at + bitmap], count)
        at += bitmap
    return section[at : at + name_size].decode(), Numbers(values, present)
