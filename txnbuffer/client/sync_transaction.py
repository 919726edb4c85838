"""A transaction of the sync client

Where the asyncio transaction would wait, these calls wait as well. Where it would not, records and the begin are handed
to the loop without waiting for it: what can be checked is checked before, in the calling thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from types import TracebackType
from typing import Any, NamedTuple, Self

from broker_io.environment import current
from txnbuffer.checks import check_flag
from txnbuffer.client.portal import Portal
from txnbuffer.client.send_columns import (
    PROPERTY_BYTES,
    Batching,
    EventTime,
    Key,
    Properties,
    SendColumns,
    check_size,
    deletion,
    many_rows,
    one_row,
    weight,
)
from txnbuffer.client.serializers import Serializer
from txnbuffer.client.transaction import Transaction, check_branches
from txnbuffer.coordinator.messages import Branch
from txnbuffer.errors import InvalidRequest
from txnbuffer.model import TxnId

NOT_BEGUN = "the transaction has not begun: use it with `with`, or call begin()"
ENDED = "the transaction has ended: begin a new one"
RETURNED = (
    "the handler of this transaction has returned: send in the transaction of the current call, and let the handler "
    "wait for its other threads"
)


class SyncSend(NamedTuple):
    """Checked records of one call of `send` or `send_many`."""

    topic: str
    rows: SendColumns
    batching: Batching | None
    partition: int | None


def joined(sends: Iterable[SyncSend]) -> Iterator[SyncSend]:
    """Join consecutive sends to a topic without properties and event times.

    Not for partitioned topics, where a send without keys goes to one partition.
    """
    for (topic, batching, plain), run in groupby(sends, _kind):
        if not plain:
            yield from run
            continue
        keys: list[bytes | None] = []
        values: list[bytes | None] = []
        size = 0
        for send in run:
            keys += send.rows.keys
            values += send.rows.values
            size += send.rows.size
        yield SyncSend(topic, SendColumns(keys, values, None, None, size), batching, None)


def _kind(send: SyncSend) -> tuple[str, Batching | None, bool]:
    return send.topic, send.batching, send.rows.properties is None and send.rows.times is None


class SyncTransaction:
    """A transaction of the sync client; use it with `with`.

        with client.transaction() as txn:
            txn.send("orders", b"...", key="o-1")

    All records become visible when it commits; none if it aborts. The end of the block commits and raises the errors of
    `commit`; an exception in the block aborts. Each method does what the method of `Transaction` with the same name
    does, at the same time, and raises its errors. Use a transaction in one thread; a send of another thread is either
    part of it or rejected.
    """

    def __init__(self, portal: Portal, transaction: Transaction) -> None:
        self._portal = portal
        self._transaction = transaction
        self._requested = transaction.begun  # whether it begins
        self._failure: Exception | None = None  # of a begin that was handed over
        self._lock = current().threads.reentrant_lock()  # guards the next four; reentrant for signal handlers
        self._handed: list[SyncSend] = []
        self._bytes = 0  # of the records that the session does not have yet
        self._scheduled = False
        self._closed = ""  # why it accepts no more records
        self._aborted = False
        self._sender: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._transaction.describe()}>"

    @property
    def id(self) -> TxnId:
        """The id of the transaction, printed as `most:least`. Raises InvalidRequest before it has begun."""
        self._check_begun()
        if not self._transaction.begun:
            self._portal.call(self._sent)
        return self._transaction.id

    def begin(self) -> Self:
        """Begin the transaction; `with` calls this. Errors as in `Transaction.begin`."""
        portal, client = self._portal, self._portal.client
        portal.check()
        client.check()
        if self._requested:
            raise InvalidRequest("the transaction has already begun: create another one")
        if self._transaction.named or not client.sessions.can_begin:
            portal.call(self._transaction.begin)
            self._requested = True
            return self
        self._requested = True
        with self._lock:
            self._schedule()
        return self

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
        batching: Batching | None = None,
        partition: int | None = None,
    ) -> None:
        """Queue one record to be sent; arguments and errors as in `Transaction.send`."""
        serializer = self._portal.client.serializers.of(topic, serializer)
        rows = one_row(value, key, ordering_key, event_time, properties, serializer)
        self._send(SyncSend(topic, rows, batching, partition))

    def send_many(
        self,
        topic: str,
        values: Sequence[Any],
        *,
        keys: Sequence[Key] | None = None,
        event_times: Sequence[EventTime] | None = None,
        properties: Sequence[Properties] | None = None,
        serializer: Serializer | None = None,
        batching: Batching | None = None,
        partition: int | None = None,
    ) -> None:
        """Queue records to be sent, given as columns; arguments and errors as in `Transaction.send_many`."""
        serializer = self._portal.client.serializers.of(topic, serializer)
        rows = many_rows(values, keys, event_times, properties, serializer)
        self._send(SyncSend(topic, rows, batching, partition))

    def delete(self, topic: str, key: Key, *, properties: Properties = None, partition: int | None = None) -> None:
        """Delete a key: send a record with this key and no value. Other arguments and errors as in `send`."""
        self._send(SyncSend(topic, deletion(key, properties), None, partition))

    def commit(self, *, wait_visible: bool = False, winners: Sequence[Branch] = ()) -> None:
        """Commit; return when all records and the commit are durable. Arguments and errors as in `Transaction.commit`.

        KeyboardInterrupt has a note that says whether the transaction may have committed.
        """
        self._check_begun()
        self._transaction.check_can_end()
        branches = check_branches(winners)
        check_flag(wait_visible, "wait_visible")
        self._portal.call(self._commit, wait_visible, branches)

    def abort(self) -> None:
        """Abort; return when the abort is durable. After another abort or a commit as `Transaction.abort`."""
        self._portal.check()
        self._transaction.check_can_end()
        if not self._requested:
            raise InvalidRequest(NOT_BEGUN)
        self._portal.call(self._abort)

    def __enter__(self) -> Self:
        return self.begin()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._aborted or self._transaction.over:
            return  # commit or abort was called in the block
        if error is None:
            self.commit()
        elif not self._portal.inherited and not self._portal.closed:
            self._transaction.check_can_end()
            self._portal.call(self._leave, error)

    async def close(self, reason: str) -> None:
        """Internal: reject later sends with this reason, and wait until the session has all records."""
        with self._lock:
            self._closed = self._closed or reason
        await self._sent()

    # In the calling thread

    def _send(self, send: SyncSend) -> None:
        client, transaction = self._portal.client, self._transaction
        if transaction.begun and not self._portal.closed:
            transaction.check()
        else:
            self._check_begun()
            client.check()
        client.check_topic(send.topic)
        check_size(client.batched(send.topic, send.rows, send.batching), client.max_message_bytes, PROPERTY_BYTES)
        if not send.rows.values:
            return
        if client.must_ask(send.topic, send.partition):
            self._portal.call(self._ask_and_send, send)
            return
        with self._lock:
            if self._closed:
                raise InvalidRequest(self._closed)
            self._handed.append(send)
            self._bytes += weight(send.rows)
            self._schedule()
            full = self._bytes >= transaction.room
        if full:
            self._portal.call(self._sent)
            if not transaction.over:
                transaction.check()

    def _schedule(self) -> None:
        """Let the loop take what was handed over."""
        if not self._scheduled:
            self._scheduled = True
            self._portal.loop.soon(self._start_sender)

    def _check_begun(self) -> None:
        """Raises UsedAfterFork, InvalidRequest before the begin and after `close`, and the error of the begin."""
        self._portal.check()
        if self._failure is not None:
            raise self._failure
        if self._closed and not self._transaction.begun:
            raise InvalidRequest(self._closed)
        if not self._requested:
            raise InvalidRequest(NOT_BEGUN)

    # On the loop

    def _start_sender(self) -> None:
        if self._sender is None or self._sender.done():
            self._sender = asyncio.ensure_future(self._send_handed())

    async def _send_handed(self) -> None:
        """Begin, and send what was handed over. An error makes the transaction unable to commit."""
        try:
            if not self._transaction.begun and not self._aborted:
                await self._transaction.begin()
            while handed := self._take():
                for send in handed if self._portal.client.routes else joined(handed):
                    await self._transaction.send_rows(*send)
        except BaseException as error:
            if self._transaction.begun:
                self._transaction.fail(error)
            else:
                self._failure = error if isinstance(error, Exception) else InvalidRequest(ENDED)
            with self._lock:
                self._handed, self._bytes, self._scheduled = [], 0, False
            if not isinstance(error, Exception):
                raise

    def _take(self) -> list[SyncSend]:
        """Return what was handed over. The records of the last call are now with the session."""
        with self._lock:
            handed, self._handed = self._handed, []
            self._bytes = sum(weight(send.rows) for send in handed)
            self._scheduled = bool(handed)
            return handed

    async def _sent(self) -> None:
        """Wait until the session has all records. Raises the error of a begin that was handed over."""
        if self._scheduled:
            self._start_sender()
        if self._sender is not None and not self._sender.done():
            await asyncio.wait([self._sender])
        if self._failure is not None:
            raise self._failure

    async def _ask_and_send(self, send: SyncSend) -> None:
        """Send records whose partition only the cluster knows, after all that was handed over."""
        await self._sent()
        if self._closed:
            raise InvalidRequest(self._closed)
        await self._transaction.send_rows(*send)

    async def _commit(self, wait_visible: bool, winners: Sequence[Branch] = ()) -> None:
        try:
            await self.close(ENDED)
        except asyncio.CancelledError as error:
            await self._leave(error)
            raise
        await self._transaction.commit(wait_visible=wait_visible, winners=winners)

    async def _abort(self) -> None:
        if await self._drop():
            await self._transaction.abort()

    async def _leave(self, error: BaseException) -> None:
        """Request an abort after an exception in the block, without waiting for it."""
        if await self._drop():
            await self._transaction.__aexit__(type(error), error, None)

    async def _drop(self) -> bool:
        """Drop the records that the session does not have yet; return whether the transaction has begun."""
        with self._lock:
            self._closed, self._handed = self._closed or ENDED, []
        self._aborted = True
        if self._sender is not None and not self._sender.done():
            self._sender.cancel()
            await asyncio.wait([self._sender])
        return self._transaction.begun
