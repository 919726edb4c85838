"""Topics as SQLite tables: their contents, rollbacks and errors."""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from golden_files import committed
from sinks.sink_rigs import batch, row, token

from broker_io.errors import UnsupportedFormat
from broker_io.position import Position
from txnbuffer import Rollback
from txnbuffer.errors import ForeignSink, SinkFailed, SinkFull, SinkLocked
from txnbuffer.mutations.batch import Mutation
from txnbuffer.sinks import sqlite
from txnbuffer.sinks.sqlite import SQLiteFile, SQLiteTable


def rows(path: Path, query: str = "SELECT key, value, seqno FROM t ORDER BY key") -> list[tuple[Any, ...]]:
    """The contents of a table as another process reads them."""
    with closing(sqlite3.connect(path)) as database:
        return database.execute(query).fetchall()


def state(path: Path) -> tuple[Any, ...]:
    return rows(path, "SELECT seqno, complete, undo_from FROM txnbuffer_topics")[0]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tables.db"


def begun(file: SQLiteFile, topic: str = "t", name: str | None = None, *, binary: bool = False) -> SQLiteTable:
    table = file.table(topic, name, binary=binary)
    table.begin()
    return table


def fill_all_kinds(table: SQLiteTable) -> None:
    full = Mutation(2, Position(1, 9, 3), b"b", "zwei é".encode(), {"n": "1", "m": "é"}, 1357034400000, 1700000000000)
    table.write([batch(token(3), row(1, "a", "one"), full, row(3, None, "keyless"))])
    odd = [Mutation(4, Position(2, 0), b"\xff", b"\xfe"), Mutation(5, Position(2, 1), b"n\0", b"n\0")]
    gone = [Mutation(6, Position(2, 2), None, None), row(7, "a", None), row(8, "c", ""), row(9, "b", "2")]
    table.write([batch(token(5), *odd), batch(token(9), *gone)])


def test_golden_file(path: Path) -> None:
    """Golden: the statements that make such a file, and what the columns hold."""
    with SQLiteFile(path) as file:
        fill_all_kinds(begun(file))
        begun(file, "u", "blobs", binary=True).write([batch(token(1), row(1, "a", "one"))])
    with closing(sqlite3.connect(path)) as database:
        pragmas = [f"PRAGMA {name} = {database.execute(f'PRAGMA {name}').fetchone()[0]};" for name in
                   ("application_id", "user_version", "journal_mode")]  # fmt: skip
        made = "\n".join([*pragmas, *database.iterdump(), ""])
    known = committed("sinks/tables.sql", made.encode()).decode()
    again = path.with_name("again.db")
    with closing(sqlite3.connect(again)) as database:
        database.executescript(known)
    with SQLiteFile(again) as file:
        table = begun(file)
        assert table.begin() == token(9)
        assert table.roll_back(Rollback("t", 4, token(9))) == 3
    assert rows(again) == [("a", "one", 1), ("b", "zwei é", 2)]


def test_a_table_has_the_latest_value_of_each_key(path: Path) -> None:
    with SQLiteFile(path) as file:
        table = begun(file)
        assert table.begin() is None
        table.write([batch(token(4), row(1, "a", "1"), row(2, "b", "1"), row(3, "a", "2"), row(4, "b", None))])
        assert (rows(path), state(path)[:2]) == ([("a", "2", 3)], (4, 1))
        table.write([batch(token(6, 4, 9), row(5, "b", "3"), row(6, "a", None))])
        assert (rows(path), state(path)[:2]) == ([("b", "3", 5)], (6, 0))
        table.write([batch(token(9))])
        assert (rows(path), state(path)[:2]) == ([("b", "3", 5)], (9, 1))
    with SQLiteFile(path) as file:
        assert begun(file).begin() == token(9)


def test_records_without_a_key_have_a_table(path: Path) -> None:
    with SQLiteFile(path) as file:
        table = begun(file)
        table.write([batch(token(2), row(1, None, "x"), row(2, "a", "y"))])
        table.write([batch(token(4), row(3, None, "x", event_time=7), row(4, None, None))])
        assert rows(path) == [("a", "y", 2)]
        found = rows(path, "SELECT * FROM t_keyless")
        assert [(row[0], row[1], row[3]) for row in found] == [(1, "x", None), (3, "x", 7), (4, None, None)]
        assert table.roll_back(Rollback("t", 3, token(4))) == 2
        assert rows(path, "SELECT seqno FROM t_keyless") == [(1,)]


