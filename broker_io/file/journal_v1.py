"""The journal of version 1, which is read only: appends since the last checkpoint, in the order of acknowledgement

All numbers are little-endian. The file starts with 32 bytes:

    offset  size
         0     8  magic `TXJOURN` and the version, 1
         8     8  number of the journal
        16     8  mark: 8 random bytes that start each record, so that no message can imitate one
        24     4  zero
        28     4  CRC32C of the 28 bytes before

Records follow, each of a head of 40 bytes, a table, and blocks (see broker_io/block.py):

         0     8  the mark
         8     8  sequence: the first record is 1, the next 2, …
        16     8  length of the whole record
        24     4  number of blocks
        28     4  CRC32C of the table
        32     4  zero
        36     4  CRC32C of the 36 bytes before

The table has 40 bytes per block: topic number (8), ledger (8), generation (8), offset in the segment (8),
length (8). Blocks have checksums of their own.

An incomplete record at the end of the file was never acknowledged: it is a torn tail. An incomplete record before a
complete one is damage.
"""

from __future__ import annotations

import struct
from contextlib import suppress
from typing import NamedTuple

import google_crc32c

from broker_io.block import BadBlock, open_block, parse_header
from broker_io.errors import Damaged, UnsupportedFormat
from broker_io.file.layout import with_crc
from broker_io.file.operations import AppendBlocks
from broker_io.replication.numbers import Change, NumberedOperation, ObjectNumbers

VERSION = 1
FILE_HEAD_BYTES = 32

_FILE_MAGIC = b"TXJOURN"
_FILE_HEAD = struct.Struct("<7sBQ8s4x")
_HEAD = struct.Struct("<8sQQII4x")
_HEAD_BYTES = 40
_ROW = struct.Struct("<QQQQQ")


class Placed(NamedTuple):
    """The location of a block."""

    topic: int
    ledger: int
    generation: int
    offset: int
    length: int


class JournalBlock(NamedTuple):
    """A block in a journal: its location and its bytes."""

    placed: Placed
    data: bytes


class Replay(NamedTuple):
    """The content of a journal of `size` bytes: blocks in order, the end offset of the last whole record."""

    blocks: list[JournalBlock]
    end: int
    size: int


def read_journal(data: bytes, number: int, path: str) -> Replay:
    """The content of a journal. Raises Damaged or UnsupportedFormat that names the file."""
    head = data[:FILE_HEAD_BYTES]
    if len(head) < FILE_HEAD_BYTES or with_crc(head[:-4]) != head:
        raise Damaged(path, 0, "the head of the journal is damaged")
    magic, version, found, mark = _FILE_HEAD.unpack_from(head)
    if magic != _FILE_MAGIC or found != number:
        raise Damaged(path, 0, f"this is not journal {number}")
    if version != VERSION:
        raise UnsupportedFormat(
            f"{path}: a journal of format version {version}; this release reads {VERSION}: upgrade it"
        )
    blocks: list[JournalBlock] = []
    at, sequence = FILE_HEAD_BYTES, 1
    while at < len(data):
        try:
            record, end = _read_record(data, at, mark, sequence)
        except BadBlock as error:
            if _later_record_exists(data, at, mark, sequence):
                raise Damaged(path, at, f"a record of the journal is damaged: {error}") from None
            break
        blocks += record
        at, sequence = end, sequence + 1
    return Replay(blocks, at, len(data))


def _read_record(data: bytes, at: int, mark: bytes, sequence: int) -> tuple[list[JournalBlock], int]:
    """The record at an offset and the offset after it. Raises BadBlock if it is not whole."""
    found, length, count, table_crc = _read_head(data, at, mark)
    table = data[at + _HEAD_BYTES : at + _HEAD_BYTES + count * _ROW.size]
    whole = len(table) == count * _ROW.size and google_crc32c.value(table) == table_crc
    if found != sequence or at + length > len(data) or not whole:
        raise BadBlock("it is incomplete, or not the next one in sequence")
    blocks: list[JournalBlock] = []
    start = at + _HEAD_BYTES + len(table)
    for placed in map(Placed._make, _ROW.iter_unpack(table)):
        content = data[start : start + placed.length]
        header = parse_header(content)
        if header.length != len(content):
            raise BadBlock("one of its blocks has another length")
        open_block(content, 0, header)
        blocks.append(JournalBlock(placed, content))
        start += placed.length
    if start != at + length:
        raise BadBlock("its length is not that of its blocks")
    return blocks, start


def _read_head(data: bytes, at: int, mark: bytes) -> tuple[int, int, int, int]:
    """Sequence, length, number of blocks and checksum of the table."""
    head = data[at : at + _HEAD_BYTES]
    if len(head) < _HEAD_BYTES or not head.startswith(mark) or with_crc(head[:-4]) != head:
        raise BadBlock("its head is invalid")
    _, sequence, length, count, table_crc = _HEAD.unpack_from(head)
    return sequence, length, count, table_crc


def _later_record_exists(data: bytes, at: int, mark: bytes, sequence: int) -> bool:
    """Whether there is a valid head with a later sequence at or after an offset.

    A head is proof enough: a record is written only after the one before it was synced.
    """
    found = data.find(mark, at)
    while found >= 0:
        with suppress(BadBlock):
            if _read_head(data, found, mark)[0] > sequence:
                return True
        found = data.find(mark, found + 1)
    return False


def read_operations(data: bytes, number: int, path: str) -> tuple[list[NumberedOperation], int]:
    """The appends in a journal, numbered, and the bytes of a torn tail. Raises as `read_journal`."""
    replay, numbers = read_journal(data, number, path), ObjectNumbers()
    operations = []
    for placed, block in replay.blocks:
        body = AppendBlocks(placed.ledger, placed.generation, placed.offset, placed.length, [block])
        operations.append(numbers.draw(Change.APPEND, placed.topic, body))
    return operations, replay.size - replay.end
