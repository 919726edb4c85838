"""How positions and groups of columns are laid out in the flat records of a snapshot.

A column of positions `x` becomes the three columns `x_ledger`, `x_entry`, `x_batch`, a single position
three longs of these names; "none" is -1, -1, -1. Every column may be written as one element that stands
for all, so each group of columns has its number of rows in a field of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from broker_io.position import EARLIEST, NO_INDEX, Int64s, Position, Positions
from snapshots.columns import constant_shortened, expanded

AXES = ("ledger", "entry", "batch")


def put_position(name: str, position: Position | None) -> dict[str, int]:
    return {f"{name}_{axis}": number for axis, number in zip(AXES, position or EARLIEST, strict=True)}


def get_position(values: Mapping[str, Any], name: str) -> Position | None:
    position = Position(*(values[f"{name}_{axis}"] for axis in AXES))
    return None if position == EARLIEST else position


def reaches(at: Position | None, position: Position | None) -> bool:
    """Whether a reader that stands behind the message `at` has passed the record at `position`."""
    if position is None:
        return True
    if at is None:
        return False
    return at >= position or (at.batch == NO_INDEX and at[:2] == position[:2])


def put_columns(columns: Mapping[str, Int64s]) -> dict[str, Int64s]:
    return {name: constant_shortened(column) for name, column in columns.items()}


def get_column(values: Mapping[str, Any], name: str, count: int) -> Int64s:
    """Raises BadColumn if it has another number of rows."""
    return expanded(values[name], count)


def put_positions(name: str, positions: Positions) -> dict[str, Int64s]:
    columns = zip(AXES, (positions.ledgers, positions.entries, positions.indexes), strict=True)
    return put_columns({f"{name}_{axis}": column for axis, column in columns})


def get_positions(values: Mapping[str, Any], name: str, count: int) -> Positions:
    ledgers, entries, indexes = (get_column(values, f"{name}_{axis}", count) for axis in AXES)
    return Positions(ledgers, entries, indexes)
