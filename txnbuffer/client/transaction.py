"""A transaction of the asyncio client"""

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
    slices,
)
from txnbuffer.client.serializers import Serializer
from txnbuffer.client.session import ClientSession
from txnbuffer.coordinator.messages import Branch, ConsumerPosition, ProducerSequence
from txnbuffer.errors import Error, Fenced, InvalidRequest, TransactionAborted
from txnbuffer.model import TxnId

PARTLY = "only some of the records of a send were sent"
CHUNK = 4096
"""Number of records of a `send_many` that are passed to the session together."""


class Transaction:
    """A group of sends to any topics that become visible together when it commits, or never.

        async with client.transaction() as txn:
            await txn.send("orders", b"...", key="o-1")

    Leaving the block commits; leaving it with an exception aborts. Committing raises TransactionAborted (nothing became
    visible: run the transaction again), OutcomeUnknown (query `client.outcome`) or Fenced (another producer took over
    the name, or another member the partition).
    """

    __slots__ = ("_client", "_home", "_lent", "_open", "_positions", "_sequence", "_session", "_timeout")

    def __init__(
        self,
        client: BaseClient,
        sequence: tuple[str, int] | None = None,
        timeout: float | None = None,
        group: str | None = None,
    ) -> None:
        """`sequence`: name and sequence number of a named producer; `group`: the consumer group whose position it
        moves.
        """
        self._client = client
        self._session: (
            ClientSession  # set by `begin`: sessions open on the loop, but a transaction may be created anywhere
        )
        self._home = sequence[0] if sequence is not None else group
        self._sequence = sequence
        self._timeout = timeout
        self._open: OpenTransaction | None = None
        self._positions: tuple[ConsumerPosition, ...] = ()
        self._lent = False

    @property
    def id(self) -> TxnId:
        """The id of the transaction, printed as `most:least`. Raises InvalidRequest before it has begun."""
        return self._begun().txn

    @property
    def begun(self) -> bool:
        """Whether the transaction has begun; stays true after it has ended."""
        return self._open is not None

    @property
    def over(self) -> bool:
        """Whether commit or abort was requested."""
        return self._open is not None and self._open.ending

    def check(self) -> None:
        """Raise the error that prevents sending, if there is one."""
        self._usable()

    def fail(self, error: BaseException) -> None:
        """Allow only an abort from now on, because a send that the caller relies on failed."""
        opened = self._open
        if opened is not None and not opened.ending:
            reason = error if isinstance(error, Error) else TransactionAborted(opened.txn, PARTLY)
            self._session.core.fail(opened, reason)

    async def begin(self) -> Self:
        """Begin the transaction; `async with` calls this. Raises AlreadyCommitted if its number has committed."""
        client = self._client
        client.check()
        if self._open is not None:
            raise InvalidRequest(f"transaction {self._open.txn} has already begun: create another one")
        sequence: ProducerSequence | None = None
        if self._sequence is not None:
            sequence = await client.sequence(*self._sequence)
        session = self._session = await client.sessions.ready(self._home)
        self._open = session.core.begin(self._timeout, sequence)
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
        """Send one record; waits only while the service accepts no more records.

        - `value`: bytes, text, or a value for the serializer.
        - `key`: bytes or text. On a partitioned topic the key selects the partition, unless `partition` does.
        - `ordering_key`: stored as the property of that name.
        - `event_time`: a datetime with a time zone, or milliseconds since 1970.
        - `properties`: a mapping of text to text.
        - `batching`: "messages" or "records", as in `connect`.

        Raises InvalidMessage and MessageTooLarge: the record is not sent, and the transaction can still commit. Any
        other error means that the transaction can only abort.
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
        """Send records given as columns: `values`, `keys`, `event_times` and `properties` have the same length."""
        serializer = self._client.serializers.of(topic, serializer)
        rows = many_rows(values, keys, event_times, properties, serializer)
        await self.send_rows(topic, rows, batching, partition)

    async def delete(self, topic: str, key: Key) -> None:
        """Delete a key: send a record with this key and no value."""
        await self.send_rows(topic, deletion(key))

    async def send_rows(
        self, topic: str, rows: SendColumns, batching: Batching | None = None, partition: int | None = None
    ) -> None:
        """Send records that are already checked columns."""
        opened = self._usable()
        session = self._session
        self._client.check_topic(topic)
        rows = self._client.batched(topic, rows, batching)
        check_size(rows, self._client.max_message_bytes, PROPERTY_BYTES)
        left = count = len(rows.values)
        try:
            for chunk in slices(rows, CHUNK) if count else ():
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
        """Move the position of a consumer group with the commit, which fails if another member moved it before."""
        self._positions += (position,)

    @contextmanager
    def handler_scope(self) -> Iterator[None]:
        """Reject commit and abort inside the block: a handler runs, and the group moves with its transaction."""
        self._lent = True
        try:
            yield
        finally:
            self._lent = False

    def check_can_end(self) -> None:
        """Raise InvalidRequest while a handler runs."""
        if self._lent:
            raise InvalidRequest(
                "a handler cannot end its transaction, which ends after the handler returns: raise an exception to "
                "abort it"
            )

    async def commit(self, *, wait_visible: bool = False, winners: Sequence[Branch] = ()) -> None:
        """Commit; return when the commit is durable.

        With `wait_visible`, wait up to two minutes until all readers can see the records. `winners` are the branches of
        other processes that commit with this transaction, see `txnbuffer.client.branches`. Cancelling this call does
        not undo a commit that is on its way; a note on the exception says so. Raises TransactionAborted,
        OutcomeUnknown, Fenced, AlreadyCommitted, and NotVisible, which means that the transaction has committed but is
        not visible yet.
        """
        self.check_can_end()
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
                text = f"transaction {opened.txn} may have committed: query its outcome"
                cancelled.add_note(text)
            session.poke()
            raise
        except Fenced:
            self._lost_name()
            raise
        if opened.sequence is not None:
            self._client.names.committed(opened.sequence)

    async def abort(self) -> None:
        """Abort; return when that is durable. Does nothing after a commit or another abort."""
        self.check_can_end()
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
        self.check_can_end()
        opened = self._begun()
        if opened.ending:
            return  # commit or abort was called in the block
        if error is None:
            await self.commit()
        else:
            self._session.core.end(opened, EndPlan(False, None))
            self._session.poke()

    def _begun(self) -> OpenTransaction:
        if self._open is None:
            raise InvalidRequest("the transaction has not begun: use it with `async with`, or await begin()")
        return self._open

    def _usable(self) -> OpenTransaction:
        """Return the open transaction. Raises the error that prevents sending."""
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
        """Release the producer name, so that its next transaction opens it again."""
        if self._open is not None and self._open.sequence is not None:
            self._client.names.lost(self._open.sequence)

    def _over(self, opened: OpenTransaction) -> InvalidRequest:
        return InvalidRequest(f"transaction {opened.txn} has ended: begin a new one")
