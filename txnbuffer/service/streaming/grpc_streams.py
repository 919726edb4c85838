"""Change streams over gRPC: the frames of `txnbuffer.streams.wire`, one stream of them each way."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from broker_io.errors import Error
from txnbuffer.rpc.names import LOG_KEY, STREAM, STREAMS_SERVICE
from txnbuffer.service.streaming.connection import StreamConnection
from txnbuffer.streams.wire import decode_client_frame, encode_server_frame

if TYPE_CHECKING:
    from txnbuffer.service.engine import Engine

LAST_WORDS = 1.0
"""Seconds that a client has to take what ends its connection, and to end its own side."""


def stream_handler(engine: Callable[[], Engine | None], waits_for: Callable[[], str]) -> Any:
    """The handler of the service; before there is an engine, clients are told what it waits for."""
    import grpc

    async def stream(_: Any, context: Any) -> None:
        serving = engine()
        if serving is None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, f"nothing is served yet: {waits_for()}")
            return
        await context.send_initial_metadata(((LOG_KEY, serving.log),))
        await _carry(context, serving.streams.connect(context.peer()))

    handler = grpc.stream_stream_rpc_method_handler(stream)
    return grpc.method_handlers_generic_handler(STREAMS_SERVICE, {STREAM: handler})


async def _carry(context: Any, connection: StreamConnection) -> None:
    reading = asyncio.ensure_future(_read(context, connection))
    writing = asyncio.ensure_future(_write(context, connection))
    ended = asyncio.ensure_future(connection.ended.wait())
    try:
        await asyncio.wait([writing, ended], return_when=asyncio.FIRST_COMPLETED)
        await asyncio.wait([writing], timeout=LAST_WORDS)
        # A stream that ends while the client writes to it would fail there instead of ending.
        await asyncio.wait([reading], timeout=LAST_WORDS)
    finally:
        for task in (reading, writing, ended):
            task.cancel()
        connection.lost()
        await asyncio.gather(reading, writing, ended, return_exceptions=True)


async def _write(context: Any, connection: StreamConnection) -> None:
    while (frame := await connection.next()) is not None:
        await context.write(encode_server_frame(frame))


async def _read(context: Any, connection: StreamConnection) -> None:
    import grpc

    while True:
        data = await context.read()
        if data is grpc.aio.EOF:
            connection.lost()
            return
        try:
            connection.receive(decode_client_frame(data))
        except Error as error:
            connection.close(error)
