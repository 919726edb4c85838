"""Readers of a topic of a service."""

from __future__ import annotations

import queue
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeVar

import grpc

from broker_io.batch import PlacedBatch
from broker_io.environment import ThreadQueue, current
from broker_io.errors import Closed, Error, ServiceUnavailable
from broker_io.port import Resource
from broker_io.position import LATEST, Position
from broker_io.remote import messages
from broker_io.remote.connection import RemoteConnection, alone, taken
from broker_io.remote.messages import Answer, Ask, OpenReader

T = TypeVar("T")

LONGEST_ASK = 10.0
"""Seconds that one request waits at the service; a longer wait sends another."""
ANSWER_SECONDS = 10.0
"""Seconds after such a wait within which the answer must come: a service may hang, although its connection is alive."""


class RemoteReader(Resource):
    """Belongs to one thread at a time. It continues after the last message it returned, on another stream if need be:
    after a broken connection, or after a call that raised, also an exception of a signal handler.
    """

    def __init__(
        self, connection: RemoteConnection, topic: str, start: Position, *, inclusive: bool, compacted: bool
    ) -> None:
        self._monotonic = current().clock.monotonic
        self._connection = connection
        self._opening = OpenReader(topic, "", start, inclusive, compacted)
        self._stream: _Stream | None = None
        self._rest: PlacedBatch | None = None
        self._raised = False
        self._closed = False
        self._retry(lambda _: None)

    def read(self, *, limit: int = 65_536, timeout: float = 0.0) -> PlacedBatch | None:
        if self._raised:  # it may have taken messages that it did not return
            self._drop()
            self._rest = None
        self._raised = True
        batch = self._read(max(limit, 1), timeout)
        self._raised = False
        return batch

    def _read(self, limit: int, timeout: float) -> PlacedBatch | None:
        deadline = self._monotonic() + timeout
        while True:
            remaining = max(deadline - self._monotonic(), 0.0)
            if self._rest is None:
                wait = min(remaining, LONGEST_ASK)
                answer = self._retry(lambda stream, wait=wait: stream.ask(limit, wait))  # type: ignore[misc]  # mypy knows no default of a lambda
                if answer.error is not None:
                    raise answer.error
                self._rest = answer.batch
            if self._rest is not None:
                batch, self._rest = self._rest.split(limit)
                self._opening = self._opening._replace(start=batch.positions.last, inclusive=False)
                return batch
            if remaining <= 0:
                return None

    def close(self) -> None:
        self._closed = True
        self._drop()

    def _retry(self, use: Callable[[_Stream], T]) -> T:
        """Use the stream, and open another one if it broke."""

        def attempt() -> T:
            if self._closed:
                raise Closed(f"this reader of topic {self._opening.topic!r} is closed: open another one")
            try:
                return use(self._stream or self._open())
            except Error:
                self._drop()
                if self._closed:
                    raise Closed(f"this reader of topic {self._opening.topic!r} was closed") from None
                raise

        return self._connection.retry(attempt)

    def _open(self) -> _Stream:
        self._connection.check()
        self._stream = stream = _Stream(self._connection, self._opening)
        opened = messages.decode_opened(stream.next())
        self._opening = self._opening._replace(incarnation=opened.incarnation)
        if self._opening.start >= LATEST:
            self._opening = self._opening._replace(start=opened.after, inclusive=False)
        return stream

    def _drop(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()


class _Stream:
    """One stream of requests and answers, which ends with this object. If the service has more, the next request is
    sent ahead.
    """

    def __init__(self, connection: RemoteConnection, opening: OpenReader) -> None:
        threads = current().threads
        self._requests: ThreadQueue[object] = threads.queue()
        self._answers: ThreadQueue[bytes | BaseException] = threads.queue()
        self._connection = connection
        self._ahead = False
        self._requests.put(messages.encode_open_reader(opening))
        end = weakref.ref(self, self._requests.put)  # written in C: in `__del__` the exception of a handler is lost
        exchange = partial(_exchange, connection, self._requests, self._answers, end)
        threads.thread(exchange, name=f"answers {opening.topic}", daemon=True).start()

    def next(self, wait: float = 0.0) -> bytes:
        """The answer to a request that waits. Raises the error that ended the stream, or ServiceUnavailable."""
        try:
            return taken(self._answers, wait + ANSWER_SECONDS)
        except queue.Empty:
            raise ServiceUnavailable(
                f"{self._connection.target} answered no request of a reader for {ANSWER_SECONDS:g} s"
            ) from None

    def ask(self, limit: int, wait: float) -> Answer:
        if not self._ahead:
            self._requests.put(messages.encode_ask(Ask(limit, round(wait * 1000))))
        answer = messages.decode_answer(self.next(wait))
        if self._ahead and answer.batch is None and answer.error is None:
            self._ahead = False
            return self.ask(limit, wait)
        self._ahead = answer.more
        if answer.more:
            self._requests.put(messages.encode_ask(Ask(limit, 0)))
        return answer

    def close(self) -> None:
        self._requests.put(None)
        self._answers.put(Closed("the stream of a reader was closed"))


def _exchange(
    connection: RemoteConnection,
    requests: ThreadQueue[object],
    answers: ThreadQueue[bytes | BaseException],
    _: object,
) -> None:
    """Send the requests, and put the answers and then an error into their queue. What is not bytes ends the call."""
    calls: ThreadQueue[Any] = current().threads.queue()

    def sent() -> Iterator[bytes]:  # in a thread of gRPC
        while isinstance(request := requests.get(), bytes):
            yield request
        calls.get().cancel()

    error: BaseException
    try:
        call = connection.stream("Read", sent())
        calls.put(call)
        answers.put(connection.first(call))
        for data in call:
            answers.put(data)
        raise StopIteration
    except StopIteration:
        error = ServiceUnavailable(f"{connection.target} ended the stream of a reader")
    except grpc.RpcError as failed:
        error = connection.to_error(failed)
    except BaseException as failed:
        error = failed
    requests.put(None)
    answers.put(alone(error))
