"""Connections of an application's database: SQLAlchemy's, and those of psycopg 3 and sqlite3 as they are

Statements of this package have `?` for each parameter; `execute` writes them as the driver has them. A connection of
asyncio is used by `run_sync` of SQLAlchemy, so this module is the same for both.
"""

from __future__ import annotations

import itertools
import re
import sqlite3
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from txnbuffer.errors import InvalidRequest

DIALECTS = {"postgresql": "postgresql", "sqlite": "sqlite", "mysql": "mysql", "mariadb": "mysql"}
"""Name of a dialect in SQLAlchemy → the dialect of this package."""
TRANSACTION_OPEN = (2, 3)
"""psycopg's transaction status INTRANS and INERROR."""

CALLS = "txnbuffer.calls"
"""The key in `info` of a session with what is called when its transaction has ended."""

AUTOCOMMIT = (
    "the connection commits each statement by itself (autocommit), so the database's change and the records would not "
    "be one commit: begin a transaction first{}"
)


class SqlConnection(ABC):
    """A connection of the database, in a transaction that the application or this package ends."""

    dialect: str
    style = "format"
    identity: object | None = None
    """The object of the application that `on_commit` is about; None if nothing tells of commits."""

    @property
    def raw(self) -> Any:
        """The connection of psycopg 3 behind it, or None."""
        return None

    @abstractmethod
    def run(self, statement: str, values: tuple[Any, ...]) -> Sequence[Any]:
        """Run a statement in the driver's form; return its rows, nothing for a statement without any."""

    @abstractmethod
    def check_transaction(self) -> None:
        """Raises InvalidRequest unless what follows is committed or rolled back as a whole."""

    def on_commit(self, call: Callable[[], None]) -> None:
        """Have a function called once after the commit, or shortly before it. Only with an `identity`."""
        raise NotImplementedError

    def execute(self, statement: str, *values: Any) -> Sequence[Any]:
        """Run a statement with a value for each `?`; return its rows."""
        return self.run(in_style(statement, self.style), values)


@lru_cache(256)
def in_style(statement: str, style: str) -> str:
    """The statement with placeholders in a paramstyle of DB-API: qmark, format, pyformat or numeric_dollar."""
    if style == "qmark":
        return statement
    if style in ("format", "pyformat"):
        return statement.replace("%", "%%").replace("?", "%s")
    if style == "numeric_dollar":
        numbers = itertools.count(1)
        return re.sub(r"\?", lambda _: f"${next(numbers)}", statement)
    raise InvalidRequest(f"drivers with the paramstyle {style!r} are not supported: use psycopg, sqlite3 or PyMySQL")


class SqlAlchemyConnection(SqlConnection):
    """A connection, or the connection of a session, of SQLAlchemy 2."""

    def __init__(self, connection: Any, session: Any = None) -> None:
        self._connection = connection
        self._session = session
        self.identity = connection if session is None else session
        self.dialect = known_dialect(connection.dialect.name)
        self.style = connection.dialect.paramstyle

    def run(self, statement: str, values: tuple[Any, ...]) -> Sequence[Any]:
        result = self._connection.exec_driver_sql(statement, values)
        rows: Sequence[Any] = result.fetchall() if result.returns_rows else ()
        return rows

    @property
    def raw(self) -> Any:
        return _psycopg(self._connection.connection.driver_connection)

    def check_transaction(self) -> None:
        own = self._connection
        if own.dialect.detect_autocommit_setting(own.connection.dbapi_connection):
            raise InvalidRequest(AUTOCOMMIT.format(", on a connection without the isolation level AUTOCOMMIT"))

    def on_commit(self, call: Callable[[], None]) -> None:
        from sqlalchemy import event

        if self._session is None:
            event.listen(self._connection, "commit", lambda _: call(), once=True)
            return
        info = self._session.info
        if CALLS not in info:  # one listener for the life of the session
            info[CALLS] = []
            event.listen(self._session, "after_transaction_end", _call_waiting)
        info[CALLS].append(call)


def _call_waiting(session: Any, transaction: Any) -> None:
    """Call what waits for the end of the session's transaction, at the end of its outermost one."""
    if transaction.parent is None:
        waiting, session.info[CALLS] = session.info[CALLS], []
        for call in waiting:
            call()


class PsycopgConnection(SqlConnection):
    """A connection of psycopg 3."""

    dialect = "postgresql"

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    def run(self, statement: str, values: tuple[Any, ...]) -> Sequence[Any]:
        with self._connection.cursor() as cursor:
            cursor.execute(statement, values)
            rows: Sequence[Any] = cursor.fetchall() if cursor.description else ()
            return rows

    @property
    def raw(self) -> Any:
        return self._connection

    def check_transaction(self) -> None:
        connection = self._connection
        if connection.autocommit and connection.info.transaction_status not in TRANSACTION_OPEN:
            raise InvalidRequest(AUTOCOMMIT.format(" with `with connection.transaction():`"))


class SqliteConnection(SqlConnection):
    """A connection of the standard library's sqlite3."""

    dialect = "sqlite"
    style = "qmark"

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def run(self, statement: str, values: tuple[Any, ...]) -> Sequence[Any]:
        return self._connection.execute(statement, values).fetchall()

    def check_transaction(self) -> None:
        connection = self._connection
        # Python 3.12 has the attribute autocommit, which is -1 where isolation_level decides
        automatic = getattr(connection, "autocommit", -1)
        if not connection.in_transaction and (
            automatic is True or (automatic == -1 and connection.isolation_level is None)
        ):
            raise InvalidRequest(AUTOCOMMIT.format(" with BEGIN"))


def known_dialect(name: str) -> str:
    """The dialect of a name of SQLAlchemy. Raises InvalidRequest."""
    if name not in DIALECTS:
        raise InvalidRequest(f"SQLAlchemy dialect {name!r} is not supported: use PostgreSQL, MySQL, MariaDB or SQLite")
    return DIALECTS[name]


def adapted(connection: object) -> SqlConnection:
    """The connection, session or database of an application. Raises InvalidRequest for anything else."""
    if isinstance(connection, SqlConnection):
        return connection
    if isinstance(connection, sqlite3.Connection):
        return SqliteConnection(connection)
    thing: Any = connection
    if is_async(thing):
        raise InvalidRequest(f"a {type(thing).__name__} needs the asyncio client: `async with connect(…) as client`")
    if hasattr(thing, "exec_driver_sql") and hasattr(thing, "get_isolation_level"):
        return SqlAlchemyConnection(thing)
    if hasattr(thing, "get_bind") and callable(getattr(thing, "connection", None)):
        scoped = hasattr(thing, "registry")
        return SqlAlchemyConnection(thing.connection(), thing() if scoped else thing)
    if _psycopg(thing) is not None:
        return PsycopgConnection(thing)
    raise InvalidRequest(
        f"a {type(thing).__name__} cannot be used as a connection: give a connection or session of SQLAlchemy, "
        "or a connection of psycopg or sqlite3"
    )


def is_async(connection: object) -> bool:
    """Whether it is an asynchronous connection or session of SQLAlchemy."""
    return hasattr(connection, "run_sync")


def _psycopg(connection: object) -> Any:
    """The connection if it is one of psycopg 3, else None."""
    psycopg = sys.modules.get("psycopg")
    return connection if psycopg is not None and isinstance(connection, psycopg.Connection) else None
