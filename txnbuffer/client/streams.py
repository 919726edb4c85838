"""Change streams as applications use them: batches with resume tokens, and rollbacks"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple, Self

from txnbuffer.client.cursors import CursorLease
from txnbuffer.client.lifecycle import ClosedOnExit
from txnbuffer.client.stream_connection import StreamParameters, StreamSession
from txnbuffer.client.tokens import TokenStore
from txnbuffer.errors import Error
from txnbuffer.mutations.batch import Mutation, MutationBatch
from txnbuffer.streams.effects import (
    CaughtUp,
    ClientEvent,
    Completed,
    Delivered,
    EndConnection,
    Interrupted,
    RollBack,
    StreamEnded,
    StreamOpened,
)
from txnbuffer.streams.token import ResumeToken

NOTHING = MutationBatch.of([])


@dataclass(frozen=True, slots=True)
class ChangeBatch:
    """Mutations to apply in order; iterate it for single ones. It is empty if only the token has moved.

    A mutation without a value deletes its key. Store `token` together with the result of the mutations: a stream from
    this token continues after the batch. If `complete`, your data now equals the topic at `token.seqno`; otherwise
    mutations may be missing whose keys newer mutations replace. If `caught_up`, there was also nothing newer. `bytes`
    is the size of the mutations.
    """

    topic: str
    mutations: MutationBatch
    token: ResumeToken
    complete: bool = False
    caught_up: bool = False
    bytes: int = 0

    def __len__(self) -> int:
        return len(self.mutations)

    def __iter__(self) -> Iterator[Mutation]:
        return iter(self.mutations)


class ChangeStatistics(NamedTuple):
    """Counters of a stream; the first five count from its creation.

    `mutations` were delivered, `deletions` of them have no value. `seqno`, `snapshot_start` and `snapshot_end` are
    those of the token of the last batch, `stored_seqno` that of the last stored token. `high_seqno` is the newest
    mutation that the service reported, and `lag` is its distance in seqnos from `seqno`.
    """

    mutations: int
    deletions: int
    bytes: int
    rollbacks: int
    interruptions: int
    seqno: int
    snapshot_start: int
    snapshot_end: int
    stored_seqno: int
    high_seqno: int
    lag: int


@dataclass(frozen=True, slots=True)
class Rollback:
    """History branched: undo all changes after `seqno`.

    Requesting the next batch confirms that this was done. If your data can only return to a lower seqno at which it was
    complete, or must start over (0), call `ChangeStream.rolled_back`.
    """

    topic: str
    seqno: int
    token: ResumeToken


class ChangeStream(ClosedOnExit):
    """A stream of changes, made by `Client.stream`; iterate it with `async for`.

    Requesting the next batch acknowledges the previous one. The stream reopens after a connection is lost; `problem` is
    the error of the last interruption, `token` the token of the last batch, and `caught_up` whether there was nothing
    newer.
    """

    def __init__(
        self,
        streaming: StreamSession,
        topic: str,
        from_: str | ResumeToken,
        to: int | str | None,
        store: TokenStore | None,
        lease: CursorLease | None = None,
    ) -> None:
        """The stream opens when its first batch is requested. `lease` is the durable cursor that follows it."""
        self.topic = topic
        self.caught_up = False
        self.problem: Error | None = None
        self.token: ResumeToken | None = None
        self._streaming = streaming
        self._store = store
        self._request = StreamParameters.of(topic, from_, to)
        self._lease = lease
        self._from = from_
        self._counts: Counter[str] = Counter()
        self._high = 0
        self._handle = 0
        self._waiting: deque[ChangeBatch | Rollback] = deque()
        self._given: ChangeBatch | Rollback | None = None
        self._ended: StreamEnded | None = None
        self._unavailable_error: Error | None = None
        self._closed = False
        self._something = asyncio.Event()
        self._turn, self._settling = asyncio.Lock(), asyncio.Lock()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> ChangeBatch | Rollback:
        """Return the next batch. Raises the error that ended the stream.

        Raises ServiceUnavailable if there is no connection for `max_unavailable` seconds; the next request continues
        the stream.
        """
        item = await self.next()
        if item is None:
            raise StopAsyncIteration
        return item

    async def next(self, timeout: float | None = None) -> ChangeBatch | Rollback | None:
        """As `__anext__`, with None at the end. Raises TimeoutError if nothing arrives within `timeout` seconds.

        Concurrent calls run one after the other.
        """
        deadline = None if timeout is None else asyncio.get_running_loop().time() + timeout
        async with asyncio.timeout_at(deadline):
            await self._turn.acquire()
        try:
            return await self._next(deadline)
        finally:
            self._turn.release()

    async def _next(self, deadline: float | None) -> ChangeBatch | Rollback | None:
        if not self._handle and not self._closed:
            async with asyncio.timeout_at(deadline):
                await self._open()
        async with self._settling:
            await self._settle()
        async with asyncio.timeout_at(deadline):
            while not self._waiting and not self._closed:
                if self._ended is not None:
                    if self._ended.error is not None:
                        raise self._ended.error
                    return None
                if self._unavailable_error is not None:
                    error, self._unavailable_error = self._unavailable_error, None
                    raise error
                self._check()
                self._something.clear()
                await self._something.wait()
        if self._closed:
            return None
        self._given = item = self._waiting.popleft()
        self.caught_up = isinstance(item, ChangeBatch) and item.caught_up
        self.token = item.token
        return item

    def _check(self) -> None:
        if self._streaming.broken is not None:
            raise self._streaming.broken

    async def rolled_back(self, seqno: int) -> None:
        """Confirm the last rollback: the data is now that of `seqno`, at which it was complete.

        `seqno` is at or below that of the rollback. Raises InvalidRequest if no rollback was delivered.
        """
        self._streaming.rolled_back(self._handle, seqno)
        self._given = None
        await self._keep(self._streaming.core.token(self._handle))

    async def done(self) -> None:
        """Acknowledge the last batch now: store its token, and move the durable cursor there.

        Raises the errors of the store, UnknownCursor, and ServiceUnavailable after `max_unavailable` seconds.
        """
        if self._given is not None and not self._closed:
            async with self._settling:
                await self._settle()
        if self._lease is not None:
            await self._lease.moved()

    async def close(self) -> None:
        """Close the stream. The last batch counts as not acknowledged, so its token is not stored."""
        if not self._closed:
            self._closed = True
            self._waiting.clear()
            self._something.set()
            self._streaming.close_stream(self._handle)
            if self._lease is not None:
                await self._lease.close()

    def statistics(self) -> ChangeStatistics:
        """Return the counters of the stream."""
        counts = self._counts
        token = self.token
        place = (0, 0, 0) if token is None else (token.seqno, token.snapshot_start, token.snapshot_end)
        return ChangeStatistics(
            *(counts["mutations"], counts["deletions"], counts["bytes"], counts["rollbacks"], counts["interruptions"]),
            *(*place, counts["stored"], self._high, max(self._high - place[0], 0)),
        )

    async def _open(self) -> None:
        """Open the stream at the first request; if that request times out, the next one opens it."""
        self._check()
        stored = None if self._store is None else await asyncio.to_thread(self._store.load, self.topic)
        if self._lease is not None:
            await self._lease.begin(self._from if stored is None else stored)
        if not self._closed:
            request = self._request if stored is None else self._request.resumed(stored)
            self._handle = self._streaming.open(request)
            self._streaming.add(self._handle, self)

    async def _settle(self) -> None:
        """Acknowledge the last batch or rollback."""
        given = self._given
        if isinstance(given, Rollback):
            await self.rolled_back(given.seqno)
        elif given is not None:
            await self._keep(given.token)
            self._given = None
            self._streaming.consumed(self._handle, len(given), given.bytes)

    async def _keep(self, token: ResumeToken | None) -> None:
        if token is not None:
            self.token = token
            if self._store is not None:
                await asyncio.to_thread(self._store.save, self.topic, str(token))
                self._counts["stored"] = token.seqno
            if self._lease is not None:
                self._lease.move(token)

    # Events of the connection

    def take(self, event: ClientEvent) -> None:
        match event:
            case Delivered(_, mutations, size, token):
                absent = mutations.messages.values.absent
                deletions = 0 if absent is None else int(absent.sum())
                self._counts.update(mutations=len(mutations), deletions=deletions, bytes=size)
                self._high = max(self._high, mutations.last)
                self._waiting.append(ChangeBatch(self.topic, mutations, token, bytes=size))
            case StreamOpened(_, token, high):
                self.problem = None
                self._moved(token, high)
            case Completed(_, token, high):
                self._moved(token, high)
            case RollBack(_, seqno, token):
                self._counts["rollbacks"] += 1
                self._high = 0
                self._waiting.append(Rollback(self.topic, seqno, token))
            case Interrupted(_, error, _):
                self._counts["interruptions"] += 1
                self.problem = error
            case StreamEnded():
                self._ended = event
            case CaughtUp() | EndConnection():
                pass  # `Completed` says the former, the connection handles the latter
        self._something.set()

    def report_unavailable(self, error: Error | None) -> None:
        """Raise an error in the calls that wait; None: raise none any more."""
        self._unavailable_error = error
        self._something.set()

    def _moved(self, token: ResumeToken, high: int) -> None:
        """Move the token; `high` is the seqno of the newest mutation at that time."""
        self._high = max(self._high, high)
        caught_up = token.complete and token.seqno >= high
        last = self._waiting[-1] if self._waiting else None
        if isinstance(last, ChangeBatch):
            self._waiting[-1] = replace(last, token=token, complete=token.complete, caught_up=caught_up)
        else:
            self._waiting.append(ChangeBatch(self.topic, NOTHING, token, token.complete, caught_up))
