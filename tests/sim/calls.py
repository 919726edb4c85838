"""The calls of a client that the service answers, and its sessions: how long each took, and which have no answer yet.

A session that closes, too, waits for the service only for some seconds. And the outcome of a commit is unknown only if
it was sent.

Each is recorded by wrapping the method for as long as a world runs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar
from unittest import mock

from sim.world import Process, World

from broker_io.pulsar.admin import CALL_SECONDS
from txnbuffer.client.client import Client
from txnbuffer.client.session.session import ClientSession
from txnbuffer.client.transaction import Transaction
from txnbuffer.errors import OutcomeUnknown
from txnbuffer.model import TxnId
from txnbuffer.rpc.frames import ClientFrame

ANSWERED = (
    (Client, "outcome"),
    (Client, "committed_number"),
    (Client, "send"),
    (Transaction, "send"),
    (Transaction, "abort"),
)
"""Methods that wait for the service only, and not for other transactions."""
ANSWER_SECONDS = 20.0
"""Virtual seconds within which each call has an answer when nothing is wrong any more, and somebody has taken over.

A session that opens, or that has lost its connection, is welcomed in this time, too. Without a welcome, a call fails
after `max_unavailable`, which may be shorter, and the next one waits again.
"""
CLUSTER_ANSWER_SECONDS = CALL_SECONDS + 5.0
"""The same on a cluster: a request to its admin interface that a partition of the network has lost is sent again after
CALL_SECONDS, and a commit on a new topic waits for it."""
CLOSE_SECONDS = 7.0
"""Virtual seconds within which a session is closed, whatever the service does: 5 s of a clock that may be slow."""


@dataclass(slots=True, eq=False)
class Wait:
    """A time in which a process waited for what the service gives. `ended` is None while it waits."""

    awaited: ClassVar[str]
    process: Process
    began: float
    ended: float | None = field(default=None, init=False)


@dataclass(slots=True, eq=False)
class Call(Wait):
    """A call without an answer."""

    awaited = "answer"
    name: str

    def __str__(self) -> str:
        return self.name


@dataclass(slots=True, eq=False)
class Unwelcomed(Wait):
    """A session without a welcome."""

    awaited = "welcome"
    session: ClientSession

    def __str__(self) -> str:
        return f"session {self.session.core.session or 'without a name'}{self.session._of_shard()}"


class Calls:
    """The calls of all processes of a world, and the times in which their sessions were not welcomed."""

    def __init__(self, world: World, *, on_cluster: bool = False) -> None:
        self._world = world
        self._answer_seconds = CLUSTER_ANSWER_SECONDS if on_cluster else ANSWER_SECONDS
        self._calls: list[Call] = []
        self._unwelcomed: dict[ClientSession, Unwelcomed] = {}
        self._long_unwelcomed: list[Unwelcomed] = []
        self._commits_sent: set[tuple[Process, TxnId]] = set()

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """Record calls for a block."""
        with contextlib.ExitStack() as stack:
            for owner, name in ANSWERED:
                stack.enter_context(mock.patch.object(owner, name, self._wrapped(getattr(owner, name))))
            stack.enter_context(mock.patch.object(Transaction, "commit", self._commit(Transaction.commit)))
            wraps: dict[str, Callable[..., Any]] = {"_run": self._running, "_talk": self._talking}
            wraps |= {"_connected": self._welcomed, "take_frame": self._taking, "close": self._close}
            for name, wrap in wraps.items():
                stack.enter_context(mock.patch.object(ClientSession, name, wrap(getattr(ClientSession, name))))
            yield

    @property
    def _process(self) -> Process:
        thread = self._world.scheduler.current
        assert thread is not None
        return thread.process

    def _running(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """A session waits for a welcome from its beginning on, until it ends."""

        async def call(session: ClientSession, *arguments: Any) -> Any:
            self._lost(session)
            try:
                return await run(session, *arguments)
            finally:
                self._had_answer(session)

        return call

    def _talking(self, talk: Callable[..., Any]) -> Callable[..., Any]:
        """A session waits for a welcome from the loss of a connection on."""

        async def call(session: ClientSession, *arguments: Any) -> Any:
            try:
                return await talk(session, *arguments)
            finally:
                self._lost(session)

        return call

    def _welcomed(self, connected: Callable[..., Any]) -> Callable[..., Any]:
        def call(session: ClientSession) -> Any:
            self._had_answer(session)
            return connected(session)

        return call

    def _lost(self, session: ClientSession) -> None:
        if session not in self._unwelcomed:
            self._unwelcomed[session] = Unwelcomed(self._process, self._world.now, session)

    def _had_answer(self, session: ClientSession) -> None:
        found = self._unwelcomed.pop(session, None)
        if found is not None and self._world.now - found.began > self._answer_seconds:
            found.ended = self._world.now
            self._long_unwelcomed.append(found)

    def _wrapped(self, method: Callable[..., Any]) -> Callable[..., Any]:
        async def call(*arguments: Any, **named: Any) -> Any:
            found = Call(self._process, self._world.now, method.__qualname__)
            self._calls.append(found)
            try:
                return await method(*arguments, **named)
            finally:
                found.ended = self._world.now

        return call

    def _close(self, close: Callable[[ClientSession], Awaitable[None]]) -> Callable[[ClientSession], Awaitable[None]]:
        """A close that is checked at once: the process may end next. Nobody expects it of a process that is paused."""

        async def call(session: ClientSession) -> None:
            process, began = self._process, self._world.now
            await close(session)
            waited = self._world.now - max(began, process.resumed_at)
            if waited > CLOSE_SECONDS:
                self._world.fail(f"{process.name} waited {waited:.1f} s until its session was closed")

        return call

    def _commit(self, commit: Callable[..., Any]) -> Callable[..., Any]:
        """A commit that waits until it is visible waits for others, too."""
        answered = self._wrapped(commit)

        async def call(*arguments: Any, wait_visible: bool = False, **named: Any) -> Any:
            method = commit if wait_visible else answered
            try:
                return await method(*arguments, wait_visible=wait_visible, **named)
            except OutcomeUnknown as unknown:
                self._check_sent(arguments[0], unknown)
                raise

        return call

    def _taking(self, take: Callable[..., ClientFrame | None]) -> Callable[..., ClientFrame | None]:
        """Note the commits in a frame that is sent."""

        def call(session: ClientSession) -> ClientFrame | None:
            frame = take(session)
            if frame is not None:
                self._commits_sent.update((self._process, commit.txn) for commit in frame.commits)
            return frame

        return call

    def _check_sent(self, transaction: Transaction, unknown: OutcomeUnknown) -> None:
        """A commit that was not sent, and is not queued to be sent later, did not happen: its outcome is known."""
        unanswered = transaction._session.core.requests.unanswered.values()
        queued = any(request.field == "commits" and request.row.txn == unknown.txn for request in unanswered)
        if not queued and (self._process, unknown.txn) not in self._commits_sent:
            self._world.fail(f"the commit of {unknown.txn} was never sent, and {self._process.name} got {unknown!r}")

    def late(self, calm: float) -> Iterator[str]:
        """The calls and the sessions of processes that still run which waited too long after everything was calm."""
        for wait in (*self._calls, *self._long_unwelcomed, *self._unwelcomed.values()):
            if (seconds := self._too_long(wait, calm)) is not None:
                awaited = f"{'no' if wait.ended is None else 'its'} {wait.awaited}"
                yield f"{wait} of {wait.process.name} had {awaited} {seconds:.1f} s after everything was calm"

    def _too_long(self, wait: Wait, calm: float) -> float | None:
        """The seconds of a wait after everything was calm, if they are too many."""
        seconds = (self._world.now if wait.ended is None else wait.ended) - max(wait.began, calm)
        return seconds if seconds > self._answer_seconds and not wait.process.dead else None
