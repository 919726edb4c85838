"""Notices between processes on PostgreSQL: a transaction with rows for an outbox has committed

A process that does not publish itself notifies the channel after its commit, on a connection of its own: a NOTIFY in
the application's transaction would let only one transaction commit at a time. A publisher listens on another
connection. Notices only save time: a publisher also looks at the table by itself.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any

from broker_io.environment import Thread, current
from txnbuffer.databases.connections import SqlConnection
from txnbuffer.databases.worker import is_async_engine, opened

LOG = logging.getLogger("txnbuffer.databases")

CHANNEL = "txnbuffer_outbox"
LISTEN_SECONDS = 0.5
"""How long a listening thread waits at once; `close` waits no longer than this."""
AGAIN_SECONDS = 5.0
"""Seconds before a new connection, after one was lost."""


def notify(connection: SqlConnection, outbox: str) -> None:
    """Tell the publisher of an outbox to look at the table, once the connection's transaction commits."""
    connection.execute("SELECT pg_notify(?, ?)", CHANNEL, outbox)


class Notifier:
    """Tells the publisher in another process of commits, from a thread of its own."""

    def __init__(self, database: Any, outbox: str) -> None:
        self._database = database
        self._thread = current().threads.executor(1, "txnbuffer-notices")
        self._outbox = outbox
        self._pending = current().threads.event()

    def notify(self) -> None:
        """Notify soon; commits that follow each other closely have one notice."""
        if not self._pending.is_set():
            self._pending.set()
            self._thread.submit(self._notify)

    def _notify(self) -> None:
        self._pending.clear()
        try:
            with ExitStack() as opening:
                connection = opened(self._database, opening, pooled=True)
                if connection.dialect == "postgresql":
                    notify(connection, self._outbox)
        except Exception as error:  # the publisher polls
            LOG.info("outbox %r could not be notified: %s", self._outbox, error)


class NoticeListener:
    """Calls a function, from any thread, when another process notifies an outbox."""

    def __init__(self, database: Any, outbox: str, call: Callable[[], None]) -> None:
        self._database = database
        self._outbox = outbox
        self._call = call
        self._closed = current().threads.event()
        self._thread: Thread | None = None

    @property
    def possible(self) -> bool:
        """Whether the driver of the database can listen: psycopg 3 can."""
        return not is_async_engine(self._database)

    def start(self) -> None:
        """Begin to listen."""
        if self.possible and self._thread is None:
            self._thread = current().threads.thread(self._run, name="txnbuffer-listener", daemon=True)
            self._thread.start()

    async def close(self) -> None:
        """End the thread."""
        self._closed.set()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)

    def _run(self) -> None:
        while not self._closed.is_set():
            try:
                with ExitStack() as opening:
                    connection = opened(self._database, opening)
                    if connection.raw is None:
                        return
                    connection.execute(f"LISTEN {CHANNEL}")
                    self._listen(connection.raw)
            except Exception as error:  # the publisher polls meanwhile
                LOG.info("listening to outbox %r begins again: %s", self._outbox, error)
                self._closed.wait(AGAIN_SECONDS)

    def _listen(self, raw: Any) -> None:
        while not self._closed.is_set():
            for notice in raw.notifies(timeout=LISTEN_SECONDS, stop_after=1):
                if notice.payload == self._outbox:
                    with suppress(RuntimeError):  # the event loop is closed
                        self._call()
