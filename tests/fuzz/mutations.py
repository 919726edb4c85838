"""Changes of valid inputs, and the repair of their checksums."""

from __future__ import annotations

import random
import struct
from collections.abc import Sequence

import google_crc32c

from broker_io.block import HEADER_BYTES, MAGIC
from broker_io.filelog.log import journal
from broker_io.filelog.log.records import Mark, mark_after
from broker_io.filelog.log.segment import ENTRY_BYTES
from snapshots.format import DIGEST_BYTES, digest

HUGE = (0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 1)
"""Values of counts and lengths at which decoders break."""
TEXTS = (
    b"\xff",
    b"\x00",
    b"-1",
    b"9" * 5000,
    b"1e999",
    b"NaN",
    b"Infinity",
    b"[" * 2000,
    b"\xed\xa0\x80",
    b"\\ud800",
    b"null",
)
MOST = 1024 * 1024
"""Bytes of a changed input, at most."""


def changed(chance: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """An input after one to four changes: bits flipped, cut, joined with another, numbers replaced by huge ones."""
    for _ in range(chance.randint(1, 4)):
        data = chance.choice(_CHANGES)(chance, data, others)[:MOST]
    return data


def _flipped(chance: random.Random, data: bytes, _: Sequence[bytes]) -> bytes:
    if not data:
        return chance.randbytes(8)
    at = chance.randrange(len(data))
    return data[:at] + bytes([data[at] ^ 1 << chance.randrange(8)]) + data[at + 1 :]


def _cut(chance: random.Random, data: bytes, _: Sequence[bytes]) -> bytes:
    start, end = sorted((chance.randint(0, len(data)), chance.randint(0, len(data))))
    return chance.choice((data[:start], data[end:], data[:start] + data[end:]))


def _joined(chance: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    other = chance.choice(others) if others else data
    return data[: chance.randint(0, len(data))] + other[chance.randint(0, len(other)) :]


def _repeated(chance: random.Random, data: bytes, _: Sequence[bytes]) -> bytes:
    start, end = sorted((chance.randint(0, len(data)), chance.randint(0, len(data))))
    return data[:end] + data[start:end] * chance.choice((1, 2, 50)) + data[end:]


def _number(chance: random.Random, data: bytes, _: Sequence[bytes]) -> bytes:
    """A fixed number, or one of groups of seven bits, at a place."""
    size, value, at = chance.choice((1, 2, 4, 8)), chance.choice(HUGE), chance.randint(0, len(data))
    if chance.random() < 0.5:
        return data[:at] + (value & (1 << 8 * size) - 1).to_bytes(size, "little") + data[at + size :]
    return data[:at] + _groups(value) + data[at + chance.randint(0, 2) :]


def _groups(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def _text(chance: random.Random, data: bytes, _: Sequence[bytes]) -> bytes:
    at = chance.randint(0, len(data))
    return data[:at] + chance.choice(TEXTS) + data[at + chance.randint(0, 4) :]


_CHANGES = (_flipped, _cut, _joined, _repeated, _number, _text)


# --- checksums ---

_CRC = struct.Struct("<I")


def _with_crc(head: bytes) -> bytes:
    return head + _CRC.pack(google_crc32c.value(head))


def seal_blocks(data: bytes) -> bytes:
    """Repair the checksums of all blocks."""
    out, at = bytearray(data), data.find(MAGIC)
    while 0 <= at <= len(out) - HEADER_BYTES:
        keys, values = struct.unpack_from("<II", out, at + 32)
        start = at + HEADER_BYTES
        parts = start, min(start + keys, len(out)), min(start + keys + -keys % 8, len(out))
        _CRC.pack_into(out, at + 48, google_crc32c.value(bytes(out[parts[0] : parts[1]])))
        _CRC.pack_into(out, at + 52, google_crc32c.value(bytes(out[parts[2] : parts[2] + values])))
        _CRC.pack_into(out, at + 60, google_crc32c.value(bytes(out[at : at + 60])))
        at = data.find(MAGIC, at + 4)
    return bytes(out)


def size_of_blocks(data: bytes) -> int:
    """The size of an input, with the parts of its blocks as large as they are once decompressed."""
    size, at = len(data), data.find(MAGIC)
    while 0 <= at <= len(data) - HEADER_BYTES:
        size += sum(struct.unpack_from("<II", data, at + 40))
        at = data.find(MAGIC, at + 4)
    return size


def seal_journal(data: bytes) -> bytes:
    """Repair the checksums of a journal: of its head, its records and their chain."""
    size, head_size = journal.FILE_HEAD_BYTES, journal.HEAD_BYTES
    if len(data) < size:
        return data
    out = bytearray(_with_crc(data[: size - 4]) + data[size:])
    token, before, at = data[16:24], Mark(*struct.unpack_from("<QQQ", data, 24)), size
    while at + head_size <= len(out) and out[at : at + 8] == token:
        epoch, _, _, commit, _, length, kind = struct.unpack_from("<QQQQQQI", out, at + 8)
        if kind == journal.NOTE:
            mark = before
        else:
            content = bytes(out[at + head_size : at + head_size + length])
            mark = before = mark_after(before._replace(lsn=before.lsn % 2**63), epoch, commit, kind, [content])
        struct.pack_into("<QQQ", out, at + 8, *[number % 2**64 for number in mark])
        _CRC.pack_into(out, at + 60, google_crc32c.value(bytes(out[at : at + 60])))
        at += head_size + length
    return bytes(out)


def seal_index(data: bytes) -> bytes:
    pieces = [data[at : at + ENTRY_BYTES] for at in range(0, len(data), ENTRY_BYTES)]
    return b"".join([_with_crc(piece[:-4]) if len(piece) == ENTRY_BYTES else piece for piece in pieces])


def seal_manifest(data: bytes) -> bytes:
    line, newline, rest = data.partition(b"\n")
    words = line.split(b" ")
    return b" ".join([*words[:2], b"%08x" % google_crc32c.value(rest)]) + newline + rest


def seal_digest(data: bytes) -> bytes:
    """Repair the digest at the end of a record of the snapshot topic."""
    return data[:-DIGEST_BYTES] + digest(data[:-DIGEST_BYTES])
