"""A relay that is stopped while its target, or another call, does not return."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from relay_kills import CLEAN, T, committed, write
from service_process import ServiceProcess

from broker_io import open_broker
from broker_io.batch import Batch, Message
from broker_io.memory import MemoryBroker
from broker_io.port import Broker
from txnbuffer import SyncClient, connect
from txnbuffer.cli import relay as command
from txnbuffer.client.session import session
from txnbuffer.client.transaction import Transaction
from txnbuffer.errors import Fenced, InvalidRequest, ProducerFenced
from txnbuffer.sinks import relay as relaying
from txnbuffer.sinks import relay_targets
from txnbuffer.sinks.relay import Relay
from txnbuffer.sinks.relay_targets import POSITION, SEQNO, SOURCE, OwnedTarget, ServiceTarget

ENDLESS = 3600.0
BOUND = 60.0


class Ending:
    """A relay that runs in a thread until it is stopped."""

    def __init__(self, relay: Relay) -> None:
        self.relay = relay
        self._stopping = threading.Event()
        self._outcome: Future[Any] = Future()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        try:
            self._outcome.set_result(self.relay.run(stop=self._stopping.is_set))
        except BaseException as error:
            self._outcome.set_exception(error)

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + BOUND
        while not condition():
            assert not self._outcome.done(), self._outcome.result()
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def end(self) -> None:
        self._stopping.set()
        self._outcome.result(BOUND)


class Silent(OwnedTarget):
    """A target that acknowledges nothing."""

    def append(self, batch: Batch, seqno: int | None) -> Future[Any]:
        return Future()


def batch(*numbers: int) -> Batch:
    return Batch.of([Message(None, b"%d" % number) for number in numbers])


def source() -> MemoryBroker:
    """A topic of five records."""
    broker = MemoryBroker()
    broker.create_topic(T)
    with broker.connect() as owner, owner.writer(T) as writer:
        writer.append(batch(*range(5))).result(120)
    return broker


def test_a_target_that_never_answers_does_not_delay_the_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relaying, "LAST_WAIT", 0.0)
    relay = Relay(source().connect, T, Silent(MemoryBroker().connect, CLEAN), max_unavailable=ENDLESS)
    ending = Ending(relay)
    ending.until(lambda: relay.unacknowledged > 0)
    ending.end()
    assert (relay.progress.records, relay.unacknowledged) == (0, 5)


def test_a_hanging_service_does_not_delay_the_stop_and_nothing_is_lost_or_doubled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relaying, "LAST_WAIT", 0.0)
    monkeypatch.setattr(relaying, "RECORDS", 3)
    monkeypatch.setattr(session, "CLOSE_TIMEOUT", 0.1)
    with ServiceProcess(tmp_path / "clean") as service, connect(f"file:{tmp_path / 'log'}") as client:
        opening = connect(f"txnbuf://127.0.0.1:{service.port}")
        write(client, 0, 10)

        def relay() -> Relay:
            target = ServiceTarget(opening.open_sync, CLEAN)
            return Relay(
                lambda: open_broker(f"file:{tmp_path / 'log'}", read_only=True), T, target, max_unavailable=ENDLESS
            )

        first = relay()
        ending = Ending(first)
        try:
            ending.until(lambda: first.progress.records > 0)
            os.kill(service.process.pid, signal.SIGSTOP)
            write(client, 10, 10)
            ending.until(lambda: first.unacknowledged > 0)
            ending.end()
            assert first.unacknowledged > 0
        finally:
            os.kill(service.process.pid, signal.SIGCONT)
        relay().run(follow=False)
        with opening as reading, open_broker(f"file:{tmp_path / 'log'}", read_only=True) as log:
            rows = committed(log, T)
            clean = reading.client.open_broker()
            deadline = time.monotonic() + BOUND
            while len(found := committed(clean, CLEAN)) < len(rows) and time.monotonic() < deadline:
                time.sleep(0.05)  # the interrupted transaction is aborted first
            assert found == rows


def test_no_append_is_stored_after_a_failed_one(monkeypatch: pytest.MonkeyPatch) -> None:
    opening = connect("memory:relay-chain")
    target = ServiceTarget(opening.open_sync, CLEAN)
    assert target.open() is None
    sent = Transaction.send_rows

    async def send_rows(self: Transaction, topic: str, rows: Any, *more: Any) -> None:
        if rows.values == [b"1"]:
            raise InvalidRequest("the second one is invalid")
        await sent(self, topic, rows, *more)

    monkeypatch.setattr(Transaction, "send_rows", send_rows)
    futures = [target.append(batch(number), number + 1) for number in range(4)]
    futures[0].result(BOUND)
    for future in futures[1:]:
        with pytest.raises(InvalidRequest, match="second one"):
            future.result(BOUND)
    target.close()
    with opening as client:
        assert client.committed_number(f"relay to {CLEAN}") == 1


def test_a_call_that_was_started_ends_with_its_client() -> None:
    client: SyncClient = connect("memory:started").open_sync()
    began, ended = threading.Event(), threading.Event()

    async def endless() -> None:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    future = client.start(endless)
    assert began.wait(BOUND)
    client.close()
    assert (ended.is_set(), future.cancelled()) == (True, True)
    with pytest.raises(InvalidRequest, match="closed"):
        client.start(endless)


class Hanging:
    """A relay that ignores its stop."""

    unacknowledged = 0

    def __init__(self) -> None:
        self.began, self.free = threading.Event(), threading.Event()

    def run(self, **_: Any) -> None:
        self.began.set()
        self.free.wait(BOUND)


def test_the_command_ends_although_a_call_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "LAST_WAIT", 0.0)
    hanging, stopping = Hanging(), threading.Event()
    stopping.set()
    assert command._run(hanging, True, stopping) is False  # type: ignore[arg-type]  # a fake relay
    assert hanging.began.wait(BOUND)
    hanging.free.set()
    assert command._run(hanging, True, threading.Event()) is True  # type: ignore[arg-type]  # a fake relay


@pytest.mark.parametrize("number", [0, 1])
def test_a_relay_that_opens_while_another_one_writes_continues_after_what_that_has_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """It has asked for its last number; the other one asks, too, and writes, before this one looks for the record."""
    ask = SyncClient.committed_number

    def early(client: SyncClient, name: str) -> int:
        found = ask(client, name)
        monkeypatch.setattr(SyncClient, "committed_number", ask)
        second.open()
        second.append(relayed(number), number + 1).result(BOUND)
        second._last_record(second._client.client.open_broker(), number + 1)  # returns once it is visible
        return found

    with ServiceProcess(tmp_path / "clean") as service:
        opening = connect(f"txnbuf://127.0.0.1:{service.port}")
        first, second = (ServiceTarget(opening.open_sync, CLEAN) for _ in range(2))
        for written in range(number):
            assert first.open() is None
            first.append(relayed(written), written + 1).result(BOUND)
            first.close()
        monkeypatch.setattr(SyncClient, "committed_number", early)
        mark = first.open()
        assert mark is not None
        assert mark.seqno == number
        first.append(relayed(number + 1), number + 2).result(BOUND)
        with pytest.raises(ProducerFenced):
            second.append(relayed(number + 1), number + 2).result(BOUND)
        for target in (first, second):
            target.close()


def test_a_relay_whose_last_message_is_trimmed_while_it_opens_reads_the_next_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The other relay has fenced it, and trims what it no longer needs; the first append of this one tells."""
    far = MemoryBroker(ledger_entries=1)
    first, second = (OwnedTarget(far.connect, CLEAN, release=True) for _ in range(2))
    assert first.open() is None
    first.append(relayed(1), 1).result(BOUND)
    first.close()
    look = relay_targets._message_at

    def late(broker: Broker, *arguments: Any) -> Message:
        monkeypatch.setattr(relay_targets, "_message_at", look)
        second.open()
        second.acknowledged(second.append(relayed(2), 2).result(BOUND))
        return look(broker, *arguments)

    monkeypatch.setattr(relay_targets, "_message_at", late)
    mark = first.open()
    assert mark is not None
    assert mark.seqno == 2
    with pytest.raises(Fenced):
        first.append(relayed(2), 2).result(BOUND)
    for target in (first, second):
        target.close()


def relayed(number: int) -> Batch:
    """A message of a relay."""
    source = json.dumps({"topic": T, "incarnation": "i", "version": 0})
    marks = {SOURCE: source, POSITION: f"0:{number}", SEQNO: str(number)}
    return Batch.of([Message(None, b"%d" % number, marks)])
