"""One connection of change streams as the service sees it: what cursors give goes out when the client takes it.

Nothing is taken from a cursor before the frame before went out, so a connection holds about a frame.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import Protocol

from broker_io.errors import Error
from txnbuffer.errors import MutationsTrimmed
from txnbuffer.mutations import Cursor
from txnbuffer.service.limits import MIB
from txnbuffer.service.streaming.feed import Feed
from txnbuffer.streams.effects import CloseCursor, FindTopic, HangUp, OpenCursor, Wanted
from txnbuffer.streams.messages import ClientMessage, EndReason, ServerMessage
from txnbuffer.streams.requests import TopicFacts
from txnbuffer.streams.server import ServerConfig, StreamServer

FRAME_BYTES = MIB
TURN_ITEMS = 16_384
LEAST_TURN_BYTES = 64 * 1024


class Feeds(Protocol):
    """What a connection needs of the service's streams."""

    @property
    def feeds(self) -> Mapping[str, Feed]: ...

    def now(self) -> float: ...

    def named(self, connection: StreamConnection) -> None: ...

    def gone(self, connection: StreamConnection) -> None: ...

    def find(self, connection: StreamConnection, stream: int, name: str) -> None: ...

    def take_hold(self, feed: Feed, cursor: str, connection: StreamConnection) -> None: ...

    def let_go(self, feed: Feed, cursor: Cursor) -> None: ...

    def settle(self, feed: Feed) -> None: ...


class StreamConnection:
    """Made by `Streams.connect`. Call `receive` for each frame of the client; `next` gives the frames to send.

    `ended` is set once nothing but the last words is left to send.
    """

    def __init__(self, streams: Feeds, number: int, peer: str, config: ServerConfig) -> None:
        self.peer = peer
        self.server = StreamServer(config, streams.now())
        self.ended = asyncio.Event()
        self._streams = streams
        self._number = number
        self._cursors: dict[int, tuple[Feed, Cursor]] = {}
        self._something = asyncio.Event()

    # For whoever carries the frames

    def receive(self, messages: Iterable[ClientMessage]) -> None:
        """A frame of the client; what comes after the end is dropped."""
        self.server.receive(messages, self._streams.now())
        self._streams.named(self)
        self.settle()

    async def next(self) -> tuple[ServerMessage, ...] | None:
        """The next frame to send; None: there will be none, end the connection."""
        while True:
            if frame := self.server.take_frame(FRAME_BYTES, self._streams.now()):
                return frame
            if self.server.closed:
                return None
            self._something.clear()
            if not self._pump():
                await self._something.wait()

    def lost(self) -> None:
        """The client went away."""
        self.server.disconnected()
        self.settle()

    # For the streams of the service

    def found(self, stream: int, facts: TopicFacts) -> None:
        self.server.topic_found(stream, facts, self._streams.now())
        self.settle()

    def refused(self, stream: int, error: Error) -> None:
        self.server.topic_refused(stream, error)
        self.settle()

    def advanced(self, feed: Feed) -> None:
        """A topic has more mutations."""
        self.server.advanced(feed.name, feed.manager.high, self._streams.now())

    def tick(self) -> None:
        self.server.tick(self._streams.now())
        self.settle()

    def close(self, error: Error) -> None:
        """Say why, and end."""
        self.server.hang_up(error)
        self.settle()

    def wake(self) -> None:
        """There may be something to send."""
        self._something.set()

    def settle(self) -> None:
        """Do what the server asks for."""
        touched: dict[Feed, None] = {}
        while effects := self.server.take_effects():
            for effect in effects:
                match effect:
                    case FindTopic(stream, topic):
                        self._streams.find(self, stream, topic)
                    case OpenCursor():
                        self._open(effect)
                    case CloseCursor(stream):
                        held = self._cursors.pop(stream, None)
                        if held is not None:
                            self._streams.let_go(*held)
                            touched[held[0]] = None
                    case HangUp():
                        pass  # `next` tells once all is sent
        if self.server.closed:
            self.ended.set()
            self._streams.gone(self)
        for feed in touched:
            self._streams.settle(feed)
        self._something.set()

    def _open(self, asked: OpenCursor) -> None:
        feed = self._streams.feeds[asked.topic]
        last = asked.end if asked.end <= feed.manager.high else None
        name = f"{self._number}.{asked.stream}"
        try:
            cursor = feed.manager.register(name, asked.start, end=last, snapshot_end=asked.floor)
        except Error as error:
            self.server.end(asked.stream, _reason(error))
            return
        self._cursors[asked.stream] = feed, cursor
        self._streams.take_hold(feed, name, self)

    def _pump(self) -> bool:
        """Take from cursors what streams may have now, about a frame; whether there was anything."""
        wanted = [one for one in self.server.wanted() if one.stream in self._cursors]
        share = max(FRAME_BYTES // max(len(wanted), 1), LEAST_TURN_BYTES)
        given = 0
        for one in wanted:
            if given >= FRAME_BYTES:
                break
            if one.stream in self._cursors:  # it may have ended with what another one caused
                feed, cursor = self._cursors[one.stream]
                given += self._give(one, feed, cursor, share)
                self._streams.settle(feed)
        return given > 0

    def _give(self, wanted: Wanted, feed: Feed, cursor: Cursor, share: int) -> int:
        """About how many bytes there are to send now."""
        server, stream = self.server, wanted.stream
        disk = cursor.backfill is not None
        try:
            slices = cursor.take(min(wanted.items, TURN_ITEMS), min(wanted.bytes, share))
        except Error as error:
            server.end(stream, _reason(error))
            self.settle()
            return 1
        now, given = self._streams.now(), 0
        for start, end, begins, ends, rows in slices:
            if begins:
                server.snapshot_begins(stream, start, end, disk=disk)
            server.mutations(stream, rows, now)
            given += 1 + rows.payload()
            if ends:
                server.snapshot_ends(stream)
        if slices:
            self.settle()
        elif feed.problem is not None and not cursor.has_next():
            server.end(stream, EndReason.BACKFILL_FAILED)
            self.settle()
        return given


def _reason(error: Error) -> EndReason:
    return EndReason.TRIMMED if isinstance(error, MutationsTrimmed) else EndReason.BACKFILL_FAILED
