"""A transaction of the client without asyncio."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self, TypeAlias

from txnbuffer.client import forking
from txnbuffer.client.outbox import Rows
from txnbuffer.client.portal import Portal
from txnbuffer.client.rows import (
    PROPERTY_BYTES,
    Batching,
    EventTime,
    Key,
    Properties,
    check_size,
    deletion,
    many_rows,
    one_row,
)
from txnbuffer.client.serializers import Serializer
from txnbuffer.client.transaction import Transaction
from txnbuffer.errors import InvalidRequest
from txnbuffer.model import TxnId

HELD_RECORDS = 1000
HELD_BYTES = 256 * 1024
"""A plain transaction hands its records over when it has so many, and when it ends."""


Held: TypeAlias = tuple[str, Rows, Batching | None, int | None]

ENDED = "the transaction has ended: begin another one"
RETURNED = (
    "the handler that was given this transaction has returned: send in the one that it is given now, and let it wait "
    "for what it has others do"
)


class PlainTransaction:
    """As Transaction. Records are held until there are many, or the transaction ends; no more are taken from then on.

    It begins when its block is entered, or at its first record, without waiting for that: so its time runs from there.
    It belongs to one thread. Where several use it nonetheless, each record is in it or is refused.
    """

    def __init__(self, plain: Portal, transaction: Transaction, name: str | None) -> None:
        self._plain = plain
        self._transaction = transaction
        self._named = name is not None
        self._aborted = False  # before it was begun
        self._closed = ""  # why it takes no more
        self._lock = threading.RLock()  # of what is held; a signal's handler may send, too
        self._turn = asyncio.Lock()  # of who hands over
        self._started = False
        self._beginning: asyncio.Task[None] | None = None
        self._held: list[Held] = []
        self._bytes = 0
        self._count = 0

    @property
    def id(self) -> TxnId:
        """The id of the transaction."""
        self._check()
        if not self._transaction.begun:
            self._plain.call(self._begin_missing)
        return self._transaction.id

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
        """Send one record. Raises InvalidMessage, MessageTooLarge, or why the transaction can only abort."""
        serializer = self._plain.client.serializers.of(topic, serializer)
        rows = one_row(value, key, ordering_key, event_time, properties, serializer)
        self._hold(topic, rows, batching, partition)

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
        """Send records given as columns of one length."""
        serializer = self._plain.client.serializers.of(topic, serializer)
        self._hold(topic, many_rows(values, keys, event_times, properties, serializer), batching, partition)

    def delete(self, topic: str, key: Key) -> None:
        """Delete a key: a record without a value."""
        self._hold(topic, deletion(key))

    def commit(self, *, wait_visible: bool = False) -> None:
        """Commit; returns when that is durable, or visible to every reader."""
        self._transaction.check_own()
        self._check()
        self._plain.call(self._commit, wait_visible)

    def abort(self) -> None:
        """Abort; returns when that is durable."""
        self._transaction.check_own()
        self._plain.call(self._abort)

    def __enter__(self) -> Self:
        if self._named:
            self._plain.call(self._transaction.begin)
        else:
            self._start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._aborted or self._transaction.over:
            return  # the block has ended it by itself
        if error is None:
            self.commit()
        elif not self._plain.inherited and not self._plain.closed:
            self._plain.call(self._leave, error)

    def _start(self) -> None:
        """Begin without waiting; what then fails is told to who hands records over, and tried again there."""
        if not self._started:
            self._started = True
            self._plain.start(self._begin_missing)

    def _hold(self, topic: str, rows: Rows, batching: Batching | None = None, partition: int | None = None) -> None:
        self._check()
        client = self._plain.client
        forking.check(client.session.forked_from)
        client.check_topic(topic)
        check_size(client.batched(topic, rows, batching), client.max_message_bytes, PROPERTY_BYTES)
        if self._transaction.begun:
            self._transaction.check()
        else:
            self._start()
        item = topic, rows, batching, partition
        with self._lock:
            if self._closed:
                raise InvalidRequest(self._closed)  # no hand-over follows that would take it
            self._held.append(item)
            self._bytes += rows.size
            self._count += len(rows.values)
            full = self._bytes > HELD_BYTES or self._count > HELD_RECORDS
        if full:
            try:
                self._plain.call(self.hand_over)
            except BaseException:
                self._take_back(item)
                raise

    def _take_back(self, item: Held) -> None:
        """What its caller is told to have failed is not sent with what comes next."""
        with self._lock:
            self._held = [other for other in self._held if other is not item]

    async def hand_over(self, closing: str = "") -> None:
        """Give what is held to the asyncio client; `closing`: why nothing more is taken from then on."""
        async with self._turn:
            await self._begin_missing()
            if self._transaction.over:
                return  # whoever ended it meanwhile took what was held, or dropped it with all else
            with self._lock:
                held, self._held = self._held, []
                self._bytes = self._count = 0
                self._closed = self._closed or closing
            try:
                for topic, rows, batching, partition in held:
                    await self._transaction.send_rows(topic, rows, batching, partition)
            except BaseException as error:
                self._transaction.fail(error)  # those behind it, which were taken before, are not in it
                raise

    async def _begin_missing(self) -> None:
        """Begin it unless that has happened; who comes while it begins is told what becomes of that."""
        if not self._transaction.begun:
            if self._beginning is None:
                self._beginning = asyncio.ensure_future(self._begin())
                self._beginning.add_done_callback(self._begin_done)
            await asyncio.shield(self._beginning)

    async def _begin(self) -> None:
        self._check()
        await self._transaction.begin()
        if self._aborted:  # meanwhile, by another thread, or because its block was left
            await self._transaction.abort()
            self._check()

    def _begin_done(self, beginning: asyncio.Task[None]) -> None:
        self._beginning = None
        if not beginning.cancelled():
            beginning.exception()  # whoever needs it waits for it; nobody else is to hear of it

    async def _leave(self, error: BaseException) -> None:
        """End it because of an exception in its block, without waiting for that."""
        if self._transaction.begun:
            await self._transaction.__aexit__(type(error), error, None)
        else:
            await self._abort()

    async def _abort(self) -> None:
        self._closed = ENDED
        self._held = []
        if self._transaction.begun:
            await self._transaction.abort()
        else:
            self._aborted = True

    async def _commit(self, wait_visible: bool) -> None:
        try:
            await self.hand_over(ENDED)
        except BaseException as error:
            if self._transaction.begun:
                await self._transaction.__aexit__(type(error), error, None)
            raise
        await self._transaction.commit(wait_visible=wait_visible)

    def _check(self) -> None:
        """Raises InvalidRequest if it was aborted before there was anything to abort."""
        if self._aborted:
            raise InvalidRequest(ENDED)
