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
from txnbuffer.streams.messages import (
    CaughtUp,
    ClientEvent,
    Completed,
    Delivered,
    EndConnection,
    Interrupted,
    RollbackReceived,
    StreamEnded,
    StreamOpened,
)
from txnbuffer.streams.token import ResumeToken

NOTHING = MutationBatch.of([])


@dataclass(frozen=True, slots=True)
class ChangeBatch:
    """Mutations to apply in order; iterate it for single mutations. It is empty if only the token has changed.

    A mutation without a value deletes its key.

    - `token`: a stream from this token continues after the batch. Store it together with the result of the mutations.
    - `complete`: after this batch your data equals the topic at `token.seqno`. Otherwise the next batches may replace
      keys whose older values were not delivered.
    - `caught_up`: the batch is complete, and the topic had no newer mutation.
    - `bytes`: the size of the mutations.
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
    """Counters of a stream, since its creation.

    - `mutations`, `deletions`, `bytes`: delivered mutations, those of them without a value, and their size.
    - `rollbacks`, `interruptions`: delivered rollbacks, and how many times the connection was lost or the stream ended.
    - `seqno`, `snapshot_start`, `snapshot_end`: of the token of the last batch.
    - `stored_seqno`: of the last token that was saved in the store.
    - `high_seqno`: the newest mutation that the service has reported.
    - `lag`: `high_seqno - seqno`, at least 0.
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
    """The history of the topic branched: undo all changes after `seqno`.

    Requesting the next batch confirms that this was done. If your data can only be restored as of a lower seqno at
    which it was complete, or is rebuilt from nothing (0), call `ChangeStream.rolled_back` with that seqno instead.
    """

    topic: str
    seqno: int
    token: ResumeToken


