"""Partitioned topics, as Pulsar's clients see them.

Partition n of topic T is the topic `T-partition-n`, n from 0. A message with a key goes to partition h mod k of k,
where h is the hash of its partition key, a text. Scheme `java` is the 31-polynomial of its UTF-16 code units
(JavaStringHash, the default of Java clients), `murmur3` is Murmur3 of its UTF-8, 32 bits, seed 0 (Murmur3_32Hash);
of either the lower 31 bits.

The partition key is the key itself if that is UTF-8, not empty, and does not begin with `tb.base64:`. Otherwise it is
`tb.base64:` and the key in base64.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Sequence
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from broker_io.errors import TopicPartitioned
from broker_io.position import Int64s

Hashing: TypeAlias = Literal["java", "murmur3"]
HASHINGS = ("java", "murmur3")

PREFIX = "tb.base64:"
_PREFIX = PREFIX.encode()
_NAME = re.compile(r"(.+)-partition-(0|[1-9]\d{0,8})", re.DOTALL)

FEW = 8
"""Fewer texts than this are hashed one by one, which is cheaper."""
_MASK = 0xFFFFFFFF
_LOW_31_BITS = 0x7FFFFFFF
_C1, _C2, _MIX1, _MIX2, _ADD = 0xCC9E2D51, 0x1B873593, 0x85EBCA6B, 0xC2B2AE35, 0xE6546B64

Uint32s: TypeAlias = "NDArray[np.uint32]"


class Partition(NamedTuple):
    """Partition `number` of a topic."""

    topic: str
    number: int


def partition_name(topic: str, number: int) -> str:
    """The topic name of a partition."""
    return f"{topic}-partition-{number}"


def partitioned(name: str) -> TopicPartitioned:
    """The error for the name of a partitioned topic."""
    return TopicPartitioned(
        f"topic {name!r} is partitioned: name one of its partitions, such as {partition_name(name, 0)!r}"
    )


def partition_of(name: str) -> Partition | None:
    """The partition of this name; None if it is not the name of a partition."""
    found = _NAME.fullmatch(name)
    return None if found is None else Partition(found[1], int(found[2]))


def whole_name(name: str) -> str:
    """The partitioned topic that this is a partition of, or the name itself."""
    found = partition_of(name)
    return name if found is None else found.topic


def key_to_text(key: bytes) -> str:
    """The partition key of a key."""
    if key and not key.startswith(_PREFIX):
        try:
            return key.decode()
        except UnicodeDecodeError:
            pass
    return PREFIX + base64.b64encode(key).decode()


def key_of_text(text: str) -> bytes | None:
    """The key of a partition key; None if that is empty."""
    if text.startswith(PREFIX):
        try:
            key = base64.b64decode(text[len(PREFIX) :], validate=True)
        except (binascii.Error, ValueError):
            return text.encode()
        return key if key_to_text(key) == text else text.encode()
    return text.encode() if text else None


def choose(keys: Sequence[bytes], count: int, hashing: Hashing = "java") -> Int64s:
    """int64[n]: the partition of each key, out of `count`."""
    return hashes([key_to_text(key) for key in keys], hashing) % count


def hashes(texts: Sequence[str], hashing: Hashing) -> Int64s:
    """int64[n]: the hash of each partition key."""
    encoded = [text.encode("utf-16-le" if hashing == "java" else "utf-8") for text in texts]
    if len(encoded) < FEW:
        found = np.array([*map(_java if hashing == "java" else _murmur3, encoded)], np.int64)
    else:
        found = (_java_columns if hashing == "java" else _murmur3_columns)(encoded).astype(np.int64)
    return found & _LOW_31_BITS


def _java(units: bytes) -> int:
    value = 0
    for unit in np.frombuffer(units, "<u2").tolist():
        value = (31 * value + unit) & _MASK
    return value


def _java_columns(texts: list[bytes]) -> Uint32s:
    """All texts in parallel, longest first, one code unit per step."""
    lengths = np.array([len(text) // 2 for text in texts], np.int64)
    order = np.argsort(-lengths, kind="stable")
    units = np.frombuffer(b"".join(texts), "<u2").astype(np.uint32)
    starts = (np.cumsum(lengths) - lengths)[order]
    longer = np.searchsorted(-lengths[order], -np.arange(lengths.max(initial=0)), side="left")
    values = np.zeros(len(texts), np.uint32)
    for at, rows in enumerate(longer.tolist()):
        values[:rows] = values[:rows] * np.uint32(31) + units[starts[:rows] + at]
    return _as_before(values, order)


def _murmur3(text: bytes) -> int:
    value = 0
    whole = len(text) & ~3
    for block in np.frombuffer(text, "<u4", whole // 4).tolist():
        value = value ^ _scrambled(block)
        value = ((value << 13) | (value >> 19)) & _MASK
        value = (value * 5 + _ADD) & _MASK
    if whole < len(text):
        value ^= _scrambled(int.from_bytes(text[whole:], "little"))
    value ^= len(text)
    value = ((value ^ (value >> 16)) * _MIX1) & _MASK
    value = ((value ^ (value >> 13)) * _MIX2) & _MASK
    return value ^ (value >> 16)


def _scrambled(block: int) -> int:
    block = (block * _C1) & _MASK
    block = ((block << 15) | (block >> 17)) & _MASK
    return (block * _C2) & _MASK


def _murmur3_columns(texts: list[bytes]) -> Uint32s:
    """All texts in parallel, longest first, four bytes per step; zeros that pad the last block change nothing."""
    sizes = np.array([len(text) for text in texts], np.int64)
    order = np.argsort(-sizes, kind="stable")
    blocks = np.frombuffer(b"".join([text + bytes(-len(text) % 4) for text in texts]), "<u4")
    padded = (sizes + 3) // 4
    starts, whole = (np.cumsum(padded) - padded)[order], (sizes // 4)[order]
    longer = np.searchsorted(-whole, -np.arange(whole.max(initial=0)), side="left")
    values = np.zeros(len(texts), np.uint32)
    for at, rows in enumerate(longer.tolist()):
        mixed = values[:rows] ^ _scrambled_columns(blocks[starts[:rows] + at])
        mixed = (mixed << np.uint32(13)) | (mixed >> np.uint32(19))
        values[:rows] = mixed * np.uint32(5) + np.uint32(_ADD)
    tails = np.flatnonzero(sizes[order] % 4)
    values[tails] ^= _scrambled_columns(blocks[starts[tails] + whole[tails]])
    values ^= sizes[order].astype(np.uint32)
    values = (values ^ (values >> np.uint32(16))) * np.uint32(_MIX1)
    values = (values ^ (values >> np.uint32(13))) * np.uint32(_MIX2)
    return _as_before(values ^ (values >> np.uint32(16)), order)


def _scrambled_columns(blocks: Uint32s) -> Uint32s:
    mixed = blocks * np.uint32(_C1)
    mixed = (mixed << np.uint32(15)) | (mixed >> np.uint32(17))
    return mixed * np.uint32(_C2)


def _as_before(values: Uint32s, order: NDArray[np.intp]) -> Uint32s:
    found = np.empty_like(values)
    found[order] = values
    return found
