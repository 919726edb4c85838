"""Calls of an asyncio client from threads without a loop: what the client and the transactions for `with` share."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, Self, TypeVar

from txnbuffer.client import forking
from txnbuffer.client.client import Client
from txnbuffer.client.loop_thread import LoopThread
from txnbuffer.errors import InvalidRequest

Result = TypeVar("Result")


class Portal:
    """Runs the calls of a client on the loop of a thread of its own. Any thread but that one may use it."""

    def __init__(self, client: Client, loop: LoopThread) -> None:
        self._client = client
        self._loop = loop
        self._forked_from = forking.generation()
        self._closed = False

    @classmethod
    def open(cls, opening: Callable[[], Coroutine[Any, Any, Client]]) -> Self:
        loop = LoopThread()
        try:
            return cls(loop.call(opening()), loop)
        except BaseException:
            loop.stop()
            raise

    @property
    def inherited(self) -> bool:
        """Whether this is a child of the process that connected, in which nothing can be closed."""
        return forking.inherited(self._forked_from)

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def close(self) -> None:
        """End the session; transactions that are open abort."""
        forking.check(self._forked_from)
        self._loop.check_other()
        if not self._closed:
            self._closed = True
            self._loop.cancel_started()
            self._loop.call(self._client.close())
            self._loop.stop()

    def call(self, function: Callable[..., Coroutine[Any, Any, Result]], *arguments: Any, **options: Any) -> Result:
        """Run a call of the asyncio client and wait. Raises UsedAfterFork, and InvalidRequest once it is closed."""
        self.check()
        return self._loop.call(function(*arguments, **options))

    def start(self, function: Callable[..., Coroutine[Any, Any, Result]], *arguments: Any) -> Future[Result]:
        """As `call`, without waiting: `close` cancels it if it has not ended."""
        self.check()
        return self._loop.start(function(*arguments))

    def check(self) -> None:
        """Raises UsedAfterFork, and InvalidRequest once it is closed."""
        forking.check(self._forked_from)
        if self._closed:
            raise InvalidRequest("the client was closed: connect again")

    @property
    def client(self) -> Client:
        """The asyncio client that does the work."""
        return self._client
