"""Backups of an embedded log by the service that owns it: one at a time, in a thread, while transactions run.

The thread rests as long as it has worked, so that transactions get the other half of the disk and of the processor.
"""

from __future__ import annotations

import asyncio
import enum
from concurrent.futures import Future
from dataclasses import dataclass

from broker_io.environment import current
from broker_io.errors import Error, NotSupported, as_error
from broker_io.port import BackupBroker, BackupReport, Broker
from txnbuffer.errors import CoordinatorStopped, InvalidRequest

LONGEST_REST = 0.5
"""Seconds that the thread rests at most after a part of the log."""


class BackupState(enum.Enum):
    """How far a backup is."""

    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"


@dataclass(slots=True, eq=False)
class BackupRun:
    """One backup to a file of this machine; numbers ascend. `report` once it is done, `problem` if it has failed."""

    path: str
    number: int
    state: BackupState = BackupState.RUNNING
    bytes_done: int = 0
    bytes_expected: int = 0
    report: BackupReport | None = None
    problem: Error | None = None


class Backups:
    """Writes backups of the log of a broker. `run`: the newest one."""

    def __init__(self, broker: Broker) -> None:
        self.run: BackupRun | None = None
        self._broker = broker
        self._disk, self._clock = current().disk, current().clock
        self._ending: Error | None = None
        self._work: Future[None] | None = None
        self._thread = current().threads.executor(1, "txnbuffer-backup")

    def start(self, path: str) -> BackupRun:
        """Begin to write a backup to a new file. Raises InvalidRequest, and NotSupported unless the log is embedded."""
        broker, last = self._broker, self.run
        if not isinstance(broker, BackupBroker):
            raise NotSupported("this service does not store the log itself: back up its cluster")
        if not path.startswith("/"):
            raise InvalidRequest(f"{path!r} is not an absolute path: the service writes the file on its own machine")
        if last is not None and last.state is BackupState.RUNNING:
            raise InvalidRequest(f"the backup to {last.path} is being written: wait for its end")
        if self._disk.exists(path):
            raise InvalidRequest(f"{path} exists on the machine of the service: name a file that does not")
        run = self.run = BackupRun(path, 1 if last is None else last.number + 1)
        self._work = self._thread.submit(self._back_up, broker, run)
        return run

    def _back_up(self, broker: BackupBroker, run: BackupRun) -> None:
        last = self._clock.monotonic()

        def progress(done: int, total: int) -> None:
            nonlocal last
            run.bytes_done, run.bytes_expected = done, total
            if self._ending is not None:
                raise self._ending
            self._clock.sleep(min(self._clock.monotonic() - last, LONGEST_REST))
            last = self._clock.monotonic()

        try:
            run.report = broker.back_up(run.path, progress)
            run.state = BackupState.DONE
        except Exception as error:
            run.problem, run.state = as_error(error), BackupState.FAILED

    def end(self, error: Error) -> None:
        """End the running backup soon; there is no file then."""
        self._ending = self._ending or error

    async def close(self) -> None:
        """End the running backup, and return once it has ended."""
        self.end(CoordinatorStopped("the service is stopping: write the backup again later"))
        if self._work is not None:
            await asyncio.wrap_future(self._work)
        self._thread.shutdown(wait=False)
