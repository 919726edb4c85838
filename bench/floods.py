"""Floods of a service on loopback, each bounded by a count: what strangers and tenants may send at most"""

from __future__ import annotations

import struct

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
