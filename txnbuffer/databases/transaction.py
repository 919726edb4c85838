"""A transaction of a database whose records are published when it commits

The block owns the transaction of the database, or is bound to a connection of the application, which then commits.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

from txnbuffer.client.path.send_columns import (
    PROPERTY_BYTES,
    EventTime,
    Key,
    Properties,
    SendColumns,
    deletion,
    many_rows,
    one_row,
)
from txnbuffer.client.serializers import Serializer
from txnbuffer.databases.connections import Connection, SqlAlchemyConnection, adapted, is_async
from txnbuffer.databases.dialects import KNOWN
from txnbuffer.databases.links import DatabaseLink
from txnbuffer.databases.owned import OwnedConnection, OwnTransaction, own_transaction, owned
from txnbuffer.databases.worker import is_async_engine
from txnbuffer.errors import InvalidRequest

Result = TypeVar("Result")
Call = Callable[[Callable[[], Coroutine[Any, Any, None]]], None]

NOT_BEGUN = "the transaction has not begun: use it with `with`, or with `async with` in the asyncio client"
USED = "the transaction was used before: create another one"
BOUND_WAIT = (
    "wait=True needs a block that commits by itself: without connection=, or send without wait and commit the "
    "connection"
)
NEEDS_ASYNC = "the asyncio client needs an AsyncEngine of SQLAlchemy for {!r}, or connection= with one of its sessions"
NEEDS_SYNC = "an AsyncEngine needs the asyncio client: `async with connect(…) as client`"


class _Base:
    """What both kinds of transactions share."""

    def __init__(self, link: DatabaseLink, connection: object | None, wait: bool) -> None:
        if wait and connection is not None:
            raise InvalidRequest(BOUND_WAIT)
        self._link = link
        self._given = connection
        self._wait = wait
        self._group = 0
        self._begun = False

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of database {self._link.name!r}>"

    def _begin(self) -> None:
        if self._begun:
            raise InvalidRequest(USED)
        self._begun = True

    def _checked(self, topic: str, rows: SendColumns) -> SendColumns:
        return self._link.client.checked(topic, rows, None, PROPERTY_BYTES)

    def _insert(self, sql: Connection, topic: str, rows: SendColumns, partition: int | None) -> None:
        self._group = self._link.outbox.add_rows(sql, topic, rows, partition)

    def _final_group(self, sql: Connection) -> int:
        """The group of the rows, to be asked before the commit."""
        return KNOWN[sql.dialect].group(sql, self._group)


class SyncDatabaseTransaction(_Base):
    """A transaction of a database that sends records; created by `SyncClient.transaction(database=…)`.

    Use it with `with`, in one thread. Without a connection of the application, the end of the block commits, and an
    exception rolls back; with one, the application commits or rolls back its connection.
    """

    def __init__(self, link: DatabaseLink, connection: object | None, wait: bool, call: Call) -> None:
        """`call` runs a coroutine function on the loop of the client."""
        super().__init__(link, connection, wait)
        self._call = call
        self._own: OwnTransaction | None = None
        self._sql: Connection | None = None

    @property
    def connection(self) -> Any:
        """The connection of the database: a Connection of SQLAlchemy for an engine, or the one that was given."""
        if self._sql is None:
            raise InvalidRequest(NOT_BEGUN)
        return self._given if self._own is None else self._own.connection

    def __enter__(self) -> Self:
        self._begin()
        if self._given is not None:
            self._sql = adapted(self._given)
            return self
        if is_async_engine(self._link.database):
            raise InvalidRequest(NEEDS_SYNC)
        self._own = own_transaction(self._link.database)
        try:
            self._sql = owned(self._own)
        except BaseException:
            self._own.roll_back()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        sql, self._sql = self._sql, None
        if self._own is None or not isinstance(sql, OwnedConnection):
            return
        if error is not None:
            self._own.roll_back()
            return
        try:
            group = self._final_group(sql) if self._wait and self._group else 0
        except BaseException:
            self._own.roll_back()
            raise
        self._own.commit()
        sql.committed()
        if group:
            self._call(lambda: self._link.wait_published(group))

    def send(
        self,
        topic: str,
        value: Any,
        *,
        key: Key = None,
        ordering_key: str | None = None,
        event_time: EventTime = None,
        properties: Properties = None,
        serializer: Serializer | None = None,
        partition: int | None = None,
    ) -> None:
        """Insert a record into the outbox; it is published after the commit. The arguments are those of
        `Transaction.send`.

        Raises InvalidMessage, MessageTooLarge, InvalidTopicName, InvalidRequest, OutboxMissing, UnsafeDatabase, and the
        errors of the database.
        """
        serializer = self._link.client.serializers.of(topic, serializer)
        self._send(topic, one_row(value, key, ordering_key, event_time, properties, serializer), partition)

    def send_many(
        self,
        topic: str,
        values: Sequence[Any],
        *,
        keys: Sequence[Key] | None = None,
        event_times: Sequence[EventTime] | None = None,
        properties: Sequence[Properties] | None = None,
        serializer: Serializer | None = None,
        partition: int | None = None,
    ) -> None:
        """Insert records, given as columns with one item for each record. Other arguments and errors as in `send`."""
        serializer = self._link.client.serializers.of(topic, serializer)
        self._send(topic, many_rows(values, keys, event_times, properties, serializer), partition)

    def delete(self, topic: str, key: Key, *, properties: Properties = None, partition: int | None = None) -> None:
        """Insert a record that deletes a key. Errors as in `send`."""
        self._send(topic, deletion(key, properties), partition)

    def _send(self, topic: str, rows: SendColumns, partition: int | None) -> None:
        if self._sql is None:
            raise InvalidRequest(NOT_BEGUN)
        self._insert(self._sql, topic, self._checked(topic, rows), partition)


class DatabaseTransaction(_Base):
    """A transaction of a database that sends records; created by `Client.transaction(database=…)`.

    Use it with `async with`. Without a connection of the application, the end of the block commits, and an exception
    rolls back; with one, the application commits or rolls back its connection or session.
    """

    def __init__(self, link: DatabaseLink, connection: object | None, wait: bool) -> None:
        super().__init__(link, connection, wait)
        self._connection: Any = None
        self._calls: OwnedConnection | None = None

    @property
    def connection(self) -> Any:
        """The connection of the database: an AsyncConnection of SQLAlchemy, or the one that was given."""
        if self._connection is None:
            raise InvalidRequest(NOT_BEGUN)
        return self._connection

    async def __aenter__(self) -> Self:
        self._begin()
        if self._given is not None:
            self._connection = self._given
            return self
        if not is_async_engine(self._link.database):
            raise InvalidRequest(NEEDS_ASYNC.format(self._link.name))
        self._connection = await self._link.database.connect()
        try:
            await self._connection.begin()
        except BaseException:
            await self._connection.close()
            raise
        self._calls = OwnedConnection(SqlAlchemyConnection(self._connection.sync_connection))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        connection, self._connection = self._connection, None
        calls, group = self._calls, 0
        if calls is None:
            return
        try:
            if error is not None:
                return
            if self._wait and self._group:
                group = await connection.run_sync(lambda _: self._final_group(calls))
            await connection.commit()
        finally:
            await connection.close()  # rolls back what is not committed
        calls.committed()
        if group:
            await self._link.wait_published(group)

    async def send(
        self,
        topic: str,
        value: Any,
        *,
        key: Key = None,
        ordering_key: str | None = None,
        event_time: EventTime = None,
        properties: Properties = None,
        serializer: Serializer | None = None,
        partition: int | None = None,
    ) -> None:
        """Insert a record into the outbox, as `SyncDatabaseTransaction.send`."""
        serializer = await self._link.client.serializer_of(topic, serializer)
        await self._send(topic, one_row(value, key, ordering_key, event_time, properties, serializer), partition)

    async def send_many(
        self,
        topic: str,
        values: Sequence[Any],
        *,
        keys: Sequence[Key] | None = None,
        event_times: Sequence[EventTime] | None = None,
        properties: Sequence[Properties] | None = None,
        serializer: Serializer | None = None,
        partition: int | None = None,
    ) -> None:
        """Insert records, as `SyncDatabaseTransaction.send_many`."""
        serializer = await self._link.client.serializer_of(topic, serializer)
        await self._send(topic, many_rows(values, keys, event_times, properties, serializer), partition)

    async def delete(
        self, topic: str, key: Key, *, properties: Properties = None, partition: int | None = None
    ) -> None:
        """Insert a record that deletes a key. Errors as in `send`."""
        await self._send(topic, deletion(key, properties), partition)

    async def _send(self, topic: str, rows: SendColumns, partition: int | None) -> None:
        if self._connection is None:
            raise InvalidRequest(NOT_BEGUN)
        rows = self._checked(topic, rows)
        if self._calls is not None:
            calls = self._calls
            await self._connection.run_sync(lambda _: self._insert(calls, topic, rows, partition))
        elif is_async(self._connection):
            await self._connection.run_sync(lambda own: self._insert(adapted(own), topic, rows, partition))
        else:
            self._insert(adapted(self._connection), topic, rows, partition)
