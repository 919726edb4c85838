"""A log that stops lets go of everybody who waits for room in it."""

from __future__ import annotations

import threading
import time

import pytest

from broker_io.batch import Batch, Message
from broker_io.environment import Environment
from broker_io.errors import DiskFull
from broker_io.file import FileBroker
from broker_io.file import broker as broker_module
from broker_io.testing import SimulatedDisk


def test_a_stopped_log_hangs_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broker_module, "WAITING_BYTES", 100_000)
    broker = FileBroker.open("/log", Environment(disk=SimulatedDisk()), watermark_bytes=0)
    broker.create_topic("t")
    writer = broker.writer("t")
    batch = Batch.of([Message(value=bytes(60_000))])
    errors: list[BaseException | None] = []

    def append() -> None:
        futures = [writer.append(batch) for _ in range(4)]
        errors.extend(future.exception(10) for future in futures)

    thread = threading.Thread(target=append, daemon=True)
    with broker._work:  # nothing is taken meanwhile
        thread.start()
        while broker._log.waiting_bytes <= 100_000:
            time.sleep(0.001)
        broker._log.stop(DiskFull("no space left"))
    thread.join(10)
    assert not thread.is_alive()
    assert len(errors) == 4
    assert all(isinstance(error, DiskFull) for error in errors)
