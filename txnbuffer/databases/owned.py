"""Transactions of the database that a block of this package begins and ends"""

from __future__ import annotations

import sqlite3
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from txnbuffer.databases.connections import SqlConnection, is_django


class OwnTransaction(ABC):
    """A transaction on a connection of its own. `connection` is the object that the user gets."""

    connection: Any

    @abstractmethod
    def commit(self) -> None:
        """Commit, and close the connection."""

    @abstractmethod
    def roll_back(self) -> None:
        """Roll back, and close the connection. Raises nothing if the connection is broken."""


class OwnedConnection(SqlConnection):
    """The adapted connection of an own transaction, whose end this package knows exactly."""

    def __init__(self, inner: SqlConnection) -> None:
        self._inner = inner
        self.dialect, self.style = inner.dialect, inner.style
        self.identity = self
        self._calls: list[Callable[[], None]] = []

    def run(self, statement: str, values: tuple[Any, ...]) -> Sequence[Any]:
        return self._inner.run(statement, values)

    def check_transaction(self) -> None:
        pass

    def on_commit(self, call: Callable[[], None]) -> None:
        self._calls.append(call)

    def committed(self) -> None:
        """Call what was given to `on_commit`."""
        calls, self._calls = self._calls, []
        for call in calls:
            call()


class _EngineTransaction(OwnTransaction):
    def __init__(self, engine: Any) -> None:
        self.connection = engine.connect()
        try:
            self._transaction = self.connection.begin()
        except BaseException:
            self.connection.close()
            raise

    def commit(self) -> None:
        try:
            self._transaction.commit()
        finally:
            self.connection.close()

    def roll_back(self) -> None:
        self.connection.close()  # rolls back


class _DjangoTransaction(OwnTransaction):
    def __init__(self, database: Any) -> None:
        from django.db import connections, transaction  # type: ignore[import-untyped]  # Django has no types

        self.connection = connections[database.alias]  # that of this thread
        self._atomic = transaction.atomic(using=database.alias)
        self._atomic.__enter__()

    def commit(self) -> None:
        self._atomic.__exit__(None, None, None)

    def roll_back(self) -> None:
        self._atomic.__exit__(RuntimeError, RuntimeError("the block failed"), None)


class _RawTransaction(OwnTransaction):
    """A new connection of psycopg or sqlite3, which is closed at the end."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self.connection = function()
        if isinstance(self.connection, sqlite3.Connection):
            self.connection.isolation_level = None
            self.connection.execute("BEGIN IMMEDIATE")
        else:
            self.connection.autocommit = False

    def commit(self) -> None:
        try:
            self.connection.commit()
        finally:
            self.connection.close()

    def roll_back(self) -> None:
        self.connection.close()


def own_transaction(database: Any) -> OwnTransaction:
    """Begin a transaction on a connection of its own."""
    if hasattr(database, "connect") and hasattr(database, "dialect"):
        return _EngineTransaction(database)
    return _DjangoTransaction(database) if is_django(database) else _RawTransaction(database)
