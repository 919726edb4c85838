"""The sync client: the calls of the asyncio client for code without asyncio

`Portal` runs the calls on the event loop of a background thread and waits for the results. `SyncTransaction` keeps
records back until there are many or the transaction ends, so that not every record waits for the other thread.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeAlias, TypeVar

from txnbuffer.checks import check_sync_function, check_sync_result
from txnbuffer.client import lifecycle
from txnbuffer.client.client import ATTEMPTS, FIRST_PAUSE, Client
from txnbuffer.client.cursors import At
from txnbuffer.client.loop_thread import LoopThread
from txnbuffer.client.outbox import (
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
)
from txnbuffer.client.reader import CommittedReader
from txnbuffer.client.routing import Start
from txnbuffer.client.serializers import Serializer
from txnbuffer.client.streams import ChangeBatch, ChangeStatistics, ChangeStream, Rollback
from txnbuffer.client.tokens import TokenStore
from txnbuffer.client.transaction import Transaction
from txnbuffer.errors import InvalidRequest, TransactionAborted
from txnbuffer.model import Outcome, TxnId
from txnbuffer.streams.token import ResumeToken

if TYPE_CHECKING:
    from txnbuffer.client.handling import Processed
    from txnbuffer.client.records import Record, RecordBatch


Result = TypeVar("Result")


class Portal:
    """Runs calls of a client on the loop of a background thread. Any other thread may use it."""

    def __init__(self, client: Client, loop: LoopThread) -> None:
        self._client = client
        self._loop = loop
        self._forked_from = lifecycle.generation()
        self._closed = False

    @classmethod
    def open(cls, opening: Callable[[], Coroutine[Any, Any, Client]]) -> Self:
        loop = LoopThread()
        try:
            return cls(loop.call(opening()), loop)
        except BaseException:
            loop.stop()
            raise

    @property
    def inherited(self) -> bool:
        """Whether this is a child of the process that connected, where nothing can be closed."""
        return lifecycle.inherited(self._forked_from)

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def close(self) -> None:
        """Close the session; open transactions abort."""
        lifecycle.check(self._forked_from)
        self._loop.check_other()
        if not self._closed:
            self._closed = True
            self._loop.cancel_started()
            self._loop.call(self._client.close())
            self._loop.stop()

    def call(self, function: Callable[..., Coroutine[Any, Any, Result]], *arguments: Any, **options: Any) -> Result:
        """Run a call of the asyncio client and wait. Raises UsedAfterFork, and InvalidRequest after `close`."""
        self.check()
        return self._loop.call(function(*arguments, **options))

    def start(self, function: Callable[..., Coroutine[Any, Any, Result]], *arguments: Any) -> Future[Result]:
        """As `call`, without waiting; `close` cancels it if it has not ended."""
        self.check()
        return self._loop.start(function(*arguments))

    def check(self) -> None:
        """Raises UsedAfterFork, and InvalidRequest after `close`."""
        lifecycle.check(self._forked_from)
        if self._closed:
            raise InvalidRequest("the client was closed: connect again")

    @property
    def client(self) -> Client:
        """The asyncio client that runs the calls."""
        return self._client


HELD_RECORDS = 1000
HELD_BYTES = 256 * 1024
"""A SyncTransaction sends its records when it holds more than this, and when it ends."""


Held: TypeAlias = tuple[str, SendColumns, Batching | None, int | None]

ENDED = "the transaction has ended: begin a new one"
RETURNED = (
    "the handler of this transaction has returned: send in the transaction of the current call, and wait in the "
    "handler for work in other threads"
)


class SyncTransaction:
    """As Transaction, for `with`.

    Records are kept back until there are more than 1,000 or 256 KiB, or until the transaction ends. The transaction
    begins, and its timeout starts, when the block is entered. It belongs to one thread; a record of another thread is
    either in it or rejected.
    """

    def __init__(self, portal: Portal, transaction: Transaction, name: str | None) -> None:
        self._portal = portal
        self._transaction = transaction
        self._named = name is not None
        self._aborted = False  # before it began
        self._closed = ""  # why it accepts no more records
        self._lock = threading.RLock()  # guards the kept records; a signal handler may send, too
        self._turn = asyncio.Lock()  # one hand-over at a time
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
            self._portal.call(self._begin_missing)
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
        """As Transaction.send. An error of the service may be raised by a later send or by the commit."""
        serializer = self._portal.client.serializers.of(topic, serializer)
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
        """As Transaction.send_many."""
        serializer = self._portal.client.serializers.of(topic, serializer)
        self._hold(topic, many_rows(values, keys, event_times, properties, serializer), batching, partition)

    def delete(self, topic: str, key: Key) -> None:
        """Delete a key: send a record with this key and no value."""
        self._hold(topic, deletion(key))

    def commit(self, *, wait_visible: bool = False) -> None:
        """As Transaction.commit."""
        self._transaction.check_can_end()
        self._check()
        self._portal.call(self._commit, wait_visible)

    def abort(self) -> None:
        """Abort; return when that is durable."""
        self._transaction.check_can_end()
        self._portal.call(self._abort)

    def __enter__(self) -> Self:
        if self._named:
            self._portal.call(self._transaction.begin)
        else:
            self._start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._aborted or self._transaction.over:
            return  # commit or abort was called in the block
        if error is None:
            self.commit()
        elif not self._portal.inherited and not self._portal.closed:
            self._portal.call(self._leave, error)

    def _start(self) -> None:
        """Begin without waiting. If that fails, the hand-over of the records tries again and raises the error."""
        if not self._started:
            self._started = True
            self._portal.start(self._begin_missing)

    def _hold(
        self, topic: str, rows: SendColumns, batching: Batching | None = None, partition: int | None = None
    ) -> None:
        self._check()
        client = self._portal.client
        lifecycle.check(client.session.forked_from)
        client.check_topic(topic)
        check_size(client.batched(topic, rows, batching), client.max_message_bytes, PROPERTY_BYTES)
        if self._transaction.begun:
            self._transaction.check()
        else:
            self._start()
        item = topic, rows, batching, partition
        with self._lock:
            if self._closed:
                raise InvalidRequest(self._closed)  # no hand-over follows that would send it
            self._held.append(item)
            self._bytes += rows.size
            self._count += len(rows.values)
            full = self._bytes > HELD_BYTES or self._count > HELD_RECORDS
        if full:
            try:
                self._portal.call(self.hand_over)
            except BaseException:
                self._take_back(item)
                raise

    def _take_back(self, item: Held) -> None:
        """Remove a record whose send raised an error, so that it is not sent later."""
        with self._lock:
            self._held = [other for other in self._held if other is not item]

    async def hand_over(self, closing: str = "") -> None:
        """Pass the kept records to the asyncio client; `closing`: why no records are accepted after that."""
        async with self._turn:
            await self._begin_missing()
            if self._transaction.over:
                return  # the call that ended it has sent or dropped the kept records
            with self._lock:
                held, self._held = self._held, []
                self._bytes = self._count = 0
                self._closed = self._closed or closing
            try:
                for topic, rows, batching, partition in held:
                    await self._transaction.send_rows(topic, rows, batching, partition)
            except BaseException as error:
                self._transaction.fail(error)  # the records after the failing one are lost
                raise

    async def _begin_missing(self) -> None:
        """Begin unless that has happened; callers during the begin share its result."""
        if not self._transaction.begun:
            if self._beginning is None:
                self._beginning = asyncio.ensure_future(self._begin())
                self._beginning.add_done_callback(self._begin_done)
            await asyncio.shield(self._beginning)

    async def _begin(self) -> None:
        self._check()
        await self._transaction.begin()
        if self._aborted:  # by another thread, or because the block was left
            await self._transaction.abort()
            self._check()

    def _begin_done(self, beginning: asyncio.Task[None]) -> None:
        self._beginning = None
        if not beginning.cancelled():
            beginning.exception()  # retrieved, so that asyncio does not log it; waiting callers raise it

    async def _leave(self, error: BaseException) -> None:
        """Abort because of an exception in the block, without waiting."""
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
        """Raises InvalidRequest if it was aborted before it began."""
        if self._aborted:
            raise InvalidRequest(ENDED)


class SyncClient(Portal):
    """A client without asyncio, created by `with connect(…)`. Each call waits for its result.

    Threads may share the client; a transaction belongs to one thread.
    """

    def transaction(
        self, *, name: str | None = None, number: int | None = None, timeout: float | None = None
    ) -> SyncTransaction:
        """As Client.transaction, for `with`."""
        return SyncTransaction(self, self._client.transaction(name=name, number=number, timeout=timeout), name)

    def run(
        self,
        work: Callable[[SyncTransaction], Result],
        *,
        name: str | None = None,
        number: int | None = None,
        timeout: float | None = None,
        attempts: int = ATTEMPTS,
    ) -> Result:
        """As Client.run: `work(txn)` is called again only after TransactionAborted."""
        check_sync_function(work)
        pause = FIRST_PAUSE
        for attempt in range(1, attempts + 1):
            try:
                with self.transaction(name=name, number=number, timeout=timeout) as txn:
                    result = check_sync_result(work(txn))
            except TransactionAborted:
                if attempt == attempts:
                    raise
                time.sleep(pause)
                pause *= 2
            else:
                return result
        raise InvalidRequest(f"attempts must be at least 1, got {attempts!r}")

    def outcome(self, txn: TxnId | str) -> Outcome | None:
        """Return how a transaction ended; None while it is open."""
        return self.call(self._client.outcome, txn)

    def committed_number(self, name: str) -> int:
        """As Client.committed_number."""
        return self.call(self._client.committed_number, name)

    def delete_name(self, name: str, *, over: int = 0) -> None:
        """As Client.delete_name."""
        self.call(self._client.delete_name, name, over=over)

    def forget_group(self, group: str, topic: str | None = None) -> None:
        """As Client.forget_group."""
        self.call(self._client.forget_group, group, topic)

    def send(self, topic: str, value: Any, **options: Any) -> None:
        """As Client.send: send one record outside of a transaction."""
        self.call(self._client.send, topic, value, **options)

    def send_many(self, topic: str, values: Sequence[Any], **options: Any) -> None:
        """As Client.send_many."""
        self.call(self._client.send_many, topic, values, **options)

    def delete(self, topic: str, key: Key) -> None:
        """Delete a key outside of a transaction."""
        self.call(self._client.delete, topic, key)

    def reader(
        self,
        topics: str | Sequence[str],
        *,
        start: Start | Mapping[str, Start] = "beginning",
        isolation: str = "read_committed",
    ) -> CommittedReader:
        """Return a CommittedReader; see there for the arguments."""
        lifecycle.check(self._forked_from)
        return CommittedReader(self._client.open_broker(), topics, start=start, isolation=isolation)

    def stream(
        self,
        topic: str,
        *,
        from_: str | ResumeToken = "beginning",
        to: int | str | None = None,
        store: TokenStore | None = None,
        cursor: str | None = None,
    ) -> SyncStream:
        """As Client.stream; iterate it with `for`."""

        async def made() -> ChangeStream:
            return self._client.stream(topic, from_=from_, to=to, store=store, cursor=cursor)

        return SyncStream(self, self.call(made))

    @property
    def cursors(self) -> SyncCursors:
        """As Client.cursors."""
        return SyncCursors(self)

    def process(
        self,
        source: str | Sequence[str],
        group: str,
        handler: Callable[[SyncTransaction, Record], None],
        **options: Any,
    ) -> Processed:
        """As Client.process, with `handler(txn, record)`, which is called in the calling thread."""
        return self._process(self._client.process, source, group, handler, options)

    def process_batches(
        self,
        source: str | Sequence[str],
        group: str,
        handler: Callable[[SyncTransaction, RecordBatch], None],
        **options: Any,
    ) -> Processed:
        """As Client.process_batches, with `handler(txn, records)`, which is called in the calling thread."""
        return self._process(self._client.process_batches, source, group, handler, options)

    def _process(
        self,
        process: Callable[..., Coroutine[Any, Any, Processed]],
        source: str | Sequence[str],
        group: str,
        handler: Callable[..., object],
        options: dict[str, Any],
    ) -> Processed:
        self.check()
        check_sync_function(handler)

        def work(in_caller: Any) -> Coroutine[Any, Any, Processed]:
            async def handle(txn: Transaction, records: Record | RecordBatch) -> None:
                sync_txn = SyncTransaction(self, txn, None)
                await in_caller(lambda: check_sync_result(handler(sync_txn, records)))
                await sync_txn.hand_over(RETURNED)

            return process(source, group, handle, **options)

        return self._loop.call_with_callbacks(work)


class SyncStream:
    """As ChangeStream, for `for`; made by `SyncClient.stream`."""

    def __init__(self, portal: Portal, stream: ChangeStream) -> None:
        self._portal = portal
        self._stream = stream

    @property
    def caught_up(self) -> bool:
        """Whether there was nothing newer than the last batch."""
        return self._stream.caught_up

    def statistics(self) -> ChangeStatistics:
        """As ChangeStream.statistics."""
        return self._stream.statistics()

    def next(self, timeout: float | None = None) -> ChangeBatch | Rollback | None:
        """As ChangeStream.next."""
        return self._portal.call(self._stream.next, timeout)

    def rolled_back(self, seqno: int) -> None:
        """As ChangeStream.rolled_back."""
        self._portal.call(self._stream.rolled_back, seqno)

    def done(self) -> None:
        """As ChangeStream.done."""
        self._portal.call(self._stream.done)

    def close(self) -> None:
        """As ChangeStream.close."""
        self._portal.call(self._stream.close)

    def __iter__(self) -> Iterator[ChangeBatch | Rollback]:
        while (item := self.next()) is not None:
            yield item

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or not self._portal.inherited:
            self.close()


class SyncCursors:
    """As DurableCursors."""

    def __init__(self, portal: Portal) -> None:
        self._portal = portal
        self._cursors = portal.client.cursors

    def add(self, topic: str, cursor: str, at: At = "beginning") -> int:
        """As DurableCursors.add."""
        return self._portal.call(self._cursors.add, topic, cursor, at)

    def advance(self, topic: str, cursor: str, at: At) -> int:
        """As DurableCursors.advance."""
        return self._portal.call(self._cursors.advance, topic, cursor, at)

    def remove(self, topic: str, cursor: str) -> None:
        """As DurableCursors.remove."""
        self._portal.call(self._cursors.remove, topic, cursor)
