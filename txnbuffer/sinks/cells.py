"""Columns of mutations as cells of a database: bytes that are text stand as text."""

from __future__ import annotations

import itertools
import json
from typing import TypeAlias

from broker_io.batch import Batch, Blobs
from broker_io.position import NO_INDEX, Int64s, Positions

Cell: TypeAlias = "str | bytes | None"


def blob_cells(column: Blobs, *, binary: bool = False) -> list[Cell]:
    """One cell for each string; `binary`: as bytes, whatever they are."""
    if binary:
        return [*column.to_list()]
    packed = column.packed()
    data = bytes(packed.data)
    if not data.isascii() or b"\0" in data:
        return [*map(cell, column.to_list())]
    text, ends = data.decode(), packed.offsets.tolist()
    cells: list[Cell] = [text[start:end] for start, end in itertools.pairwise(ends)]
    if packed.absent is not None:
        for at in packed.absent.nonzero()[0].tolist():
            cells[at] = None
    return cells


def cell(data: bytes | None) -> Cell:
    """Text where the bytes are UTF-8 without a NUL, which ends a text for much of SQLite; else the bytes."""
    if data is None or b"\0" in data:
        return data
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data


def property_cells(messages: Batch) -> list[str | None]:
    """The properties of each message as a JSON object, None where it has none."""
    if not messages.properties:
        return [None] * len(messages)
    names = [*messages.properties]
    known: dict[tuple[str | None, ...], str | None] = {}
    cells = []
    for texts in zip(*(column.to_list() for column in messages.properties.values()), strict=True):
        if texts not in known:
            row = {name: text for name, text in zip(names, texts, strict=True) if text is not None}
            known[texts] = json.dumps(row, ensure_ascii=False) if row else None
        cells.append(known[texts])
    return cells


def time_cells(times: Int64s) -> list[int | None]:
    """Milliseconds since 1970, None for 0: there is none."""
    return [time or None for time in times.tolist()]


def position_cells(positions: Positions) -> list[str]:
    """As positions are printed."""
    columns = positions.ledgers.tolist(), positions.entries.tolist(), positions.indexes.tolist()
    return [
        f"{ledger}:{entry}" if index == NO_INDEX else f"{ledger}:{entry}:{index}"
        for ledger, entry, index in zip(*columns, strict=True)
    ]
