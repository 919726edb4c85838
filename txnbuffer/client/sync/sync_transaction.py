"""A transaction of the sync client

Where the asyncio transaction would wait, these calls wait as well. Where it would not, records and the begin are handed
to the loop without waiting for it: what can be checked is checked before, in the calling thread.

A signal handler may raise an exception at any step of a call or of the end of a block. The loop then ends the
transaction: a commit that was not requested becomes an abort, and the exception has a note about one that was.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from functools import partial
from itertools import groupby
from opcode import opmap
from types import CodeType, TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeVar

from broker_io.environment import current
from txnbuffer.checks import check_flag
from txnbuffer.client.path.send_columns import (
    PROPERTY_BYTES,
    Batching,
    EventTime,
    Key,
    Properties,
    SendColumns,
    deletion,
    many_rows,
    one_row,
    weight,
)
from txnbuffer.client.serializers import Serializer
from txnbuffer.client.sync.portal import LoopCall, Portal
from txnbuffer.client.transaction import Transaction, check_branches
from txnbuffer.coordinator.messages import Branch
from txnbuffer.errors import Error, InvalidRequest, TransactionAborted
from txnbuffer.model import TxnId

NOT_BEGUN = "the transaction has not begun: use it with `with`, or call begin()"
ENDED = "the transaction has ended: begin a new one"
RETURNED = (
    "the handler of this transaction has returned: send in the transaction of the current call, and let the handler "
    "wait for its other threads"
)


LEFT = "its block or a call was interrupted before the commit was requested"
INTERRUPTED_SEND = "a send was interrupted, so its records may be missing"
OUTCOME_TIMEOUT = 1.0
"""Seconds that an interrupted commit waits for its outcome if it was sent already."""

AFTER_AWAIT = 3
"""The argument of RESUME, the first step of a function, if a coroutine continues there."""

Method = TypeVar("Method", bound=Callable[..., Any])


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


class EndingCall(LoopCall[Any]):
    """A call that begins or ends a transaction. If it is interrupted, the loop ends the transaction."""

    def __init__(self, transaction: SyncTransaction, work: Callable[[], Coroutine[Any, Any, Any]]) -> None:
        super().__init__(work, transaction._portal.loop.loop)
        self._transaction = transaction

    def completion(self) -> Sequence[str]:
        """None after a begin or an abort, which made nothing visible."""
        ended = self._transaction._transaction
        return [f"transaction {ended.id} has committed"] if ended.committed else []

    def give_up(self, task: asyncio.Task[None]) -> None:
        if self._transaction._transaction.commit_sent:
            self._loop.call_later(OUTCOME_TIMEOUT, task.cancel)
        else:
            task.cancel()

    def on_interrupt(self) -> None:
        self._transaction._abandon()


def _exit_of(method: Callable[..., None], transaction: Any) -> Any:
    """The `__exit__` of one block, in which no step runs unprotected. Where nothing is called, no handler runs."""

    def exiting(kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            method(transaction, kind, error, trace)
        except BaseException as raised:
            try:
                transaction._portal.left.append(transaction._finish)
            except BaseException as another:
                try:  # noqa: SIM105  `suppress` would be a call
                    another.__notes__ = raised.__notes__
                except AttributeError:
                    pass
                raise
            raise

    return exiting


def without_check(code: CodeType) -> CodeType:
    """Return the code of a function that starts as after an `await`, where the interpreter runs no signal handlers.

    An interpreter that has other steps gets the code as it is: there a handler may raise first.
    """
    steps, resume = bytearray(code.co_code), opmap.get("RESUME")
    starts = [at for at in range(0, len(steps), 2) if steps[at] == resume and steps[at + 1] == 0]
    if not starts:
        return code
    steps[starts[0] + 1] = AFTER_AWAIT
    return code.replace(co_code=bytes(steps))


if TYPE_CHECKING:

    def of_block(method: Method) -> Method: ...

else:

    class of_block:  # noqa: N801  a decorator
        """Makes a new `__exit__` for each `with` block.

        A signal handler could raise before the first step of a usual method, and again after it has returned, as if
        from the block: the interpreter runs handlers when a function starts, and after each call of a bound method.
        """

        def __init__(self, method: Callable[..., None]) -> None:
            self._method = method
            self._code = without_check(_exit_of(method, None).__code__)

        def __get__(self, transaction: SyncTransaction | None, owner: type) -> Callable[..., None]:
            if transaction is None:
                return self._method
            exiting = _exit_of(self._method, transaction)
            exiting.__code__ = self._code
            return exiting


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
        self._ending = False  # a commit runs on the loop
        self._failure: Exception | None = None  # of a begin that was handed over
        self._lock = current().threads.reentrant_lock()  # guards the next four; reentrant for signal handlers
        self._handed: list[SyncSend] = []
        self._bytes = 0  # of the records that the session does not have yet
        self._scheduled = False
        self._closed = ""  # why it accepts no more records
        self._aborted = False
        self._abandoned = False  # a call or the end of the block was interrupted
        self._interrupted_send = False
        self._leaving: asyncio.Task[None] | None = None
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
            self._requested = True
            try:
                portal.loop.wait_for(EndingCall(self, self._transaction.begin))
            except Error:
                self._requested = False
                raise
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

        An exception that a signal handler raises meanwhile, such as KeyboardInterrupt, has a note if the transaction
        has or may have committed; without one it has not.
        """
        self._check_begun()
        self._transaction.check_can_end()
        branches = check_branches(winners)
        check_flag(wait_visible, "wait_visible")
        self._portal.loop.wait_for(EndingCall(self, partial(self._commit, wait_visible, branches)))

    def abort(self) -> None:
        """Abort; return when the abort is durable. After another abort or a commit as `Transaction.abort`."""
        self._portal.check()
        self._transaction.check_can_end()
        if not self._requested:
            raise InvalidRequest(NOT_BEGUN)
        self._portal.loop.wait_for(EndingCall(self, self._abort))

    def __enter__(self) -> Self:
        try:
            return self.begin()
        except Error:
            raise
        except BaseException:
            self._portal.left.append(self._finish)
            raise

    @of_block
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        over = self._aborted or self._transaction.over  # commit or abort was called in the block
        if self._abandoned and error is None:
            raise self._left()
        if over:
            pass
        elif error is None:
            self.commit()
        elif not self._portal.inherited and not self._portal.closed:
            self._transaction.check_can_end()
            self._portal.loop.wait_for(EndingCall(self, partial(self._leave, error)))

    def _finish(self) -> bool:
        """End a transaction whose block was left by an exception, on the loop; return whether that is done."""
        if self._ending and not self._transaction.over:
            return False
        self._abandon()
        return True

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
        client.checked(send.topic, send.rows, send.batching, PROPERTY_BYTES)
        if not send.rows.values:
            return
        try:
            if client.must_ask(send.topic, send.partition):
                self._portal.call(self._ask_and_send, send)
            elif self._hand_over(send):
                self._portal.call(self._sent)
                if not transaction.over:
                    transaction.check()
        except Error:
            raise
        except BaseException:
            self._interrupted_send = True  # the records may or may not be part of it
            raise

    def _hand_over(self, send: SyncSend) -> bool:
        """Hand records over to the loop; return whether the caller waits until the session has them."""
        with self._lock:
            if self._closed:
                raise InvalidRequest(self._closed)
            self._handed.append(send)
            self._bytes += weight(send.rows)
            self._schedule()
            return self._bytes >= self._transaction.room

    def _schedule(self) -> None:
        """Let the loop take what was handed over."""
        if not self._scheduled:
            self._scheduled = True
            self._portal.loop.soon(self._start_sender)

    def _check_begun(self) -> None:
        """Raises UsedAfterFork, InvalidRequest before the begin and after `close`, and the error of the begin."""
        self._portal.check()
        if self._failure is not None:
            raise self._failure.with_traceback(None)
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
        finally:
            self._sender = None  # the loop drops the task, not the calling thread

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
            raise self._failure.with_traceback(None)

    async def _ask_and_send(self, send: SyncSend) -> None:
        """Send records whose partition only the cluster knows, after all that was handed over."""
        await self._sent()
        if self._closed:
            raise InvalidRequest(self._closed)
        await self._transaction.send_rows(*send)

    async def _commit(self, wait_visible: bool, winners: Sequence[Branch] = ()) -> None:
        self._ending = True
        try:
            if self._abandoned:
                raise self._left()
            await self.close(ENDED)
            if self._interrupted_send:
                self._transaction.fail(TransactionAborted(self._transaction.id, INTERRUPTED_SEND))
            await self._transaction.commit(wait_visible=wait_visible, winners=winners)
        finally:
            self._ending = False

    async def _abort(self) -> None:
        if await self._drop():
            await self._transaction.abort()

    async def _leave(self, error: BaseException) -> None:
        """Request an abort after an exception in the block, without waiting for it."""
        if await self._drop():
            await self._transaction.__aexit__(type(error), error, None)

    def _abandon(self) -> None:
        """End the transaction, unless that was requested."""
        if self._requested and not self._transaction.over:
            self._abandoned = not self._aborted
            self._leaving = asyncio.ensure_future(self._leave(asyncio.CancelledError()))

    def _left(self) -> Error:
        """The error of a commit that is requested after `_abandon`."""
        return TransactionAborted(self._transaction.id, LEFT) if self._transaction.begun else InvalidRequest(ENDED)

    async def _drop(self) -> bool:
        """Drop the records that the session does not have yet; return whether the transaction has begun."""
        with self._lock:
            self._closed, self._handed = self._closed or ENDED, []
        self._aborted = True
        if self._sender is not None and not self._sender.done():
            self._sender.cancel()
            await asyncio.wait([self._sender])
        return self._transaction.begun
