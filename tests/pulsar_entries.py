"""The entries of a Pulsar topic as bytes: a message, or a batch, as Pulsar's producers pack them."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import google_crc32c
import zstandard

from broker_io.batch import Message

NONE, ZLIB, ZSTD = COMPRESSIONS = 0, 2, 3
CHECKSUM, BROKER = 0x0E01, 0x0E02
"""Magic numbers before a message and before the data of the broker."""


def varint(number: int) -> bytes:
    found = bytearray()
    while number > 0x7F:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*found, number])


def field(tag: int, value: int | str | bytes) -> bytes:
    """A field of a message of Protobuf, a number or bytes."""
    if isinstance(value, int):
        return varint(tag << 3) + varint(value)
    content = value.encode() if isinstance(value, str) else value
    return varint(tag << 3 | 2) + varint(len(content)) + content


def properties_of(tag: int, properties: Mapping[str, str]) -> bytes:
    return b"".join(field(tag, field(1, name) + field(2, text)) for name, text in properties.items())


def compressed(compression: int, payload: bytes) -> bytes:
    if compression == ZLIB:
        return zlib.compress(payload)
    return zstandard.ZstdCompressor().compress(payload) if compression == ZSTD else payload


def entry(
    messages: Sequence[Message],
    *,
    batched: bool = True,
    compression: int = NONE,
    broker_data: bytes = b"",
    more: bytes = b"",
) -> bytes:
    """An entry of these messages, of one if it is not `batched`; in a batch, each has `more` metadata."""
    metadata = field(1, "producer") + field(2, 7) + field(3, 1_600_000_000_000)
    if batched:
        payload = b"".join(member(message, more) for message in messages)
    else:
        payload = messages[0].value or b""
        metadata += properties_of(4, messages[0].properties)
        metadata += b"" if messages[0].key is None else field(6, messages[0].key)
    metadata += (field(8, compression) if compression else b"") + field(9, len(payload))
    metadata += field(11, len(messages)) if batched else b""
    metadata += field(25, 1) if not batched and messages[0].value is None else b""
    rest = struct.pack(">I", len(metadata)) + metadata + compressed(compression, payload)
    before = struct.pack(">HI", BROKER, len(broker_data)) + broker_data if broker_data else b""
    return before + struct.pack(">HI", CHECKSUM, google_crc32c.value(rest)) + rest


def member(message: Message, more: bytes = b"") -> bytes:
    """A message within a batch; `more` is a part of its metadata."""
    value = message.value or b""
    metadata = properties_of(1, message.properties) + more
    metadata += b"" if message.key is None else field(2, message.key)
    metadata += field(3, len(value)) + (field(9, 1) if message.value is None else b"")
    return struct.pack(">I", len(metadata)) + metadata + value


class Parts(NamedTuple):
    """An entry without its checksum: what is before it, its metadata, and its payload, not compressed."""

    before: bytes
    metadata: bytes
    payload: bytes


def parts(data: bytes, compression: int = NONE) -> Parts:
    """The parts of an entry. Asserts that the checksum is that of the rest."""
    at = 0
    if data[:2] == struct.pack(">H", BROKER):
        at = 6 + struct.unpack_from(">I", data, 2)[0]
    magic, checksum = struct.unpack_from(">HI", data, at)
    assert (magic, checksum) == (CHECKSUM, google_crc32c.value(data[at + 6 :]))
    start = at + 10
    end = start + struct.unpack_from(">I", data, at + 6)[0]
    payload = data[end:]
    if compression == ZLIB:
        payload = zlib.decompressobj().decompress(payload)  # Pulsar does not end the stream
    elif compression == ZSTD:
        payload = zstandard.ZstdDecompressor().decompress(payload)
    return Parts(data[:at], data[start:end], payload)
