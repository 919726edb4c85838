"""What frames of both sides are made of, beside what `txnbuffer.wire.parts` has: versions, checks, columns by kind."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from txnbuffer.streams.failover import MAX_SEQNO, Version
from txnbuffer.wire.parts import Fields, record, same_length

NAMESPACE = "txnbuffer.streams"

M = TypeVar("M")


def schema_of(name: str, fields: Iterable[tuple[str, Any]]) -> Fields:
    """The schema of a record of this protocol."""
    return record(name, fields, NAMESPACE)


def columns(messages: Iterable[Iterable[Any]], *names: str) -> Fields:
    """The fields of some messages as columns of these names."""
    rows = list(messages)
    return {name: list(column) for name, column in zip(names, zip(*rows, strict=True), strict=True)} if rows else {
        name: [] for name in names
    }  # fmt: skip


def rows_of(control: Fields, what: str, *names: str) -> Iterator[tuple[Any, ...]]:
    """The rows of some columns, all of which are numbers from 0 on. Raises ValueError."""
    found = [control[name] for name in names]
    same_length(what, *found)
    for column in found:
        if column and min(column) < 0:
            raise ValueError(f"{what} have a number below 0")
    return zip(*found, strict=True)


def in_order(kinds: bytes, by_kind: list[Iterator[M]]) -> tuple[M, ...]:
    """The messages as `kinds` mixes them. Raises ValueError if there are others than that says."""
    if kinds and max(kinds) >= len(by_kind):
        raise ValueError(f"{max(kinds)} is no kind of message")
    try:
        messages = tuple([next(by_kind[kind]) for kind in kinds])
    except StopIteration:
        raise ValueError("it has fewer messages than it announces") from None
    if any(next(rest, None) is not None for rest in by_kind):
        raise ValueError("it has more messages than it announces")
    return messages


def version_columns(versions: tuple[Version, ...]) -> Fields:
    return {"uuids": [version.uuid for version in versions], "version_seqnos": [version.seqno for version in versions]}


def versions_of(fields: Fields) -> tuple[Version, ...]:
    """The versions that `version_columns` wrote. Raises ValueError."""
    return tuple(map(Version._make, rows_of(fields, "versions", "uuids", "version_seqnos")))


def seqnos(what: str, *numbers: int) -> None:
    """Raise ValueError if one is no seqno."""
    if not 0 <= min(numbers) <= max(numbers) <= MAX_SEQNO:
        raise ValueError(f"{what} has a number that is no seqno")
