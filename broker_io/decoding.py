"""Blocks decoded to columns: many small blocks in one numpy pass, a big one without copies.

A numpy call costs microseconds whatever the length. So the columns of many blocks are concatenated as bytes
and then decoded in one call.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from broker_io import block as codec
from broker_io.batch import ABSENT, Batch, Blobs, Labels, Numbers, PropertyColumn, as_numbers
from broker_io.block import BadBlock, RawBlock
from broker_io.position import Int64s


class Decoded(NamedTuple):
    """The messages of blocks, in order: entry numbers int64[n], publish times int64[n], columns of n."""

    entries: Int64s
    publish_times: Int64s
    messages: Batch


def decode_blocks(blocks: Sequence[RawBlock]) -> Decoded:
    """All messages of at least one block. Raises BadBlock if a column does not fit its block."""
    try:
        counts = [block.header.rows for block in blocks]
        return Decoded(_entries(blocks, counts), _publish_times(blocks, counts), _messages(blocks, counts))
    except (ValueError, IndexError, struct.error) as error:
        raise BadBlock(f"the columns of a block do not fit it ({error})") from None


def decode_foreign_block(data: bytes, at: int = 0) -> tuple[Decoded, int]:
    """The messages of a block from an untrusted peer, and the offset of its end.

    A peer can compute a valid checksum of bad columns, so the columns are checked. Compressed blocks are rejected,
    because their decompressed size is unknown. Raises BadBlock, or UnsupportedFormat.
    """
    header = codec.parse_header(data, at, 0)
    if not header.rows or header.flags:
        raise BadBlock("it is compressed" if header.flags else "it has no messages")
    end = at + header.length
    if end > len(data):
        raise BadBlock(f"it is cut off after {len(data) - at} of {header.length} bytes")
    decoded = decode_blocks([codec.open_block(data, at, header)])
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


def decode_keys(block: RawBlock) -> Blobs:
    """The keys of one block."""
    return _blobs([block], [block.header.rows], codec.KEY_OFFSETS, codec.KEY_ABSENT, _key_bytes)


def decode_hashes(block: RawBlock) -> NDArray[np.uint64]:
    """uint64[n, 2]: the key hashes of one block as two halves; zeros where there is no key."""
    where = block.sections.get(codec.HASHES)
    count = block.header.rows
    if where is None:
        return np.zeros((count, 2), np.uint64)
    return np.frombuffer(block.part[where], ">u8").reshape(count, 2).astype(np.uint64)


def absent_values(block: RawBlock) -> NDArray[np.bool_]:
    """bool[n]: which messages of one block have no value."""
    return _mask([block], [block.header.rows], codec.VALUE_ABSENT)


def block_entries(block: RawBlock) -> Int64s:
    """int64[n]: the entry numbers of one block."""
    return _entries([block], [block.header.rows])


def block_publish_times(block: RawBlock) -> Int64s:
    """int64[n]: the publish times of one block."""
    return _publish_times([block], [block.header.rows])


def _messages(blocks: Sequence[RawBlock], counts: list[int]) -> Batch:
    times: Int64s | None = None
    if any(codec.EVENT_TIMES in block.sections for block in blocks):
        times = _numbers(blocks, codec.EVENT_TIMES, "<i8", lambda block: bytes(8 * block.header.rows))
    return Batch(
        _blobs(blocks, counts, codec.KEY_OFFSETS, codec.KEY_ABSENT, _key_bytes),
        _blobs(blocks, counts, codec.VALUE_OFFSETS, codec.VALUE_ABSENT, lambda block: block.values),
        _properties(blocks, counts),
        times,
    )


def _entries(blocks: Sequence[RawBlock], counts: list[int]) -> Int64s:
    first = blocks[0].header.first_entry
    if len(blocks) == 1 and codec.ENTRIES not in blocks[0].sections:
        return np.arange(first, first + counts[0], dtype=np.int64)
    lengths = np.array(counts, np.int64)
    starts = np.cumsum(lengths) - lengths
    entries = np.arange(int(lengths.sum()), dtype=np.int64)
    firsts = np.array([block.header.first_entry for block in blocks], np.int64)
    entries += np.repeat(firsts - starts, lengths)
    for index, block in enumerate(blocks):
        if codec.ENTRIES in block.sections:
            start = int(starts[index])
            gaps = np.frombuffer(block.part[block.sections[codec.ENTRIES]], "<u4")
            entries[start : start + counts[index]] = gaps.astype(np.int64) + block.header.first_entry
    return entries


def _publish_times(blocks: Sequence[RawBlock], counts: list[int]) -> Int64s:
    if len(blocks) == 1 and codec.PUBLISH_TIMES not in blocks[0].sections:
        return np.full(counts[0], blocks[0].header.publish_time, np.int64)
    times = np.repeat(np.array([block.header.publish_time for block in blocks], np.int64), counts)
    at = 0
    for block, count in zip(blocks, counts, strict=True):
        if codec.PUBLISH_TIMES in block.sections:
            times[at : at + count] = np.frombuffer(block.part[block.sections[codec.PUBLISH_TIMES]], "<i8")
        at += count
    return times


def _key_bytes(block: RawBlock) -> bytes:
    where = block.sections.get(codec.KEYS)
    return b"" if where is None else block.part[where]


def _numbers(blocks: Sequence[RawBlock], tag: int, kind: str, fill: Callable[[RawBlock], bytes]) -> NDArray[np.int64]:
    """One section of all blocks as one column, with `fill(block)` for blocks without the section."""
    try:
        pieces = [block.part[block.sections[tag]] for block in blocks]
    except KeyError:
        pieces = [block.part[block.sections[tag]] if tag in block.sections else fill(block) for block in blocks]
    return np.frombuffer(pieces[0] if len(pieces) == 1 else b"".join(pieces), kind)


def _blobs(
    blocks: Sequence[RawBlock],
    counts: list[int],
    offsets_tag: int,
    absent_tag: int,
    data_of: Callable[[RawBlock], bytes],
) -> Blobs:
    data = data_of(blocks[0]) if len(blocks) == 1 else b"".join([data_of(block) for block in blocks])
    raw = _numbers(blocks, offsets_tag, "<i4", lambda block: bytes(4 * block.header.rows + 4))
    total = sum(counts)
    if len(raw) != total + len(blocks):
        raise BadBlock("a column of offsets of a block does not fit it")
    offsets = raw.astype(np.int32, copy=False) if len(blocks) == 1 else _joined_offsets(raw, counts)
    if offsets[0] != 0 or offsets[-1] != len(data):
        raise BadBlock("the offsets of a block do not fit its bytes")
    absent: NDArray[np.bool_] | None = None
    if any(absent_tag in block.sections or offsets_tag not in block.sections for block in blocks):
        absent = _mask(blocks, counts, absent_tag, offsets_tag)
    return Blobs(data, offsets, absent)


def _joined_offsets(raw: NDArray[np.int64], counts: list[int]) -> NDArray[np.int32]:
    """Turn n + 1 offsets per block, each block's from 0, into the offsets of the concatenated strings of all blocks."""
    lengths = np.diff(raw)
    inner = np.ones(len(raw) - 1, np.bool_)
    inner[np.cumsum(np.array(counts[:-1], np.int64) + 1) - 1] = False
    offsets = np.zeros(len(raw) - len(counts) + 1, np.int32)
    np.cumsum(lengths[inner], out=offsets[1:])
    return offsets


