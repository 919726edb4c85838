"""Writers to a topic of a service."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from queue import Empty
from typing import Any

import grpc

from broker_io.batch import Batch
from broker_io.environment import ThreadQueue, current
from broker_io.errors import AppendUnknown, Closed, Error, InvalidMessage, ServiceUnavailable
from broker_io.port import Resource, check_batch, settle
from broker_io.position import Positions
from broker_io.remote import messages
from broker_io.remote.connection import RemoteConnection, alone, taken

MAX_PENDING_BYTES = 16 * 1024 * 1024
"""Bytes of appends without an answer; above this limit `append` blocks."""
FRAME_BYTES = 1024 * 1024
"""Approximate bytes of small appends that are sent together."""


class RemoteWriter(Resource):
    """Any thread may append. A broken connection ends it; pending appends may or may not be in the log."""

    def __init__(self, connection: RemoteConnection, topic: str, *, exclusive: bool, limits: tuple[int, int]) -> None:
        """`limits` are the maximum bytes of one message, and of one append as a block."""
        self._connection = connection
        self._topic = topic
        self._limits = limits
        threads = current().threads
        self._queue: ThreadQueue[bytes | None] = threads.queue()
        self._changed = threads.condition()
        self._pending: deque[tuple[Future[Positions], int, int]] = deque()
        self._pending_bytes = self._pending_messages = 0
        self._dead: Error | None = None
        self._queue.put(messages.encode_open_writer(topic, exclusive))
        opened: ThreadQueue[BaseException | None] = threads.queue()
        self._thread = threads.thread(lambda: self._exchange(opened), name=f"answers {topic}", daemon=True)
        try:
            self._thread.start()
            taken(opened)
        except BaseException:
            self._queue.put(None)
            raise

    def append(self, batch: Batch) -> Future[Positions]:
        max_message_bytes, max_append_bytes = self._limits
        check_batch(batch, max_message_bytes)
        block = messages.encode_append(batch) if len(batch) else b""
        if len(block) > max_append_bytes:
            raise InvalidMessage(
                f"the batch has {len(block)} bytes, more than this service's limit of {max_append_bytes}: split it; "
                "nothing of it was appended"
            )
        future: Future[Positions] = Future()
        with self._changed:
            self._changed.wait_for(lambda: self._dead or self._pending_bytes < MAX_PENDING_BYTES)
            dead = self._dead
            if dead is None and block:
                self._pending.append((future, len(block), len(batch)))
                self._pending_bytes += len(block)
                self._pending_messages += len(batch)
                self._queue.put(block)
        if dead is not None:
            future.set_exception(dead)
        elif not block:
            future.set_result(Positions.of([]))
        return future

    def close(self) -> None:
        with self._changed:
            self._die(Closed(f"this writer of topic {self._topic!r} is closed: open another one"))
        if not self._thread.is_current():
            self._thread.join()

    def _die(self, error: Error) -> None:
        """Accept no more appends; the caller holds the lock."""
        if self._dead is None:
            self._dead = error
            self._queue.put(None)
            self._changed.notify_all()

    def _frames(self) -> Iterator[bytes]:
        yield self._queue.get() or b""
        while (block := self._queue.get()) is not None:
            blocks, size = [block], len(block)
            ended = False
            while size < FRAME_BYTES:
                try:
                    more = self._queue.get_nowait()
                except Empty:
                    break
                if more is None:
                    ended = True
                    break
                blocks.append(more)
                size += len(more)
            yield messages.encode_appends(blocks)
            if ended:
                return

    def _exchange(self, opened: ThreadQueue[BaseException | None]) -> None:
        """Open the stream, say how that ended, and take the answers."""
        answers: Any = None
        try:
            answers = self._connection.stream("Append", self._frames())
            messages.decode_appended(self._connection.first(answers), 0)
        except grpc.RpcError as error:
            opened.put(alone(self._connection.to_error(error)))
        except StopIteration:
            opened.put(ServiceUnavailable(f"{self._connection.target} ended the stream of a writer"))
        except BaseException as error:  # also the service of another log
            if answers is not None:
                answers.cancel()
            opened.put(alone(error))
        else:
            opened.put(None)
            self._take_answers(answers)

    def _take_answers(self, answers: Any) -> None:
        try:
            for data in answers:
                for outcome in messages.decode_appended(data, self._pending_messages):
                    self._settle(outcome)
            self._fail("the service ended the stream")
        except grpc.RpcError as error:
            self._fail(str(self._connection.to_error(error)))
        except Exception as error:
            answers.cancel()
            self._fail(str(error))

    def _settle(self, outcome: messages.Outcome) -> None:
        with self._changed:
            future, size, count = self._pending.popleft()
            self._pending_bytes -= size
            self._pending_messages -= count
            self._changed.notify_all()
        settle(future, outcome)

    def _fail(self, why: str) -> None:
        with self._changed:
            self._die(ServiceUnavailable(f"this writer of topic {self._topic!r} has ended ({why}): open another one"))
            pending, self._pending_bytes = [*self._pending], 0
            self._pending.clear()
        unknown = (
            f"an append to topic {self._topic!r} was pending when the connection broke ({why}): it may or may not "
        )
        for future, _, _ in pending:
            settle(future, AppendUnknown(unknown + "be in the log; open another writer"))
