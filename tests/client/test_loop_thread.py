"""The loop thread: calls made while another thread stops it are rejected and do not hang."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import pytest

from txnbuffer import Client, connect
from txnbuffer.client.session.session_core import SessionCore
from txnbuffer.client.session.session_requests import Requests
from txnbuffer.client.sync import portal
from txnbuffer.client.sync.portal import LoopThread
from txnbuffer.errors import InvalidRequest, ServiceUnavailable

SECONDS = 120.0


def assert_refused(loop: LoopThread) -> None:
    with pytest.raises(InvalidRequest, match="was closed"):
        loop.call(partial(asyncio.sleep, 0))
    with pytest.raises(InvalidRequest, match="was closed"):
        loop.start(partial(asyncio.sleep, 0))


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

    loop.start(lingers)
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


def interrupt_soon(seconds: float = 0.5) -> None:
    """Send SIGINT to the main thread, as Ctrl-C does."""
    main = threading.main_thread().ident
    assert main is not None
    threading.Timer(seconds, signal.pthread_kill, (main, signal.SIGINT)).start()


def test_keyboard_interrupt_cancels_a_call_that_has_not_started() -> None:
    blocked, ran = threading.Event(), []

    async def never() -> None:
        ran.append(None)

    async def nothing() -> None:
        pass

    with connect("memory:") as client:
        client.loop.soon(lambda: blocked.wait(SECONDS))
        interrupt_soon()
        with pytest.raises(KeyboardInterrupt):
            client.call(never)
        blocked.set()
        client.call(nothing)
        client.send("log", b"the client still works")
    assert ran == []


def test_keyboard_interrupt_of_a_commit_says_that_it_may_have_happened(monkeypatch: pytest.MonkeyPatch) -> None:
    with connect("memory:") as client:
        txn = client.transaction().begin()
        name = str(txn.id)
        monkeypatch.setattr(Requests, "withdraw", lambda self, number: False)  # as if it was sent
        monkeypatch.setattr(SessionCore, "receive", lambda self, frame: None)
        interrupt_soon()
        with pytest.raises(KeyboardInterrupt) as interrupt:
            txn.commit()
        assert interrupt.value.__notes__ == [f"transaction {name} may have committed: query its outcome"]
        monkeypatch.undo()


def test_keyboard_interrupt_of_a_call_that_cannot_be_cancelled_yet_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(portal, "CANCEL_TIMEOUT", 0.05)
    blocked = threading.Event()
    with connect("memory:") as client:
        client.loop.soon(lambda: blocked.wait(SECONDS))
        interrupt_soon()
        with pytest.raises(KeyboardInterrupt) as interrupt:
            client.send("log", b"v")
        assert interrupt.value.__notes__ == ["the interrupted call has not ended yet, and may still take effect"]
        blocked.set()


def test_interrupted_close_completes_in_the_background(tmp_path: Path) -> None:
    before = threading.enumerate()
    address, blocked = f"file:{tmp_path / 'log'}", threading.Event()
    client = connect(address).open_sync()
    client.send("log", b"v")
    client.loop.soon(lambda: blocked.wait(SECONDS))
    interrupt_soon()
    with pytest.raises(KeyboardInterrupt) as interrupt:
        client.close()
    assert not hasattr(interrupt.value, "__notes__")
    threading.Timer(0.2, blocked.set).start()
    client.close()  # waits
    client.close()
    with connect(address) as again:
        again.send("log", b"w")
    deadline = time.monotonic() + SECONDS
    while left := [thread for thread in threading.enumerate() if thread not in before]:
        assert time.monotonic() < deadline, left
        time.sleep(0.01)


def test_error_of_closing_is_raised_after_all_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fails(self: Client) -> None:
        raise ServiceUnavailable("some reason")

    client = connect("memory:").open_sync()
    monkeypatch.setattr(Client, "close", fails)
    with pytest.raises(ServiceUnavailable, match="some reason"):
        client.close()
    client.close()
    assert_refused(client.loop)


def test_keyboard_interrupt_ends_processing() -> None:
    with connect("memory:") as client:
        client.send("source", b"1")
        interrupt_soon(1.0)
        with pytest.raises(KeyboardInterrupt):
            client.process("source", "g", lambda txn, record: None)
        assert client.process("source", "g", lambda txn, record: None, idle_timeout=0.05).records in (0, 1)


def test_closing_in_another_thread_ends_a_waiting_call() -> None:
    with connect("memory:") as client:
        client.send("log", b"v")
        waiting = threading.Event()

        async def waits() -> None:
            waiting.set()
            await asyncio.sleep(SECONDS)

        def close() -> None:
            assert waiting.wait(SECONDS)
            client.close()

        closing = threading.Thread(target=close)
        closing.start()
        with pytest.raises(InvalidRequest, match="closed during the call"):
            client.call(waits)
        closing.join(SECONDS)
        with pytest.raises(InvalidRequest, match="was closed"):
            client.reader("log")


LATE = """
import atexit, sys
from txnbuffer import connect
from txnbuffer.errors import InvalidRequest
client = connect(sys.argv[1]).open_sync()
client.send("log", b"v")
def late():
    for call in (lambda: client.send("log", b"w"), connect("memory:").open_sync):
        try:
            call()
        except InvalidRequest as error:
            print(error)
    client.close()
atexit.register(late)
"""


def test_atexit_handler_of_an_embedded_log_gets_one_clear_error(tmp_path: Path) -> None:
    address = f"file:{tmp_path / 'log'}"
    done = subprocess.run(
        [sys.executable, "-c", LATE, address], capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert done.stdout.splitlines() == [
        "the client was closed: connect again",
        "the interpreter is exiting, and cannot open a log any more: open it earlier",
    ]
    assert (done.stderr, done.returncode) == ("", 0)
