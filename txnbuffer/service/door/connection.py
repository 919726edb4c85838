"""A client's connection in the engine: its unsettled sends, the frames to send to it, and the limits on both.

Everything that happens for a client within one turn of the loop is sent in one frame.

Beyond the limits on memory, on messages and on requests in flight clients have to wait. A client waits in
`client.session_core` while its credits are used up; the service stops reading from a client over its limit here. On a
cluster records do not pass through the service: `client.writers` has a constant.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from broker_io.port import MAX_MESSAGE_BYTES
from txnbuffer.access.limits import NO_LIMITS, PrincipalLimits
from txnbuffer.coordinator.messages import Result
from txnbuffer.errors import (
    Error,
    ForeignTransaction,
    InvalidRequest,
    NotAuthorized,
    OutcomeForgotten,
    TooManyTransactions,
    UnknownTransaction,
    UnregisteredTopic,
)
from txnbuffer.model import TxnId
from txnbuffer.rpc.frames import ClientFrame, Failure, ServerFrame, Welcome
from txnbuffer.service.door.access import EVERYTHING_ALLOWED, Permissions
from txnbuffer.service.door.quotas import MAX_HOLD, SMALLEST_CREDIT, ClientQuota

MIB = 1024 * 1024
CELL_BYTES = 8
"""Maximum memory of a record in a property column, even if it lacks the property."""

MISTAKES = (
    ForeignTransaction, InvalidRequest, NotAuthorized, OutcomeForgotten, TooManyTransactions, UnknownTransaction,
    UnregisteredTopic,
)  # fmt: skip
"""Answers to requests that a client should not have made."""
FREE_MISTAKES = 32
MISTAKE_SECONDS = 0.0005
"""How long a client is not read for each of its mistakes if there are more than FREE_MISTAKES at once. It costs the
service a small part of that."""
WAITING_ROWS = 1024
"""Rows of a client that may wait for a turn of the engine before it is not read any more."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes in bytes: unacknowledged records of one client and of all clients, and one message.

    `answers`: answers that one client has not read; beyond it the service stops reading from that client.
    `create_topics`: create topics on first use. `require_plug_in`: serve no clients while a broker lacks the plug-in.
    `principal`: limits of each principal, unless the policy differs.
    `overload`: the queue delay in seconds above which new work is refused; 0.0: none is.
    """

    client_bytes: int = 8 * MIB
    total_bytes: int = 256 * MIB
    max_message_bytes: int = MAX_MESSAGE_BYTES
    answers: int = 200_000
    create_topics: bool = True
    require_plug_in: bool = False
    principal: PrincipalLimits = NO_LIMITS
    overload: float = 0.0

    def credits(self, clients: int) -> int:
        """Bytes that each of `clients` clients may have unacknowledged."""
        return max(min(self.client_bytes, self.total_bytes // max(clients, 1)), SMALLEST_CREDIT)


Take = Callable[["SessionConnection", ClientFrame], None]


class SessionConnection:
    """Created by `Engine.connect`. For each frame call `room`, then `receive`; `next` returns the frames to send.

    A client on the same event loop does not wait: it reads `reads`, sets `notify`, and calls `take`.
    """

    def __init__(
        self,
        take: Take,
        disconnected: Callable[[SessionConnection], None],
        limits: Limits,
        peer: str,
        quota: ClientQuota,
        permissions: Permissions = EVERYTHING_ALLOWED,
        *,
        local: bool = False,
    ) -> None:
        self.peer = peer
        self.local = local
        """Whether the client is in this process, so that it is gone when the next owner begins."""
        self.quota = quota
        self.permissions = permissions
        self.filtered = permissions is not EVERYTHING_ALLOWED or quota.applies
        """Whether its requests need permissions, or count for a limit: not if there are no principals and limits."""
        self.session = ""
        self.welcomed = False
        self.closed = False
        self.unsettled = 0
        self.sends = 0
        self.frames: deque[tuple[ClientFrame, int]] = deque()
        """Frames that wait for a turn of the engine, with the number of their rows; `waiting_rows` is the sum."""
        self.waiting_rows = 0
        self._take = take
        self._disconnected = disconnected
        self._limits = limits
        self._acknowledged = self._reported = 0
        self._settled: set[int] = set()
        self._welcome: Welcome | None = None
        self._failures: list[Failure] = []
        self._answers: list[tuple[int, Result]] = []
        self._credits: int | None = None
        self._allowed = 0
        self._draining = False
        self._held = False
        self._held_until = 0.0
        self._closing_error: Error | None = None
        self._waiter: asyncio.Future[None] | None = None
        """What `next` waits for."""
        self.notify: Callable[[], None] = self._notify
        """Called when there may be a frame for the client, or it may be read from again."""
        self.reads = True
        """Whether the client is read from; `_room` is set then."""
        self._room = asyncio.Event()
        self._room.set()
        quota.last_send = self._last_send

    @property
    def settled(self) -> bool:
        """Whether all sends that were taken are durable, or have failed."""
        return self._acknowledged == self.sends

    @property
    def finished(self) -> bool:
        """Whether the last frame was handed over to the transport."""
        return self.closed and self._closing_error is None

    # For the transport

    def receive(self, frame: ClientFrame) -> None:
        """Handle a frame of the client; frames that arrive after the end are dropped."""
        if not self.closed:
            self._take(self, frame)
            if self.waiting_rows > WAITING_ROWS:
                self._let_read(False)

    async def room(self) -> None:
        """Wait until the client may send more; then read its next frame."""
        if not self.reads:
            await self._room.wait()

    async def next(self) -> ServerFrame | None:
        """Return the next frame to send; None once the connection has ended."""
        while (frame := self.take()) is None:
            if self.closed:
                return None
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return frame

    def lost(self) -> None:
        """The client disconnected."""
        if not self.closed:
            self.close()

    def recheck(self) -> None:
        """Raises NotAuthorized if the client has to authenticate again."""
        self.permissions.check_valid()

    # For the engine

    def welcome(self, welcome: Welcome, allowed: int) -> None:
        self.welcomed = True
        self._welcome, self._credits, self._allowed = welcome, allowed, allowed
        self.notify()

    def answer(self, answers: Sequence[tuple[int, Result]]) -> None:
        self._answers += answers
        mistakes = 0
        for _, result in answers:
            if isinstance(result, MISTAKES):
                mistakes += 1
                if type(result) is ForeignTransaction:
                    self.permissions.denied(result)
        if mistakes:
            self.mistaken(mistakes)
        self.notify()

    def settle(self, send: int, size: int) -> None:
        """A send is durable, or has failed and the failure is queued."""
        self.unsettled -= size
        settled = self._settled
        settled.add(send)
        while self._acknowledged + 1 in settled:
            self._acknowledged += 1
            settled.discard(self._acknowledged)
        self.notify()

    def fail(self, send: int, error: Error, txn: TxnId | None = None) -> None:
        """Report records of a send that were not appended; the caller settles the send."""
        self._failures.append(Failure(send, error, txn))
        if type(error) is ForeignTransaction:
            self.permissions.denied(error)

    def allow(self, allowed: int) -> None:
        if allowed != self._allowed:
            self._credits = self._allowed = allowed
            self.notify()

    def drain(self) -> None:
        self._draining = True
        self.notify()

    def limit_reading(self, full: bool) -> None:
        """Stop or resume reading, by the records in flight of all clients (`full`) and of this one."""
        much = self.unsettled > self._limits.client_bytes or len(self._answers) > self._limits.answers
        much = much or self.waiting_rows > WAITING_ROWS
        full = full or (self.filtered and self.quota.usage.too_many_bytes)
        if (full and self.unsettled) or much or self._held:
            if self.reads:
                self._let_read(False)
        elif not self.reads:
            self._let_read(True)

    def _let_read(self, reads: bool) -> None:
        self.reads = reads
        if reads:
            self._room.set()
            self.notify()
        else:
            self._room.clear()

    def _last_send(self) -> Callable[[], bool]:
        number = self.sends
        return lambda: self._acknowledged >= number

    def hold(self, seconds: float) -> None:
        """Do not read from the client for some time."""
        if not self._held:
            self._hold_until(asyncio.get_running_loop().time() + seconds)

    def mistaken(self, requests: int) -> None:
        """Read less from a client for requests that it should not have made: they cost as much as good ones."""
        if requests > FREE_MISTAKES:
            now = asyncio.get_running_loop().time()
            until = max(self._held_until, now) + requests * MISTAKE_SECONDS
            self._hold_until(min(until, now + MAX_HOLD))

    def _hold_until(self, when: float) -> None:
        self._held_until = when
        if not (self._held or self.closed):
            self._held = True
            self._let_read(False)
            asyncio.get_running_loop().call_at(when, self._release)

    def _release(self) -> None:
        loop = asyncio.get_running_loop()
        if loop.time() < self._held_until and not self.closed:
            loop.call_at(self._held_until, self._release)
            return
        self._held = False
        self._let_read(True)  # the next turn clears it again if another limit is reached

    def close(self, error: Error | None = None) -> None:
        """End the connection after all queued frames are sent; `error` tells the client why."""
        if not self.closed:
            self.closed = True
            self._closing_error = error
            self._let_read(True)
            self.notify()
            self._disconnected(self)

    def _notify(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def take(self) -> ServerFrame | None:
        """Return the next frame for the client; None if there is nothing to send."""
        closing, self._closing_error = self._closing_error, None
        reports = self._acknowledged > self._reported or self._credits is not None or self._draining
        if not (reports or self._answers or self._failures or self._welcome or closing):
            return None
        frame = ServerFrame(
            welcome=self._welcome,
            acknowledged=self._acknowledged,
            failures=tuple(self._failures),
            answers=tuple(self._answers),
            credits=self._credits,
            draining=self._draining,
            goodbye=closing,
            settled=closing is not None and self.settled,
        )
        self._reported = self._acknowledged
        self._welcome, self._credits = None, None
        self._failures, self._answers = [], []
        self._draining = False
        return frame
