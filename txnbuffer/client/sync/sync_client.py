"""The sync client: the asyncio client for code without asyncio

Each method waits for the method of the asyncio client with the same name, which runs on the event loop of a background
thread (see `txnbuffer.client.sync.portal`), and raises its errors.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, TypeAlias, TypeVar, overload

from broker_io.environment import current
from txnbuffer.checks import check_attempts, check_sync_function, check_sync_result
from txnbuffer.client.client import ATTEMPTS, FIRST_PAUSE, Client
from txnbuffer.client.database_transaction import OutboxStatus, SyncDatabaseTransaction
from txnbuffer.client.reading.reader import CommittedReader, read_table
from txnbuffer.client.reading.starts import Isolation, Start, Until
from txnbuffer.client.streams.cursors import DurableCursors
from txnbuffer.client.streams.streams import ChangeBatch, ChangeStatistics, ChangeStream, Rollback
from txnbuffer.client.streams.tokens import TokenStore
from txnbuffer.client.sync.portal import InCaller, Portal, SyncObject, blocking
from txnbuffer.client.sync.sync_transaction import RETURNED, SyncTransaction
from txnbuffer.client.transaction import Transaction
from txnbuffer.errors import LimitExceeded, TransactionAborted, retry_pause
from txnbuffer.streams.failover import ResumeToken

if TYPE_CHECKING:
    import pyarrow as pa

    from txnbuffer.client.groups.handling import OnError, Processed
    from txnbuffer.client.reading.records import Decode, Record, RecordBatch

Result = TypeVar("Result")
Handled = TypeVar("Handled")
AsyncHandler: TypeAlias = Callable[[Transaction, Handled], Coroutine[Any, Any, None]]


class SyncClient(Portal):
    """A client for code without asyncio, created by `with connect(…)`. Each call waits for its result.

    Threads may share the client, but not a transaction.
    """

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.client.describe()}>"

    @overload
    def transaction(
        self, *, name: str | None = None, number: int | None = None, timeout: float | None = None
    ) -> SyncTransaction: ...

    @overload
    def transaction(
        self, *, database: str, connection: object | None = None, wait: bool = False
    ) -> SyncDatabaseTransaction: ...

    def transaction(
        self,
        *,
        name: str | None = None,
        number: int | None = None,
        timeout: float | None = None,
        database: str | None = None,
        connection: object | None = None,
        wait: bool = False,
    ) -> SyncTransaction | SyncDatabaseTransaction:
        """Return a new transaction; use it with `with`. Arguments and errors are those of `Client.transaction`."""
        if database is not None or connection is not None or wait is not False:
            self.check()
            link = self.client.database(database, name, number, timeout)
            return SyncDatabaseTransaction(link, connection, wait=wait, call=self.call)
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

        After TransactionAborted and LimitExceeded, `work` is called again with a new transaction, up to `attempts`
        calls in total. The other arguments and the errors are those of `Client.run`. Raises InvalidHandler if `work` is
        asynchronous.
        """
        check_sync_function(work)
        pause = FIRST_PAUSE
        for attempt in range(1, check_attempts(attempts) + 1):
            try:
                with self.transaction(name=name, number=number, timeout=timeout) as txn:
                    result = check_sync_result(work(txn))
            except (TransactionAborted, LimitExceeded) as error:
                if attempt == attempts or (isinstance(error, LimitExceeded) and not error.retryable):
                    raise
                current().clock.sleep(retry_pause(error, pause))
                pause *= 2
            else:
                return result
        raise AssertionError("unreachable: the last attempt returns or raises")

    def outbox_status(self, database: str) -> OutboxStatus:
        """Return the state of the publisher of a database, as `Client.outbox_status`."""
        return self.client.outbox_status(database)

    outcome = blocking(Client.outcome)
    """Return whether a transaction committed or aborted, as `Client.outcome`."""

    committed_number = blocking(Client.committed_number)
    """Return the number of the last committed transaction of a named producer, as `Client.committed_number`."""

    delete_name = blocking(Client.delete_name)
    """Delete a producer name, fence its holder and abort its open transactions, as `Client.delete_name`."""

    forget_group = blocking(Client.forget_group)
    """Delete the positions of a consumer group, as `Client.forget_group`."""

    send = blocking(Client.send)
    """Send one record outside of a transaction; return when it is durable, as `Client.send`."""

    send_many = blocking(Client.send_many)
    """Send records outside of a transaction; return when all are durable, as `Client.send_many`."""

    delete = blocking(Client.delete)
    """Delete a key outside of a transaction: send a record with this key and no value, as `Client.delete`."""

    topics = blocking(Client.topics)
    """Return the names of all topics that this client may see, as `Client.topics`."""

    last_visible = blocking(Client.last_visible)
    """Return the position of the last record of a topic that readers get now, as `Client.last_visible`."""

    delete_topic = blocking(Client.delete_topic)
    """Delete a whole topic with all its records, irrevocably, as `Client.delete_topic`."""

    def reader(
        self,
        topics: str | Sequence[str],
        *,
        start: Start | Mapping[str, Start] = "beginning",
        until: Until | Mapping[str, Until] | None = None,
        isolation: Isolation = "read_committed",
        wait: bool = False,
    ) -> CommittedReader:
        """Return a reader of committed records. The arguments and errors are those of CommittedReader."""
        self.check()
        deserializers = self.client.deserializers
        reader = CommittedReader(
            self.client.open_broker(),
            topics,
            start=start,
            until=until,
            isolation=isolation,
            deserializers=deserializers,
            wait=wait,
        )
        reader.ends_by = self.client.ends_by
        return reader

    def read_table(
        self,
        topics: str | Sequence[str],
        *,
        columns: Sequence[str] | None = None,
        start: Start | Mapping[str, Start] = "beginning",
        until: Until | Mapping[str, Until] = "now",
        decode: Decode | None = None,
    ) -> pa.Table:
        """Return the committed records of topics as an Arrow table: what is visible now, or until another place.

        - `columns`: some of topic, position, seqno, key, value, properties, event_time, publish_time and txn. The
          others take no memory.
        - `start`, `until`: the first and the last record; see CommittedReader.
        - `decode`: keys and values are bytes; `{"value": "text"}` makes them text, `{"value": "json"}` what the JSON
          is: numbers, text, lists and structs, whose types unify over all records; and `{"value": "deserializer"}`
          what the deserializer of the topic returns.

        `reader(…, until="now").arrow_batches()` reads what memory does not hold. Raises UndecodableValue for a record
        that cannot be decoded, or does not fit those before it; InvalidRequest; MissingDependency without pyarrow; and
        the errors of CommittedReader.
        """
        self.check()
        return read_table(self.client.open_broker, topics, columns, start, until, decode, self.client.deserializers)

    def stream(
        self,
        topic: str,
        *,
        from_: str | ResumeToken = "beginning",
        to: int | Literal["now"] | None = None,
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
        return SyncCursors(self, self.client.cursors)

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
        wait: bool = False,
    ) -> Processed:
        """Call `handler(txn, record)` in this thread for each committed record of the source topics, exactly once.

        The other arguments, the result and the errors are those of `Client.process`.
        """
        return self._process(
            handler,
            lambda handle: self.client.process(
                source,
                group,
                handle,
                on_error=on_error,
                retries=retries,
                start=start,
                batch=batch,
                idle_timeout=idle_timeout,
                wait=wait,
            ),
        )

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
        wait: bool = False,
    ) -> Processed:
        """Call `handler(txn, records)` in this thread with RecordBatches of one partition each.

        The other arguments, the result and the errors are those of `Client.process_batches`.
        """
        return self._process(
            handler,
            lambda handle: self.client.process_batches(
                source,
                group,
                handle,
                on_error=on_error,
                retries=retries,
                start=start,
                batch=batch,
                idle_timeout=idle_timeout,
                wait=wait,
            ),
        )

    def _process(
        self,
        handler: Callable[[SyncTransaction, Handled], object],
        process: Callable[[AsyncHandler[Handled]], Coroutine[Any, Any, Processed]],
    ) -> Processed:
        """Run `process` with a handler of the asyncio client that calls this one in the waiting thread."""
        self.check()
        check_sync_function(handler)

        def work(in_caller: InCaller) -> Coroutine[Any, Any, Processed]:
            async def handle(txn: Transaction, records: Handled) -> None:
                sync_txn = SyncTransaction(self, txn)
                await in_caller(lambda: check_sync_result(handler(sync_txn, records)))
                await sync_txn.close(RETURNED)

            return process(handle)

        return self.call_with_callbacks(work)


