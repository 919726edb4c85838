"""The connection of a process to a log service: calls, and their failures as errors of the tree.

All work of gRPC is done in threads of the library, and its objects are dropped there. A signal handler runs in the main
thread: if it raised while gRPC has one of its Python locks there, gRPC would wait for that lock forever. So the calling
thread only waits for queues written in C.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import grpc

from broker_io.environment import ThreadQueue, current
from broker_io.errors import Closed, Error, ServiceUnavailable
from broker_io.remote.messages import SERVICE, parse
from broker_io.rpc.channel import LOG_KEY, Endpoint, LogIdentity, Metadata, error_of
from broker_io.rpc.log_pb2 import TopicRequest
from broker_io.waits import RetryPolicy, next_of

T = TypeVar("T")

CALL_SECONDS = 60.0
"""Timeout of a request."""


def taken(outcomes: ThreadQueue[T | BaseException], seconds: float = math.inf) -> T:
    """Wait for what another thread puts into a queue: a result, or an error to raise. Raises as `next_of`."""
    outcome = next_of(outcomes, seconds)
    if isinstance(outcome, BaseException):
        try:
            raise outcome
        finally:
            del outcome  # a cycle through the traceback would keep the frames of the caller
    return outcome


def alone(error: BaseException) -> BaseException:
    """Return an error without what refers to objects of gRPC, for another thread."""
    error.__context__ = None
    return error.with_traceback(None)


def _run_calls(calls: ThreadQueue[Any], idle: deque[ThreadQueue[Any]], _: object) -> None:
    """Make the calls of a queue, and put the queue among the idle ones after each. What is not a call ends this."""
    while _run_call(calls.get(), calls, idle):
        pass


def _run_call(call: Any, calls: ThreadQueue[Any], idle: deque[ThreadQueue[Any]]) -> bool:
    if not isinstance(call, tuple):
        return False
    work, outcomes = call
    try:
        outcome = work()
    except BaseException as error:
        outcome = alone(error)
    idle.append(calls)
    outcomes.put(outcome)
    return True


class RemoteConnection:
    """A connection to a service; `retry` repeats idempotent calls for up to `max_unavailable` seconds.

    `addresses`: where the service may be. A pair has two, of which one serves; after a failure calls go to the next.
    Each call has the identity of the log in `log`, which the first reply sets if it is not known before. So no call
    reaches the service of another log at the same address.
    """

    def __init__(self, addresses: Sequence[Endpoint], log: LogIdentity, max_unavailable: float) -> None:
        self.closed = False
        self._log = log
        self._max_unavailable = max_unavailable
        self._addresses = addresses
        self._targets = [(address.target, address.channel()) for address in addresses]
        self._used = 0
        self._calls: dict[tuple[int, str], Any] = {}
        self._idle: deque[ThreadQueue[Any]] = deque()

    @property
    def target(self) -> str:
        """HOST:PORT to which calls go now."""
        return self._targets[self._used][0]

    def check(self) -> None:
        if self.closed:
            raise Closed(f"the connection to {self.target} was closed in this process: open it again")

    def ask(self, method: str, kind: type[T], topic: str = "", number: int = 0, *, slow: bool = False) -> T:
        """The reply, of this kind, to one request. Raises the error of the service, or ServiceUnavailable."""
        self.check()
        request = TopicRequest(topic=topic, number=number).SerializeToString()
        with self._leaving_unavailable():
            return parse(kind, self.run(partial(self._answer, method, request, slow)))

    def run(self, work: Callable[[], T]) -> T:
        """Do work with gRPC in a thread of this connection; return the result or raise the error."""
        outcomes: ThreadQueue[T | BaseException] = current().threads.queue()
        try:
            calls = self._idle.pop()
        except IndexError:
            calls = self._new_thread()
        calls.put((work, outcomes))
        return taken(outcomes)

    def _new_thread(self) -> ThreadQueue[Any]:
        """The queue of a new thread for calls, which ends with this connection."""
        threads = current().threads
        calls: ThreadQueue[Any] = threads.queue()
        end = weakref.ref(self, calls.put)
        threads.thread(partial(_run_calls, calls, self._idle, end), name="calls of a log", daemon=True).start()
        return calls

    # In a thread of the library

    def _answer(self, method: str, request: bytes, slow: bool) -> bytes:
        used = self._used, method
        if used not in self._calls:
            self._calls[used] = self._targets[self._used][1].unary_unary(f"/{SERVICE}/{method}")
        timeout, metadata = None if slow else CALL_SECONDS, self._metadata()
        try:
            reply, call = self._calls[used].with_call(request, timeout=timeout, metadata=metadata)
        except grpc.RpcError as error:
            raise self.to_error(error) from None
        self._check_log(call)
        return bytes(reply)

    def stream(self, method: str, requests: Any) -> Any:
        """The answers of a stream; `cancel` ends it. Take the first one with `first`."""
        channel = self._targets[self._used][1]
        return channel.stream_stream(f"/{SERVICE}/{method}")(requests, metadata=self._metadata())

    def _metadata(self) -> Metadata:
        return (*self._log.known_metadata(), *self._addresses[self._used].metadata())

    def first(self, answers: Any) -> bytes:
        """The first answer of a stream. Raises as `next`, and ServiceUnavailable if the service has another log."""
        data: bytes = next(answers)
        self._check_log(answers)
        return data

    def _check_log(self, call: Any) -> None:
        served = dict(call.initial_metadata() or ()).get(LOG_KEY)
        if served is not None:  # a broker that is served by another program may have no identity
            self._log.check(self.target, served)

    # In any thread

    def retry(self, attempt: Callable[[], T]) -> T:
        def one() -> T:
            with self._leaving_unavailable():
                return attempt()

        policy = RetryPolicy(self._max_unavailable, self.check)
        return policy(f"the service at {','.join(target for target, _ in self._targets)}", one)

    @contextlib.contextmanager
    def _leaving_unavailable(self) -> Iterator[None]:
        """After ServiceUnavailable use the next address, unless another thread has left this one meanwhile."""
        used = self._used
        try:
            yield
        except ServiceUnavailable:
            if self._used == used:
                self._used = (used + 1) % len(self._targets)
            raise

    def to_error(self, error: Any) -> Error:
        """The error of the tree for a failed call.

        The call itself is the error of gRPC, and refers to itself by the traceback: without that it ends in this
        thread, and not in the one that collects garbage.
        """
        error.__traceback__ = None
        if self.closed:
            return Closed(f"the connection to {self.target} was closed in this process: open it again")
        return error_of(error, self.target)

    def close(self) -> None:
        self.closed = True
        self.run(lambda: [channel.close() for _, channel in self._targets])
        with contextlib.suppress(IndexError):
            while True:
                self._idle.pop().put(None)
