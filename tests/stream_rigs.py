"""One side of change streams, for tests that play the other side."""

from __future__ import annotations

from broker_io.position import Position
from txnbuffer.mutations.batch import Mutation, MutationBatch
from txnbuffer.streams.client import ClientConfig, StreamClient
from txnbuffer.streams.failover import FailoverLog, ResumeToken, Version
from txnbuffer.streams.messages import (
    NO_END,
    ClientEvent,
    ClientMessage,
    FindTopic,
    Grant,
    Ok,
    RequestFlag,
    ServerEffect,
    ServerMessage,
    StreamHello,
    StreamRequest,
)
from txnbuffer.streams.server import ServerConfig, StreamServer, TopicInfo

W = Version(0x10, 0)
LOG = FailoverLog((W,))
PLENTY = (1000, 1_000_000)


def facts(high: int = 300, log: FailoverLog = LOG, **more: object) -> TopicInfo:
    return TopicInfo("c-1", "i-1", log, high, **more)  # type: ignore[arg-type]  # fields that a test adds


def request(stream: int = 1, start: int = 0, **more: object) -> StreamRequest:
    fields = {"topic": "t", "end": NO_END, "versions": (W,) if start else (), "snapshot_start": start}
    return StreamRequest(stream=stream, start=start, **{**fields, "snapshot_end": start, **more})  # type: ignore[arg-type]  # as above


def rows(*seqnos: int, size: int = 3) -> MutationBatch:
    return MutationBatch.of([Mutation(seqno, Position(1, seqno), b"k%d" % seqno, bytes(size)) for seqno in seqnos])


class ServerRig:
    """A server whose client sent hello at 0 s; noops are 10 s apart."""

    def __init__(self, config: ServerConfig | None = None, name: str = "") -> None:
        self.server = StreamServer(config or ServerConfig(), 0.0)
        self.say(StreamHello(name, 10.0))

    def say(self, *messages: ClientMessage, now: float = 0.0) -> None:
        self.server.receive(messages, now)

    def heard(self, now: float = 0.0, max_bytes: int = 10**9) -> list[ServerMessage]:
        return list(self.server.take_frame(max_bytes, now))

    def effects(self) -> list[ServerEffect]:
        return self.server.take_effects()

    def open(self, asked: StreamRequest, known: TopicInfo, granted: tuple[int, int] = PLENTY) -> list[ServerMessage]:
        """Open a stream; the messages of the server."""
        self.say(asked, Grant(asked.stream, *granted))
        if FindTopic(asked.stream, asked.topic) in self.effects():
            self.server.topic_found(asked.stream, known, 0.0)
        return self.heard()

    def snapshot(self, stream: int, start: int, end: int, *seqnos: int, ends: bool = True) -> list[ServerMessage]:
        """Pass a snapshot of the cursor; the messages of the server."""
        self.server.snapshot_begins(stream, start, end)
        if seqnos:
            self.server.mutations(stream, rows(*seqnos), 0.0)
        if ends:
            self.server.snapshot_ends(stream)
        return self.heard()


class ClientRig:
    """A connected client with one open stream of topic `t`: stream 1."""

    def __init__(
        self,
        token: ResumeToken | None = None,
        *,
        end: int = NO_END,
        flags: RequestFlag = RequestFlag.NONE,
        reopen: bool = True,
        config: ClientConfig | None = None,
    ) -> None:
        self.client = StreamClient(config or ClientConfig())
        self.handle = self.client.open(token or ResumeToken("t"), 0.0, end=end, flags=flags, reopen=reopen)
        self.client.connected(0.0)
        self.first = self.said()

    def said(self) -> list[ClientMessage]:
        return list(self.client.take_frame())

    def tell(self, *messages: ServerMessage, now: float = 0.0) -> list[ClientEvent]:
        """Pass messages of the server; the events of the client."""
        self.client.receive(messages, now)
        return self.client.take_events()

    def ok(self, start: int = 0, high: int = 300, *, end: int = NO_END, **more: object) -> list[ClientEvent]:
        """Open stream 1 from `start` on; the events of the client."""
        bounds = (start, start)
        fields: dict[str, object] = {"snapshot_start": bounds[0], "snapshot_end": bounds[1], "purge_seqno": 0, **more}
        stream = self.client._last_stream
        return self.tell(
            Ok(
                stream=stream,
                log=LOG,
                start=start,
                end=end,
                high_seqno=high,
                cluster="c-1",
                incarnation="i-1",
                **fields,
            )  # type: ignore[arg-type]  # fields that a test changes
        )
