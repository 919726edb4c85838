"""The sync client: the asyncio client for code without asyncio

Each method waits for the method of the asyncio client with the same name, which runs on the event loop of a background
thread (see `txnbuffer.client.portal`), and raises its errors.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from broker_io.environment import current
from txnbuffer.checks import check_sync_function, check_sync_result
from txnbuffer.client.client import ATTEMPTS, FIRST_PAUSE
from txnbuffer.client.cursors import At
from txnbuffer.client.portal import InCaller, Portal
from txnbuffer.client.reader import CommittedReader, Start
from txnbuffer.client.send_columns import Batching, EventTime, Key, Properties, Serializer
from txnbuffer.client.streams import ChangeBatch, ChangeStatistics, ChangeStream, Rollback
from txnbuffer.client.sync_transaction import RETURNED, SyncTransaction
from txnbuffer.client.tokens import TokenStore
from txnbuffer.client.transaction import Transaction
from txnbuffer.errors import InvalidRequest, TransactionAborted
from txnbuffer.model import Outcome, TxnId
from txnbuffer.streams.failover import ResumeToken

if TYPE_CHECKING:
    from txnbuffer.client.handling import OnError, Processed
    from txnbuffer.client.records import Record, RecordBatch

Result = TypeVar("Result")
Handled = TypeVar("Handled")


class SyncClient(Portal):
    """A client for code without asyncio, created by `with connect(…)`. Each call waits for its result.

    Threads may share the client, but not a transaction.
    """

    def transaction(
        self, *, name: str | None = None, number: int | None = None, timeout: float | None = None
    ) -> SyncTransaction:
        """Return a new transaction; use it with `with`. Arguments and errors are those of `Client.transaction`."""
        return SyncTransaction(self, self.client.transaction(name=name, number=number, timeout=timeout))

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
        return self.call(self.client.outcome, txn)

    def committed_number(self, name: str) -> int:
        """Return the number of the last committed transaction of a named producer; 0 if there is none.

        This opens the name: open transactions under it, of this or any other client, can no longer commit.
        """
        return self.call(self.client.committed_number, name)

    def delete_name(self, name: str, *, last_number: int = 0) -> None:
        """Delete a producer name, fence its holder and abort its open transactions; see `Client.delete_name`."""
        self.call(self.client.delete_name, name, last_number=last_number)

    def forget_group(self, group: str, topic: str | None = None) -> None:
        """Delete the positions of a consumer group on a topic and its partitions; None: on all topics.

        Raises InvalidRequest if the group has members.
        """
        self.call(self.client.forget_group, group, topic)

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
        """Send one record outside of a transaction; return when it is durable. Errors as in `Client.send`."""
        self.call(
            self.client.send,
            topic,
            value,
            key=key,
            ordering_key=ordering_key,
            event_time=event_time,
            properties=properties,
            serializer=serializer,
            batching=batching,
            partition=partition,
        )

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
        """Send records outside of a transaction; return when all are durable. Errors as in `Client.send_many`."""
        self.call(
            self.client.send_many,
            topic,
            values,
            keys=keys,
            event_times=event_times,
            properties=properties,
            serializer=serializer,
            batching=batching,
            partition=partition,
        )

    def delete(self, topic: str, key: Key) -> None:
        """Delete a key outside of a transaction: send a record with this key and no value."""
        self.call(self.client.delete, topic, key)

    def reader(
        self,
        topics: str | Sequence[str],
        *,
        start: Start | Mapping[str, Start] = "beginning",
        isolation: str = "read_committed",
    ) -> CommittedReader:
        """Return a reader of committed records. The arguments and errors are those of CommittedReader."""
        self.check()
        return CommittedReader(self.client.open_broker(), topics, start=start, isolation=isolation)

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
            return self.client.stream(topic, from_=from_, to=to, store=store, cursor=cursor)

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
        *,
        on_error: OnError = "stop",
        retries: int = 0,
        start: Start = "beginning",
        batch: int = 100,
        idle_timeout: float | None = None,
    ) -> Processed:
        """Call `handler(txn, record)` in this thread for each committed record of the source topics, exactly once.

        The other arguments, the result and the errors are those of `Client.process`.
        """
        self.check()
        check_sync_function(handler)

        def work(in_caller: InCaller) -> Coroutine[Any, Any, Processed]:
            return self.client.process(
                source,
                group,
                self._in_caller(in_caller, handler),
                on_error=on_error,
                retries=retries,
                start=start,
                batch=batch,
                idle_timeout=idle_timeout,
            )

        return self.call_with_callbacks(work)

    def process_batches(
        self,
        source: str | Sequence[str],
        group: str,
        handler: Callable[[SyncTransaction, RecordBatch], None],
        *,
        on_error: OnError = "stop",
        retries: int = 0,
        start: Start = "beginning",
        batch: int = 1000,
        idle_timeout: float | None = None,
    ) -> Processed:
        """Call `handler(txn, records)` in this thread with RecordBatches of one partition each.

        The other arguments, the result and the errors are those of `Client.process_batches`.
        """
        self.check()
        check_sync_function(handler)

        def work(in_caller: InCaller) -> Coroutine[Any, Any, Processed]:
            return self.client.process_batches(
                source,
                group,
                self._in_caller(in_caller, handler),
                on_error=on_error,
                retries=retries,
                start=start,
                batch=batch,
                idle_timeout=idle_timeout,
            )

        return self.call_with_callbacks(work)

    def _in_caller(
        self, in_caller: InCaller, handler: Callable[[SyncTransaction, Handled], object]
    ) -> Callable[[Transaction, Handled], Coroutine[Any, Any, None]]:
        """Return a handler of the asyncio client that calls this one in the waiting thread."""

        async def handle(txn: Transaction, records: Handled) -> None:
            sync_txn = SyncTransaction(self, txn)
            await in_caller(lambda: check_sync_result(handler(sync_txn, records)))
            await sync_txn.close(RETURNED)

        return handle


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