def test_utf8_is_text_and_everything_else_bytes(path: Path) -> None:
    with SQLiteFile(path) as file:
        table = begun(file)
        fill_all_kinds(table)
    found = rows(path, "SELECT key, value, CAST(key AS BLOB) FROM t ORDER BY seqno")
    assert found == [(b"\xff", b"\xfe", b"\xff"), (b"n\0", b"n\0", b"n\0"), ("c", "", b"c"), ("b", "2", b"b")]
    with SQLiteFile(path) as file:
        begun(file, "u", binary=True).write([batch(token(1), row(1, "a", "1"))])
        begun(file, "u", binary=True).roll_back(Rollback("u", 0, token(1)))
        begun(file, "u", binary=True).write([batch(token(1), row(1, "a", "1"))])
        begun(file, "u", binary=True).write([batch(token(2), row(2, "a", "2"))])
    assert rows(path, "SELECT key, value FROM u") == [(b"a", b"2")]
    assert rows(path, "SELECT key, value FROM u_undo") == [(b"a", b"1")]


def test_a_rollback_restores_the_tables(path: Path) -> None:
    with SQLiteFile(path) as file:
        table = begun(file)
        table.write([batch(token(2), row(1, "a", "1"), row(2, "b", "1"))])
        table.write([batch(token(4), row(3, "a", "2"), row(4, "c", "2"))])
        table.write([batch(token(6, 4, 8), row(5, "a", None), row(6, "d", "3"))])
    with SQLiteFile(path) as file:
        table = begun(file)
        table.write([batch(token(8), row(7, "b", None), row(8, "a", "4"))])
        table.write([batch(token(9), row(9, "e", "5"))])
        assert table.roll_back(Rollback("t", 7, token(9))) == 4
        assert rows(path) == [("a", "2", 3), ("b", "1", 2), ("c", "2", 4)]
        assert state(path) == (4, 1, 1)
        assert table.begin() == token(9).rolled_back(4)
        assert table.roll_back(Rollback("t", 3, token(4))) == 2
        assert rows(path) == [("a", "1", 1), ("b", "1", 2)]
        table.write([batch(token(3), row(3, "z", "other"))])
        assert table.roll_back(Rollback("t", 1, token(3))) == 0
        assert rows(path) == rows(path, "SELECT seqno FROM t_keyless") == rows(path, "SELECT seqno FROM t_undo") == []
        assert state(path) == (0, 1, 1)


def test_a_rollback_over_several_points_finds_the_oldest(path: Path) -> None:
    with SQLiteFile(path) as file:
        table = begun(file)
        for seqno in range(1, 7):
            table.write([batch(token(seqno), row(seqno, "ab"[seqno % 2], f"{seqno}" if seqno != 4 else None))])
        assert table.roll_back(Rollback("t", 2, token(6))) == 2
        assert rows(path) == [("a", "2", 2), ("b", "1", 1)]
        assert rows(path, "SELECT point FROM t_undo") == [(1,)]


def test_a_rollback_with_nothing_to_undo_changes_nothing(path: Path) -> None:
    with SQLiteFile(path) as file:
        table = begun(file)
        table.write([batch(token(2), row(1, "a", "1"), row(2, "b", "1"))])
        assert table.roll_back(Rollback("t", 2, token(5, 2, 9))) == 2
        assert len(rows(path)) == 2


def test_a_rollback_beyond_the_undo_table_discards_everything(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite, "UNDO_ROWS", 4)
    with SQLiteFile(path) as file:
        table = begun(file)
        for seqno in range(1, 10):
            table.write([batch(token(seqno), row(seqno, "a", f"{seqno}"))])
        points = [point for (point,) in rows(path, "SELECT point FROM t_undo")]
        assert points == [7, 8]
        assert state(path)[2] == 7
        table.write([batch(token(12, 9, 20), *(row(at, f"{at}", "x") for at in (10, 11, 12)))])
        table.write([batch(token(15, 9, 20), *(row(at, f"{at}", "x") for at in (13, 14, 15)))])
        assert rows(path, "SELECT point FROM t_undo") == []
        table.write([batch(token(20), row(20, "b", "x"))])
        table.write([batch(token(21), row(21, "b", "y"))])
        assert table.roll_back(Rollback("t", 20, token(21))) == 20
        assert ("b", "x", 20) in rows(path)
        assert table.roll_back(Rollback("t", 19, token(20))) == 0
        assert rows(path) == []