class ChangeStream(ClosedOnExit):
    """A stream of changes, created by `Client.stream`; iterate it with `async for`.

    Requesting the next batch acknowledges the previous one. After a connection is lost, the stream continues over a new
    one. `problem`: the error of the current interruption, or None. `token`: the token of the last batch. `caught_up`:
    the topic had no newer mutation than the last batch.
    """

    def __init__(
        self,
        session: StreamSession,
        topic: str,
        from_: str | ResumeToken,
        to: int | str | None,
        store: TokenStore | None,
        lease: CursorLease | None = None,
    ) -> None:
        """The stream opens when its first batch is requested. `lease`: the durable cursor that moves with it."""
        self.topic = topic
        self.caught_up = False
        self.problem: Error | None = None
        self.token: ResumeToken | None = None
        self._session = session
        self._store = store
        self._request = StreamParameters.of(topic, from_, to)
        self._lease = lease
        self._from = from_
        self._counts: Counter[str] = Counter()
        self._high = 0
        self._handle = 0
        self._waiting: deque[ChangeBatch | Rollback] = deque()
        self._delivered: ChangeBatch | Rollback | None = None
        self._ended: StreamEnded | None = None
        self._unavailable_error: Error | None = None
        self._closed = False
        self._something = asyncio.Event()
        self._next_lock, self._settle_lock = asyncio.Lock(), asyncio.Lock()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> ChangeBatch | Rollback:
        """Return the next batch or rollback. Raises the error that ended the stream.

        Raises ServiceUnavailable after `max_unavailable` seconds without a connection; the next call continues the
        stream.
        """
        item = await self.next()
        if item is None:
            raise StopAsyncIteration
        return item

    async def next(self, timeout: float | None = None) -> ChangeBatch | Rollback | None:
        """Return the next batch or rollback; None at the end. Raises TimeoutError after `timeout` seconds.

        Raises the error that ended the stream, and ServiceUnavailable after `max_unavailable` seconds without a
        connection; the next call continues the stream. Concurrent calls run one after the other.
        """
        deadline = None if timeout is None else asyncio.get_running_loop().time() + timeout
        async with asyncio.timeout_at(deadline):
            await self._next_lock.acquire()
        try:
            return await self._next(deadline)
        finally:
            self._next_lock.release()

    async def _next(self, deadline: float | None) -> ChangeBatch | Rollback | None:
        if not self._handle and not self._closed:
            async with asyncio.timeout_at(deadline):
                await self._open()
        async with self._settle_lock:
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
        self._delivered = item = self._waiting.popleft()
        self.caught_up = isinstance(item, ChangeBatch) and item.caught_up
        self.token = item.token
        return item

    def _check(self) -> None:
        if self._session.broken is not None:
            raise self._session.broken

    async def rolled_back(self, seqno: int) -> None:
        """Confirm the last rollback: the data is now that of `seqno`, at which it was complete.

        `seqno` is at most that of the rollback. Raises InvalidRequest if no rollback was delivered.
        """
        self._session.rolled_back(self._handle, seqno)
        self._delivered = None
        await self._store_token(self._session.core.token(self._handle))

    async def done(self) -> None:
        """Acknowledge the last batch now: store its token, and move the durable cursor there.

        Raises the errors of the store, UnknownCursor, and ServiceUnavailable after `max_unavailable` seconds.
        """
        if self._delivered is not None and not self._closed:
            async with self._settle_lock:
                await self._settle()
        if self._lease is not None:
            await self._lease.moved()

    async def close(self) -> None:
        """Close the stream. The last batch is not acknowledged, so its token is not stored."""
        if not self._closed:
            self._closed = True
            self._waiting.clear()
            self._something.set()
            self._session.close_stream(self._handle)
            if self._lease is not None:
                await self._lease.close()

    def statistics(self) -> ChangeStatistics:
        """Return the counters of the stream."""
        counts = self._counts
        token = self.token
        at = (0, 0, 0) if token is None else (token.seqno, token.snapshot_start, token.snapshot_end)
        return ChangeStatistics(
            *(counts["mutations"], counts["deletions"], counts["bytes"], counts["rollbacks"], counts["interruptions"]),
            *(*at, counts["stored"], self._high, max(self._high - at[0], 0)),
        )

    async def _open(self) -> None:
        """Open the stream, starting from the stored token if there is one."""
        self._check()
        stored = None if self._store is None else await asyncio.to_thread(self._store.load, self.topic)
        if self._lease is not None:
            await self._lease.begin(self._from if stored is None else stored)
        if not self._closed:
            request = self._request if stored is None else self._request.resumed(stored)
            self._handle = self._session.open(request)
            self._session.add(self._handle, self)

    async def _settle(self) -> None:
        """Acknowledge the last batch or rollback."""
        delivered = self._delivered
        if isinstance(delivered, Rollback):
            await self.rolled_back(delivered.seqno)
        elif delivered is not None:
            await self._store_token(delivered.token)
            self._delivered = None
            self._session.consumed(self._handle, len(delivered), delivered.bytes)

    async def _store_token(self, token: ResumeToken | None) -> None:
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
            case RollbackReceived(_, seqno, token):
                self._counts["rollbacks"] += 1
                self._high = 0
                self._waiting.append(Rollback(self.topic, seqno, token))
            case Interrupted(_, error, _):
                self._counts["interruptions"] += 1
                self.problem = error
            case StreamEnded():
                self._ended = event
            case CaughtUp() | EndConnection():
                pass  # `Completed` reports the first as well; the session handles the second
        self._something.set()

    def report_unavailable(self, error: Error | None) -> None:
        """Raise this error in the calls that wait; None: the service is available again."""
        self._unavailable_error = error
        self._something.set()

    def _moved(self, token: ResumeToken, high: int) -> None:
        """Deliver a new token, with the last batch if that still waits. `high`: the seqno of the newest mutation."""
        self._high = max(self._high, high)
        caught_up = token.complete and token.seqno >= high
        last = self._waiting[-1] if self._waiting else None
        if isinstance(last, ChangeBatch):
            self._waiting[-1] = replace(last, token=token, complete=token.complete, caught_up=caught_up)
        else:
            self._waiting.append(ChangeBatch(self.topic, NOTHING, token, token.complete, caught_up))
