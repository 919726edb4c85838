"""A stopping log completes all appends: those that wait for room, those in a flush, and later ones."""

from __future__ import annotations

import threading
import time
from collections import deque

import pytest

from broker_io.batch import Batch, Message
from broker_io.environment import Environment
from broker_io.errors import DiskFailed, DiskFull
from broker_io.filelog.log import FileBroker
from broker_io.filelog.log import broker as broker_module
from broker_io.filelog.log.commit import PendingUnit
from broker_io.testing import SimulatedDisk


def test_stopped_log_blocks_no_append(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broker_module, "MAX_PENDING_BYTES", 100_000)
    broker = FileBroker.open("/log", Environment(disk=SimulatedDisk()), watermark_bytes=0)
    broker.create_topic("t")
    writer = broker.writer("t")
    batch = Batch.of([Message(value=bytes(60_000))])
    errors: list[BaseException | None] = []

    def append() -> None:
        futures = [writer.append(batch) for _ in range(4)]
        errors.extend(future.exception(60) for future in futures)

    thread = threading.Thread(target=append, daemon=True)
    with broker._work:  # no flush runs meanwhile
        thread.start()
        while broker._log.pending_bytes <= 100_000:
            time.sleep(0.001)
        broker._log.stop(DiskFull("no space left"))
    thread.join(60)
    assert not thread.is_alive()
    assert len(errors) == 4
    assert all(isinstance(error, DiskFull) for error in errors)


@pytest.mark.parametrize("error", [MemoryError("no memory"), KeyError("a defect"), SystemExit(3)])
@pytest.mark.parametrize("where", ["_record_appends", "_write", "_after"])
def test_any_error_of_the_committer_fails_the_appends(
    error: BaseException, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = FileBroker.open("/log", Environment(disk=SimulatedDisk()), watermark_bytes=0)
    broker.create_topic("t")
    writer = broker.writer("t")

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(broker._log, where, fail)
    with broker._work:  # so that one flush takes both, and a third append waits
        futures = [writer.append(Batch.of([Message(value=bytes(5 << 20))])) for _ in range(5)]
    told = [future.exception(30) for future in futures]
    later = writer.append(Batch.of([Message()])).exception(30)
    assert isinstance(later, DiskFailed)
    assert repr(error) in str(later)
    assert [one for one in told if one is not None] == [later] * (2 if where == "_after" else 5)
    broker.close()


def test_append_during_the_stop_is_completed() -> None:
    """An append between the check of the failure and the queueing can be failed by the next flush only."""
    broker = FileBroker.open("/log", Environment(disk=SimulatedDisk()), watermark_bytes=0)
    broker.create_topic("t")
    writer, log = broker.writer("t"), broker._log
    batch = Batch.of([Message()])

    class Late(deque[PendingUnit]):
        def append(self, unit: PendingUnit) -> None:
            log.stop(DiskFull("no space left"))
            super().append(unit)

    log.pending = Late()
    assert isinstance(writer.append(batch).exception(30), DiskFull)
    assert isinstance(writer.append(batch).exception(30), DiskFull)
    broker.close()
