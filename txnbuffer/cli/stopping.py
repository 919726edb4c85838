"""Commands that run until SIGTERM or SIGINT"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from txnbuffer.client.client import Client
    from txnbuffer.client.connection import PendingConnection


@contextlib.asynccontextmanager
async def client_until_signal(connection: PendingConnection) -> AsyncIterator[tuple[Client | None, asyncio.Event]]:
    """A client, and the event that SIGTERM and SIGINT set; None if one of them comes while the client opens."""
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    opening = asyncio.ensure_future(connection.open())

    def end() -> None:
        stop.set()
        opening.cancel()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end)
    try:
        client = await opening
    except asyncio.CancelledError:
        if not stop.is_set():
            raise
        yield None, stop
        return
    try:
        yield client, stop
    finally:
        await client.close()
