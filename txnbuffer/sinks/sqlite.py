"""A SQLite file as a sink: topics as tables with the latest value of each key

The file has the application id 0x74786e62 ("txnb") and the user version 1, and is in WAL mode. Table `txnbuffer_topics`
has a row for each topic:

- `topic`     the name of the topic
- `name`      the name of its table, with which the names of its two other tables begin
- `binary`    1: all keys and values are BLOB
- `token`     the resume token of the stored rows, as text
- `seqno`     the seqno of the token
- `complete`  1: the tables are equal to the topic at `seqno`. 0: a part of a large snapshot is stored, so keys are
              missing whose newer mutations are still to come
- `undo_from` the lowest seqno, besides 0, to which the tables can roll back

The tables of a topic, named after it or as requested:

- `NAME`          a row for each key: `key`, `value`, `properties` (a JSON object; NULL: none), `event_time` and
                  `publish_time` (milliseconds since 1970; NULL: unknown), `seqno`, `position` (`ledger:entry`, or
                  `ledger:entry:batch`). A deleted key has no row.
- `NAME_keyless`  a row for each record without a key, by `seqno`; the same columns, but a value may be NULL
- `NAME_undo`     earlier rows of `NAME`: `(point, key)`, then the columns as they were when the tables were last
                  complete, at seqno `point`, before the key changed; `seqno` NULL: there was no row. The empty key of
                  the other type (BLOB in a TEXT column) means that records without a key arrived

Keys and values are TEXT if they are UTF-8 without a NUL, else BLOB; `CAST(value AS BLOB)` gives the bytes of both.
Rows, undo rows and token change in one transaction. The undo table has at most 100,000 rows and starts when the tables
were first complete. A rollback goes back to the nearest possible point; if it must go back further, it discards all
rows.

The process that writes holds a lock on the empty file `FILE-writer` in the same directory.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeAlias

from broker_io.batch import Batch, Blobs
from broker_io.errors import Error, UnsupportedFormat
from broker_io.port import Resource
from broker_io.position import NO_INDEX, Int64s, Positions
from txnbuffer.client.streams.streams import ChangeBatch, Rollback
from txnbuffer.errors import ForeignSink, SinkFailed, SinkFull, SinkLocked
from txnbuffer.mutations.batch import MutationBatch
from txnbuffer.streams.failover import ResumeToken

SQLValue: TypeAlias = "str | bytes | None"


def sql_values(column: Blobs, *, binary: bool = False) -> list[SQLValue]:
    """The SQL value of each string; with `binary` always bytes."""
    if binary:
        return [*column.to_list()]
    packed = column.packed()
    data = bytes(packed.data)
    if not data.isascii() or b"\0" in data:
        return [*map(sql_value, column.to_list())]
    text, ends = data.decode(), packed.offsets.tolist()
    cells: list[SQLValue] = [text[start:end] for start, end in itertools.pairwise(ends)]
    if packed.absent is not None:
        for at in packed.absent.nonzero()[0].tolist():
            cells[at] = None
    return cells


def sql_value(data: bytes | None) -> SQLValue:
    """Text if the bytes are UTF-8 without a NUL, which ends a text in much of SQLite; else the bytes."""
    if data is None or b"\0" in data:
        return data
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data


def property_values(messages: Batch) -> list[str | None]:
    """The properties of each message as text of a JSON object, or None if it has none."""
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


def time_values(times: Int64s) -> list[int | None]:
    """Milliseconds since 1970; None for 0, which means unknown."""
    return [time or None for time in times.tolist()]


def position_values(positions: Positions) -> list[str]:
    """Positions as text."""
    columns = positions.ledgers.tolist(), positions.entries.tolist(), positions.indexes.tolist()
    return [
        f"{ledger}:{entry}" if index == NO_INDEX else f"{ledger}:{entry}:{index}"
        for ledger, entry, index in zip(*columns, strict=True)
    ]


LOCK_SUFFIX = "-writer"


def lock_file(path: str) -> int:
    """A descriptor that holds the lock on the empty file `path-writer` until it is closed.

    Raises SinkLocked, SinkFailed.
    """
    descriptor = -1
    try:
        descriptor = os.open(os.path.realpath(path) + LOCK_SUFFIX, os.O_RDWR | os.O_CREAT, 0o644)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if descriptor >= 0:
            os.close(descriptor)
        if isinstance(error, BlockingIOError):
            raise SinkLocked(f"another process writes to {path}: stop it, or use another file") from None
        raise SinkFailed(f"cannot write to {path}: {error.strerror}") from error
    return descriptor


def is_same_file(path: str, found: os.stat_result) -> bool:
    """Whether a path still names the file with the status `found`."""
    try:
        return os.path.samestat(os.stat(path), found)
    except OSError:
        return False


# ruff: noqa: S608 - names of tables can't be parameters; they are quoted


APPLICATION_ID = 0x74786E62
FORMAT = 1
TOPICS = "txnbuffer_topics"
RESERVED = "sqlite_"
SUFFIXES = ("", "_keyless", "_undo")

UNDO_ROWS = 100_000
"""Maximum rows of an undo table; when it has more, its older half is deleted."""

BUSY_SECONDS = 30.0
"""Seconds that a write waits for a transaction of another program on the file."""

CACHE_KIB = 32 * 1024

VALUES = "value, properties, event_time, publish_time, seqno, position"
REPLACE = "ON CONFLICT (key) DO UPDATE SET " + ", ".join(f"{name} = excluded.{name}" for name in VALUES.split(", "))

CREATE_TOPICS = f"""CREATE TABLE {TOPICS} (
  topic TEXT NOT NULL PRIMARY KEY,
  name TEXT NOT NULL UNIQUE COLLATE NOCASE,
  binary INTEGER NOT NULL,
  token TEXT,
  seqno INTEGER NOT NULL,
  complete INTEGER NOT NULL,
  undo_from INTEGER NOT NULL
)"""

CREATE = """CREATE TABLE {name} (
  key {bytes} NOT NULL PRIMARY KEY,
  value {bytes} NOT NULL,
  properties TEXT,
  event_time INTEGER,
  publish_time INTEGER,
  seqno INTEGER NOT NULL,
  position TEXT NOT NULL
)"""

CREATE_KEYLESS = """CREATE TABLE {name} (
  seqno INTEGER NOT NULL PRIMARY KEY,
  value {bytes},
  properties TEXT,
  event_time INTEGER,
  publish_time INTEGER,
  position TEXT NOT NULL
)"""

CREATE_UNDO = """CREATE TABLE {name} (
  point INTEGER NOT NULL,
  key {bytes} NOT NULL,
  value {bytes},
  properties TEXT,
  event_time INTEGER,
  publish_time INTEGER,
  seqno INTEGER,
  position TEXT,
  PRIMARY KEY (point, key)
) WITHOUT ROWID"""


class SQLiteFile(Resource):
    """A SQLite file opened for writing; a context manager.

    Raises SinkLocked while another process writes to it, ForeignSink for a file of another application,
    UnsupportedFormat, SinkFailed.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self._lock = threading.Lock()
        with contextlib.ExitStack() as stack:
            lock = lock_file(self.path)
            stack.callback(os.close, lock)
            with self._sqlite_errors():
                self._database = sqlite3.connect(
                    self.path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False
                )
                stack.enter_context(contextlib.closing(self._database))
                self._initialize()
                place = os.path.realpath(self.path)
                self._files = {place: os.stat(place), place + LOCK_SUFFIX: os.fstat(lock)}
            self._resources = stack.pop_all()

    def close(self) -> None:
        self._resources.close()

    def table(self, topic: str, name: str | None = None, *, binary: bool = False, replace: bool = False) -> SQLiteTable:
        """The tables of a topic, created with the first write; `name` defaults to the existing name or the topic.

        `replace`: the first write drops the existing tables. Raises ForeignSink if the topic has tables with another
        name or another `binary`, or the name is taken.
        """
        with self.transaction() as database:
            row = database.execute(f"SELECT name, binary FROM {TOPICS} WHERE topic = ?", (topic,)).fetchone()
            if row is None or replace:
                table = SQLiteTable(self, topic, name or topic, binary, None if row is None else row[0])
                table.check(database)
                return table
            if row != (name or row[0], binary):
                found = f"table {row[0]!r}{' with blobs' * row[1]}"
                raise ForeignSink(f"{self.path} has topic {topic!r} as {found}: use the same options, or another file")
            return SQLiteTable(self, topic, row[0], binary)

    @contextlib.contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """An atomic transaction, one at a time. Raises SinkFailed if the file or its lock file was removed."""
        with self._lock, self._sqlite_errors():
            self._database.execute("BEGIN IMMEDIATE")
            try:
                yield self._database
                self._check_files()
                self._database.execute("COMMIT")
            finally:
                if self._database.in_transaction:
                    self._database.execute("ROLLBACK")

    def _check_files(self) -> None:
        for path, found in self._files.items():
            if not is_same_file(path, found):
                raise SinkFailed(f"{path} was removed or replaced while {self.path} was written: start again")

    def _initialize(self) -> None:
        """Check the kind and format of the file; initialize an empty one."""
        database = self._database
        found, version = (
            database.execute(f"PRAGMA {name}").fetchone()[0] for name in ("application_id", "user_version")
        )
        empty = not (found or version or database.execute("SELECT 1 FROM sqlite_master").fetchone())
        if not empty and found != APPLICATION_ID:
            raise ForeignSink(f"{self.path} is a database of another application: use another file")
        if not empty and version != FORMAT:
            raise UnsupportedFormat(f"{self.path} has format {version}, not {FORMAT}: use another file")
        if database.execute("PRAGMA journal_mode = WAL").fetchone() != ("wal",):
            raise SinkFailed(f"{self.path} does not support WAL mode: put it on a local disk")
        database.execute("PRAGMA synchronous = FULL")
        database.execute(f"PRAGMA cache_size = -{CACHE_KIB}")
        if empty:
            database.execute("BEGIN IMMEDIATE")
            database.execute(CREATE_TOPICS)
            database.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            database.execute(f"PRAGMA user_version = {FORMAT}")
            database.execute("COMMIT")

    @contextlib.contextmanager
    def _sqlite_errors(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            raise _failure(self.path, error) from error


class SQLiteTable:
    """The tables of a topic as a sink, made by `SQLiteFile.table`. The first write drops the tables `replaced`."""

    def __init__(self, file: SQLiteFile, topic: str, table: str, binary: bool, replaced: str | None = None) -> None:
        self.name = f"table {table!r} of {file.path}"
        self.topic = topic
        self.table = table
        self._file = file
        self._binary = binary
        self._replaced = replaced
        self._names = [table + suffix for suffix in SUFFIXES]
        self._rows, self._keyless, self._undo = map(_quoted, self._names)
        self._created = False
        self._stored: str | None = None
        self._token: ResumeToken | None = None
        self._undo_from = 1
        self._undo_rows = 0

    def check(self, database: sqlite3.Connection) -> None:
        """Raises ForeignSink if the name of a table is taken."""
        taken = "SELECT name FROM sqlite_master WHERE name = ? COLLATE NOCASE"
        free = () if self._replaced is None else [(self._replaced + suffix).lower() for suffix in SUFFIXES]
        for name in self._names:
            held = name.lower() not in free and database.execute(taken, (name,)).fetchone()
            if held or name.lower().startswith(RESERVED):
                raise ForeignSink(
                    f"{self._file.path} cannot have a table {name!r} for topic {self.topic!r}: use another name"
                )

    def begin(self) -> ResumeToken | None:
        """As `Sink.begin`. Raises UnreadableToken, SinkFailed."""
        if self._replaced is not None:
            return None
        with self._file.transaction() as database:
            query = f"SELECT token, undo_from FROM {TOPICS} WHERE topic = ?"
            row = database.execute(query, (self.topic,)).fetchone()
            self._created = row is not None
            if row is None:
                return None
            self._stored, self._undo_from = row
            self._count_undo(database)
        self._token = ResumeToken.parse(row[0])
        return self._token

    def write(self, batches: Sequence[ChangeBatch]) -> None:
        """As `Sink.write`. Raises SinkFailed, SinkFull, SinkLocked."""
        mutations = [batch.mutations for batch in batches if len(batch)]
        with self._file.transaction() as database:
            if not self._created:
                self._create(database)
            if mutations:
                self._apply(database, MutationBatch.concat(mutations))
            text = self._store_token(database, batches[-1].token)
        self._created, self._replaced, self._stored, self._token = True, None, text, batches[-1].token

    def roll_back(self, rollback: Rollback) -> int:
        """As `Sink.roll_back`. Raises as `write`."""
        with self._file.transaction() as database:
            seqno = self._highest_point(database, rollback.seqno)
            if seqno:
                self._restore(database, seqno)
            else:
                self._discard(database)
            self._count_undo(database)
            token = rollback.token.rolled_back(seqno)
            text = self._store_token(database, token)
        self._stored, self._token = text, token
        return seqno

    def _create(self, database: sqlite3.Connection) -> None:
        if self._replaced is not None:
            database.execute(f"DELETE FROM {TOPICS} WHERE topic = ?", (self.topic,))
            for suffix in SUFFIXES:
                database.execute(f"DROP TABLE IF EXISTS {_quoted(self._replaced + suffix)}")
        self.check(database)
        for statement, name in zip((CREATE, CREATE_KEYLESS, CREATE_UNDO), self._names, strict=True):
            database.execute(statement.format(name=_quoted(name), bytes="BLOB" if self._binary else "TEXT"))
        database.execute(
            f"INSERT INTO {TOPICS} VALUES (?, ?, ?, NULL, 0, 1, ?)",
            (self.topic, self.table, self._binary, self._undo_from),
        )

    def _store_token(self, database: sqlite3.Connection, token: ResumeToken) -> str:
        """Store the token of the tables; returns its text."""
        text = str(token)
        moved = database.execute(
            f"UPDATE {TOPICS} SET token = ?, seqno = ?, complete = ?, undo_from = ? WHERE topic = ? AND token IS ?",
            (text, token.seqno, token.complete, self._undo_from, self.topic, self._stored),
        )
        if moved.rowcount != 1:
            raise SinkLocked(f"another program has written to {self.name}: stop it, or use another file")
        return text

    def _apply(self, database: sqlite3.Connection, mutations: MutationBatch) -> None:
        messages = mutations.messages
        raw = messages.keys.to_list()
        last = dict(zip(raw, range(len(raw)), strict=True))  # the newest of each key
        keys = sql_values(messages.keys, binary=self._binary)
        values = sql_values(messages.values, binary=self._binary)
        columns: tuple[list[Any], ...] = (
            *(keys, values, property_values(messages), time_values(messages.times())),
            *(time_values(mutations.publish_times), mutations.seqnos.tolist(), position_values(mutations.positions)),
        )
        if None in last:
            rows = [row[1:] for row in zip(*columns, strict=True) if row[0] is None]
            database.executemany(f"INSERT INTO {self._keyless} ({VALUES}) VALUES (?, ?, ?, ?, ?, ?)", rows)
        chosen = [last[key] for key in sorted(key for key in last if key is not None)]  # in the order of the file
        self._save_undo(database, [*(keys[at] for at in chosen), *[b"" if not self._binary else ""] * (None in last)])
        database.executemany(
            f"DELETE FROM {self._rows} WHERE key = ?", [(keys[at],) for at in chosen if values[at] is None]
        )
        rest = [at for at in chosen if values[at] is not None]
        database.executemany(
            f"INSERT INTO {self._rows} (key, {VALUES}) VALUES (?, ?, ?, ?, ?, ?, ?) {REPLACE}",
            zip(*([column[at] for at in rest] for column in columns), strict=True),
        )

    def _save_undo(self, database: sqlite3.Connection, keys: Iterable[SQLValue]) -> None:
        """Save the rows of keys that change for the first time since the tables were complete."""
        if self._token is None or (point := self._token.snapshot_start) < self._undo_from:
            return
        kept = database.executemany(
            f"INSERT OR IGNORE INTO {self._undo} SELECT ?, asked.key, {VALUES} FROM (SELECT ? AS key) AS asked "
            f"LEFT JOIN {self._rows} AS now ON now.key = asked.key",
            ((point, key) for key in keys),
        )
        self._undo_rows += kept.rowcount
        if self._undo_rows > UNDO_ROWS:
            query = f"SELECT point FROM {self._undo} ORDER BY point DESC LIMIT 1 OFFSET ?"
            (oldest,) = database.execute(query, (UNDO_ROWS // 2,)).fetchone()
            database.execute(f"DELETE FROM {self._undo} WHERE point <= ?", (oldest,))
            self._undo_from = oldest + 1
            self._count_undo(database)

    def _count_undo(self, database: sqlite3.Connection) -> None:
        (self._undo_rows,) = database.execute(f"SELECT count(*) FROM {self._undo}").fetchone()

    def _highest_point(self, database: sqlite3.Connection, seqno: int) -> int:
        """The highest seqno up to `seqno` at which the tables were complete and to which they can roll back."""
        token = self._token
        if token is not None and token.complete and token.seqno <= seqno:
            return token.seqno
        query = f"SELECT max(point) FROM {self._undo} WHERE point BETWEEN ? AND ?"
        (point,) = database.execute(query, (self._undo_from, seqno)).fetchone()
        return point or 0

    def _restore(self, database: sqlite3.Connection, point: int) -> None:
        changed = f"SELECT key FROM {self._undo} WHERE point >= ?"
        database.execute(f"DELETE FROM {self._rows} WHERE key IN ({changed})", (point,))
        # SQLite takes the other columns from the row of min(point).
        oldest = f"SELECT key, {VALUES}, min(point) FROM {self._undo} WHERE point >= ? GROUP BY key"
        database.execute(
            f"INSERT INTO {self._rows} (key, {VALUES}) SELECT key, {VALUES} FROM ({oldest}) WHERE seqno IS NOT NULL",
            (point,),
        )
        database.execute(f"DELETE FROM {self._undo} WHERE point >= ?", (point,))
        database.execute(f"DELETE FROM {self._keyless} WHERE seqno > ?", (point,))

    def _discard(self, database: sqlite3.Connection) -> None:
        for table in (self._rows, self._keyless, self._undo):
            database.execute(f"DELETE FROM {table}")
        self._undo_from = 1


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _failure(path: str, error: sqlite3.Error | OSError) -> Error:
    """The error to raise for an error of SQLite or the file system."""
    match getattr(error, "sqlite_errorcode", 0) & 0xFF:
        case sqlite3.SQLITE_FULL:
            return SinkFull(f"no space left for {path} ({error}): free space and run again; its contents are intact")
        case sqlite3.SQLITE_BUSY | sqlite3.SQLITE_LOCKED:
            return SinkLocked(
                f"another program's transaction on {path} took more than {BUSY_SECONDS:.0f} s: end it and run again"
            )
        case sqlite3.SQLITE_NOTADB:
            return ForeignSink(f"{path} is not a database: use another file")
        case _:
            return SinkFailed(f"cannot read or write {path} ({error}): its contents are intact, run again")
