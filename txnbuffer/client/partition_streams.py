"""The change streams of all partitions of a topic, merged into one"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Literal, Self

from broker_io.partitions import partition_name
from broker_io.port import PartitionedBroker
from txnbuffer.client.client import Client
from txnbuffer.client.lifecycle import ClosedOnExit, cancel
from txnbuffer.client.streams.streams import ChangeBatch, ChangeStream, Rollback
from txnbuffer.client.streams.tokens import TokenStore
from txnbuffer.errors import InvalidRequest
from txnbuffer.streams.failover import ResumeToken

REFRESH = 10.0
"""Seconds between checks for new partitions."""

Item = ChangeBatch | Rollback
Tokens = Mapping[str, str | ResumeToken]


def stream_partitions(
    client: Client,
    topic: str,
    *,
    from_: Literal["beginning", "now"] | Tokens = "beginning",
    to: Literal["now"] | None = None,
    store: TokenStore | None = None,
    cursor: str | None = None,
) -> PartitionedStream:
    """Return a stream of the committed changes of all partitions of a topic. The arguments are as in `Client.stream`.

    Each batch, token and rollback belongs to one partition, which its `topic` names; a store keeps a token for each.
    `from_` may be a mapping from partitions to tokens. Partitions that are missing there or are added later start at
    their oldest mutation. The mutations of a key are in one partition and in order, unless the number of partitions
    grows. The first request raises InvalidRequest if the topic has no partitions.
    """
    if to not in (None, "now"):
        raise InvalidRequest(f"to must be 'now' or None because each partition has its own seqnos, got {to!r}")
    return PartitionedStream(client, topic, from_, to, store, cursor)


class PartitionedStream(ClosedOnExit):
    """A stream of the changes of all partitions of a topic, created by `stream_partitions`; see ChangeStream.

    `tokens` maps each partition to the token of its last batch.
    """

    def __init__(
        self,
        client: Client,
        topic: str,
        from_: Literal["beginning", "now"] | Tokens,
        to: Literal["now"] | None,
        store: TokenStore | None,
        cursor: str | None,
    ) -> None:
        self.topic = topic
        self.tokens: dict[str, ResumeToken] = {}
        self._client = client
        self._from = from_
        self._to = to
        self._store = store
        self._cursor = cursor
        self._streams: dict[str, ChangeStream] = {}
        self._requests: dict[str, asyncio.Task[Item | None]] = {}
        self._last: ChangeStream | None = None
        self._check_at = 0.0
        self._closed = False

    @property
    def caught_up(self) -> bool:
        """Whether no partition had a newer mutation than its last batch."""
        return bool(self._streams) and all(stream.caught_up for stream in self._streams.values())

    async def next(self, timeout: float | None = None) -> Item | None:
        """Return the next batch or rollback of any partition; None once all streams have ended.

        Raises TimeoutError after `timeout` seconds, and the error of a partition's stream once; the next call continues
        with the others.
        """
        now = asyncio.get_running_loop().time
        deadline = None if timeout is None else now() + timeout
        await self._find_partitions()
        self._acknowledge()
        while self._requests and not self._closed:
            left = REFRESH if deadline is None else min(REFRESH, max(deadline - now(), 0.0))
            await asyncio.wait(self._requests.values(), timeout=left, return_when=asyncio.FIRST_COMPLETED)
            done = next((name for name, task in self._requests.items() if task.done()), None)
            if done is None:
                if deadline is not None and now() >= deadline:
                    raise TimeoutError
                await self._find_partitions()
                continue
            task, self._last = self._requests.pop(done), self._streams[done]
            if (item := task.result()) is not None:
                self.tokens[done] = item.token
                return item
            self._last = None  # it has ended
        return None

    async def rolled_back(self, seqno: int) -> None:
        """Confirm the last rollback: the data of its partition is now that of `seqno`. Raises InvalidRequest."""
        if self._last is None:
            raise InvalidRequest("no rollback was delivered: there is nothing to confirm")
        await self._last.rolled_back(seqno)

    async def done(self) -> None:
        """Acknowledge the last batch now: store its token, and move the durable cursor there."""
        if self._last is not None:
            await self._last.done()

    async def close(self) -> None:
        """Close the streams of all partitions. The last batch is not acknowledged."""
        self._closed = True
        await cancel(*self._requests.values())
        for stream in self._streams.values():
            await stream.close()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Item:
        item = await self.next()
        if item is None:
            raise StopAsyncIteration
        return item

    def _acknowledge(self) -> None:
        """Acknowledge the last batch by requesting the next one of its partition."""
        stream, self._last = self._last, None
        if stream is not None:
            self._requests[stream.topic] = asyncio.ensure_future(stream.next())

    async def _find_partitions(self) -> None:
        """Start streams for new partitions, at most every REFRESH seconds."""
        now = asyncio.get_running_loop().time()
        if self._closed or (self._streams and (self._to is not None or now < self._check_at)):
            return
        self._check_at = now + REFRESH
        broker = await asyncio.to_thread(self._client.open_broker)
        count = await asyncio.to_thread(broker.partitions, self.topic) if isinstance(broker, PartitionedBroker) else 0
        if not count:
            raise InvalidRequest(f"topic {self.topic!r} has no partitions: use client.stream")
        begins = self._from if isinstance(self._from, Mapping) else {}
        default = "beginning" if self._streams or isinstance(self._from, Mapping) else self._from
        for name in (partition_name(self.topic, number) for number in range(count)):
            if name not in self._streams:
                begin = begins.get(name, default)
                stream = self._client.stream(name, from_=begin, to=self._to, store=self._store, cursor=self._cursor)
                self._streams[name] = stream
                self._requests[name] = asyncio.ensure_future(stream.next())
