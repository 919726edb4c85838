"""Digests of single records, as `txnbuffer.pipeline.jobs.audit` defines them, to check those of Spark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import xxhash

from txnbuffer.pipeline.jobs.audit import MASK

SEED = 42


def record_digest(
    topic: str,
    key: bytes | None,
    value: bytes | None,
    position: Sequence[int] | None = None,
    event_time: int | None = None,
    properties: Mapping[str, str] | None = None,
) -> int:
    """The digest of a record; of the last three arguments, None is not compared. `event_time` in microseconds."""
    parts: list[bytes | None] = [topic.encode(), key, *map(_number, position or ()), value]
    if event_time is not None:
        parts.append(_number(event_time))
    if properties is not None:
        parts.append(_number(len(properties)))
        parts += [text.encode() for pair in sorted(properties.items()) for text in pair]
    digest = SEED
    for part in parts:
        if part is not None:
            digest = xxhash.xxh64_intdigest(part, digest)
    return digest


def _number(number: int) -> bytes:
    return (number & MASK).to_bytes(8, "little")
