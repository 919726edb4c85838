"""What a transaction of a client does in a database

The block owns the transaction of the database, or is bound to a connection of the application, which then commits.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from typing import Any

from txnbuffer.client.path.send_columns import SendColumns
from txnbuffer.databases.connections import SqlAlchemyConnection, SqlConnection, adapted, is_async
from txnbuffer.databases.dialects import KNOWN
from txnbuffer.databases.outbox import Outbox
from txnbuffer.databases.worker import is_async_engine
from txnbuffer.errors import InvalidRequest

NEEDS_ASYNC = "the asyncio client needs an AsyncEngine of SQLAlchemy for {!r}, or connection= with one of its sessions"
NEEDS_SYNC = "an AsyncEngine needs the asyncio client: `async with connect(…) as client`"


def group_of(sql: SqlConnection, given: int) -> int:
    """The group of rows that were inserted in the transaction of a connection; 0 if there are none."""
    return KNOWN[sql.dialect].group(sql, given) if given else 0


class BoundTransaction:
    """The transaction of a connection of the application."""

    def __init__(self, outbox: Outbox, connection: object) -> None:
        self.connection = connection
        self._outbox = outbox
        self._sql = adapted(connection)

    def add(self, topic: str, rows: SendColumns, partition: int | None) -> None:
        self._outbox.add_rows(self._sql, topic, rows, partition)

    def commit(self) -> int:
        return 0

    def roll_back(self) -> None:
        pass


class OwnedConnection(SqlConnection):
    """The connection of a transaction that a block owns, so that its commit is known exactly."""

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


def begun(database: Any) -> Any:
    """A connection of its own to a database, with a transaction that `commit` and `close` end."""
    is_engine = hasattr(database, "connect") and hasattr(database, "dialect")
    connection = database.connect() if is_engine else database()
    try:
        if is_engine:
            connection.begin()
        elif isinstance(connection, sqlite3.Connection):
            connection.isolation_level = None
            connection.execute("BEGIN IMMEDIATE")
        else:
            connection.autocommit = False
    except BaseException:
        connection.close()
        raise
    return connection


class OwnedTransaction:
    """A transaction that begins and ends with a block."""

    def __init__(self, outbox: Outbox, database: Any) -> None:
        if is_async_engine(database):
            raise InvalidRequest(NEEDS_SYNC)
        self._outbox = outbox
        self.connection = begun(database)
        self._group = 0
        try:
            self._sql = OwnedConnection(adapted(self.connection))
        except BaseException:
            self.connection.close()
            raise

    def add(self, topic: str, rows: SendColumns, partition: int | None) -> None:
        self._group = self._outbox.add_rows(self._sql, topic, rows, partition)

    def commit(self) -> int:
        try:
            group = group_of(self._sql, self._group)
            self.connection.commit()
        finally:
            self.connection.close()  # rolls back what is not committed
        self._sql.committed()
        return group

    def roll_back(self) -> None:
        self.connection.close()


class AsyncBoundTransaction:
    """The transaction of a connection or session of the application, with asyncio."""

    def __init__(self, outbox: Outbox, connection: Any) -> None:
        self.connection = connection
        self._outbox = outbox

    async def add(self, topic: str, rows: SendColumns, partition: int | None) -> None:
        if is_async(self.connection):
            await self.connection.run_sync(lambda own: self._outbox.add_rows(adapted(own), topic, rows, partition))
        else:
            self._outbox.add_rows(adapted(self.connection), topic, rows, partition)

    async def commit(self) -> int:
        return 0

    async def roll_back(self) -> None:
        pass


class AsyncOwnedTransaction:
    """A transaction that begins and ends with a block, with asyncio."""

    def __init__(self, outbox: Outbox, connection: Any) -> None:
        self.connection = connection
        self._outbox = outbox
        self._sql = OwnedConnection(SqlAlchemyConnection(connection.sync_connection))
        self._group = 0

    @classmethod
    async def begin(cls, outbox: Outbox, name: str, database: Any) -> AsyncOwnedTransaction:
        """Begin a transaction on a connection of its own. Raises InvalidRequest for a synchronous engine."""
        if not is_async_engine(database):
            raise InvalidRequest(NEEDS_ASYNC.format(name))
        connection = await database.connect()
        try:
            await connection.begin()
            return cls(outbox, connection)
        except BaseException:
            await connection.close()
            raise

    async def add(self, topic: str, rows: SendColumns, partition: int | None) -> None:
        self._group = await self.connection.run_sync(lambda _: self._outbox.add_rows(self._sql, topic, rows, partition))

    async def commit(self) -> int:
        try:
            group: int = await self.connection.run_sync(lambda _: group_of(self._sql, self._group))
            await self.connection.commit()
        finally:
            await self.connection.close()  # rolls back what is not committed
        self._sql.committed()
        return group

    async def roll_back(self) -> None:
        await self.connection.close()
