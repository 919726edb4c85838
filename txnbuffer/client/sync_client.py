"""The sync client: the calls of the asyncio client for code without asyncio

`Portal` runs the calls on the event loop of a background thread and waits for the results. A `SyncTransaction` buffers
records and passes many of them to the other thread at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeAlias, TypeVar

from broker_io.environment import current
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
from txnbuffer.streams.failover import ResumeToken

if TYPE_CHECKING:
    from txnbuffer.client.handling import Processed
    from txnbuffer.client.records import Record, RecordBatch


Result = TypeVar("Result")


class Portal:
    """Runs the methods of an asyncio client on the event loop of a background thread; all other threads may call it."""

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
        """Whether this is a forked child of the process that connected, in which nothing can be closed."""
        return lifecycle.inherited(self._forked_from)

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def close(self) -> None:
        """Close the client; open transactions abort. Raises UsedAfterFork."""
        lifecycle.check(self._forked_from)
        self._loop.check_other()
        if not self._closed:
            self._closed = True
            self._loop.cancel_started()
            self._loop.call(self._client.close())
            self._loop.stop()

    def call(self, function: Callable[..., Coroutine[Any, Any, Result]], *arguments: Any, **options: Any) -> Result:
        """Run a coroutine function on the loop; return its result.

        Raises UsedAfterFork, and InvalidRequest after `close`.
        """
        self.check()
        return self._loop.call(function(*arguments, **options))

    def start(self, function: Callable[..., Coroutine[Any, Any, Result]], *arguments: Any) -> Future[Result]:
        """Start a coroutine function on the loop; return a future. `close` cancels it. Raises as `call`."""
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


BUFFERED_RECORDS = 1000
BUFFERED_BYTES = 256 * 1024
"""A SyncTransaction sends its buffered records when there are more than this, and when it ends."""


BufferedSend: TypeAlias = tuple[str, SendColumns, Batching | None, int | None]

ENDED = "the transaction has ended: begin a new one"
RETURNED = (
    "the handler of this transaction has returned: send in the transaction of the current call, and let the handler "
    "wait for its other threads"
)


class SyncTransaction:
    """A transaction of the sync client; use it with `with`.

    All records become visible when it commits; none if it aborts. The end of the block commits and raises the errors of
    `commit`; an exception in the block aborts. The timeout starts when the block is entered.

    Records are buffered until there are more than 1,000 or 256 KiB, or until the transaction ends. Use a transaction in
    one thread; a send of another thread is either part of it or rejected.
    """

    def __init__(self, portal: Portal, transaction: Transaction, name: str | None) -> None:
        self._portal = portal
        self._transaction = transaction
        self._named = name is not None
        self._aborted = False  # before the transaction began
        self._closed = ""  # why it accepts no more records
        self._lock = current().threads.reentrant_lock()  # guards the buffered records; reentrant for signal handlers
        self._flush_lock = asyncio.Lock()
        self._started = False
        self._beginning: asyncio.Task[None] | None = None
        self._buffered: list[BufferedSend] = []
        self._bytes = 0
        self._count = 0

    @property
    def id(self) -> TxnId:
        """The id of the transaction. Waits until it has begun."""
        self._check()
        if not self._transaction.begun:
            self._portal.call(self._ensure_begun)
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
        """Send one record; arguments and errors as in `Transaction.send`.

        The record is buffered, so an error of the service may be raised by a later send or by the commit.
        """
        serializer = self._portal.client.serializers.of(topic, serializer)
        rows = one_row(value, key, ordering_key, event_time, properties, serializer)
        self._buffer(topic, rows, batching, partition)

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
        """Send records given as columns; arguments as in `Transaction.send_many`, errors as in `send`."""
        serializer = self._portal.client.serializers.of(topic, serializer)
        self._buffer(topic, many_rows(values, keys, event_times, properties, serializer), batching, partition)

    def delete(self, topic: str, key: Key) -> None:
        """Delete a key: send a record with this key and no value. Raises as `send`."""
        self._buffer(topic, deletion(key))

    def commit(self, *, wait_visible: bool = False) -> None:
        """Commit; return when all records and the commit are durable.

        With `wait_visible`, also wait for up to two minutes until all readers can see the records. Raises the errors of
        `Transaction.commit`, and of sends of buffered records.
        """
        self._transaction.check_can_end()
        self._check()
        self._portal.call(self._commit, wait_visible)

    def abort(self) -> None:
        """Abort; return when the abort is durable. Does nothing after a commit or another abort."""
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
            self._portal.call(self._abort_after, error)

    def _start(self) -> None:
        """Begin without waiting. If that fails, `flush` tries again and raises the error."""
        if not self._started:
            self._started = True
            self._portal.start(self._ensure_begun)

    def _buffer(
        self, topic: str, rows: SendColumns, batching: Batching | None = None, partition: int | None = None
    ) -> None:
        """Check records and buffer them; if the buffer is full, send what it has.

        If sending fails, the error is raised and these records are discarded.
        """
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
                raise InvalidRequest(self._closed)  # `flush` will not be called again
            self._buffered.append(item)
            self._bytes += rows.size
            self._count += len(rows.values)
            full = self._bytes > BUFFERED_BYTES or self._count > BUFFERED_RECORDS
        if full:
            try:
                self._portal.call(self.flush)
            except BaseException:
                self._discard(item)
                raise

    def _discard(self, item: BufferedSend) -> None:
        """Remove records whose send raised an error, so that they are not sent later."""
        with self._lock:
            self._buffered = [other for other in self._buffered if other is not item]

    async def flush(self, closing: str = "") -> None:
        """Internal: send the buffered records. `closing`: reject later sends with this error message."""
        async with self._flush_lock:
            await self._ensure_begun()
            if self._transaction.over:
                return  # the call that ended it has sent or dropped the buffered records
            with self._lock:
                buffered, self._buffered = self._buffered, []
                self._bytes = self._count = 0
                self._closed = self._closed or closing
            try:
                for topic, rows, batching, partition in buffered:
                    await self._transaction.send_rows(topic, rows, batching, partition)
            except BaseException as error:
                self._transaction.fail(error)  # the records after the failing one are lost
                raise

    async def _ensure_begun(self) -> None:
        """Begin, unless the transaction has begun. Concurrent callers share one begin and its error."""
        if not self._transaction.begun:
            if self._beginning is None:
                self._beginning = asyncio.ensure_future(self._begin())
                self._beginning.add_done_callback(self._begin_done)
            await asyncio.shield(self._beginning)

    async def _begin(self) -> None:
        self._check()
        await self._transaction.begin()
        if self._aborted:  # by another thread, or by an exception in the block
            await self._transaction.abort()
            self._check()

    def _begin_done(self, beginning: asyncio.Task[None]) -> None:
        self._beginning = None
        if not beginning.cancelled():
            beginning.exception()  # mark it as retrieved, or asyncio logs it; the waiting callers raise it

    async def _abort_after(self, error: BaseException) -> None:
        """Request an abort after an exception in the block, without waiting for it."""
        if self._transaction.begun:
            await self._transaction.__aexit__(type(error), error, None)
        else:
            await self._abort()

    async def _abort(self) -> None:
        self._closed = ENDED
        self._buffered = []
        if self._transaction.begun:
            await self._transaction.abort()
        else:
            self._aborted = True

    async def _commit(self, wait_visible: bool) -> None:
        try:
            await self.flush(ENDED)
        except BaseException as error:
            if self._transaction.begun:
                await self._transaction.__aexit__(type(error), error, None)
            raise
        await self._transaction.commit(wait_visible=wait_visible)

    def _check(self) -> None:
        """Raises InvalidRequest if the transaction was aborted before it began."""
        if self._aborted:
            raise InvalidRequest(ENDED)


class SyncClient(Portal):
    """A client for code without asyncio, created by `with connect(…)`. Each call waits for its result.

    Threads may share the client, but not a transaction.
    """

    def transaction(
        self, *, name: str | None = None, number: int | None = None, timeout: float | None = None
    ) -> SyncTransaction:
        """Return a new transaction; use it with `with`. Arguments and errors are those of `Client.transaction`."""
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
        """Call `work(txn)` with a new transaction, commit it, and return the result of `work`.

        After TransactionAborted, `work` is called again with a new transaction, up to `attempts` calls in total. The
        other arguments and the errors are those of `Client.run`. Raises InvalidHandler if `work` is asynchronous.
        """
        check_sync_function(work)
        pause = FIRST_PAUSE
        for attempt in range(1, attempts + 1):
            try:
                with self.transaction(name=name, number=number, timeout=timeout) as txn:
                    result = check_sync_result(work(txn))
            except TransactionAborted:
                if attempt == attempts:
                    raise
                current().clock.sleep(pause)
                pause *= 2
            else:
                return result
        raise InvalidRequest(f"attempts must be at least 1, got {attempts!r}")

    def outcome(self, txn: TxnId | str) -> Outcome | None:
        """Return whether a transaction committed or aborted; None while it is open.

        Raises OutcomeForgotten, UnknownTransaction.
        """
        return self.call(self._client.outcome, txn)

    def committed_number(self, name: str) -> int:
        """Return the number of the last committed transaction of a named producer; 0 if there is none.

        This opens the name: open transactions under it, of this or any other client, can no longer commit.
        """
        return self.call(self._client.committed_number, name)

    def delete_name(self, name: str, *, last_number: int = 0) -> None:
        """Delete a producer name, fence its holder and abort its open transactions; see `Client.delete_name`."""
        self.call(self._client.delete_name, name, last_number=last_number)

    def forget_group(self, group: str, topic: str | None = None) -> None:
        """Delete the positions of a consumer group on a topic and its partitions; None: on all topics.

        Raises InvalidRequest if the group has members.
        """
        self.call(self._client.forget_group, group, topic)

    def send(self, topic: str, value: Any, **options: Any) -> None:
        """Send one record outside of a transaction; options and errors are those of `Client.send`."""
        self.call(self._client.send, topic, value, **options)

    def send_many(self, topic: str, values: Sequence[Any], **options: Any) -> None:
        """Send records outside of a transaction; options and errors are those of `Client.send_many`."""
        self.call(self._client.send_many, topic, values, **options)

    def delete(self, topic: str, key: Key) -> None:
        """Delete a key outside of a transaction: send a record with this key and no value."""
        self.call(self._client.delete, topic, key)

    def reader(
        self,
        topics: str | Sequence[str],
        *,
        start: Start | Mapping[str, Start] = "beginning",
        isolation: str = "read_committed",
    ) -> CommittedReader:
        """Return a reader of committed records. The arguments and errors are those of CommittedReader."""
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
        """Return a stream of the committed changes of a topic; iterate it with `for`.

        The arguments and errors are those of `Client.stream`.
        """

        async def made() -> ChangeStream:
            return self._client.stream(topic, from_=from_, to=to, store=store, cursor=cursor)

        return SyncStream(self, self.call(made))

    @property
    def cursors(self) -> SyncCursors:
        """The durable cursors of topics. The service does not trim the records after a cursor."""
        return SyncCursors(self)

    def process(
        self,
        source: str | Sequence[str],
        group: str,
        handler: Callable[[SyncTransaction, Record], None],
        **options: Any,
    ) -> Processed:
        """Call `handler(txn, record)` in this thread for each committed record of the source topics, exactly once.

        Options, result and errors are those of `Client.process`.
        """
        return self._process(self._client.process, source, group, handler, options)

    def process_batches(
        self,
        source: str | Sequence[str],
        group: str,
        handler: Callable[[SyncTransaction, RecordBatch], None],
        **options: Any,
    ) -> Processed:
        """Call `handler(txn, records)` in this thread with RecordBatches of one partition each.

        Options, result and errors are those of `Client.process_batches`.
        """
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
                await sync_txn.flush(RETURNED)

            return process(source, group, handle, **options)

        return self._loop.call_with_callbacks(work)


class SyncStream:
    """A stream of changes, created by `SyncClient.stream`; iterate it with `for`.

    Requesting the next batch acknowledges the previous one. Each method waits for the method of ChangeStream with the
    same name, and raises its errors.
    """

    def __init__(self, portal: Portal, stream: ChangeStream) -> None:
        self._portal = portal
        self._stream = stream

    @property
    def caught_up(self) -> bool:
        """Whether there was nothing newer than the last batch."""
        return self._stream.caught_up

    def statistics(self) -> ChangeStatistics:
        """Return the counters of the stream."""
        return self._stream.statistics()

    def next(self, timeout: float | None = None) -> ChangeBatch | Rollback | None:
        """Return the next batch or rollback; None at the end. Raises TimeoutError after `timeout` seconds."""
        return self._portal.call(self._stream.next, timeout)

    def rolled_back(self, seqno: int) -> None:
        """Confirm the last rollback: the data is now that of `seqno`, at which it was complete."""
        self._portal.call(self._stream.rolled_back, seqno)

    def done(self) -> None:
        """Acknowledge the last batch now: store its token, and move the durable cursor there."""
        self._portal.call(self._stream.done)

    def close(self) -> None:
        """Close the stream. The last batch is not acknowledged."""
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
    """The durable cursors of topics, by name; see `SyncClient.cursors`.

    Each method waits for the method of DurableCursors with the same name, and raises its errors.
    """

    def __init__(self, portal: Portal) -> None:
        self._portal = portal
        self._cursors = portal.client.cursors

    def add(self, topic: str, cursor: str, at: At = "beginning") -> int:
        """Create a cursor at a seqno, a resume token, "beginning" or "now"; return its seqno."""
        return self._portal.call(self._cursors.add, topic, cursor, at)

    def advance(self, topic: str, cursor: str, at: At) -> int:
        """Move a cursor forward to a seqno or resume token; return its seqno."""
        return self._portal.call(self._cursors.advance, topic, cursor, at)

    def remove(self, topic: str, cursor: str) -> None:
        """Remove a cursor."""
        self._portal.call(self._cursors.remove, topic, cursor)
