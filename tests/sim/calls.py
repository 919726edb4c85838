"""The calls of a client that the service answers: how long each took, and which have no answer yet.

Each is recorded by wrapping the method for as long as a world runs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

from sim.world import Process, World

from txnbuffer.client.client import Client
from txnbuffer.client.transaction import Transaction

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

A session is welcomed in this time, too: without a welcome, a call waits for `max_unavailable`, which may be longer.
"""


@dataclass(slots=True, eq=False)
class Call:
    """A call of a process. `ended` is None while it has no answer."""

    process: Process
    name: str
    began: float
    ended: float | None = None


class Calls:
    """The calls of all processes of a world."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._calls: list[Call] = []

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """Record calls for a block."""
        with contextlib.ExitStack() as stack:
            for owner, name in ANSWERED:
                stack.enter_context(mock.patch.object(owner, name, self._wrapped(getattr(owner, name))))
            stack.enter_context(mock.patch.object(Transaction, "commit", self._commit(Transaction.commit)))
            yield

    def _wrapped(self, method: Callable[..., Any]) -> Callable[..., Any]:
        async def call(*arguments: Any, **named: Any) -> Any:
            thread = self._world.scheduler.current
            assert thread is not None
            found = Call(thread.process, method.__qualname__, self._world.now)
            self._calls.append(found)
            try:
                return await method(*arguments, **named)
            finally:
                found.ended = self._world.now

        return call

    def _commit(self, commit: Callable[..., Any]) -> Callable[..., Any]:
        """A commit that waits until it is visible waits for others, too."""
        answered = self._wrapped(commit)

        async def call(*arguments: Any, wait_visible: bool = False, **named: Any) -> Any:
            method = commit if wait_visible else answered
            return await method(*arguments, wait_visible=wait_visible, **named)

        return call

    def late(self, calm: float) -> Iterator[str]:
        """The calls of processes that still run which waited too long for an answer after everything was calm."""
        for call in self._calls:
            ended = self._world.now if call.ended is None else call.ended
            waited = ended - max(call.began, calm)
            if waited > ANSWER_SECONDS and not call.process.dead:
                answer = "no answer" if call.ended is None else "its answer"
                yield f"{call.name} of {call.process.name} had {answer} {waited:.1f} s after everything was calm"
