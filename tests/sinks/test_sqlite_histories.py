"""Any history of writes, rollbacks and restarts: the tables equal a dictionary."""

from __future__ import annotations

import sqlite3
import tempfile
from contextlib import closing
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from sinks.sink_rigs import batch, row, token

from txnbuffer import ChangeBatch, Rollback
from txnbuffer.mutations.batch import Mutation
from txnbuffer.sinks import sqlite
from txnbuffer.sinks.sqlite import SQLiteFile

KEYS = st.sampled_from(["", "a", "b", "\0", None])
ROWS = st.lists(st.tuples(KEYS, st.sampled_from([None, "", "1", "2"])), max_size=4)
PARTS = st.tuples(ROWS, st.integers(0, 2), st.booleans())
Rows = list[tuple[str | None, str | None]]
Contents = tuple[dict[bytes, tuple[bytes, int]], dict[int, bytes | None]]


class Tables(RuleBasedStateMachine):
    """`points`: the tables after each write that completed them, newest last."""

    @initialize(undo=st.sampled_from([3, 8, 1000]), binary=st.booleans())
    def open(self, undo: int, binary: bool) -> None:
        self.directory = tempfile.TemporaryDirectory()
        self.path = Path(self.directory.name) / "tables.db"
        self.binary = binary
        self.plenty = undo == 1000
        self.limit, sqlite.UNDO_ROWS = sqlite.UNDO_ROWS, undo
        self.keyed: dict[bytes, tuple[bytes, int]] = {}
        self.keyless: dict[int, bytes | None] = {}
        self.points: dict[int, Contents] = {0: ({}, {})}
        self.changed: set[int] = set()
        self.place = token(0)
        self.begin()

    def begin(self) -> None:
        self.file = SQLiteFile(self.path)
        self.file._database.execute("PRAGMA synchronous = OFF")
        self.table = self.file.table("t", binary=self.binary)
        if self.table.begin() is None:
            self.table.write([batch(self.place)])

    @rule(rows=ROWS)
    def write_whole(self, rows: Rows) -> None:
        """One snapshot."""
        self.write([(rows, 0, True)], True)

    @rule(parts=st.lists(PARTS, min_size=1, max_size=3), completes=st.booleans())
    def write(self, parts: list[tuple[Rows, int, bool]], completes: bool) -> None:
        """Batches of which the last is complete, or none."""
        batches: list[ChangeBatch] = []
        point = self.place.snapshot_start
        for number, (rows, gap, ends) in enumerate(parts, 1):
            seqno = self.place.seqno + gap
            mutations = [row(seqno + at, key, value) for at, (key, value) in enumerate(rows, 1)]
            seqno += len(rows)
            complete = completes and (ends or number == len(parts))
            start = self.place.snapshot_start
            if complete:
                self.place = token(seqno)
            else:
                seqno = max(seqno, start + 1)
                self.place = token(seqno, start, seqno + 5)
            batches.append(batch(self.place, *mutations))
            for mutation in mutations:
                self.apply(mutation)
                self.changed.add(point)
        self.table.write(batches)
        self.keep()

    def apply(self, mutation: Mutation) -> None:
        if mutation.key is None:
            self.keyless[mutation.seqno] = mutation.value
        elif mutation.value is None:
            self.keyed.pop(mutation.key, None)
        else:
            self.keyed[mutation.key] = mutation.value, mutation.seqno

    def keep(self) -> None:
        if self.place.complete:
            self.points[self.place.seqno] = dict(self.keyed), dict(self.keyless)

    @precondition(lambda self: self.place.seqno > 0)
    @rule(data=st.data())
    def roll_back(self, data: st.DataObject) -> None:
        asked = data.draw(st.integers(0, self.place.seqno))
        point = self.table.roll_back(Rollback("t", asked, self.place))
        assert point <= asked
        assert point in self.points
        if self.plenty:
            reachable = [one for one in self.points if one <= asked and (one in self.changed or not one)]
            if self.place.complete and self.place.seqno <= asked:
                reachable = [self.place.seqno]
            assert point == max(reachable)
        self.keyed, self.keyless = dict(self.points[point][0]), dict(self.points[point][1])
        self.points = {one: contents for one, contents in self.points.items() if one <= point}
        self.changed = {one for one in self.changed if one < point}
        self.place = token(point)
        if not point:
            self.points = {0: ({}, {})}

    @rule()
    def restart(self) -> None:
        self.file.close()
        self.begin()

    @invariant()
    def as_the_dictionary_says(self) -> None:
        if not hasattr(self, "file"):
            return
        with closing(sqlite3.connect(self.path)) as database:
            keyed = database.execute("SELECT CAST(key AS BLOB), CAST(value AS BLOB), seqno FROM t").fetchall()
            keyless = database.execute("SELECT seqno, CAST(value AS BLOB) FROM t_keyless").fetchall()
            place = database.execute("SELECT seqno, complete FROM txnbuffer_topics").fetchone()
        assert {key: (value, seqno) for key, value, seqno in keyed} == self.keyed
        assert len(keyed) == len(self.keyed)
        assert dict(keyless) == self.keyless
        assert place == (self.place.seqno, self.place.complete)

    def teardown(self) -> None:
        if hasattr(self, "file"):
            self.file.close()
            sqlite.UNDO_ROWS = self.limit
            self.directory.cleanup()


TestTables = Tables.TestCase
TestTables.settings = settings(max_examples=60, stateful_step_count=25)  # each example makes files
