"""A transaction as an application uses it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

from txnbuffer.client.base import BaseClient
from txnbuffer.client.open_transactions import EndPlan
from txnbuffer.client.outbox import (
    PROPERTY_BYTES,
    Batching,
    EventTime,
    Key,
    OpenTransaction,
    Properties,
    SendColumns,
    check_size,
    deletion,
    many_rows,
    one_row,
    pieces,
)
from txnbuffer.client.serializers import Serializer
from txnbuffer.client.session import ClientSession
from txnbuffer.coordinator.messages import Branch, ConsumerPosition, ProducerSequence
from txnbuffer.errors import Error, Fenced, InvalidRequest, TransactionAborted
from txnbuffer.model import TxnId

PARTLY = "only a part of what was given to it was sent"
CHUNK = 4096
"""Records of a `send_many` that are handed over together."""


class Transaction:
    """What is sent in it becomes visible all at once when it commits, or never.

        async with client.transaction() as txn:
            await txn.send("orders", b"...", key="o-1")

    Leaving the block commits; leaving it by an exception aborts. Commit raises TransactionAborted (nothing of
    it happened: run it again), OutcomeUnknown (ask `client.outcome`), Fenced (another one took over: open anew).
    """

    __slots__ = ("_client", "_home", "_lent", "_naming", "_open", "_positions", "_session", "_timeout")

    def __init__(
        self,
        client: BaseClient,
        naming: tuple[str, int] | None = None,
        timeout: float | None = None,
        group: str | None = None,
    ) -> None:
        """`naming`: the name and number of a producer; `group`: whose positions it is to move."""
        self._client = client
        self._session: (
            ClientSession  # from `begin` on: sessions are opened on the loop, where a transaction need not be made
        )
        self._home = naming[0] if naming is not None else group
        self._naming = naming
        self._timeout = timeout
        self._open: OpenTransaction | None = None
        self._positions: tuple[ConsumerPosition, ...] = ()
        self._lent = False

    @property
    def id(self) -> TxnId:
        """The id of the transaction; printed as `most:least`."""
        return self._begun().txn

    @property
    def begun(self) -> bool:
        """Whether it was begun, be it over or not."""
        return self._open is not None

    @property
    def over(self) -> bool:
        """Whether commit or abort was asked for."""
        return self._open is not None and self._open.ending

    def check(self) -> None:
        """Raises why nothing can be sent in it."""
        self._usable()

    def fail(self, error: BaseException) -> None:
        """From now on it can only abort: what its caller believes to be in it is not."""
        opened = self._open
        if opened is not None and not opened.ending:
            told = error if isinstance(error, Error) else TransactionAborted(opened.txn, PARTLY)
            self._session.core.fail(opened, told)

    async def begin(self) -> Self:
        """Begin; `async with` does it. Raises AlreadyCommitted if the number of its name is."""
        client = self._client
        client.check()
        if self._open is not None:
            raise InvalidRequest(f"transaction {self._open.txn} was begun before: make another one")
        naming: ProducerSequence | None = None
        if self._naming is not None:
            naming = await client.naming(*self._naming)
        session = self._session = await client.sessions.ready(self._home)
        self._open = session.core.begin(self._timeout, naming)
        session.poke()
        return self

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
        batching: Batching | None = None,
        partition: int | None = None,
    ) -> None:
        """Send one record; waits only while the service takes no more.

        `value` is bytes, text, or what the serializer takes. `event_time` is a datetime, or milliseconds since
        1970. `batching` as in `connect`; `partition` of a partitioned topic, else the key chooses one. Raises
        InvalidMessage, MessageTooLarge (the transaction goes on), or why it can only abort.
        """
        serializer = self._client.serializers.of(topic, serializer)
        rows = one_row(value, key, ordering_key, event_time, properties, serializer)
        await self.send_rows(topic, rows, batching, partition)

    async def send_many(
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
        serializer = self._client.serializers.of(topic, serializer)
        rows = many_rows(values, keys, event_times, properties, serializer)
        await self.send_rows(topic, rows, batching, partition)

    async def delete(self, topic: str, key: Key) -> None:
        """Delete a key: a record without a value."""
        await self.send_rows(topic, deletion(key))

    async def send_rows(
        self, topic: str, rows: SendColumns, batching: Batching | None = None, partition: int | None = None
    ) -> None:
        """Send records that are checked columns already."""
        opened = self._usable()
        session = self._session
        self._client.check_topic(topic)
        rows = self._client.batched(topic, rows, batching)
        check_size(rows, self._client.max_message_bytes, PROPERTY_BYTES)
        left = count = len(rows.values)
        try:
            for chunk in pieces(rows, CHUNK) if count else ():
                for name, some in await self._client.parts(topic, chunk, partition):
                    opened = self._usable()
                    session.core.send(name, some, opened)
                    left -= len(some.values)
                session.poke()
                if not session.core.has_room:
                    await self._client.room(session)
                    if left:
                        self._usable()
        except BaseException as error:
            if 0 < left < count:
                self.fail(error)
            raise

    def consumed(self, position: ConsumerPosition) -> None:
        """The transaction consumed a topic for a group; it commits only if nobody else did."""
        self._positions += (position,)

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Meanwhile it can't be ended: it is a handler's, of a group that moves by it."""
        self._lent = True
        try:
            yield
        finally:
            self._lent = False

    def check_own(self) -> None:
        """Raises InvalidRequest while it can't be ended."""
        if self._lent:
            raise InvalidRequest(
                "a handler can't end its transaction, which also moves the group and ends when the handler has "
                "returned: raise an exception to abort it"
            )

    async def commit(self, *, wait_visible: bool = False, winners: Sequence[Branch] = ()) -> None:
        """Commit; returns when that is durable, or visible to every reader, for which it waits two minutes at most.

        `winners`: what others wrote for it, see `txnbuffer.client.branches`. Cancelling does not undo the commit: it
        may have happened, and the exception says so. Raises TransactionAborted, OutcomeUnknown, Fenced,
        AlreadyCommitted, and NotVisible of a transaction that is committed.
        """
        self.check_own()
        opened = self._begun()
        session = self._session
        session.check()
        if opened.ending:
            raise self._over(opened)
        future = session.future()
        session.core.end(opened, EndPlan(True, future, wait_visible, self._positions, tuple(winners)))
        session.poke()
        try:
            await future
        except asyncio.CancelledError as cancelled:
            if not session.core.withdraw_commit(opened):
                text = f"the commit of transaction {opened.txn} may still have happened: ask for its outcome"
                cancelled.add_note(text)
            session.poke()
            raise
        except Fenced:
            self._lost_name()
            raise
        if opened.naming is not None:
            self._client.names.committed(opened.naming)

    async def abort(self) -> None:
        """Abort; returns when that is durable. After a commit, or another abort, this does nothing."""
        self.check_own()
        opened = self._begun()
        session = self._session
        session.check()
        if not opened.ending:
            await session.result(lambda future: session.core.end(opened, EndPlan(False, future)))

    async def __aenter__(self) -> Self:
        return await self.begin()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.check_own()
        opened = self._begun()
        if opened.ending:
            return  # the block has ended it by itself
        if error is None:
            await self.commit()
        else:
            self._session.core.end(opened, EndPlan(False, None))
            self._session.poke()

    def _begun(self) -> OpenTransaction:
        if self._open is None:
            raise InvalidRequest("the transaction was not begun: use it in `async with`, or await begin()")
        return self._open

    def _usable(self) -> OpenTransaction:
        """The open transaction. Raises why nothing can be sent in it."""
        opened = self._begun()
        self._session.check()
        if opened.failure is not None:
            if isinstance(opened.failure, Fenced):
                self._lost_name()
            raise opened.failure
        if opened.ending:
            raise self._over(opened)
        return opened

    def _lost_name(self) -> None:
        """The next transaction of the name opens it anew."""
        if self._open is not None and self._open.naming is not None:
            self._client.names.lost(self._open.naming)

    def _over(self, opened: OpenTransaction) -> InvalidRequest:
        return InvalidRequest(f"transaction {opened.txn} has ended: begin another one")
