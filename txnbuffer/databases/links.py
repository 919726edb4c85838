"""The databases of a client: an outbox and its publisher for each

A publisher runs as a task on the client's event loop. If it stops, the next transaction with its database raises
OutboxStopped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from txnbuffer.checks import check_flag
from txnbuffer.client.base import BaseClient
from txnbuffer.client.database_transaction import AsyncSqlTransaction, OutboxStatus, SqlTransaction
from txnbuffer.client.lifecycle import cancel
from txnbuffer.databases.notices import NoticeListener
from txnbuffer.databases.outbox import MAX_BYTES, Lock, Outbox
from txnbuffer.databases.publisher import LogClient, OnStatus, Publisher
from txnbuffer.databases.transaction import (
    AsyncBoundTransaction,
    AsyncOwnedTransaction,
    BoundTransaction,
    OwnedTransaction,
)
from txnbuffer.databases.worker import worker_for
from txnbuffer.errors import InvalidRequest, OutboxStopped


@dataclass(frozen=True)
class Database:
    """A database for `connect(databases=…)`, with options.

    - `database`: an Engine or AsyncEngine of SQLAlchemy, or a function that returns a new connection of psycopg or
      sqlite3.
    - `publish`: whether this client publishes the outbox; False: another process does, such as `txnbuf outbox run`.
    - `lock`, `max_bytes`: as of Outbox.
    - `dead_letter`: the topic for groups of records that cannot be published. None: they wait, with those after them.
    """

    database: Any
    publish: bool = True
    lock: Lock | None = None
    max_bytes: int = MAX_BYTES
    dead_letter: str | None = None


class OutboxLink:
    """A database of a client: its outbox, and its publisher if this client publishes."""

    def __init__(self, client: BaseClient, log: LogClient, name: str, options: Database) -> None:
        self.client = client
        self.name = name
        self.database = options.database
        self.outbox = Outbox(options.database, name, lock=options.lock, max_bytes=options.max_bytes)
        self.publisher: Publisher | None = None
        self._loop = asyncio.get_running_loop()
        self._task: asyncio.Task[None] | None = None
        self._listener: NoticeListener | None = None
        if check_flag(options.publish, "publish"):
            worker = worker_for(options.database)
            self.publisher = Publisher(log, name, worker, dead_letter=options.dead_letter)
            self.outbox.wakers.append(self._committed)
            self._listener = NoticeListener(options.database, name, self._wake)
            self._listener.start()
            self._task = self._loop.create_task(self._run(self.publisher), name=f"outbox {name}")

    async def _run(self, publisher: Publisher) -> None:
        try:
            await publisher.run()
        finally:
            await publisher.close()

    def _wake(self) -> None:
        """Wake the publisher, from any thread."""
        if self.publisher is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.publisher.wake)

    def _committed(self) -> None:
        """A transaction of this client has committed, or will: wake the publisher, here or in another process."""
        self._wake()
        if self.publisher is not None and not self.publisher.has_lock:
            self.outbox.notify()

    def begin(self, connection: object | None) -> SqlTransaction:
        """Begin a transaction, or bind one to the connection of the application. Raises InvalidRequest."""
        if connection is not None:
            return BoundTransaction(self.outbox, connection)
        return OwnedTransaction(self.outbox, self.database)

    async def begin_async(self, connection: object | None) -> AsyncSqlTransaction:
        """As `begin`, with asyncio."""
        if connection is not None:
            return AsyncBoundTransaction(self.outbox, connection)
        return await AsyncOwnedTransaction.begin(self.outbox, self.name, self.database)

    def check(self) -> None:
        """Raises OutboxStopped if the publisher has stopped."""
        if self.publisher is not None and self.publisher.status.state == "stopped":
            error = self.publisher.status.error
            raise OutboxStopped(f"the publisher of outbox {self.name!r} has stopped: {error}") from error

    def on_status(self, call: OnStatus) -> None:
        """Have a function called with each new status of the publisher."""
        if self.publisher is not None:
            self.publisher.on_status = call

    async def wait_stopped(self, other: asyncio.Future[Any]) -> None:
        """Wait until the publisher stops, or until `other` is done. Raises OutboxStopped."""
        if self._task is not None:
            await asyncio.wait([other, self._task], return_when=asyncio.FIRST_COMPLETED)
        self.check()

    @property
    def status(self) -> OutboxStatus:
        """The state of the publisher. Raises InvalidRequest if this client does not publish."""
        if self.publisher is None:
            raise InvalidRequest(f"this client does not publish outbox {self.name!r}: ask the process that does")
        return self.publisher.status

    async def wait_published(self, group: int) -> None:
        """Wait until the rows of a group, which is committed, are published. Raises OutboxStopped."""
        if self.publisher is None or self._task is None:
            raise InvalidRequest(f"this client does not publish outbox {self.name!r}, so it cannot wait for that")
        waiting = asyncio.ensure_future(self.publisher.wait_for_group(group))
        try:
            await asyncio.wait([waiting, self._task], return_when=asyncio.FIRST_COMPLETED)
            if not waiting.done():
                self.check()
            await waiting
        finally:
            await cancel(waiting)

    async def close(self) -> None:
        """Stop publishing. Rows that are not published stay in the database."""
        if self._task is not None:
            await cancel(self._task)
        if self._listener is not None:
            await self._listener.close()


class Databases:
    """The databases of a client, by name."""

    def __init__(self, client: BaseClient, log: LogClient, databases: Mapping[str, Any]) -> None:
        self._links: dict[str, OutboxLink] = {}
        for name, given in databases.items():
            options = given if isinstance(given, Database) else Database(given)
            self._links[name] = OutboxLink(client, log, name, options)

    def link(self, name: str) -> OutboxLink:
        """The database with this name. Raises InvalidRequest if there is none, and OutboxStopped."""
        found = self._found(name)
        found.check()
        return found

    def status(self, name: str) -> OutboxStatus:
        """The state of the publisher of a database. Raises InvalidRequest."""
        return self._found(name).status

    def _found(self, name: str) -> OutboxLink:
        if name not in self._links:
            known = ", ".join(map(repr, self._links)) or "none"
            raise InvalidRequest(f"there is no database {name!r}: connect was given {known}")
        return self._links[name]

    async def close(self) -> None:
        """Stop all publishers."""
        for link in self._links.values():
            await link.close()
