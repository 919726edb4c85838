"""The connection of a publisher to its database, used from asyncio

A synchronous connection lives in a thread of its own. Each statement commits by itself: `Dialect.page` needs that.
"""

from __future__ import annotations

import asyncio
import sqlite3
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, TypeVar

from broker_io.environment import current
from txnbuffer.databases.connections import (
    PsycopgConnection,
    SqlAlchemyConnection,
    SqlConnection,
    adapted,
)
from txnbuffer.errors import InvalidRequest

Result = TypeVar("Result")


class Worker(ABC):
    """A connection that runs functions one after another."""

    @abstractmethod
    async def run(self, function: Callable[[SqlConnection], Result]) -> Result:
        """Call the function with the connection; opens it first if there is none. Raises what the database raises."""

    @abstractmethod
    async def close(self) -> None:
        """Close the connection, and give up what it holds."""


class ThreadWorker(Worker):
    """A synchronous connection, in a thread."""

    def __init__(self, database: Any) -> None:
        self._database = database
        self._thread = current().threads.executor(1, "txnbuffer-outbox")
        self._connection: SqlConnection | None = None
        self._opened = ExitStack()

    async def run(self, function: Callable[[SqlConnection], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._run, function)

    def _run(self, function: Callable[[SqlConnection], Result]) -> Result:
        if self._connection is None:
            with ExitStack() as opening:
                self._connection = opened(self._database, opening)
                self._opened = opening.pop_all()
        return function(self._connection)

    async def close(self) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, self._close)

    def _close(self) -> None:
        self._connection = None
        self._opened.close()


class AsyncWorker(Worker):
    """A connection of an AsyncEngine of SQLAlchemy."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._connection: Any = None

    async def run(self, function: Callable[[SqlConnection], Result]) -> Result:
        if self._connection is None:
            connection = await self._engine.connect()
            self._connection = await connection.execution_options(isolation_level="AUTOCOMMIT")
        result: Result = await self._connection.run_sync(lambda connection: function(SqlAlchemyConnection(connection)))
        return result

    async def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.invalidate()  # also ends what belongs to the session, such as the lock of the publisher
            await connection.close()


def worker_for(database: Any) -> Worker:
    """The worker of a database as `connect(databases=…)` takes it. Raises InvalidRequest."""
    return AsyncWorker(database) if is_async_engine(database) else ThreadWorker(database)


def is_async_engine(database: Any) -> bool:
    return hasattr(database, "sync_engine")


def opened(database: Any, opening: ExitStack, *, pooled: bool = False) -> SqlConnection:
    """A connection of its own to the database, which commits each statement by itself.

    `pooled`: it is used for a moment only, so a connection of the pool will do.
    """
    if hasattr(database, "connect") and hasattr(database, "dialect"):
        connection = database.connect().execution_options(isolation_level="AUTOCOMMIT")
        opening.callback(connection.close)
        if not pooled:
            connection.detach()  # it is kept open for long, so it must not count in the pool
        return SqlAlchemyConnection(connection)
    if not callable(database):
        raise InvalidRequest(
            f"a {type(database).__name__} is not a database: give an engine of SQLAlchemy, or a function that "
            " returns a new connection of psycopg or sqlite3"
        )
    raw = database()
    opening.callback(raw.close)
    connection = adapted(raw)
    if isinstance(raw, sqlite3.Connection):
        raw.isolation_level = None
    elif isinstance(connection, PsycopgConnection):
        raw.autocommit = True
    return connection
