"""The loop thread: calls made while another thread stops it are rejected and do not hang."""

from __future__ import annotations

import asyncio
import threading

import pytest

from txnbuffer import connect
from txnbuffer.client.loop_thread import LoopThread
from txnbuffer.errors import InvalidRequest

SECONDS = 120.0


def assert_refused(loop: LoopThread) -> None:
    with pytest.raises(InvalidRequest, match="was closed"):
        loop.call(asyncio.sleep(0))
    with pytest.raises(InvalidRequest, match="was closed"):
        loop.start(asyncio.sleep(0))


def test_calls_are_rejected_while_the_loop_stops_and_afterwards() -> None:
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


def test_code_in_the_loops_thread_cannot_wait_for_the_client() -> None:
    told = []

    class Nested:
        def dumps(self, value: str) -> bytes:
            for use in (
                lambda: client.send("other", b"nested"),
                lambda: client.process("other", "g", lambda txn, record: None, idle_timeout=0.05),
                client.close,
            ):
                with pytest.raises(InvalidRequest, match="runs in the client's own thread") as error:
                    use()
                told.append(error)
            return value.encode()

        def loads(self, data: bytes) -> str:
            return data.decode()

    with connect("memory:", serializer=Nested()) as client:
        client.send("log", "value")
        assert len(told) == 3
        with client.reader("log") as reader:
            batch = reader.read(timeout=60)
            assert batch is not None
            assert [record.value for record in batch] == [b"value"]
