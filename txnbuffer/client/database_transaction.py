"""Transactions of a database of the application, whose records are published when it commits

`txnbuffer.databases` has what they do to the database; these classes check and convert what is sent, as transactions of
the log do.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NamedTuple, Protocol, Self

from txnbuffer.checks import check_flag
from txnbuffer.client.base import BaseClient
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
from txnbuffer.errors import InvalidRequest

Call = Callable[[Callable[[], Coroutine[Any, Any, None]]], None]

NOT_BEGUN = "the transaction has not begun: use it with `with`, or with `async with` in the asyncio client"
USED = "the transaction was used before: create another one"
BOUND_WAIT = (
    "wait=True needs a block that commits by itself: without connection=, or send without wait and commit the "
    "connection"
)


class HoldBack(NamedTuple):
    """A transaction of the database that may still insert rows: its process in the database, and since when it runs."""

    process: int | None
    seconds: float | None
    query: str | None


@dataclass(frozen=True)
class OutboxStatus:
    """The state of a publisher.

    `state`: waiting (another process publishes), publishing, blocked (a group cannot be published), unavailable (the
    database or the log; the publisher tries again) or stopped. `error`: why, for the last three.
    """

    name: str
    state: str = "waiting"
    published: int = 0
    rows_published: int = 0
    held_back: HoldBack | None = None
    error: BaseException | None = None


class SqlTransaction(Protocol):
    """A transaction of a database: begun by a block, or by the application."""

    @property
    def connection(self) -> Any:
        """The connection that the user gets."""

    def add(self, topic: str, rows: SendColumns, partition: int | None) -> None:
        """Insert rows into the outbox."""

    def commit(self) -> int:
        """Commit, unless the application does; return the group of the rows, 0 if there are none."""

    def roll_back(self) -> None:
        """Roll back, unless the application does."""


class AsyncSqlTransaction(Protocol):
    """As SqlTransaction, with asyncio."""

    @property
    def connection(self) -> Any: ...

    async def add(self, topic: str, rows: SendColumns, partition: int | None) -> None: ...

    async def commit(self) -> int: ...

    async def roll_back(self) -> None: ...


class DatabaseLink(Protocol):
    """A database of a client."""

    name: str
    client: BaseClient

    def begin(self, connection: object | None) -> SqlTransaction:
        """Begin a transaction, or bind one to the connection of the application."""

    async def begin_async(self, connection: object | None) -> AsyncSqlTransaction:
        """As `begin`, with asyncio."""

    async def wait_published(self, group: int) -> None:
        """Wait until the rows of a group, which is committed, are published. Raises OutboxStopped."""


class DatabaseLinks(Protocol):
    """The databases of a client, by name."""

    def link(self, name: str) -> DatabaseLink:
        """The database with this name. Raises InvalidRequest if there is none, and OutboxStopped."""

    def status(self, name: str) -> OutboxStatus:
        """The state of the publisher of a database. Raises InvalidRequest."""

    async def close(self) -> None:
        """Stop all publishers."""


class _AnyTransaction:
    """What both kinds of transactions share."""

    def __init__(self, link: DatabaseLink, connection: object | None, *, wait: bool) -> None:
        self._wait = check_flag(wait, "wait")
        if wait and connection is not None:
            raise InvalidRequest(BOUND_WAIT)
        self._link = link
        self._given = connection
        self._begun = False

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of database {self._link.name!r}>"

    def _begin(self) -> None:
        if self._begun:
            raise InvalidRequest(USED)
        self._begun = True

    def _checked(self, topic: str, rows: SendColumns) -> SendColumns:
        return self._link.client.checked(topic, rows, None, PROPERTY_BYTES)


class SyncDatabaseTransaction(_AnyTransaction):
    """A transaction of a database that sends records; created by `SyncClient.transaction(database=…)`.

    Use it with `with`, in one thread. Without a connection of the application, the end of the block commits, and an
    exception rolls back; with one, the application commits or rolls back its connection.
    """

    def __init__(self, link: DatabaseLink, connection: object | None, *, wait: bool, call: Call) -> None:
        """`call` runs a coroutine function on the loop of the client."""
        super().__init__(link, connection, wait=wait)
        self._call = call
        self._sql: SqlTransaction | None = None

    @property
    def connection(self) -> Any:
        """The connection of the database: a Connection of SQLAlchemy for an engine, or the one that was given."""
        return self._open().connection

    def _open(self) -> SqlTransaction:
        if self._sql is None:
            raise InvalidRequest(NOT_BEGUN)
        return self._sql

    def __enter__(self) -> Self:
        self._begin()
        self._sql = self._link.begin(self._given)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        sql, self._sql = self._open(), None
        if error is not None:
            sql.roll_back()
            return
        group = sql.commit()
        if self._wait and group:
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
        self._open().add(topic, self._checked(topic, rows), partition)


class DatabaseTransaction(_AnyTransaction):
    """A transaction of a database that sends records; created by `Client.transaction(database=…)`.

    Use it with `async with`. Without a connection of the application, the end of the block commits, and an exception
    rolls back; with one, the application commits or rolls back its connection or session.
    """

    def __init__(self, link: DatabaseLink, connection: object | None, *, wait: bool) -> None:
        super().__init__(link, connection, wait=wait)
        self._sql: AsyncSqlTransaction | None = None

    @property
    def connection(self) -> Any:
        """The connection of the database: an AsyncConnection of SQLAlchemy, or the one that was given."""
        return self._open().connection

    def _open(self) -> AsyncSqlTransaction:
        if self._sql is None:
            raise InvalidRequest(NOT_BEGUN)
        return self._sql

    async def __aenter__(self) -> Self:
        self._begin()
        self._sql = await self._link.begin_async(self._given)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        sql, self._sql = self._open(), None
        if error is not None:
            await sql.roll_back()
            return
        group = await sql.commit()
        if self._wait and group:
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
        await self._open().add(topic, self._checked(topic, rows), partition)
