"""The publisher of an outbox: sends its rows, each once, in transactions of a named producer

The number of a transaction is the id of the last row of its last group, so the log itself knows what was published, and
a publisher that is killed at any moment continues there. Rows are deleted only to save space. Of several publishers of
an outbox the one that has a lock in the database publishes; opening the name of the producer fences one that has lost
the lock unnoticed.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import Any, Protocol, TypeAlias

from broker_io.environment import current
from broker_io.errors import Error, InvalidMessage, MessageTooLarge, TopicNotFound
from txnbuffer.client.database_transaction import OutboxStatus
from txnbuffer.client.reading.async_reader import AsyncReader
from txnbuffer.client.reading.starts import Until
from txnbuffer.client.transaction import Transaction
from txnbuffer.databases.connections import SqlConnection
from txnbuffer.databases.continuity import LogState, TableState, check_continuity
from txnbuffer.databases.dialects import KNOWN, Dialect, PublisherLock
from txnbuffer.databases.groups import OutboxProgress, OutboxRow, RowGroup, batches
from txnbuffer.databases.tables import OUTBOX, OUTBOXES
from txnbuffer.databases.worker import Worker
from txnbuffer.errors import Fenced, ForeignOutbox, NotAuthorized, OutboxMissing, UnsafeDatabase

LOG = logging.getLogger("txnbuffer.databases")

REGISTRY = "txnbuffer-outboxes"
"""The topic that tells which table is published under a name: key: the producer; value: JSON with its identity."""
PAGE = 10_000
"""Rows read at once; more if one transaction of the database has more."""
BATCH = 1000
"""Rows of one transaction, or those of one transaction of the database if it has more."""
DELETE = 1000
"""Published rows that are deleted at once."""
OTHERS_SECONDS = 0.1
"""How often a group is looked for that another process may publish."""
LOCK_SECONDS = 1.0
"""How often a publisher tries to get the lock."""
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 5.0
"""Seconds before the next attempt after an error; doubles each time."""
SOON, LATER = 0.001, 0.25
"""Seconds before the next look at the table: after a commit, doubling; and without any."""
FINAL_ERRORS = (ForeignOutbox, OutboxMissing, UnsafeDatabase)
"""Errors that another attempt would not cure."""
GROUP_ERRORS = (TopicNotFound, MessageTooLarge, NotAuthorized, InvalidMessage)
"""Errors that are about a group and not about the publisher."""


class LogClient(Protocol):
    """The calls of `Client` that a publisher makes."""

    async def run(
        self, work: Callable[[Transaction], Awaitable[None]], *, name: str | None, number: int | None
    ) -> None: ...

    async def committed_number(self, name: str) -> int: ...

    async def reader(self, topics: str, *, until: Until) -> AsyncReader: ...

    async def send(self, topic: str, value: bytes, *, key: str) -> None: ...


OnStatus: TypeAlias = Callable[[OutboxStatus], None]
"""Called with each new status."""


def producer_of(name: str) -> str:
    """The named producer of an outbox."""
    return f"outbox {name}"


def table_state(dialect: Dialect, connection: SqlConnection, outbox: str) -> TableState:
    """What the table says about an outbox, which gets its identity here if it is new."""
    home = dialect.home(connection)
    statement = f"SELECT identity, home, published FROM {OUTBOXES} WHERE outbox = ?"  # noqa: S608 - a constant
    if not (found := connection.execute(statement, outbox)):
        insert = f"INSERT INTO {OUTBOXES} (outbox, identity, home, published) VALUES (?, ?, ?, 0)"  # noqa: S608
        connection.execute(insert, outbox, current().randomness.token(16).hex(), home)
        found = connection.execute(statement, outbox)
    [(identity, made_in, published)] = found
    return TableState(identity, made_in, home, dialect.last_id(connection), published)


async def registered_identity(log: LogClient, outbox: str) -> str | None:
    """The identity of the table that was published under the name last; None if the log has none."""
    found: str | None = None
    try:
        reader = await log.reader(REGISTRY, until="now")
    except TopicNotFound:
        return None
    async with reader:
        async for record in reader.records():
            if record.key == producer_of(outbox).encode() and record.value is not None:
                found = json.loads(record.value)["identity"]
    return found


def registration(identity: str) -> bytes:
    """The record of the topic REGISTRY about a table with this identity; its key is the producer."""
    return json.dumps({"identity": identity}).encode()


class Publisher:
    """Publishes the rows of one outbox until it is cancelled."""

    def __init__(self, client: LogClient, name: str, worker: Worker, *, dead_letter: str | None = None) -> None:
        """`dead_letter`: the topic for groups that cannot be published; None: such a group waits, and those after."""
        self._client = client
        self._name = name
        self._worker = worker
        self._rejects = dead_letter
        self._producer = producer_of(name)
        self._lock: PublisherLock | None = None
        self._dialect: Dialect
        self._progress: OutboxProgress
        self._identity = ""
        self._registered = False
        self._deletable: list[int] = []
        self._pause = FIRST_PAUSE
        self._woken = asyncio.Event()
        self._published = asyncio.Condition()
        self.status = OutboxStatus(name)
        self.on_status: OnStatus | None = None

    @property
    def has_lock(self) -> bool:
        """Whether this process publishes, or would if it could."""
        return self.status.state != "waiting"

    def wake(self) -> None:
        """Look at the table now: a transaction of the database has committed, or is about to. On the event loop."""
        self._woken.set()

    async def run(self) -> None:
        """Publish until cancelled. Raises ForeignOutbox, UnsafeDatabase and OutboxMissing."""
        while True:
            try:
                await self._take_lock()
                await self._open()
                await self._publish_all()
            except FINAL_ERRORS as error:
                self._set(state="stopped", error=error)
                raise
            except GROUP_ERRORS as error:
                self._set(state="blocked", error=error)
            except Exception as error:
                LOG.warning("the publisher of outbox %r tries again in %.1f s: %s", self._name, self._pause, error)
                self._set(state="waiting" if isinstance(error, Fenced) else "unavailable", error=error)
                await self.close()
            await asyncio.sleep(self._pause)
            self._pause = min(2 * self._pause, LONGEST_PAUSE)

    async def close(self) -> None:
        """Give up the lock, and close the connection to the database. Raises nothing if it is broken."""
        lock, self._lock = self._lock, None
        if lock is not None:
            lock.close()
        with suppress(Exception):
            await self._worker.close()

    async def wait_for_group(self, group: int) -> None:
        """Wait until the rows of a group, which is committed, are published."""
        last = f"SELECT max(id) FROM {OUTBOX} WHERE grp = ?"  # noqa: S608 - a constant
        while True:
            [(number,)] = await self._worker.run(lambda connection: connection.execute(last, group))
            if number is None:  # its rows are published, and deleted
                return
            with suppress(TimeoutError):  # another process may publish them
                async with asyncio.timeout(OTHERS_SECONDS), self._published:
                    await self._published.wait_for(partial(self._has_published, number))
                    return

    def _has_published(self, number: int) -> bool:
        return self.status.published >= number

    # Begin

    async def _take_lock(self) -> None:
        def take(connection: SqlConnection) -> PublisherLock | None:
            self._dialect = KNOWN[connection.dialect]
            self._dialect.check(connection)
            return self._dialect.take_lock(connection, self._name) if self._lock is None else self._lock

        while (lock := await self._worker.run(take)) is None:
            self._set(state="waiting", error=None)
            await asyncio.sleep(LOCK_SECONDS)
        self._lock = lock

    async def _open(self) -> None:
        """Check that table and log belong together, and fence a former publisher."""
        table = await self._worker.run(partial(table_state, self._dialect, outbox=self._name))
        number = await self._client.committed_number(self._producer)
        log = LogState(await registered_identity(self._client, self._name), number)
        check_continuity(self._name, table, log)
        self._registered = log.identity is not None
        self._identity = table.identity
        self._deletable = []
        self._progress = OutboxProgress(number, serial=self._dialect.serial)
        await self._note_published(number, 0)

    # Publish

    async def _publish_all(self) -> None:
        rows, pause = PAGE, SOON
        while True:
            self._woken.clear()
            low, size = self._progress.low, rows

            def ready(connection: SqlConnection, low: int = low, size: int = size) -> tuple[list[RowGroup], bool, bool]:
                page = self._dialect.page(connection, self._name, low, size)
                groups = self._progress.ready(page, partial(self._dialect.cut, connection, self._name))
                return groups, page.full, bool(page.rows)

            groups, full, left = await self._worker.run(ready)
            for batch in batches(groups, BATCH):
                await self._publish(batch)
            if groups:
                rows, pause = PAGE, SOON
                continue
            if full:
                rows *= 2
                continue
            if self._deletable:
                await self._delete()
                continue
            self._set(
                state="publishing",
                error=None,
                held_back=await self._worker.run(self._dialect.held_back) if left else None,
            )
            pause = SOON if await self._wakes(pause) else min(2 * pause, LATER)

    async def _wakes(self, seconds: float) -> bool:
        """Wait; return whether it was woken before the time was up."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._woken.wait()
                return True
        return False

    async def _publish(self, batch: Sequence[RowGroup]) -> None:
        """Publish groups as one transaction; one by one if that fails because of one of them."""
        try:
            await self._send([row for group in batch for row in group.rows], batch[-1].number)
        except GROUP_ERRORS as error:
            if len(batch) > 1:
                for group in batch:
                    await self._publish([group])
                return
            if self._rejects is None:
                raise
            rows = [_dead(row, error, self._rejects) for row in batch[0].rows]
            await self._send(rows, batch[0].number)
        await self._note_published(batch[-1].number, sum(len(group.rows) for group in batch))
        self._deletable += [row.id for group in batch for row in group.rows]
        if len(self._deletable) >= DELETE:
            await self._delete()

    async def _send(self, rows: Sequence[OutboxRow], number: int) -> None:
        async def send(txn: Transaction) -> None:
            if not self._registered:
                await txn.send(REGISTRY, registration(self._identity), key=self._producer)
            for (topic, partition), some in _by_topic(rows).items():
                await send_all(txn, topic, partition, some)

        await self._client.run(send, name=self._producer, number=number)
        self._registered = True
        self._pause = FIRST_PAUSE

    async def _note_published(self, number: int, rows: int) -> None:
        self._progress.done(number)
        async with self._published:
            status = self.status
            self._set(state="publishing", error=None, published=number, rows_published=status.rows_published + rows)
            self._published.notify_all()

    async def _delete(self) -> None:
        ids, self._deletable = self._deletable, []
        published = self._progress.published
        await self._worker.run(lambda connection: self._dialect.delete(connection, self._name, ids, published))

    def _set(self, **changes: Any) -> None:
        status = replace(self.status, **changes)
        if status != self.status:
            self.status = status
            if self.on_status is not None:
                self.on_status(status)