def _mask(
    blocks: Sequence[RawBlock], counts: list[int], tag: int, offsets_tag: int = codec.VALUE_OFFSETS
) -> NDArray[np.bool_]:
    """A bitmap section of all blocks; all rows of a block without the column are absent."""
    masks: list[NDArray[np.bool_]] = []
    for block, count in zip(blocks, counts, strict=True):
        where = block.sections.get(tag)
        if where is not None:
            masks.append(_bits(block.part[where], count))
        else:
            masks.append(np.full(count, offsets_tag not in block.sections, np.bool_))
    return masks[0] if len(masks) == 1 else np.concatenate(masks)


def _bits(bitmap: bytes, count: int) -> NDArray[np.bool_]:
    return np.unpackbits(np.frombuffer(bitmap, np.uint8), count=count, bitorder="little").view(np.bool_)


# --- properties ---


def _properties(blocks: Sequence[RawBlock], counts: list[int]) -> dict[str, PropertyColumn]:
    columns: dict[str, list[tuple[int, PropertyColumn]]] = {}
    for index, block in enumerate(blocks):
        for tag, where in block.properties:
            read = _read_labels if tag == codec.LABELS else _read_numbers
            name, column = read(block.part[where], counts[index])
            columns.setdefault(name, []).append((index, column))
    return {name: _joined(parts, counts) for name, parts in columns.items()}


