"""What differs between databases: how rows are inserted and read in a safe order, and what makes a commit durable

A publisher must not pass a row that can still appear with a lower id. `page` gives it the limit below which none can.

PostgreSQL  Sequences give out ids before the commits, so ids appear out of order. A transaction takes a shared advisory
            lock before its first id. The lock's number is the last id that was given out before, so all ids of the
            transaction are higher. `page` reads the last id given out, then the lowest number among the locks, then the
            rows: a transaction with an id up to both has ended before the rows were read. Whether a transaction has its
            lock is kept in a setting that is local to the transaction, because a savepoint that is rolled back takes
            both back.
SQLite      has one writer at a time: what is visible has no gap that is filled later.
MySQL       A transaction locks a row before its first id, until its commit: writers of an outbox run one by one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from typing import ClassVar, NamedTuple, TypeVar

from broker_io.environment import File, current
from txnbuffer.client.database_transaction import HoldBack
from txnbuffer.databases.connections import SqlConnection
from txnbuffer.databases.groups import OutboxRow, Page
from txnbuffer.databases.tables import NOW, OUTBOX, OUTBOXES, SEQUENCE, VERSION, VERSIONS
from txnbuffer.errors import OutboxMissing, UnsafeDatabase

Item = TypeVar("Item")

NO_LIMIT = 2**63 - 1
ROWS = 50
"""Rows of one INSERT, where a statement has a fixed number of them."""
SLICE = 500
"""Values of one IN list."""
MASK = 2**32 - 1


class NewRows(NamedTuple):
    """Rows for one topic, as columns of the same length."""

    topic: str
    partition: int | None
    keys: Sequence[bytes | None]
    values: Sequence[bytes | None]
    properties: Sequence[str | None]
    event_times: Sequence[int | None]


class PublisherLock(NamedTuple):
    """The lock of the publisher of an outbox: it ends with the connection, and with the file where one is locked."""

    file: File | None = None

    def close(self) -> None:
        """Unlock the file."""
        if self.file is not None:
            self.file.close()


class Dialect(ABC):
    """A kind of database."""

    name: ClassVar[str]
    serial: ClassVar[bool]
    """Whether transactions that insert rows run one after another, so that ids are in the order of commits."""
    checks_each = False
    """Whether each transaction must be checked, because durability is a setting of the connection."""
    key = "key"
    """How the column `key` is spelled."""
    missing = (
        "the database has no tables of txnbuffer: create them with `txnbuf outbox create`, or in a "
        "migration with what `txnbuf outbox sql` prints (docs/databases.md)"
    )

    @abstractmethod
    def has_tables(self, connection: SqlConnection) -> bool:
        """Whether the tables are there."""

    @abstractmethod
    def check_durable(self, connection: SqlConnection) -> None:
        """Raises UnsafeDatabase if a commit may be lost with the power, or the database cannot be written to."""

    @abstractmethod
    def insert(self, connection: SqlConnection, outbox: str, group: int, rows: NewRows) -> None:
        """Insert rows into the outbox, in order, as part of the transaction of the connection."""

    @abstractmethod
    def group(self, connection: SqlConnection, given: int) -> int:
        """The group of the rows that the connection has inserted in its transaction."""

    @abstractmethod
    def last_id(self, connection: SqlConnection) -> int:
        """The highest id that was given out."""

    @abstractmethod
    def limit(self, connection: SqlConnection) -> int:
        """An id up to which no row can appear after this call."""

    @abstractmethod
    def lock_keys(self, connection: SqlConnection, hashes: Collection[int]) -> None:
        """Lock keys, given as 32-bit hashes, until the transaction ends."""

    @abstractmethod
    def home(self, connection: SqlConnection) -> str:
        """What identifies this database, and not a copy of it; "" where it has nothing of the kind."""

    @abstractmethod
    def take_lock(self, connection: SqlConnection, outbox: str) -> PublisherLock | None:
        """Become the publisher of an outbox until the connection and the result are closed; None while another
        process is.
        """

    @abstractmethod
    def raise_id(self, connection: SqlConnection, number: int) -> None:
        """Give out only ids above a number from now on."""

    @abstractmethod
    def renumber(self, connection: SqlConnection, outbox: str, last: int) -> None:
        """Give the rows of an outbox with ids up to `last` new ids, in the same order, all or none."""

    def now(self, connection: SqlConnection) -> int:
        """Milliseconds since 1970 by the clock of the database."""
        return int(connection.execute(f"SELECT {NOW[self.name]}")[0][0])

    def held_back(self, connection: SqlConnection) -> HoldBack | None:
        """The oldest transaction that may still insert rows, where the database tells."""
        return None

    def check(self, connection: SqlConnection) -> None:
        """Raises OutboxMissing, and UnsafeDatabase."""
        if not self.has_tables(connection):
            raise OutboxMissing(self.missing)
        found = [version for (version,) in connection.execute(f"SELECT version FROM {VERSIONS}")]  # noqa: S608 - a constant
        if found != [VERSION]:
            raise UnsafeDatabase(
                f"the tables of txnbuffer in the database have version {found}, and this release knows {VERSION}: "
                "install the release that made them, or a newer one"
            )
        self.check_durable(connection)

    def page(self, connection: SqlConnection, outbox: str, low: int, rows: int) -> Page:
        """The first rows of the outbox with ids above `low`. Each statement must see what is committed before it."""
        limit = self.limit(connection)
        found = connection.execute(
            f"SELECT id, grp, topic, part, {self.key}, value, properties, event_time FROM {OUTBOX} "  # noqa: S608
            "WHERE outbox = ? AND id > ? ORDER BY id LIMIT ?",
            outbox, low, rows,
        )  # fmt: skip
        return Page([OutboxRow(*row) for row in found], len(found) == rows, limit)

    def cut(self, connection: SqlConnection, outbox: str, groups: Collection[int], last: int) -> set[int]:
        """Those of the groups that have rows of this outbox after the id `last`."""
        found: set[int] = set()
        for some in _slices([*groups], SLICE):
            marks = ", ".join("?" * len(some))
            statement = f"SELECT DISTINCT grp FROM {OUTBOX} WHERE outbox = ? AND id > ? AND grp IN ({marks})"  # noqa: S608
            found.update(group for (group,) in connection.execute(statement, outbox, last, *some))
        return found

    def delete(self, connection: SqlConnection, outbox: str, ids: Sequence[int], published: int) -> None:
        """Delete published rows, and note the number of the last one."""
        for some in _slices(ids, SLICE):
            marks = ", ".join("?" * len(some))
            connection.execute(f"DELETE FROM {OUTBOX} WHERE id IN ({marks})", *some)  # noqa: S608
        connection.execute(
            f"UPDATE {OUTBOXES} SET published = ? WHERE outbox = ? AND published < ?",  # noqa: S608
            published, outbox, published,
        )  # fmt: skip


class PostgreSQL(Dialect):
    """PostgreSQL 12 and newer."""

    name = "postgresql"
    serial = False
    _setting = "txnbuffer.group"
    _insert = f"""
        WITH held AS MATERIALIZED (
            SELECT CASE
                WHEN split_part(current_setting('{_setting}', true), ':', 1) = '{SEQUENCE}'::regclass::oid::text
                THEN split_part(current_setting('{_setting}'), ':', 2)
                WHEN pg_advisory_xact_lock_shared(
                    '{SEQUENCE}'::regclass::oid::bigint::bit(32)::int, (last_value - 1 + is_called::int)::bit(32)::int
                ) IS NOT NULL AND (current_setting('synchronous_commit') <> 'off'
                    OR set_config('synchronous_commit', 'on', true) IS NOT NULL)
                THEN split_part(set_config('{_setting}',
                    '{SEQUENCE}'::regclass::oid::text || ':' || nextval('{SEQUENCE}'), true), ':', 2)
            END::bigint AS grp FROM {SEQUENCE})
        INSERT INTO {OUTBOX} (id, outbox, grp, topic, part, key, value, properties, event_time)
        SELECT nextval('{SEQUENCE}'), ?, sorted.* FROM (
            SELECT held.grp, ?, ?::bigint, r.key, r.value, r.properties, r.event_time
            FROM held, unnest(?::bytea[], ?::bytea[], ?::text[], ?::bigint[])
                WITH ORDINALITY AS r (key, value, properties, event_time, n) ORDER BY n) AS sorted
    """  # noqa: S608 - constants

    def has_tables(self, connection: SqlConnection) -> bool:
        return connection.execute("SELECT to_regclass(?) IS NOT NULL", VERSIONS)[0][0] is True

    def check_durable(self, connection: SqlConnection) -> None:
        [(replica, fsync, kind)] = connection.execute(
            "SELECT pg_is_in_recovery(), current_setting('fsync'), "
            "(SELECT relpersistence::text FROM pg_class WHERE oid = to_regclass(?))", OUTBOX
        )  # fmt: skip
        if replica:
            raise UnsafeDatabase("the database is a replica in recovery, which cannot be written to: use the primary")
        if fsync != "on":
            raise UnsafeDatabase("the database has fsync = off, so a commit may be lost: set fsync = on")
        if kind != "p":
            raise UnsafeDatabase(
                f"the table {OUTBOX} is not permanent, so rows may be lost: ALTER TABLE {OUTBOX} SET LOGGED"
            )

    def insert(self, connection: SqlConnection, outbox: str, group: int, rows: NewRows) -> None:
        columns = [list(column) for column in rows[2:]]
        connection.execute(self._insert, outbox, rows.topic, rows.partition, *columns)

    def group(self, connection: SqlConnection, given: int) -> int:
        [(text,)] = connection.execute("SELECT split_part(current_setting(?, true), ':', 2)", self._setting)
        return int(text or 0)

    def last_id(self, connection: SqlConnection) -> int:
        return int(connection.execute(f"SELECT last_value - 1 + is_called::int FROM {SEQUENCE}")[0][0])  # noqa: S608

    def limit(self, connection: SqlConnection) -> int:
        last = self.last_id(connection)
        locks = connection.execute(
            "SELECT objid::bigint FROM pg_locks WHERE locktype = 'advisory' AND objsubid = 2 AND classid = ?::regclass "
            "AND database = (SELECT oid FROM pg_database WHERE datname = current_database())", SEQUENCE
        )  # fmt: skip
        return min([last, *(last + _signed(int(number) - last) for (number,) in locks)])

    def raise_id(self, connection: SqlConnection, number: int) -> None:
        connection.execute(f"SELECT setval('{SEQUENCE}', greatest(last_value, ?)) FROM {SEQUENCE}", max(number, 1))  # noqa: S608

    def renumber(self, connection: SqlConnection, outbox: str, last: int) -> None:
        connection.execute(
            f"UPDATE {OUTBOX} SET id = new.id FROM (SELECT old.id AS before, nextval('{SEQUENCE}') AS id FROM "  # noqa: S608
            f"(SELECT id FROM {OUTBOX} WHERE outbox = ? AND id <= ? ORDER BY id) AS old) AS new "
            f"WHERE {OUTBOX}.id = new.before", outbox, last
        )  # fmt: skip

    def lock_keys(self, connection: SqlConnection, hashes: Collection[int]) -> None:
        connection.execute(
            f"SELECT pg_advisory_xact_lock('{OUTBOX}'::regclass::oid::bigint::bit(32)::int, hash) "  # noqa: S608
            "FROM unnest(?::int[]) AS hash", sorted({_signed(number) for number in hashes})
        )  # fmt: skip

    def home(self, connection: SqlConnection) -> str:
        [(known,)] = connection.execute("SELECT has_function_privilege('pg_control_system()', 'execute')")
        [(number,)] = connection.execute("SELECT oid::bigint FROM pg_database WHERE datname = current_database()")
        if not known:
            return f"database {number}"
        [(system,)] = connection.execute("SELECT system_identifier FROM pg_control_system()")
        return f"system {system}, database {number}"

    def take_lock(self, connection: SqlConnection, outbox: str) -> PublisherLock | None:
        statement = "SELECT pg_try_advisory_lock(?::regclass::oid::bigint::bit(32)::int, hashtext(?))"
        return PublisherLock() if connection.execute(statement, OUTBOXES, outbox)[0][0] else None

    def held_back(self, connection: SqlConnection) -> HoldBack | None:
        found = connection.execute(
            "SELECT l.pid, extract(epoch FROM clock_timestamp() - a.xact_start)::float8, left(a.query, 200) "
            "FROM pg_locks l LEFT JOIN pg_stat_activity a ON a.pid = l.pid WHERE l.locktype = 'advisory' "
            "AND l.objsubid = 2 AND l.classid = ?::regclass "
            "AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database()) "
            "ORDER BY a.xact_start LIMIT 1", SEQUENCE
        )  # fmt: skip
        return HoldBack(*found[0]) if found else None


class _Serial(Dialect):
    """A database whose writers of the outbox run one after another."""

    serial = True
    begin: ClassVar[str]
    """The statement that begins a transaction for writing."""

    def insert(self, connection: SqlConnection, outbox: str, group: int, rows: NewRows) -> None:
        records = list(zip(*rows[2:], strict=True))
        for some in _slices(records, ROWS) if len(records) > 1 else [records]:
            marks = ", ".join(["(?, ?, ?, ?, ?, ?, ?, ?)"] * len(some))
            connection.execute(
                f"INSERT INTO {OUTBOX} (outbox, grp, topic, part, {self.key}, value, properties, event_time) "  # noqa: S608
                f"VALUES {marks}",
                *(value for record in some for value in (outbox, group, rows.topic, rows.partition, *record)),
            )

    def renumber(self, connection: SqlConnection, outbox: str, last: int) -> None:
        columns = f"outbox, grp, topic, part, {self.key}, value, properties, event_time, created"
        connection.execute(self.begin)
        try:
            connection.execute(
                f"INSERT INTO {OUTBOX} ({columns}) SELECT {columns} FROM {OUTBOX} "  # noqa: S608
                "WHERE outbox = ? AND id <= ? ORDER BY id", outbox, last
            )  # fmt: skip
            connection.execute(f"DELETE FROM {OUTBOX} WHERE outbox = ? AND id <= ?", outbox, last)  # noqa: S608
        except BaseException:
            connection.execute("ROLLBACK")
            raise
        connection.execute("COMMIT")

    def group(self, connection: SqlConnection, given: int) -> int:
        return given

    def limit(self, connection: SqlConnection) -> int:
        return NO_LIMIT

    def lock_keys(self, connection: SqlConnection, hashes: Collection[int]) -> None:
        pass  # only one transaction at a time inserts rows


class SQLite(_Serial):
    """SQLite 3.35 and newer."""

    name = "sqlite"
    checks_each = True
    begin = "BEGIN IMMEDIATE"

    def has_tables(self, connection: SqlConnection) -> bool:
        return bool(connection.execute("SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = ?", VERSIONS))

    def check_durable(self, connection: SqlConnection) -> None:
        [(_, _, file)] = connection.execute("SELECT * FROM pragma_database_list WHERE name = 'main'")
        if not file:
            raise UnsafeDatabase("the SQLite database is in memory, so commits do not last: give it a file")
        [(mode,)] = connection.execute("PRAGMA journal_mode")
        [(level,)] = connection.execute("PRAGMA synchronous")
        if mode in ("off", "memory") or int(level) < 2:
            raise UnsafeDatabase(
                f"SQLite commits may be lost with synchronous = {level} and journal_mode = {mode}: execute "
                "`PRAGMA synchronous = FULL` on each connection, and use the journal mode wal or delete"
            )

    def last_id(self, connection: SqlConnection) -> int:
        found = connection.execute("SELECT seq FROM sqlite_sequence WHERE name = ?", OUTBOX)
        return int(found[0][0]) if found else 0

    def raise_id(self, connection: SqlConnection, number: int) -> None:
        if self.last_id(connection) < number:
            connection.execute("DELETE FROM sqlite_sequence WHERE name = ?", OUTBOX)
            connection.execute("INSERT INTO sqlite_sequence (name, seq) VALUES (?, ?)", OUTBOX, number)

    def home(self, connection: SqlConnection) -> str:
        return ""

    def take_lock(self, connection: SqlConnection, outbox: str) -> PublisherLock | None:
        [(path,)] = connection.execute("SELECT file FROM pragma_database_list WHERE name = 'main'")
        name = "".join(one if one.isalnum() else "_" for one in outbox)
        file = current().disk.lock(f"{path}-outbox-{name}")
        return None if file is None else PublisherLock(file)


class MySQL(_Serial):
    """MySQL 8 and MariaDB 10.6, and newer."""

    name = "mysql"
    key = "`key`"
    begin = "START TRANSACTION"

    def has_tables(self, connection: SqlConnection) -> bool:
        statement = "SELECT 1 FROM information_schema.tables WHERE table_schema = database() AND table_name = ?"
        return bool(connection.execute(statement, VERSIONS))

    def check_durable(self, connection: SqlConnection) -> None:
        [(flush, binlog, sync, replica)] = connection.execute(
            "SELECT @@innodb_flush_log_at_trx_commit, @@log_bin, @@sync_binlog, @@read_only"
        )
        if replica:
            raise UnsafeDatabase("the database is read-only, as replicas are: use the primary")
        if flush != 1 or (binlog and sync != 1):
            raise UnsafeDatabase(
                f"commits may be lost with innodb_flush_log_at_trx_commit = {flush} and sync_binlog = {sync}: "
                "set both to 1"
            )

    def insert(self, connection: SqlConnection, outbox: str, group: int, rows: NewRows) -> None:
        connection.execute(f"SELECT version FROM {VERSIONS} FOR UPDATE")  # noqa: S608
        super().insert(connection, outbox, group, rows)

    def last_id(self, connection: SqlConnection) -> int:
        statement = (
            "SELECT auto_increment - 1 FROM information_schema.tables "
            "WHERE table_schema = database() AND table_name = ?"
        )
        return int(connection.execute(statement, OUTBOX)[0][0] or 0)

    def raise_id(self, connection: SqlConnection, number: int) -> None:
        if self.last_id(connection) < number:
            connection.execute(f"ALTER TABLE {OUTBOX} AUTO_INCREMENT = {number + 1:d}")

    def home(self, connection: SqlConnection) -> str:
        return ""

    def take_lock(self, connection: SqlConnection, outbox: str) -> PublisherLock | None:
        [(taken,)] = connection.execute("SELECT GET_LOCK(?, 0)", f"txnbuffer {outbox}"[:64])
        return PublisherLock() if taken else None


def _signed(number: int) -> int:
    """The number whose low 32 bits are given, nearest to 0."""
    return (number + 2**31 & MASK) - 2**31


def _slices(items: Sequence[Item], size: int) -> Iterator[Sequence[Item]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]


def new_group() -> int:
    """A group that no other transaction has."""
    return 1 + current().randomness.below(2**62)


KNOWN: dict[str, Dialect] = {dialect.name: dialect for dialect in (PostgreSQL(), SQLite(), MySQL())}
