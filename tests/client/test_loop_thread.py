"""The loop in a thread: whoever calls while another thread ends it is told so, and waits for nobody."""

from __future__ import annotations

import asyncio
import threading

import pytest

from txnbuffer.client.loop_thread import LoopThread
from txnbuffer.errors import InvalidRequest

SECONDS = 120.0


def assert_refused(loop: LoopThread) -> None:
    with pytest.raises(InvalidRequest, match="was closed"):
        loop.call(asyncio.sleep(0))
    with pytest.raises(InvalidRequest, match="was closed"):
        loop.start(asyncio.sleep(0))


def test_nothing_begins_while_it_ends_or_later() -> None:
    loop = LoopThread()
    begun, leaving, go = threading.Event(), threading.Event(), threading.Event()

    async def lingers() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            leaving.set()
            await asyncio.to_thread(go.wait, SECONDS)

    loop.start(lingers())
    assert begun.wait(SECONDS)
    ending = threading.Thread(target=loop.stop)
    ending.start()
    try:
        assert leaving.wait(SECONDS)
        assert_refused(loop)
    finally:
        go.set()
        ending.join(SECONDS)
    assert_refused(loop)
