"""Whether a table and a log belong together, decided before a publisher publishes anything

The log knows the identity of the table that was published under a name, and the number of the last published group.
The table knows its own identity, the database that it was made in, the highest id that it gave out, and a number up to
which the log has its rows. What contradicts is refused: publishing would lose rows or publish them twice.
"""

from __future__ import annotations

from typing import NamedTuple

from txnbuffer.errors import ForeignOutbox


class TableState(NamedTuple):
    """What the table says: `home` is where it was made, `here` the database that it is in now."""

    identity: str
    home: str
    here: str
    last_id: int
    published: int


class LogState(NamedTuple):
    """What the log says: the identity that was published under the name, None if there is none, and the last number."""

    identity: str | None
    number: int


def check_continuity(name: str, table: TableState, log: LogState) -> None:
    """Raises ForeignOutbox unless the table may be published to the log under the name."""
    adopt = "`txnbuf outbox adopt` says what that would skip, and continues"
    if table.home != table.here:
        raise ForeignOutbox(
            f"outbox {name!r} was made in another database ({table.home}) than this one ({table.here}): a copy. "
            f"Give the copy an outbox of another name; if it replaces the original, {adopt}"
        )
    if log.identity is not None and log.identity != table.identity:
        raise ForeignOutbox(
            f"another table was published to the log as outbox {name!r}: this one is new, or belongs to another "
            f"database. Give it another name; if it replaces the other, {adopt}"
        )
    if log.number > table.last_id:
        raise ForeignOutbox(
            f"the log has rows of outbox {name!r} up to {log.number}, and the database only gave out ids up to "
            f"{table.last_id}: it was restored to an older state. New rows would count as published: {adopt} above "
            f"{log.number}"
        )
    if log.number < table.published:
        raise ForeignOutbox(
            f"rows of outbox {name!r} up to {table.published} were published, and the log has them up to {log.number} "
            f"only: it is another log, a new one, or was restored. The rows between are gone: {adopt}"
        )
    if log.number and log.identity is None:
        raise ForeignOutbox(
            f"the log has rows of outbox {name!r}, and does not say of which table: its topic of outboxes was "
            f"deleted or trimmed: {adopt}"
        )