def test_a_write_is_atomic(path: Path) -> None:
    with SQLiteFile(path) as file:
        table = begun(file)
        table.write([batch(token(1), row(1, "a", "1"))])
        file._database.execute("PRAGMA max_page_count = 20")
        with pytest.raises(SinkFull, match=r"no space left for .*tables\.db"):
            table.write([batch(token(9), row(2, "a", "2"), row(9, "b", "x" * 200_000))])
        assert (rows(path), state(path)[0]) == ([("a", "1", 1)], 1)
        file._database.execute("PRAGMA max_page_count = 1000000")
        assert table.begin() == token(1)
        table.write([batch(token(2), row(2, "a", "2"))])
        file._database.execute("PRAGMA query_only = 1")
        with pytest.raises(SinkFailed, match="readonly"):
            table.write([batch(token(3), row(3, "a", "3"))])
    assert rows(path) == [("a", "2", 2)]


def test_one_file_has_several_topics(path: Path) -> None:
    with SQLiteFile(path) as file:
        begun(file).write([batch(token(1), row(1, "a", "1"))])
        begun(file, "u", "other").write([batch(token(2), row(2, "b", "2"))])
        begun(file, 'quoted " name').write([batch(token(3), row(3, "c", "3"))])
    assert rows(path, "SELECT topic, name, seqno FROM txnbuffer_topics ORDER BY seqno") == [
        ("t", "t", 1), ("u", "other", 2), ('quoted " name', 'quoted " name', 3),
    ]  # fmt: skip
    assert rows(path, 'SELECT key FROM "quoted "" name"') == [("c",)]


@pytest.mark.parametrize("topic", ["T", "t_undo", "T_KEYLESS", "txnbuffer_topics", "sqlite_x", "SQLite_x"])
def test_a_name_in_use_is_rejected(path: Path, topic: str) -> None:
    with SQLiteFile(path) as file:
        begun(file).write([batch(token(1), row(1, "a", "1"))])
        with pytest.raises(ForeignSink, match=f"for topic '{topic}': use another name"):
            file.table(topic)
        begun(file, topic, "free").write([batch(token(1), row(1, "b", "1"))])
    assert rows(path) == [("a", "1", 1)]


def test_a_topic_without_mutations_has_no_tables(path: Path) -> None:
    with SQLiteFile(path) as file:
        begun(file)
    assert rows(path, "SELECT name FROM sqlite_schema WHERE type = 'table'") == [("txnbuffer_topics",)]
    with SQLiteFile(path) as file:
        early, late = begun(file, "t", "one"), begun(file, "u", "ONE")
        early.write([batch(token(0))])
        with pytest.raises(ForeignSink, match="cannot have a table 'ONE' for topic 'u'"):
            late.write([batch(token(0))])


def test_a_topic_keeps_its_table(path: Path) -> None:
    with SQLiteFile(path) as file:
        begun(file, "t", "orders").write([batch(token(0))])
        assert file.table("t").table == file.table("t", "orders").table == "orders"
        for name, binary in (("other", False), (None, True)):
            with pytest.raises(ForeignSink, match="has topic 't' as table 'orders': use the same options"):
                file.table("t", name, binary=binary)