def _by_topic(rows: Sequence[OutboxRow]) -> dict[tuple[str, int | None], list[OutboxRow]]:
    """The rows of each topic and partition, in order."""
    found: dict[tuple[str, int | None], list[OutboxRow]] = {}
    for row in rows:
        found.setdefault((row.topic, row.partition), []).append(row)
    return found


async def send_all(txn: Transaction, topic: str, partition: int | None, rows: Sequence[OutboxRow]) -> None:
    """Send rows in order; a row without a value deletes its key."""
    for deletes, some in groupby(rows, lambda row: row.value is None):
        if deletes:
            for row in some:
                await txn.delete(topic, row.key, properties=_properties(row), partition=partition)
            continue
        run = list(some)
        await txn.send_many(
            topic,
            [row.value for row in run],
            keys=[row.key for row in run],
            event_times=[row.event_time for row in run],
            properties=[_properties(row) for row in run] if any(row.properties for row in run) else None,
            partition=partition,
        )


def _properties(row: OutboxRow) -> dict[str, str] | None:
    return None if row.properties is None else json.loads(row.properties)


def _dead(row: OutboxRow, error: Error, topic: str) -> OutboxRow:
    """The row for the topic of dead letters, with its topic and the error as properties."""
    properties = {**(_properties(row) or {}), "outbox.topic": row.topic, "outbox.error": str(error)[:1000]}
    return row._replace(topic=topic, partition=None, properties=json.dumps(properties))
