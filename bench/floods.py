"""Floods of a service on loopback, each bounded by a count: what strangers and tenants may send at most"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import time
from contextlib import ExitStack
from typing import Any

HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5)
"""The preface of HTTP/2 and empty settings."""
HEADERS, RESET, PING, SETTINGS, WINDOW, GOAWAY = 1, 3, 6, 4, 8, 7
WATCH = "/grpc.health.v1.Health/Watch"
TALK = "/txnbuffer.v1.Session/Talk"


def frame(kind: int, stream: int, content: bytes = b"", flags: int = 0) -> bytes:
    """A frame of HTTP/2."""
    return struct.pack(">I", len(content))[1:] + bytes((kind, flags)) + struct.pack(">I", stream) + content


def headers(path: str, more: tuple[tuple[str, str], ...] = ()) -> bytes:
    """The headers of a call of gRPC, each written out."""
    pairs: tuple[tuple[str, str], ...] = (
        (":method", "POST"),
        (":scheme", "http"),
        (":path", path),
        (":authority", "localhost"),
    )
    pairs += (("te", "trailers"), ("content-type", "application/grpc"), *more)
    return b"".join(b"\x00" + b"".join(bytes((len(text),)) + text.encode() for text in pair) for pair in pairs)


def call(stream: int, path: str, *, reset: bool = False, more: tuple[tuple[str, str], ...] = ()) -> bytes:
    """Frames that begin a call with an empty message, and reset it."""
    begun = frame(HEADERS, stream, headers(path, more), 0x4) + frame(0, stream, bytes(5), 0x1)
    return begun + frame(RESET, stream, struct.pack(">I", 8)) * reset


CONNECTIONS = 1_100
CALLS_PER_S = 25_000
ROWS = 50_000
"""Queries of one frame."""
LEASES = 100
"""Requests of one frame, each for so many ids that a few of them are the share of a principal."""


def connections(port: int, seconds: float) -> int:
    """Connections without a byte, from one address; each that ends is replaced once. How many there were."""
    end, begun = time.monotonic() + seconds, 0
    with ExitStack() as stack:
        for _ in range(2):
            for _ in range(CONNECTIONS):
                with contextlib.suppress(OSError):
                    stack.enter_context(socket.create_connection(("127.0.0.1", port), 5, ("127.0.0.2", 0)))
                    begun += 1
            time.sleep(max(end - time.monotonic(), 0) / 2)
    return begun


def calls(port: int, seconds: float) -> int:
    """Calls without a token that are reset at once, CALLS_PER_S in a second on one connection. How many there were."""
    begun, sent = time.monotonic(), 0
    while time.monotonic() - begun < seconds:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 30) as connection:
            connection.sendall(HELLO)
            stream = 1
            while (elapsed := time.monotonic() - begun) < seconds:
                while sent < CALLS_PER_S * elapsed:
                    connection.sendall(b"".join(call(stream + 2 * number, TALK, reset=True) for number in range(100)))
                    stream, sent = stream + 200, sent + 100
                with contextlib.suppress(BlockingIOError):
                    while connection.recv(65536, socket.MSG_DONTWAIT):
                        pass
                time.sleep(0.001)
    return sent


def watches(port: int, seconds: float) -> int:
    """10,000 health watches on one connection."""
    with socket.create_connection(("127.0.0.1", port), 30) as connection:
        connection.sendall(HELLO + b"".join(call(2 * number + 1, WATCH) for number in range(10_000)))
        time.sleep(seconds)
    return 10_000


def frames(port: int, seconds: float, token: str) -> int:
    """Frames of ROWS queries each, of a principal that may only read. How many were sent."""
    from txnbuffer.model import TxnId
    from txnbuffer.rpc.frames import ClientFrame, Query

    return _session(port, seconds, token, ClientFrame(queries=tuple(Query(n, TxnId(0, n)) for n in range(1, ROWS + 1))))


def leases(port: int, seconds: float, token: str) -> int:
    """Frames that ask for all transaction ids, of a principal that may only read. How many were sent."""
    from txnbuffer.rpc.frames import ClientFrame, LeaseRequest

    return _session(port, seconds, token, ClientFrame(leases=tuple(LeaseRequest(n, 10_000) for n in range(1, LEASES))))


def _session(port: int, seconds: float, token: str, frame: Any) -> int:
    """Send a frame again and again, in sessions of one principal."""
    import grpc

    from broker_io.rpc.channel import VERSION_METADATA
    from txnbuffer.rpc.frames import ClientFrame, SessionHello
    from txnbuffer.rpc.session_encoding import encode_client_frame

    hello, data = encode_client_frame(ClientFrame(hello=SessionHello(""))), encode_client_frame(frame)

    async def one(talk: Any) -> None:
        reading = asyncio.ensure_future(_read(talk))
        try:
            await talk.write(hello)
            while not reading.done():
                await talk.write(data)
                sent.append(1)
        finally:
            reading.cancel()

    async def run() -> None:
        metadata = (*VERSION_METADATA, ("authorization", f"Bearer {token}"))
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            while True:
                with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError):
                    await one(channel.stream_stream(TALK)(metadata=metadata))
                await asyncio.sleep(0.1)

    async def limited() -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await run()

    sent: list[int] = []
    asyncio.run(limited())
    return len(sent)


async def _read(talk: Any) -> None:
    import grpc

    with contextlib.suppress(grpc.RpcError):
        while await talk.read() is not grpc.aio.EOF:
            pass
