"""The asyncio client: transactions, sends, readers and exactly-once processing"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Any, Literal, TypeVar, overload

from broker_io.port import Broker
from txnbuffer.checks import (
    check_attempts,
    check_awaitable,
    check_callable,
    check_last_number,
    check_name,
    check_number,
    check_timeout,
)
from txnbuffer.client import lifecycle
from txnbuffer.client.admin_clients import AdminClients
from txnbuffer.client.base import BaseClient
from txnbuffer.client.database_transaction import DatabaseLink, DatabaseLinks, DatabaseTransaction, OutboxStatus
from txnbuffer.client.groups.handling import BatchHandler, Handler, HandlerTask, OnError, Processed
from txnbuffer.client.groups.processing import GroupSource, process
from txnbuffer.client.lifecycle import run_to_completion
from txnbuffer.client.path.send_columns import (
    Batching,
    EventTime,
    Key,
    Properties,
    SendColumns,
    deletion,
    many_rows,
    one_row,
    slices,
    take_rows,
)
from txnbuffer.client.path.writers import OrdinarySends
from txnbuffer.client.reading.starts import Start
from txnbuffer.client.serializers import Serializer, Serializers
from txnbuffer.client.session.session import ClientSession
from txnbuffer.client.streams.cursors import CursorLease, DurableCursors
from txnbuffer.client.streams.streams import ChangeStream, ShardStreams
from txnbuffer.client.streams.tokens import TokenStore
from txnbuffer.client.topic_queries import last_visible, topic_names
from txnbuffer.client.transaction import Transaction
from txnbuffer.coordinator.messages import Joined
from txnbuffer.errors import (
    OPEN_TRANSACTION,
    InvalidRequest,
    LimitExceeded,
    TopicInUse,
    TransactionAborted,
    retry_pause,
)
from txnbuffer.model import Position
from txnbuffer.rpc.frames import Deletion, NamedRequest
from txnbuffer.streams.failover import ResumeToken

Result = TypeVar("Result")

LOG = logging.getLogger("txnbuffer.client")
SHOWN = 5
"""How many transactions a warning names."""

ATTEMPTS = 10
FIRST_PAUSE = 0.01
"""Seconds before `run` retries an aborted transaction; doubles with each attempt."""


class Client(BaseClient):
    """An asyncio client of an embedded log, a service or a cluster, created by `connect`.

    Use it only on the event loop on which it was created.
    """

    def __init__(
        self,
        session: ClientSession,
        broker: Callable[[], Broker],
        serializers: Serializers | None,
        ordinary: OrdinarySends | None = None,
    ) -> None:
        """The arguments are those of BaseClient; `connect` sets the other attributes."""
        super().__init__(session, broker, serializers, ordinary)
        self.resources = AsyncExitStack()
        self.streams = ShardStreams((), 0.0)
        session.on_broken = lambda error: self.streams.fail(error)
        self.admin = AdminClients((), 0.0)
        self.databases: DatabaseLinks | None = None

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.describe()}>"

    async def close(self) -> None:
        """Close the session and all change streams, and abort open transactions.

        Logs a warning that names the aborted transactions with records. If the caller is cancelled, the exception is
        raised only after everything is closed. Raises InvalidRequest on another event loop, and closes nothing.
        """
        self.session.check_close()
        self._warn_if_uncommitted()
        self.closed = True
        parts = AsyncExitStack()
        for close in (self.resources.aclose, self.sessions.close, self.admin.close, self.streams.close):
            parts.push_async_callback(close)  # the last one is closed first
        if self.databases is not None:
            parts.push_async_callback(self.databases.close)
        await run_to_completion(parts.aclose())

    def _warn_if_uncommitted(self) -> None:
        """Log the transactions whose records are lost because nobody has committed or aborted them."""
        lost = [] if lifecycle.inherited(self.session.forked_from) else self.sessions.uncommitted()
        if lost:
            shown = [
                f"{one.txn} ({', '.join(f'{n} for {topic!r}' for topic, n in one.counts.items())})" for one in lost
            ]
            names = ", ".join(shown[:SHOWN]) + (f" and {len(shown) - SHOWN} more" if len(shown) > SHOWN else "")
            LOG.warning(
                "the client was closed before these transactions were committed, so their records are dropped: %s. "
                "Use transactions with `with` or `async with`, or call commit()",
                names,
            )

    # Transactions

    @overload
    def transaction(
        self, *, name: str | None = None, number: int | None = None, timeout: float | None = None
    ) -> Transaction: ...

    @overload
    def transaction(
        self, *, database: str, connection: object | None = None, wait: bool = False
    ) -> DatabaseTransaction: ...

    def transaction(
        self,
        *,
        name: str | None = None,
        number: int | None = None,
        timeout: float | None = None,
        database: str | None = None,
        connection: object | None = None,
        wait: bool = False,
    ) -> Transaction | DatabaseTransaction:
        """Return a new transaction; use it with `async with`.

        - `timeout`: the service aborts the transaction if it is still open after this many seconds. None: after
          `transactions.timeout` of the service, 60 s by default.
        - `name`, `number`: the transaction is this number of a named producer. Each one is greater than those before;
          numbers may be left out. A number commits at most once, even if it is retried.
        - `database`: a name of `connect(databases=…)`. The records are published if the database commits: at the end of
          the block, or when the application commits the `connection` that it gives. `wait`: the end of the block waits
          until they are published. It has no name, number or timeout.

        Raises InvalidRequest, and ReadOnly.
        """
        if self.refusal is not None:
            raise self.refusal.with_traceback(None)
        if database is not None or connection is not None or wait is not False:
            return DatabaseTransaction(self.database(database, name, number, timeout), connection, wait=wait)
        if (name is None) != (number is None):
            raise InvalidRequest("a named transaction needs both name and number: give both or neither")
        sequence = None
        if name is not None:
            sequence = check_name(name, "a producer"), check_number(number)
        return Transaction(self, sequence, None if timeout is None else check_timeout(timeout))

    def database(self, database: str | None, *others: object) -> DatabaseLink:
        """Internal: the database of a transaction; `others`: its name, number and timeout, which it must not have.

        Raises InvalidRequest, and OutboxStopped.
        """
        if database is None:
            raise InvalidRequest("connection and wait need database=, a name of connect(databases=…)")
        if others != (None, None, None):
            raise InvalidRequest("a transaction with a database has no name, number or timeout: the database decides")
        return self._databases(database).link(database)

    def outbox_status(self, database: str) -> OutboxStatus:
        """Return the state of the publisher of a database, also after it has stopped. Raises InvalidRequest."""
        return self._databases(database).status(database)

    def _databases(self, name: str) -> DatabaseLinks:
        self.check_open()
        if self.databases is None:
            raise InvalidRequest(f"there is no database {name!r}: give connect(databases={{{name!r}: engine}})")
        return self.databases

    async def run(
        self,
        work: Callable[[Transaction], Awaitable[Result]],
        *,
        name: str | None = None,
        number: int | None = None,
        timeout: float | None = None,
        attempts: int = ATTEMPTS,
    ) -> Result:
        """Call `await work(txn)` with a new transaction, commit it, and return the result of `work`.

        After TransactionAborted and LimitExceeded, call `work` again with a new transaction, up to `attempts` calls in
        total, with pauses that double from 10 ms, and last at least the `retry_after` of LimitExceeded. An exception of
        `work` aborts the transaction; it is raised unless it is one of these. The other arguments are those of
        `transaction`.

        Raises TransactionAborted or LimitExceeded after the last attempt, InvalidHandler if `work` returns nothing to
        await, and the other errors of `Transaction.commit`.
        """
        check_callable(work)
        pause = FIRST_PAUSE
        for attempt in range(1, check_attempts(attempts) + 1):
            try:
                async with self.transaction(name=name, number=number, timeout=timeout) as txn:
                    result = await check_awaitable(work(txn))
            except (TransactionAborted, LimitExceeded) as error:
                if attempt == attempts or (isinstance(error, LimitExceeded) and not error.retryable):
                    raise
                await asyncio.sleep(retry_pause(error, pause))
                pause *= 2
            else:
                return result
        raise AssertionError("unreachable: the last attempt returns or raises")

    async def delete_name(self, name: str, *, last_number: int = 0) -> None:
        """Delete a producer name, fence its holder and abort its open transactions.

        Afterwards the numbers of the name start at 1 again. `last_number` protects against late retries: for the
        service's `transactions.remember` seconds (one hour by default) transactions with a number up to it raise
        AlreadyCommitted. Raises InvalidRequest.
        """
        check_last_number(last_number)
        self.names.forget(check_name(name, "a producer"))
        session = self.sessions.of(name)
        await session.ask("delete_names", lambda number: Deletion(number, name, last_number))

    # Ordinary sends

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
        """Send one record outside of a transaction; return when it is durable.

        The arguments are those of `Transaction.send`. Raises InvalidMessage, MessageTooLarge, InvalidTopicName,
        TopicNotFound and ServiceUnavailable: the record was not sent. Raises SendUnknown if the connection broke or
        the log stopped before the acknowledgement: the record may or may not be in the log, and a retry may duplicate
        it.
        """
        chosen = await self.serializer_of(topic, serializer)
        rows = one_row(value, key, ordering_key, event_time, properties, chosen)
        await self._send(topic, rows, batching, partition)

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
        """Send records outside of a transaction; return when all are durable.

        `values`, `keys`, `event_times` and `properties` have one item for each record. More than 4 MiB are sent in
        several appends, one after the other, so after an error the first records may be in the log. Raises as `send`.
        """
        rows = many_rows(values, keys, event_times, properties, await self.serializer_of(topic, serializer))
        await self._send(topic, rows, batching, partition)

    async def delete(
        self, topic: str, key: Key, *, properties: Properties = None, partition: int | None = None
    ) -> None:
        """Delete a key outside of a transaction: send a record with this key and no value.

        Other arguments and errors as in `send`.
        """
        await self._send(topic, deletion(key, properties), partition=partition)

    # Reading

    async def process(
        self,
        source: str | Sequence[str],
        group: str,
        handler: Handler,
        *,
        on_error: OnError = "stop",
        retries: int = 0,
        start: Start = "beginning",
        batch: int = 100,
        idle_timeout: float | None = None,
        wait: bool = False,
    ) -> Processed:
        """Call `await handler(txn, record)` for each committed record of the source topics, exactly once.

        What the handler sends in `txn` and the group's new position commit in one transaction. All processes that
        consume with the same `group` share the partitions of the topics.

        - `on_error`: what follows when the handler still fails after its retries. "stop" raises its error, "skip" skips
          the record, and `dead_letter(topic)` sends the record to that topic.
        - `retries`: how many times a failed handler is called again, after growing pauses. The transaction was aborted,
          so the handler is also called again for the earlier records in it.
        - `start`: the initial position on topics that the group has not consumed before; see CommittedReader.
        - `batch`: the maximum number of records, all of one partition, in a transaction.
        - `idle_timeout`: return after this many seconds without a record. None: run until cancelled.
        - `wait`: wait for topics that do not exist yet, as long as for records, instead of raising TopicNotFound.

        Returns the counts of what was done. Raises TopicNotFound, InvalidRequest and HandlerTooSlow.
        """
        task = HandlerTask(handler, None, on_error, retries)
        return await process(self, GroupSource(source, group, start, batch, idle_timeout, wait), task)

    async def process_batches(
        self,
        source: str | Sequence[str],
        group: str,
        handler: BatchHandler,
        *,
        on_error: OnError = "stop",
        retries: int = 0,
        start: Start = "beginning",
        batch: int = 1000,
        idle_timeout: float | None = None,
        wait: bool = False,
    ) -> Processed:
        """Call `await handler(txn, records)` for batches: RecordBatches of up to `batch` records of one partition.

        If the handler fails, the batch is halved until the failing record is found. Everything else is as in
        `process`.
        """
        task = HandlerTask(None, handler, on_error, retries)
        return await process(self, GroupSource(source, group, start, batch, idle_timeout, wait), task)

    def stream(
        self,
        topic: str,
        *,
        from_: str | ResumeToken = "beginning",
        to: int | Literal["now"] | None = None,
        store: TokenStore | None = None,
        cursor: str | None = None,
    ) -> ChangeStream:
        """Return a stream of the committed changes of a topic: `ChangeBatch`es of mutations with resume tokens.

        - `from_`: where to start: "beginning" (or "earliest"), "now" (or "latest"), or the resume token of the last
          batch that was processed.
        - `to`: the seqno of the last mutation to deliver, or "now" for the newest one; None: the stream has no end.
        - `store`: where the stream saves the token of each acknowledged batch. If it has a token, the stream starts
          there and ignores `from_`.
        - `cursor`: the name of a durable cursor. The service does not trim the records after it. The stream creates it
          if necessary, and moves it to the last acknowledged batch about once a second and in `stream.done()`.

        All streams of a client share one connection; after it is lost, they continue over a new one. If the history of
        the topic branched, the stream delivers a `Rollback`. Raises UnreadableToken, ForeignToken, InvalidRequest.
        """
        self.check_topic(topic)
        self.check_writable()
        self.session.check_tasks()
        if store is not None and not (hasattr(store, "load") and hasattr(store, "save")):
            raise InvalidRequest(f"a token store needs methods load and save, got {store!r}")
        lease = None if cursor is None else CursorLease(self.cursors, topic, cursor)
        return ChangeStream(self.streams.of(topic), topic, from_, to, store, lease, self.session.check_loop)

    # Topics

    async def topics(self) -> list[str]:
        """Return the names of all topics that this client may see, sorted. A partitioned topic is one of them."""
        self.check_readable()
        return await asyncio.to_thread(lambda: topic_names(self.open_broker()))

    async def last_visible(self, topic: str) -> Position | None:
        """Return the position of the last record of a topic that readers get now; None if there is none.

        Later records may be committed already, if an older transaction is still open on the topic. A reader that has
        returned this position has returned everything that was visible at the time of the call. The name of a partition
        is needed for a partitioned topic. Raises TopicNotFound, and the errors of CommittedReader.
        """
        self.check_readable()
        self.check_topic(topic)
        return await asyncio.to_thread(lambda: last_visible(self.open_broker(), topic))

    async def delete_topic(self, topic: str) -> None:
        """Delete a whole topic: all its records, for all readers, irrevocably. `delete` deletes a single key.

        Nothing is deleted, and TopicInUse names the reasons, while a transaction is open on the topic, a change stream
        reads it, a consumer group has a position on it (see `forget_group`), or a durable cursor is on it. On a
        cluster, first stop the other programs that use the topic, because their connections may create it again. It
        needs the right to `operate` the topic.

        Raises TopicInUse, TopicNotFound, NotSupported for a partitioned topic, and NotAuthorized. After
        ServiceUnavailable, the topic may or may not be deleted.
        """
        self.check_writable()
        self.check_topic(topic)
        own = [one.txn for one in self.sessions.uncommitted() if topic in one.counts]  # some may not be sent yet
        if own:
            raise TopicInUse.by(topic, [*map(OPEN_TRANSACTION.format, own)])
        if self._ordinary is not None:
            await self._ordinary.close_topic(topic)
        await self.admin.ask(topic, "DeleteTopic", {"topic": topic})
        self.sessions.topic_deleted(topic)

    @property
    def cursors(self) -> DurableCursors:
        """The durable cursors of topics. The service does not trim the records after a cursor."""
        self.check_writable()
        return DurableCursors(self.admin)

    async def forget_group(self, group: str, topic: str | None = None) -> None:
        """Delete the positions of a consumer group on a topic and its partitions; None: on all topics.

        The group then starts there like a new group. Raises InvalidRequest if the group has members.
        """
        self.check_writable()
        arguments = {"group": check_name(group, "a group"), "topic": topic}
        await self.admin.ask(group, "ForgetGroup", arguments, self.admin.max_unavailable)

    async def join(self, group: str) -> Joined:
        """Internal: remove all members of a consumer group; return its new generation and its positions.

        Their transactions can no longer commit; the members join again with their next heartbeat.
        """
        session = self.sessions.of(check_name(group, "a group"))
        joined: Joined = await session.ask("joins", lambda number: NamedRequest(number, group))
        return joined

    async def _send(
        self, topic: str, rows: SendColumns, batching: Batching | None = None, partition: int | None = None
    ) -> None:
        try:
            await self._send_rows(topic, rows, batching, partition)
        except asyncio.CancelledError as cancelled:
            cancelled.add_note(f"records for {topic!r} may or may not be in the log")
            raise

    async def _send_rows(self, topic: str, rows: SendColumns, batching: Batching | None, partition: int | None) -> None:
        core = self.session.core
        self.check()
        rows = self.checked(topic, rows, batching)
        if not len(rows.values):
            return
        if self._ordinary is not None:
            groups = await self.groups(topic, rows.keys, partition)
            parts = ((name, rows if which is None else take_rows(rows, which.tolist())) for name, which in groups)
            await asyncio.gather(*(self._ordinary.send(name, some) for name, some in parts))
            return
        await self.groups(topic, rows.keys, partition)  # it only checks the partition
        for piece in slices(rows):
            await self.session.wait_for_room()
            await self.session.result(partial(core.send, topic, piece, None))