class SyncStream(SyncObject[ChangeStream]):
    """A stream of changes, created by `SyncClient.stream`; iterate it with `for`.

    Requesting the next batch acknowledges the previous one. Each method waits for the method of ChangeStream with the
    same name, and raises its errors.
    """

    next = blocking(ChangeStream.next)
    """Return the next batch or rollback; None at the end. Raises TimeoutError after `timeout` seconds."""

    rolled_back = blocking(ChangeStream.rolled_back)
    """Confirm the last rollback: the data is now that of `seqno`, at which it was complete."""

    done = blocking(ChangeStream.done)
    """Acknowledge the last batch now: store its token, and move the durable cursor there."""

    close = blocking(ChangeStream.close)
    """Close the stream. The last batch is not acknowledged."""

    @property
    def caught_up(self) -> bool:
        """Whether there was nothing newer than the last batch."""
        return self._target.caught_up

    def statistics(self) -> ChangeStatistics:
        """Return the counters of the stream."""
        return self._target.statistics()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._target.describe()}>"

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


class SyncCursors(SyncObject[DurableCursors]):
    """The durable cursors of topics, by name; see `SyncClient.cursors`.

    Each method waits for the method of DurableCursors with the same name, and raises its errors.
    """

    add = blocking(DurableCursors.add)
    """Create a cursor at a seqno, a resume token, "beginning" or "now"; return its seqno."""

    advance = blocking(DurableCursors.advance)
    """Move a cursor forward to a seqno or resume token; return its seqno."""

    remove = blocking(DurableCursors.remove)
    """Remove a cursor."""
