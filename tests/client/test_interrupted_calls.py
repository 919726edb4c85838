"""Exceptions of signal handlers in calls of the sync client: what the program is told is what the log has."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import pytest

from txnbuffer import Outcome, connect
from txnbuffer.client.session.session_core import SessionCore
from txnbuffer.client.sync.portal import LoopCall
from txnbuffer.client.sync.sync_transaction import EndingCall, without_check

SECONDS = 120.0
SCRIPT = Path(__file__).parents[1] / "interrupts.py"


class Stop(BaseException):
    """An exception that no `except Exception` catches."""


@pytest.mark.parametrize("log", ["file", "service"])
def test_programs_are_told_what_became_of_interrupted_blocks(log: str) -> None:
    command = [sys.executable, str(SCRIPT), "--blocks", "60", "--seed", "7", "--log", log]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS * 2, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_interrupted_readers_of_a_service_do_not_hang() -> None:
    command = [sys.executable, str(SCRIPT), "--reads", "100", "--seed", "7"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@contextmanager
def handler(kind: type[BaseException]) -> Iterator[None]:
    """Let SIGUSR1 raise an exception in the main thread."""

    def raises(number: int, frame: FrameType | None) -> None:
        raise kind

    before = signal.signal(signal.SIGUSR1, raises)
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, before)


def interrupt_when(event: threading.Event) -> None:
    main = threading.main_thread().ident
    assert main is not None

    def wait_and_interrupt() -> None:
        assert event.wait(SECONDS)
        time.sleep(0.2)
        signal.pthread_kill(main, signal.SIGUSR1)

    threading.Thread(target=wait_and_interrupt).start()


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, Stop, TimeoutError, RuntimeError])
def test_any_exception_of_a_handler_cancels_a_call(kind: type[BaseException]) -> None:
    began, cancelled = threading.Event(), threading.Event()

    async def waits() -> None:
        began.set()
        try:
            await asyncio.sleep(SECONDS)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    with handler(kind), connect("memory:") as client:
        interrupt_when(began)
        with pytest.raises(kind) as raised:
            client.call(waits)
        assert not hasattr(raised.value, "__notes__")
        assert cancelled.is_set()
        client.send("log", b"the client still works")


def test_interrupted_commit_that_was_not_sent_aborts() -> None:
    blocked = threading.Event()
    with handler(Stop), connect("memory:") as client:
        client.send("log", b"v")
        txn = client.transaction().begin()
        txn.send("log", b"dropped")
        name = str(txn.id)
        client.loop.soon(lambda: blocked.wait(SECONDS))  # so that the loop gets the commit and its end together
        began = threading.Event()
        interrupt_when(began)
        threading.Timer(1.0, blocked.set).start()
        began.set()
        with pytest.raises(Stop) as raised:
            txn.commit()
        assert not hasattr(raised.value, "__notes__")
        until = time.monotonic() + SECONDS
        while (outcome := client.outcome(name)) is None and time.monotonic() < until:
            time.sleep(0.01)
        assert outcome is Outcome.ABORT


def test_interrupted_begin_of_a_named_transaction_does_not_say_that_it_completed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(call: EndingCall) -> None:
        LoopCall.result(call)
        signal.raise_signal(signal.SIGUSR1)

    with handler(Stop), connect("memory:") as client:
        txn = client.transaction(name="job", number=1)
        with monkeypatch.context() as patch:
            patch.setattr(EndingCall, "result", interrupted)
            with pytest.raises(Stop) as raised:
                txn.begin()
        assert not hasattr(raised.value, "__notes__")
        name = str(txn.id)
        until = time.monotonic() + SECONDS
        while (outcome := client.outcome(name)) is None and time.monotonic() < until:
            time.sleep(0.01)
        assert outcome is Outcome.ABORT


def test_interrupted_block_ends_at_once() -> None:
    with handler(Stop), connect("memory:") as client:
        with pytest.raises(Stop), client.transaction() as txn:
            txn.send("log", b"dropped")
            signal.raise_signal(signal.SIGUSR1)
        client.send("log", b"v")
        with client.reader("log") as reader:
            batch = reader.read(timeout=SECONDS / 4)  # less than the timeout of the transaction
            assert [record.value for record in batch or ()] == [b"v"]


def test_interrupted_send_says_that_its_records_may_be_in_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = threading.Event()
    with handler(Stop), connect("memory:") as client:
        with monkeypatch.context() as patch:
            patch.setattr(SessionCore, "receive", lambda core, frame: sent.set())
            interrupt_when(sent)
            with pytest.raises(Stop) as raised:
                client.send("log", b"v")
        assert raised.value.__notes__ == ["records for 'log' may or may not be in the log"]


def test_end_of_a_block_begins_without_a_look_for_signals() -> None:
    code = test_end_of_a_block_begins_without_a_look_for_signals.__code__
    assert without_check(code).co_code != code.co_code
    assert without_check(without_check(code)).co_code == without_check(code).co_code
