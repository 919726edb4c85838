"""Which groups of an outbox may be published, against a naive model of concurrent transactions."""

from __future__ import annotations

from collections.abc import Collection

from hypothesis import given
from hypothesis import strategies as st

from txnbuffer.databases.groups import UNKNOWN, OutboxProgress, OutboxRow, Page, RowGroup, batches

TRANSACTIONS = 8

Step = tuple[str, int]
steps = st.lists(
    st.tuples(
        st.sampled_from(["insert", "insert", "commit", "roll back", "publish"]), st.integers(0, TRANSACTIONS - 1)
    ),
    max_size=80,
)


class NaiveDatabase:
    """Transactions that draw ids in turn and commit in any order; a slot is used again after its transaction ended."""

    def __init__(self) -> None:
        self.last_id = 0
        self.open: dict[int, tuple[int, list[OutboxRow]]] = {}
        self.rows: list[OutboxRow] = []
        self.committed: list[list[OutboxRow]] = []

    def insert(self, slot: int) -> None:
        if slot not in self.open:
            self.last_id += 1
            self.open[slot] = (self.last_id, [])
        group, rows = self.open[slot]
        self.last_id += 1
        rows.append(OutboxRow(self.last_id, group, "orders", None, None, b"", None, None))

    def commit(self, slot: int) -> None:
        _, rows = self.open.pop(slot, (0, []))
        if rows:
            self.rows = sorted([*self.rows, *rows])
            self.committed.append(rows)

    def page(self, low: int, size: int) -> Page:
        begun = [group - 1 for group, _ in self.open.values()]
        found = [row for row in self.rows if row.id > low]
        return Page(found[:size], len(found) >= size, min([self.last_id, *begun]))

    def cut(self, groups: Collection[int], last: int) -> set[int]:
        return {row.group for row in self.rows if row.id > last and row.group in groups}


@given(steps, st.integers(1, 6), st.booleans())
def test_each_group_is_published_once_whole_and_in_order(steps: list[Step], size: int, restarts: bool) -> None:
    database, published = NaiveDatabase(), list[RowGroup]()
    progress = OutboxProgress(0, serial=False)

    def publish() -> None:
        nonlocal progress
        rows = size
        while True:
            page = database.page(progress.low, rows)
            ready = progress.ready(page, database.cut)
            for batch in batches(ready, 3):
                published.extend(batch)
                progress.done(batch[-1].number)
            if restarts:
                progress = OutboxProgress(progress.published, serial=False)
            if not ready:
                if not page.full:
                    return
                rows *= 2

    for what, slot in [*steps, *(("commit", slot) for slot in range(TRANSACTIONS)), ("publish", 0)]:
        if what == "insert":
            database.insert(slot)
        elif what == "commit":
            database.commit(slot)
        elif what == "roll back":
            database.open.pop(slot, None)
        else:
            publish()
    assert sorted([list(group.rows) for group in published]) == sorted(database.committed)
    numbers = [group.number for group in published]
    assert numbers == sorted(numbers)


@given(st.lists(st.tuples(st.integers(1, 4), st.booleans()), max_size=12), st.integers(1, 5))
def test_rows_of_unknown_transactions_are_published_once(transactions: list[tuple[int, bool]], size: int) -> None:
    rows: list[OutboxRow] = []
    for number, (count, known) in enumerate(transactions, 1):
        for _ in range(count):
            group = 1000 + number if known else UNKNOWN
            rows.append(OutboxRow(len(rows) + 1, group, "orders", None, None, b"", None, None))
    progress, found, limit = OutboxProgress(0, serial=True), list[int](), size
    while True:
        left = [row for row in rows if row.id > progress.low]
        page = Page(left[:limit], len(left) >= limit, 2**62)
        ready = progress.ready(page, lambda groups, last: {row.group for row in rows if row.id > last} & {*groups})
        for group in ready:
            found += [row.id for row in group.rows]
            progress.done(group.number)
        if not ready and not page.full:
            break
        limit = size if ready else 2 * limit
    assert found == [row.id for row in rows]
