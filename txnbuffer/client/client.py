"""The asyncio client: transactions, sends, readers and exactly-once processing"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Any, TypeVar

from broker_io.port import Broker
from txnbuffer.checks import check_name, check_number, check_timeout
from txnbuffer.client.base import BaseClient
from txnbuffer.client.cursors import CursorLease, DurableCursors
from txnbuffer.client.handling import BatchHandler, Handler, HandlerTask, OnError, Processed
from txnbuffer.client.lifecycle import close_all, run_to_completion
from txnbuffer.client.links import AdminClients, StreamConnector
from txnbuffer.client.outbox import (
    Batching,
    EventTime,
    Key,
    Properties,
    SendColumns,
    check_size,
    deletion,
    many_rows,
    one_row,
    slices,
)
from txnbuffer.client.processing import GroupSource, process
from txnbuffer.client.routing import Start
from txnbuffer.client.serializers import Serializer, Serializers
from txnbuffer.client.session import ClientSession
from txnbuffer.client.stream_connection import ShardStreams, StreamSession
from txnbuffer.client.streams import ChangeStream
from txnbuffer.client.tokens import TokenStore
from txnbuffer.client.transaction import Transaction
from txnbuffer.client.writers import OrdinarySends
from txnbuffer.coordinator.messages import Joined
from txnbuffer.errors import InvalidRequest, TransactionAborted
from txnbuffer.streams.token import ResumeToken

Result = TypeVar("Result")

ATTEMPTS = 10
FIRST_PAUSE = 0.01
"""Seconds before `run` retries an aborted transaction; doubles with each attempt."""


class Client(BaseClient):
    """An asyncio client of an embedded log, a service or a cluster. `connect` creates it; use it on the loop that
    created it.
    """

    def __init__(
        self,
        session: ClientSession,
        broker: Callable[[], Broker],
        serializers: Serializers | None,
        ordinary: OrdinarySends | None = None,
    ) -> None:
        """Take the arguments of BaseClient; `connect` sets the other attributes."""
        super().__init__(session, broker, serializers, ordinary)
        self.resources = AsyncExitStack()
        self.stream_connector: StreamConnector | None = None
        self.admin = AdminClients((), 0.0)
        self.shard_streams: ShardStreams | None = None  # set if there are several shards
        self._streaming: StreamSession | None = None

    async def close(self) -> None:
        """Close the session and all change streams, and abort open transactions.

        If the caller is cancelled, the exception is raised only after everything is closed.
        """
        parts = (self._streaming, self.shard_streams, self.admin, self.sessions)
        closings = [part.close for part in parts if part is not None]
        await run_to_completion(close_all([*closings, self.resources.aclose]))

    # Transactions

    def transaction(
        self, *, name: str | None = None, number: int | None = None, timeout: float | None = None
    ) -> Transaction:
        """Return a transaction; use it with `async with`.

        The service aborts it after `timeout` seconds. With `name` and `number` (1, 2, 3 …) it belongs to the named
        producer, and `number` is its sequence number: each number commits at most once, however often it is retried.
        Raises InvalidRequest.
        """
        if (name is None) != (number is None):
            raise InvalidRequest("a named transaction needs both name and number: give both or neither")
        sequence = None
        if name is not None:
            sequence = check_name(name, "a producer"), check_number(number)
        return Transaction(self, sequence, check_timeout(timeout))

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

        If the transaction aborts, retry with a new one after a pause, up to `attempts` times in total. Only
        TransactionAborted is retried; any other exception aborts the transaction and is raised.
        """
        pause = FIRST_PAUSE
        for attempt in range(1, attempts + 1):
            try:
                async with self.transaction(name=name, number=number, timeout=timeout) as txn:
                    result = await work(txn)
            except TransactionAborted:
                if attempt == attempts:
                    raise
                await asyncio.sleep(pause)
                pause *= 2
            else:
                return result
        raise InvalidRequest(f"attempts must be at least 1, got {attempts!r}")

    async def delete_name(self, name: str, *, over: int = 0) -> None:
        """Delete a producer name.

        For one hour the numbers up to `over` count as used: transactions with these numbers are rejected.
        """
        self.names.forget(check_name(name, "a producer"))
        await self.sessions.ask(name, lambda core, future: core.delete_name(name, over, future))

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

        The arguments are those of `Transaction.send`. Raises SendUnknown if the connection broke before the
        acknowledgement: the record may or may not be in the log, so sending it again may duplicate it.
        """
        rows = one_row(value, key, ordering_key, event_time, properties, self.serializers.of(topic, serializer))
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

        `values`, `keys`, `event_times` and `properties` are columns of the same length. More than 4 MiB are sent as
        several appends in order, so after an error the first records may be in the log.
        """
        rows = many_rows(values, keys, event_times, properties, self.serializers.of(topic, serializer))
        await self._send(topic, rows, batching, partition)

    async def delete(self, topic: str, key: Key) -> None:
        """Delete a key outside of a transaction: append a record with this key and no value."""
        await self._send(topic, deletion(key))

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
    ) -> Processed:
        """Call `await handler(txn, record)` for each committed record of the source topics, exactly once.

        The records that the handler sends in `txn` and the new position of the group commit together, with up to
        `batch` records of one partition in a transaction. All processes of the group share its partitions. `start` is
        the initial position on topics that the group has not consumed before.

        If the handler raises, it is called again up to `retries` times, with growing pauses. After that `on_error`
        applies: "stop" raises the error, "skip" skips the record, and `dead_letter(topic)` sends the record to that
        topic. A retry may call the handler again for earlier records of the same transaction, which was aborted.

        Returns the counts when no record arrives for `idle_timeout` seconds; without it, runs until cancelled. Raises
        TopicNotFound.
        """
        task = HandlerTask(handler, None, on_error, retries)
        return await process(self, GroupSource(source, group, start, batch, idle_timeout), task)

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
    ) -> Processed:
        """As `process`, with `await handler(txn, records)`: a RecordBatch of up to `batch` records of one partition.

        If the handler fails on several records, the batch is halved until the failing record is found.
        """
        task = HandlerTask(None, handler, on_error, retries)
        return await process(self, GroupSource(source, group, start, batch, idle_timeout), task)

    def stream(
        self,
        topic: str,
        *,
        from_: str | ResumeToken = "beginning",
        to: int | str | None = None,
        store: TokenStore | None = None,
        cursor: str | None = None,
    ) -> ChangeStream:
        """Return a stream of the committed changes of a topic: batches of mutations with resume tokens.

        - `from_`: "beginning", "now" or a resume token.
        - `to`: the last seqno to deliver, or "now"; None streams without end.
        - `store`: keeps the token of the last acknowledged batch. A token in the store takes precedence over `from_`.
        - `cursor`: the name of a durable cursor, which keeps unacknowledged records from being trimmed. It is created
          if it does not exist, and follows the stream within about a second, or immediately on `stream.done()`.

        The streams of a client share a connection and reopen after a connection is lost. The stream delivers a
        `Rollback` where history branched. Raises UnreadableToken, ForeignToken, InvalidRequest.
        """
        self.check_topic(topic)
        lease = None if cursor is None else CursorLease(self.cursors, topic, cursor)
        return ChangeStream(self._streams(topic), topic, from_, to, store, lease)

    @property
    def cursors(self) -> DurableCursors:
        """The durable cursors of topics: records after a cursor are kept in the topic's log."""
        return DurableCursors(self.admin)

    async def forget_group(self, group: str, topic: str | None = None) -> None:
        """Delete the position of a consumer group on a topic and its partitions, or on all topics.

        The group then starts there as a new group. Raises InvalidRequest if the group has members.
        """
        question = {"group": check_name(group, "a group"), "topic": topic}
        await self.admin.ask(group, "ForgetGroup", question, self.admin.max_unavailable)

    async def join(self, group: str) -> Joined:
        """Start a new generation of a consumer group without members; its former members must join again."""
        joined: Joined = await self.ask("joins", check_name(group, "a group"))
        return joined

    async def _send(
        self, topic: str, rows: SendColumns, batching: Batching | None = None, partition: int | None = None
    ) -> None:
        core = self.session.core
        self.check()
        self.check_topic(topic)
        rows = self.batched(topic, rows, batching)
        check_size(rows, self.max_message_bytes)
        if self._ordinary is not None:
            if len(rows.values):
                parts = await self.parts(topic, rows, partition)
                await asyncio.gather(*(self._ordinary.send(name, some) for name, some in parts))
            return
        if not len(rows.values):
            return
        for piece in slices(rows):
            await self.room(self.session)
            await self.parts(topic, piece, partition)
            await self.session.result(partial(core.send, topic, piece, None))

    def _streams(self, topic: str) -> StreamSession:
        if self.shard_streams is not None:
            return self.shard_streams.of(topic)
        if self._streaming is None:
            if self.stream_connector is None:
                raise InvalidRequest("this client has no connector for change streams: create it with connect")
            self._streaming = StreamSession(self.stream_connector, self.session.max_unavailable)
        return self._streaming