def test_a_file_has_one_writer(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link = path.with_name("link.db")
    link.symlink_to(path)
    with SQLiteFile(path):
        for other in (path, link):
            with pytest.raises(SinkLocked, match="another process writes to"):
                SQLiteFile(other)
    monkeypatch.setattr(sqlite, "BUSY_SECONDS", 0.01)
    with SQLiteFile(path) as file:
        table = begun(file)
        with closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            with pytest.raises(SinkLocked, match="another program's transaction"):
                table.write([batch(token(1), row(1, "a", "1"))])
            other.execute("ROLLBACK")
            table.write([batch(token(1), row(1, "a", "1"))])
            other.execute("UPDATE txnbuffer_topics SET token = token || ' '")
        with pytest.raises(SinkLocked, match="another program has written"):
            table.write([batch(token(2), row(2, "a", "2"))])
    assert rows(path) == [("a", "1", 1)]


def test_files_of_other_applications_are_rejected_and_unchanged(path: Path) -> None:
    with closing(sqlite3.connect(path)) as database:
        database.execute("CREATE TABLE mine (x)")
    before = path.read_bytes()
    with pytest.raises(ForeignSink, match="a database of another application"):
        SQLiteFile(path)
    assert path.read_bytes() == before
    text = path.with_name("text")
    text.write_text("no database, and long enough to be told from an empty one " * 20)
    with pytest.raises(ForeignSink, match="is not a database"):
        SQLiteFile(text)
    newer = path.with_name("newer.db")
    SQLiteFile(newer).close()
    with closing(sqlite3.connect(newer)) as database:
        database.execute("PRAGMA user_version = 2")
    with pytest.raises(UnsupportedFormat, match="has format 2, not 1"):
        SQLiteFile(newer)
    with pytest.raises(SinkFailed, match=r"cannot write to .*: No such file or directory"):
        SQLiteFile(path.parent / "in" / "nothing.db")
    with pytest.raises(SinkFailed, match="cannot read or write"):
        SQLiteFile(path.parent)


def test_an_invalid_token_is_an_error(path: Path) -> None:
    with SQLiteFile(path) as file:
        begun(file).write([batch(token(1))])
        file._database.execute("UPDATE txnbuffer_topics SET token = 'x'")
        with pytest.raises(Exception, match="not a resume token"):
            begun(file)


def test_indexes_and_views_of_a_user_are_kept(path: Path) -> None:
    with SQLiteFile(path) as file:
        begun(file).write([batch(token(1), row(1, "a", '{"n": 1}'))])
    with closing(sqlite3.connect(path)) as database:
        database.execute("CREATE INDEX by_n ON t (json_extract(value, '$.n'))")
        database.execute("CREATE VIEW n AS SELECT json_extract(value, '$.n') AS n FROM t")
    with SQLiteFile(path) as file:
        begun(file).write([batch(token(2), row(2, "b", '{"n": 2}'))])
    assert rows(path, "SELECT n FROM n ORDER BY n") == [(1,), (2,)]


def test_tables_are_replaced_with_the_first_write_to_the_new_ones(path: Path) -> None:
    with SQLiteFile(path) as file:
        begun(file).write([batch(token(2), row(1, "a", "1"), row(2, None, "2"))])
    with closing(sqlite3.connect(path)) as database:
        database.execute("CREATE TABLE mine (x)")
    with SQLiteFile(path) as file:
        with pytest.raises(ForeignSink, match="cannot have a table 'mine' for topic 't': use another name"):
            file.table("t", "mine", replace=True)
        late, again = file.table("t", "late", replace=True), file.table("t", binary=True, replace=True)
        assert late.begin() is again.begin() is None
        with closing(sqlite3.connect(path)) as database:
            database.execute("CREATE TABLE late_undo (x)")
        with pytest.raises(ForeignSink, match="cannot have a table 'late_undo'"):
            late.write([batch(token(0))])
        assert (rows(path), rows(path, "SELECT value FROM t_keyless")) == ([("a", "1", 1)], [("2",)])
        assert begun(file).begin() == token(2)
        again.write([batch(token(3), row(3, "b", "3"))])
        again.write([batch(token(4), row(4, "c", "4"))])
        assert (rows(path), rows(path, "SELECT value FROM t_keyless")) == ([(b"b", b"3", 3), (b"c", b"4", 4)], [])
        assert again.begin() == token(4)
        file.table("t", "other", replace=True).write([batch(token(0))])
    names = "SELECT name FROM sqlite_schema WHERE type = 'table' ORDER BY name"
    kept = ["late_undo", "mine", "other", "other_keyless", "other_undo", "txnbuffer_topics"]
    assert [name for (name,) in rows(path, names)] == kept


@pytest.mark.parametrize("suffix", ["", "-writer"])
@pytest.mark.parametrize("again", [False, True])
def test_a_removed_or_replaced_file_is_not_written(path: Path, suffix: str, again: bool) -> None:
    place = path.with_name(path.name + suffix)
    with SQLiteFile(path) as file:
        table = begun(file)
        table.write([batch(token(1), row(1, "a", "1"))])
        place.rename(path.with_name("away"))
        if again:
            shutil.copy(path.with_name("away"), place)
        with pytest.raises(SinkFailed, match=f"{place.name} was removed or replaced while .*: start again"):
            table.write([batch(token(2), row(2, "a", "2"))])
        path.with_name("away").replace(place)
        table.write([batch(token(2), row(2, "b", "2"))])
    assert rows(path) == [("a", "1", 1), ("b", "2", 2)]