def property_names(block: RawBlock) -> set[bytes]:
    """Names of properties in UTF-8, without those that can't be read: decoding reports them."""
    part, rows = block.part, block.header.rows
    names = set()
    for tag, where in block.properties:
        start = where.start
        try:
            size, more = codec.PAIR.unpack_from(part, start)
        except struct.error:
            continue
        at = start + 8 + (4 * (more + rows) if tag == codec.LABELS else 8 * rows + ((rows + 7) // 8 if more else 0))
        names.add(part[at : at + size])
    return names


def _read_labels(section: bytes, count: int) -> tuple[str, Labels]:
    name_size, labels = codec.PAIR.unpack_from(section)
    sizes = struct.unpack_from(f"<{labels}I", section, 8)
    start = 8 + 4 * labels
    at = start + 4 * count
    codes = np.frombuffer(section, "<i4", count, start)
    ends = itertools.accumulate(sizes, initial=at + name_size)
    values = tuple(section[a:b].decode() for a, b in itertools.pairwise(ends))
    return section[at : at + name_size].decode(), Labels(codes.astype(np.int32, copy=False), values)


def _read_numbers(section: bytes, count: int) -> tuple[str, Numbers]:
    name_size, sparse = codec.PAIR.unpack_from(section)
    values = np.frombuffer(section, "<i8", count, 8).astype(np.int64, copy=False)
    at = 8 + 8 * count
    present: NDArray[np.bool_] | None = None
    if sparse:
        bitmap = (count + 7) // 8
        present = _bits(section[at : at + bitmap], count)
        at += bitmap
    return section[at : at + name_size].decode(), Numbers(values, present)


def _joined(parts: list[tuple[int, PropertyColumn]], counts: list[int]) -> PropertyColumn:
    """One property of all blocks from the blocks that have it."""
    if len(parts) == len(counts) == 1:
        return parts[0][1]
    figures = [(index, as_numbers(column)) for index, column in parts]
    if all(column is not None for _, column in figures):
        return _joined_numbers([(index, column) for index, column in figures if column is not None], counts)
    labels = [(index, column if isinstance(column, Labels) else Labels.of(column.to_list())) for index, column in parts]
    return _joined_labels(labels, counts)


def _joined_numbers(parts: list[tuple[int, Numbers]], counts: list[int]) -> Numbers:
    full = len(parts) == len(counts)
    if full and all(column.present is None for _, column in parts):
        return Numbers(np.concatenate([column.values for _, column in parts]))
    starts = list(itertools.accumulate(counts, initial=0))
    values = np.zeros(starts[-1], np.int64)
    present = np.zeros(starts[-1], np.bool_)
    for index, column in parts:
        rows = slice(starts[index], starts[index + 1])
        values[rows] = column.values
        present[rows] = True if column.present is None else column.present
    return Numbers(values, present)


def _joined_labels(parts: list[tuple[int, Labels]], counts: list[int]) -> Labels:
    seen: dict[str, int] = {}
    starts = list(itertools.accumulate(counts, initial=0))
    codes = np.full(starts[-1], ABSENT, np.int32)
    for index, column in parts:
        renamed = [seen.setdefault(value, len(seen)) for value in column.values]
        if renamed == list(range(len(renamed))):
            codes[starts[index] : starts[index + 1]] = column.codes
        else:
            codes[starts[index] : starts[index + 1]] = np.array([*renamed, ABSENT], np.int32)[column.codes]
    return Labels(codes, tuple(seen))
