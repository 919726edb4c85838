"""The client for asyncio: transactions, ordinary sends, readers, exactly-once processing."""

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
from txnbuffer.client.lifecycle import close_all, to_the_end
from txnbuffer.client.links import AdminClients, StreamDial
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
    pieces,
)
from txnbuffer.client.processing import GroupSource, process
from txnbuffer.client.routing import Start
from txnbuffer.client.serializers import Serializer, Serializers
from txnbuffer.client.session import ClientSession
from txnbuffer.client.stream_connection import ShardStreams, StreamSession
from txnbuffer.client.streams import ChangeStream
from txnbuffer.client.tokens import TokenStore
from txnbuffer.client.transaction import Transaction
from txnbuffer.client.writers import PlainSends
from txnbuffer.coordinator.messages import Joined
from txnbuffer.errors import InvalidRequest, TransactionAborted
from txnbuffer.streams.token import ResumeToken

Result = TypeVar("Result")

ATTEMPTS = 10
FIRST_PAUSE = 0.01
"""Seconds before a transaction is run again; twice as long each time."""


class Client(BaseClient):
    """A connection to a service, or to a log in this process; made by `connect`. Use it on the loop that made it."""

    def __init__(
        self,
        session: ClientSession,
        broker: Callable[[], Broker],
        serializers: Serializers | None,
        ordinary: PlainSends | None = None,
    ) -> None:
        """Make a client as BaseClient; `connect` sets what else it needs."""
        super().__init__(session, broker, serializers, ordinary)
        self.resources = AsyncExitStack()
        self.dial_streams: StreamDial | None = None
        self.questions = AdminClients((), 0.0)
        self.shard_streams: ShardStreams | None = None  # where there are several shards
        self._streaming: StreamSession | None = None

    async def close(self) -> None:
        """End the session and all change streams; transactions that are open abort. A cancel waits for that."""
        parts = (self._streaming, self.shard_streams, self.questions, self.sessions)
        closings = [part.close for part in parts if part is not None]
        await to_the_end(close_all([*closings, self.resources.aclose]))

    # Transactions

    def transaction(
        self, *, name: str | None = None, number: int | None = None, timeout: float | None = None
    ) -> Transaction:
        """A transaction, to be used with `async with`.

        `timeout` in seconds, after which the service aborts it. With `name` and `number` (1, 2, 3 …) it is that
        attempt of a named producer: a number commits once, whatever is repeated.
        """
        if (name is None) != (number is None):
            raise InvalidRequest("a named transaction has a name and a number: give both, or neither")
        naming = None
        if name is not None:
            naming = check_name(name, "a producer"), check_number(number)
        return Transaction(self, naming, check_timeout(timeout))

    async def run(
        self,
        work: Callable[[Transaction], Awaitable[Result]],
        *,
        name: str | None = None,
        number: int | None = None,
        timeout: float | None = None,
        attempts: int = ATTEMPTS,
    ) -> Result:
        """Call `work` with a transaction and commit it; once more with another one each time it was aborted.

        Nothing but TransactionAborted is repeated.
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
        raise InvalidRequest(f"{attempts} attempts are none: allow at least 1")

    async def delete_name(self, name: str, *, over: int = 0) -> None:
        """Forget a producer's name; for an hour numbers up to `over` are over, and shares of them refused."""
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
        """Send one record outside of any transaction; returns when it is durable.

        Raises SendUnknown if the connection broke meanwhile: sent again it may stand there twice.
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
        """Send records given as columns of one length, outside of any transaction.

        More than 4 MiB go in several appends, in order: after an error a beginning of them may stand.
        """
        rows = many_rows(values, keys, event_times, properties, self.serializers.of(topic, serializer))
        await self._send(topic, rows, batching, partition)

    async def delete(self, topic: str, key: Key) -> None:
        """Delete a key, outside of any transaction."""
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
        """Call `await handler(txn, record)` for each record that commits in the source topics, exactly once.

        What the handler sends in `txn` and how far the group has come commit together, up to `batch` records of one
        partition in a transaction. All who process for the group share its partitions. Where the handler fails it is
        called again, `retries` times, each after a longer pause; then `on_error` is "stop" (raise), "skip", or
        `dead_letter(topic)`. It may also be called again for the records before that one. Ends when cancelled, or
        without a record for `idle_timeout` seconds. Raises TopicNotFound.
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

        Where it fails on several they are halved until the one is found that it fails on.
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
        """What committed in a topic, for ever or up to a seqno or "now": batches of mutations with resume tokens.

        `from_` is "beginning", "now" or a token. A `store` keeps the token of what is done with, and its token comes
        before `from_`. `cursor` names a durable cursor, made if there is none, that keeps in the log what is not done
        with: it follows within a second or so, and at once with `stream.done()`. Streams of a client share a
        connection, and are opened again after any unexpected end; a `Rollback` comes where history branched. Raises
        UnreadableToken, ForeignToken, InvalidRequest.
        """
        self.check_topic(topic)
        hold = None if cursor is None else CursorLease(self.cursors, topic, cursor)
        return ChangeStream(self._streams(topic), topic, from_, to, store, hold)

    @property
    def cursors(self) -> DurableCursors:
        """Durable cursors: what stands behind one is kept in its topic's log."""
        return DurableCursors(self.questions)

    async def forget_group(self, group: str, topic: str | None = None) -> None:
        """Let a group without members begin anew on a topic and its partitions, or on all. Raises InvalidRequest."""
        question = {"group": check_name(group, "a group"), "topic": topic}
        await self.questions.ask(group, "ForgetGroup", question, self.questions.max_unavailable)

    async def join(self, group: str) -> Joined:
        """Begin a new generation of a consumer group without members; those that it had join it anew."""
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
        for piece in pieces(rows):
            await self.room(self.session)
            await self.parts(topic, piece, partition)
            await self.session.result(partial(core.send, topic, piece, None))

    def _streams(self, topic: str) -> StreamSession:
        if self.shard_streams is not None:
            return self.shard_streams.of(topic)
        if self._streaming is None:
            if self.dial_streams is None:
                raise InvalidRequest("this client was made without a way to change streams: use connect")
            self._streaming = StreamSession(self.dial_streams, self.session.max_unavailable)
        return self._streaming
