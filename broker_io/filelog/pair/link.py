"""A link of a pair: a gRPC call, its outbox, and what arrives over it

Frames wait in the order in which they are sent. gRPC's thread for a call takes the next one when the connection has
room, so a copy is read as fast as the peer writes it. A thread of each link reports what arrives, and takes the next
frame after that, so a node that stores slowly slows its peer down.

Frames that show that a node is there are sent when nothing else is. A link over which nothing arrives for a while,
although the node waits for it, is broken by the transport.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from broker_io.environment import Environment, ThreadQueue
from broker_io.errors import Error
from broker_io.filelog.pair.link_frames import LATER, CopyEnd, decode_frame, encode_frames, size_of
from broker_io.filelog.pair.port import CopyChunk, LinkEvents, PairLink, StoreCopy
from broker_io.filelog.replication.messages import CopyBegin, Message

OUTBOX_BYTES = 512 * 1024 * 1024
"""What may wait to be sent before the link is broken: far more than a primary sends before it hears of its backup."""


@dataclass
class _CopyToSend:
    """A copy that waits to be sent, or is being sent."""

    copy: StoreCopy
    closed: bool = False


class GrpcLink(PairLink):
    """A call as a link; `cancel` ends it, from any thread and at once."""

    def __init__(self, number: int, idle_timeout: float, environment: Environment) -> None:
        threads = environment.threads
        self.cancel: Callable[[], object] = lambda: None
        self.takes: frozenset[str] = frozenset()
        """Which messages of `LATER` the other member takes; no others of them are sent."""
        self.reason = ""
        """Why it ended; empty while it is there, and after `close`."""
        self._number = number
        self._pause = idle_timeout / 5
        self._monotonic = environment.clock.monotonic
        self._start_thread = threads.thread
        self._mutex = threads.lock()
        self._copying = threads.lock()
        self._outbox: ThreadQueue[Message | _CopyToSend | None] = threads.queue()
        self._waiting_bytes = 0
        self._copies: list[_CopyToSend] = []
        self._closed = False
        self._finished = False
        self._waits_since: float | None = None

    @property
    def number(self) -> int:
        return self._number

    def send(self, message: Message) -> None:
        if (later := LATER.get(type(message))) is not None and later not in self.takes:
            return
        with self._mutex:
            self._waiting_bytes += size_of(message)
            full = self._waiting_bytes > OUTBOX_BYTES
        if full:
            self.fail(f"the other member took nothing while {OUTBOX_BYTES >> 20} MiB waited to be sent")
        elif not self._closed:
            self._outbox.put(message)

    def send_copy(self, begin: CopyBegin, copy: StoreCopy) -> None:
        self.send(begin)
        sending = _CopyToSend(copy)
        with self._mutex:
            self._copies.append(sending)
            finished = self._finished
        self._outbox.put(sending)
        if finished:
            self._start_thread(self._close_copies, name="pair copy", daemon=True).start()

    def close(self) -> None:
        self._closed = True
        self._outbox.put(None)
        self.cancel()

    def fail(self, reason: str) -> None:
        """Break the link."""
        with self._mutex:
            if not self._closed:
                self.reason = self.reason or reason
        self.close()

    def idle_for(self, now: float) -> float:
        """Seconds for which this node has waited for a frame."""
        since = self._waits_since
        return 0.0 if since is None else now - since

    # --- what is sent: in gRPC's thread

    def frames(self) -> Iterator[bytes]:
        """The frames to send, until the link ends."""
        while not self._closed:
            try:
                item = self._outbox.get(timeout=self._pause)
            except queue.Empty:
                yield from encode_frames(None)
                continue
            if item is None:
                return
            if isinstance(item, _CopyToSend):
                yield from self._copy_frames(item)
            else:
                yield from encode_frames(item)
                with self._mutex:
                    self._waiting_bytes -= size_of(item)

    def _copy_frames(self, sending: _CopyToSend) -> Iterator[bytes]:
        chunks = iter(sending.copy)
        while True:
            try:
                with self._copying:
                    chunk = None if self._closed or sending.closed else next(chunks, None)
            except Error as error:
                self.fail(f"the copy could not be read: {error}")
                return
            if chunk is None:
                break
            yield from encode_frames(chunk)
        if not self._closed:
            yield from encode_frames(CopyEnd())
        self._close_copy(sending)

    def _close_copy(self, sending: _CopyToSend) -> None:
        with self._copying:
            closed, sending.closed = sending.closed, True
        if not closed:
            sending.copy.close()

    def _close_copies(self) -> None:
        for sending in self._copies:
            self._close_copy(sending)

    # --- what arrives: in the thread of the link

    def run(self, frames: Iterator[bytes], events: LinkEvents) -> None:
        """Report the link, what arrives until it ends, and its end."""
        import grpc

        try:
            events.up(self)
            for data in self._arriving(frames):
                self._report(data, events)
        except grpc.RpcError as error:
            call: Any = error
            details = call.details() if isinstance(call, grpc.Call) else ""
            self.fail(f"the connection was lost ({details or 'it ended'})")
        except Error as error:
            self.fail(str(error))
        finally:
            self.fail("the other member has ended the link")
            with self._mutex:
                self._finished = True
            self._close_copies()
            events.down(self._number, self.reason)

    def _arriving(self, frames: Iterator[bytes]) -> Iterator[bytes]:
        while not self._closed:
            self._waits_since = self._monotonic()
            data = next(frames, None)
            self._waits_since = None
            if data is None:
                return
            yield data

    def _report(self, data: bytes, events: LinkEvents) -> None:
        frame = decode_frame(data)
        if self._closed or frame is None:
            return
        if isinstance(frame, CopyChunk):
            events.copy_chunk(self._number, frame)
        elif isinstance(frame, CopyEnd):
            events.copy_end(self._number)
        else:
            events.received(self._number, frame)
