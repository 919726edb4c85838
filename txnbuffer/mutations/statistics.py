"""Statistics of a manager and its cursors."""

from __future__ import annotations

from typing import NamedTuple

from txnbuffer.mutations.cursor import Cursor
from txnbuffer.mutations.snapshot import MutationSnapshot

PERSISTENCE = "persistence"
"""The name under which statistics show the persistence cursor; no other cursor may have it."""


class CursorStatistics(NamedTuple):
    """One cursor.

    `snapshot_start`: where the snapshot in memory begins in which it has its place, None without one.
    `last_read_seqno`: it has given everything up to there. `items_remaining`: mutations still to come; those
    that the log has to give are counted by their seqnos, so they are at most as many. `backfill_items` came from the
    log so far in the backfill under way; `backfill_held` of them, in `backfill_bytes`, wait to be taken.
    `drops`: how often it lost its place.
    """

    name: str
    snapshot_start: int | None
    last_read_seqno: int
    end_seqno: int | None
    items_sent: int
    items_remaining: int
    waiting: bool = False
    drops: int = 0
    backfilling: bool = False
    backfill_items: int = 0
    backfill_held: int = 0
    backfill_bytes: int = 0


class ManagerStatistics(NamedTuple):
    """One topic's manager; bytes and items are those in memory now, what follows `queued` counts from its start."""

    high_seqno: int
    open_snapshot_start: int
    snapshots: int
    items: int
    memory_bytes: int
    index_bytes: int
    backfill_bytes: int
    leaving_bytes: int
    cursors: int
    index_entries: int
    queued: int
    deduplicated: int
    snapshots_removed: int
    snapshots_collapsed: int
    snapshots_evicted: int
    items_expelled: int
    bytes_removed: int
    bytes_expelled: int
    bytes_evicted: int
    cursors_dropped: int


def of_persistence(place: MutationSnapshot) -> CursorStatistics:
    """Of the persistence cursor: it has passed all snapshots before the one where it is, and gives no items."""
    return CursorStatistics(PERSISTENCE, place.start, place.start - 1, None, 0, _from(place, place.start - 1))


def of_cursor(cursor: Cursor, high: int) -> CursorStatistics:
    backfill = cursor.backfill
    return CursorStatistics(
        cursor.name,
        None if cursor.pin is None else cursor.pin.start,
        cursor.after,
        cursor.end,
        cursor.items_sent,
        _remaining(cursor, high),
        cursor.waiting,
        cursor.drops,
        *(() if backfill is None else (True, backfill.items, backfill.rows, backfill.bytes)),
    )


def _remaining(cursor: Cursor, high: int) -> int:
    reading, backfill, pin = cursor.reading, cursor.backfill, cursor.pin
    after, items = cursor.after, 0
    if reading is not None and reading is not pin:
        items += reading.rows_above(after)
        after = reading.end
    if backfill is not None:
        items += backfill.rows + backfill.last - backfill.next + 1
        after = backfill.last
    return items + (high - after if pin is None else _from(pin, after))


def _from(snapshot: MutationSnapshot | None, after: int) -> int:
    """How many mutations stand above a seqno, from a snapshot on."""
    items = 0
    while snapshot is not None:
        items += snapshot.rows_above(after)
        snapshot = snapshot.newer
    return items
