"""Columns of the entries of the decision log: positions as three numbers, ids as differences."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from broker_io.position import Position


def position_columns(ends: Sequence[Position], prefix: str) -> dict[str, list[int]]:
    return {
        f"{prefix}ledgers": [position.ledger for position in ends],
        f"{prefix}entries": [position.entry for position in ends],
        f"{prefix}batches": [position.batch for position in ends],
    }


def positions(record: dict[str, Any], prefix: str) -> list[Position]:
    columns = [record[f"{prefix}{name}"] for name in ("ledgers", "entries", "batches")]
    same_length(*columns)
    return list(map(Position, *columns))


def deltas(numbers: list[int]) -> list[int]:
    """Each number as the difference from the one before, the first from 0."""
    return [after - before for before, after in itertools.pairwise([0, *numbers])]


def sums(differences: list[int]) -> list[int]:
    """What `deltas` made these of."""
    return list(itertools.accumulate(differences))


def same_length(*columns: Sequence[Any]) -> None:
    """Raises ValueError for columns of different lengths."""
    lengths = [len(column) for column in columns]
    if len(set(lengths)) != 1:
        raise ValueError(f"columns that belong together have {lengths} items")
