"""The change streams of all partitions of a topic as one; see `stream_partitions`."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Literal, Self

from broker_io.partitions import partition_name
from broker_io.port import PartitionedBroker
from txnbuffer.client.client import Client
from txnbuffer.client.lifecycle import ClosedOnExit
from txnbuffer.client.streams import ChangeBatch, ChangeStream, Rollback
from txnbuffer.client.tokens import TokenStore
from txnbuffer.errors import InvalidRequest
from txnbuffer.streams.token import ResumeToken

REFRESH = 10.0
"""Seconds after which it is asked again how many partitions there are."""

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
    """As `Client.stream`, for a topic with partitions: what committed in any of them.

    Each batch, token and rollback is of one partition, which its `topic` names; so a store has a token for each, and
    `from_` may be those of all, by partition. A partition that is not among them, or that the topic gets later,
    begins at its oldest mutation. A key's mutations are all in one partition and stay in order, unless the topic
    gets more of them. Raises InvalidRequest when it is first asked for a batch, if there are no partitions.
    """
    if to not in (None, "now"):
        raise InvalidRequest(f"streams of partitions can't go to {to!r}, each has its seqnos: give 'now', or None")
    return PartitionedStream(client, topic, from_, to, store, cursor)


class PartitionedStream(ClosedOnExit):
    """As ChangeStream. `tokens`: by partition, that of the batch handed out last."""

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
        self._asked: dict[str, asyncio.Task[Item | None]] = {}
        self._again: ChangeStream | None = None
        self._look_at = 0.0
        self._closed = False

    @property
    def caught_up(self) -> bool:
        """Whether there was nothing newer than the last batch of each partition."""
        return bool(self._streams) and all(stream.caught_up for stream in self._streams.values())

    async def next(self, timeout: float | None = None) -> Item | None:
        """As ChangeStream.next; what a partition's stream raises is raised once, and asking again goes on."""
        now = asyncio.get_running_loop().time
        deadline = None if timeout is None else now() + timeout
        await self._find_partitions()
        self._ask_again()
        while self._asked and not self._closed:
            left = REFRESH if deadline is None else min(REFRESH, max(deadline - now(), 0.0))
            await asyncio.wait(self._asked.values(), timeout=left, return_when=asyncio.FIRST_COMPLETED)
            done = next((name for name, task in self._asked.items() if task.done()), None)
            if done is None:
                if deadline is not None and now() >= deadline:
                    raise TimeoutError
                await self._find_partitions()
                continue
            task, self._again = self._asked.pop(done), self._streams[done]
            if (item := task.result()) is not None:
                self.tokens[done] = item.token
                return item
            self._again = None  # it has come to its end
        return None

    async def rolled_back(self, seqno: int) -> None:
        """As ChangeStream.rolled_back, of the partition whose rollback was just given."""
        if self._again is None:
            raise InvalidRequest("no rollback was given: there is nothing to go back from")
        await self._again.rolled_back(seqno)

    async def done(self) -> None:
        """As ChangeStream.done."""
        if self._again is not None:
            await self._again.done()

    async def close(self) -> None:
        """As ChangeStream.close, of all partitions."""
        self._closed = True
        for task in self._asked.values():
            task.cancel()
        await asyncio.gather(*self._asked.values(), return_exceptions=True)
        for stream in self._streams.values():
            await stream.close()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Item:
        item = await self.next()
        if item is None:
            raise StopAsyncIteration
        return item

    def _ask_again(self) -> None:
        """What was handed out last is done with; the others are being asked."""
        stream, self._again = self._again, None
        if stream is not None:
            self._asked[stream.topic] = asyncio.ensure_future(stream.next())

    async def _find_partitions(self) -> None:
        """Begin to stream those that are new."""
        now = asyncio.get_running_loop().time()
        if self._closed or (self._streams and (self._to is not None or now < self._look_at)):
            return
        self._look_at = now + REFRESH
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
                self._asked[name] = asyncio.ensure_future(stream.next())
