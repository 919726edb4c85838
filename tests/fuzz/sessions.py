"""Targets: frames in any order and in any state, at a running service and at the cores of its clients.

An input is a sequence of frames, each after its length in two bytes. Frames that can't be decoded are what another
target tests; here they end the connection as the transport ends it.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from fuzz.stored import joined, parted
from fuzz.target import Target
from raw_session import stop, transactional
from service_setup import session_on
from stream_rigs import rows

from broker_io.batch import Batch, Message
from broker_io.memory import MemoryBroker
from broker_io.position import Position
from txnbuffer.client.path.record_path import EndPlan, ServicePath
from txnbuffer.client.path.send_columns import SendColumns
from txnbuffer.client.session.session_core import SessionCore
from txnbuffer.coordinator.messages import (
    Begin,
    Branch,
    Commit,
    ConsumerPosition,
    Done,
    GroupHeartbeat,
    Joined,
    Leased,
    MemberAssignments,
    NameOpened,
    PartitionAssignment,
    ProducerSequence,
    State,
)
from txnbuffer.errors import Error, StreamTrimmed, TransactionAborted
from txnbuffer.model import Outcome, TxnId
from txnbuffer.rpc.frames import (
    Abort,
    ClientFrame,
    Deletion,
    Failure,
    IdBlock,
    LeaseRequest,
    NamedRequest,
    Query,
    Send,
    ServerFrame,
    SessionHello,
    Welcome,
)
from txnbuffer.rpc.session_encoding import (
    decode_client_frame,
    decode_server_frame,
    encode_client_frame,
    encode_server_frame,
)
from txnbuffer.rpc.streams_encoding import (
    decode_stream_client_frame,
    decode_stream_server_frame,
    encode_stream_client_frame,
    encode_stream_server_frame,
)
from txnbuffer.service.engine.engine import Engine
from txnbuffer.streams.client import ClientConfig, StreamClient
from txnbuffer.streams.failover import MAX_SEQNO, FailoverLog, ResumeToken, Version
from txnbuffer.streams.messages import (
    CloseStream,
    Delivered,
    EndReason,
    Goodbye,
    Grant,
    Noop,
    NoopAnswer,
    Ok,
    Refused,
    RequestFlag,
    RollbackReceived,
    RollbackRequired,
    SnapshotBegin,
    SnapshotEnd,
    SnapshotFlag,
    StreamEnd,
    StreamHello,
    StreamMutations,
    StreamRequest,
)

TURNS = 8
"""Turns of the event loop after each frame."""
GROUP = GroupHeartbeat(7, "group", "me", ("orders",), ("orders",), (Position(1, -1),))


class Stopped(Exception):
    """The service stopped, or no longer serves another session."""


# --- the service ---


async def _serve(frames: Sequence[bytes], *, stream: bool) -> None:
    """Send frames to a new service, then check that it still serves the session of another client."""
    engine = await Engine.start(MemoryBroker())
    try:
        other, ids = await session_on(engine, "orders", ids=10)
        await _commit(other, ids[0])
        connection: Any = engine.streams.connect("fuzz") if stream else engine.connect("fuzz")
        decode: Any = decode_stream_client_frame if stream else decode_client_frame
        answers = asyncio.ensure_future(_answers(connection, stream=stream))
        for data in frames:
            with suppress(Error):
                try:
                    connection.receive(decode(data))
                except Error as error:
                    connection.close(error)
                    raise
            for _ in range(TURNS):
                await asyncio.sleep(0)
        await _commit(other, ids[1])
        connection.lost()
        await asyncio.wait_for(answers, 10)
        if engine.ended.done():
            raise Stopped(f"the service stopped: {engine.ended.result()}")
    finally:
        await stop(engine)


async def _commit(session: Any, least: int) -> None:
    await session.write(("orders", transactional([least])))
    if (answer := await session.commit(least, ["orders"], [1])) is not Outcome.COMMIT:
        raise Stopped(f"another session is affected: {answer!r}")


async def _answers(connection: Any, *, stream: bool) -> None:
    """Encode the answers as the transport does."""
    encode: Any = encode_stream_server_frame if stream else encode_server_frame
    while (frame := await connection.next()) is not None:
        encode(frame)


def _session(data: bytes) -> None:
    asyncio.run(asyncio.wait_for(_serve(parted(data), stream=False), 20))


def _streams(data: bytes) -> None:
    asyncio.run(asyncio.wait_for(_serve(parted(data), stream=True), 20))


def _session_frames() -> list[bytes]:
    """A client that uses every field of the protocol; the other session of `_serve` has leased the ids up to 10."""
    number = itertools.count(1)
    first, second, third = TxnId(0, 11), TxnId(0, 12), TxnId(0, 13)
    branch = (Branch(TxnId(0, 14), ("orders",), (0,)),)
    moved = (ConsumerPosition("group", "orders", 1, Position(1, -1), Position(1, 0)),)
    frames = [
        ClientFrame(hello=SessionHello("")),
        ClientFrame(registers=(NamedRequest(next(number), "orders"),), leases=(LeaseRequest(next(number), 10),)),
        ClientFrame(begins=(Begin(next(number), first, 5.0), Begin(next(number), second, None, first))),
        ClientFrame(sends=(Send("orders", transactional([11])), Send("plain", Batch.of([Message(b"k", b"v")])))),
        ClientFrame(commits=(Commit(next(number), first, ("orders",), (1,), True),)),
        ClientFrame(open_names=(NamedRequest(next(number), "job"),)),
        ClientFrame(begins=(Begin(next(number), third, None, None, ProducerSequence("job", 1, 1)),)),
        ClientFrame(
            commits=(Commit(next(number), third, (), (), False, ProducerSequence("job", 1, 1), branch, (second,)),)
        ),
        ClientFrame(joins=(NamedRequest(next(number), "group"),), members=(GROUP,)),
        ClientFrame(commits=(Commit(next(number), TxnId(0, 15), (), (), False, None, (), (), moved),)),
        ClientFrame(queries=(Query(next(number), first),), aborts=(Abort(next(number), TxnId(0, 16), ("orders",)),)),
        ClientFrame(delete_names=(Deletion(next(number), "job", 3),), returned=(IdBlock(18, 3),)),
        ClientFrame(bye=True),
    ]
    encoded = [*map(encode_client_frame, frames)]
    return [
        joined(encoded),
        joined([encoded[0], *encoded[:0:-1]]),
        joined(encoded[:5] + encoded[1:5]),
        joined(encoded[1:]),
    ]


def _stream_frames() -> list[bytes]:
    request = StreamRequest(1, "orders", 0, MAX_SEQNO, (), 0, 0, RequestFlag.NONE)
    frames: list[tuple[Any, ...]] = [
        (StreamHello("indexer", 20.0),),
        (request, Grant(1, 100, 100_000)),
        (request._replace(stream=2, flags=RequestFlag.FROM_NOW), Grant(2, 1, 1)),
        (request._replace(stream=3, start=1, end=1, versions=(Version(7, 0),), snapshot_end=1),),
        (request._replace(stream=4, topic="missing"), NoopAnswer()),
        (Grant(1, 200, 200_000), CloseStream(2)),
    ]
    encoded = [*map(encode_stream_client_frame, frames)]
    return [joined(encoded), joined([encoded[0], *encoded[:0:-1]]), joined(encoded[1:])]


# --- the cores of clients ---


def _client(data: bytes) -> None:
    """A client with transactions in every state receives frames of a service."""
    core = SessionCore(ServicePath())
    core.hello()
    core.wait_to_begin("ids")
    opened: list[Any] = []
    for part in parted(data):
        try:
            frame = decode_server_frame(part)
        except Error:
            break
        core.receive(frame)
        core.tick()
        while core.ids and len(opened) < 4:
            opened.append(transaction := core.begin(5.0))
            core.send("orders", SendColumns([b"k"], [b"v"], None, None, 2), transaction, "sent")
            end = EndPlan(commit=len(opened) % 2 == 0, waiter="end")
            if len(opened) != 3:
                core.transactions.end(transaction, end)
        taken = core.take_frame()
        if taken is not None:
            encode_client_frame(taken)
        core.take_results()
        if core.broken is not None:
            core.hello()
    core.give_up(Error("over"))


def _client_frames() -> list[bytes]:
    txn = TxnId(0, 100)
    answers = (
        (1, Leased(100, 50)),
        (2, Done()),
        (3, Outcome.COMMIT),
        (4, State.COMMITTING),
        (5, TransactionAborted(txn, "its time is up")),
        (6, NameOpened(2, 41)),
        (7, Joined(3, (("orders", Position(1, 2)),))),
        (8, MemberAssignments(4, (PartitionAssignment("orders", 2, Position(1, 2)),))),
    )
    frames = [
        ServerFrame(welcome=Welcome("s1", 0, 1, 5_000_000, ()), credits=1_000_000),
        ServerFrame(answers=answers[:1]),
        ServerFrame(answers=answers[1:3], acknowledged=1),
        ServerFrame(acknowledged=3, failures=(Failure(2, TransactionAborted(txn, "over"), txn),)),
        ServerFrame(answers=answers[3:], draining=True),
        ServerFrame(welcome=Welcome("s1", 0, 2, 5_000_000, ((txn, State.OPEN), (TxnId(0, 101), State.ABORTED)))),
        ServerFrame(goodbye=Error("over")),
    ]
    encoded = [*map(encode_server_frame, frames)]
    return [joined(encoded), joined(encoded[::-1]), joined(encoded[:3] * 3)]


def _stream_client(data: bytes) -> None:
    """A client of change streams with three streams receives frames of a service."""
    core = StreamClient(ClientConfig())
    core.connected(0.0)
    handles = [core.open(ResumeToken(topic), 0.0, reopen=topic != "once") for topic in ("orders", "stock", "once")]
    for now, part in enumerate(parted(data), 1):
        try:
            messages = decode_stream_server_frame(part)
        except Error:
            break
        core.receive(messages, float(now))
        for event in core.take_events():
            match event:
                case RollbackReceived(handle, seqno):
                    core.rolled_back(handle, seqno, float(now))
                case Delivered(handle, mutations, size):
                    core.consumed(handle, len(mutations), size)
        core.tick(float(now))
        encode_stream_client_frame(core.take_frame())
        if core.next_tick() is None:
            core.connected(float(now))
    for handle in handles:
        if (token := core.token(handle)) is not None:
            ResumeToken.parse(str(token))
        core.close(handle)


def _stream_client_frames() -> list[bytes]:
    log = FailoverLog((Version(9, 0),))
    ok = Ok(1, log, 0, 0, 0, MAX_SEQNO, 5, 0, "c", "i")
    frames: list[tuple[Any, ...]] = [
        (Noop(), ok, SnapshotBegin(1, 1, 5, SnapshotFlag.NONE)),
        (StreamMutations(1, rows(1, 2, 3)), SnapshotEnd(1, 5, 6)),
        (ok._replace(stream=2), SnapshotBegin(2, 1, 3, SnapshotFlag.DISK), StreamMutations(2, rows(1, 3))),
        (SnapshotEnd(2, 3, 3), RollbackRequired(1, 2), StreamEnd(2, EndReason.TOO_SLOW)),
        (Refused(3, StreamTrimmed("trimmed")), StreamEnd(3, EndReason.OK)),
        (Goodbye(Error("over")),),
    ]
    encoded = [*map(encode_stream_server_frame, frames)]
    return [joined(encoded), joined(encoded[::-1]), joined(encoded[:2] * 2)]


SESSIONS = (
    Target(
        "session-states",
        _session,
        (
            "txnbuffer.service.topics.requests.RequestHandler.handle",
            "txnbuffer.service.door.connection.SessionConnection.receive",
        ),
        (),
        _session_frames,
    ),
    Target(
        "stream-states",
        _streams,
        ("txnbuffer.service.streams.streams.StreamConnection.receive", "txnbuffer.streams.server.StreamServer.receive"),
        (),
        _stream_frames,
    ),
    Target(
        "client-states", _client, ("txnbuffer.client.session.session_core.SessionCore.receive",), (), _client_frames
    ),
    Target(
        "stream-client-states",
        _stream_client,
        ("txnbuffer.streams.client.StreamClient.receive",),
        (),
        _stream_client_frames,
    ),
)
