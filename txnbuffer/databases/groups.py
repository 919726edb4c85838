"""Which rows of an outbox are published next

A group, all rows of one transaction of the database, is published whole. Groups are published in the order of their
last rows, and the number of a published group is the id of its last row. The ids of two groups may overlap: a group
whose last row has a higher id may have rows below the number that is published already.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

UNKNOWN = 0
"""The group of rows of which nobody knows where their transaction ends: a run of them is one group.

Only in databases where ids are in the order of commits, so what is visible ends with a whole transaction.
"""


class OutboxRow(NamedTuple):
    """A row of the outbox; see `txnbuffer.databases.tables`."""

    id: int
    group: int
    topic: str
    partition: int | None
    key: bytes | None
    value: bytes | None
    properties: str | None
    event_time: int | None


class RowGroup(NamedTuple):
    """The rows of one transaction of the database, in the order of their ids."""

    rows: Sequence[OutboxRow]

    @property
    def number(self) -> int:
        """The id of its last row, with which it is published."""
        return self.rows[-1].id


class Page(NamedTuple):
    """What was read: rows in the order of their ids.

    `full`: there may be more rows. `limit`: no row with an id up to this one can still appear.
    """

    rows: Sequence[OutboxRow]
    full: bool
    limit: int


class OutboxProgress:
    """How far an outbox is published, from what its publisher has read.

    `serial`: ids are in the order of commits, so no row up to `published` is unpublished.
    """

    def __init__(self, published: int, *, serial: bool) -> None:
        self.published = published
        self._serial = serial
        """The number of the last group that is published."""
        self.low = 0
        """All rows up to this id are published."""

    def ready(self, page: Page, cut: Callable[[Collection[int], int], Collection[int]]) -> list[RowGroup]:
        """The whole groups of a page that may be published now, in order.

        `cut(groups, id)`: those of the groups that have rows after this id; asked about a full page only.
        """
        last = page.rows[-1].id if page.rows else 0
        groups: dict[int, list[OutboxRow]] = {}
        run = -1
        for row in page.rows:
            if self._serial and row.id <= self.published:
                continue
            run -= row.group != UNKNOWN  # the name of each run of rows with an unknown group
            groups.setdefault(row.group or run, []).append(row)
        cut_groups = set(cut([name for name in groups if name > 0], last)) if page.full else set()
        if page.full and page.rows[-1].group == UNKNOWN:
            cut_groups.add(run)
        left = {name: rows for name, rows in groups.items() if rows[-1].id > self.published or name in cut_groups}
        ready = [RowGroup(rows) for name, rows in left.items() if rows[-1].id <= page.limit and name not in cut_groups]
        first = min((rows[0].id for rows in left.values()), default=None)
        self.low = max(self.low, min(page.limit, last) if first is None else min(page.limit, first - 1))
        return sorted(ready, key=lambda group: group.number)

    def done(self, number: int) -> None:
        """The groups up to this number are published."""
        self.published = max(self.published, number)


def batches(groups: Sequence[RowGroup], rows: int) -> list[Sequence[RowGroup]]:
    """Cut groups into batches of about `rows` rows; each is published as one transaction."""
    found: list[list[RowGroup]] = []
    size = rows
    for group in groups:
        if size >= rows:
            found.append([])
            size = 0
        found[-1].append(group)
        size += len(group.rows)
    return list(found)
