"""The disk of a simulated host as one of its processes sees it.

The host has one `SimulatedDisk`. Each operation of a process takes virtual time and may fail: the process may have a
limit of descriptors, and its locks end with it.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from broker_io.testing import SimulatedDisk

if TYPE_CHECKING:
    from sim.world import Process

ENDLESS = 1 << 40
"""The bytes of a disk that is not full."""
SYNC_SECONDS = 0.002
"""Virtual time of a sync; each takes up to twice as long."""
LONGEST_SYNC_SECONDS = 10.0
"""Seconds that a sync takes, at most: one that began on a slow disk must not end long after the faults."""


class ProcessFile:
    """An open file of a process."""

    def __init__(self, disk: ProcessDisk, file: Any) -> None:
        self._disk = disk
        self._file = file
        disk.files[self] = None

    def _live(self) -> Any:
        self._disk.alive()
        return self._file

    def read(self, offset: int, size: int) -> bytes:
        return self._live().read(offset, size)

    def write(self, offset: int, chunks: Sequence[bytes | memoryview]) -> None:
        with self._disk.changing():
            self._file.write(offset, chunks)

    def sync(self) -> None:
        self._disk.wait_for_sync()
        with self._disk.changing():
            self._file.sync()

    def truncate(self, size: int) -> None:
        with self._disk.changing():
            self._file.truncate(size)

    def size(self) -> int:
        return self._live().size()

    def close(self) -> None:
        if self._disk.files.pop(self, self) is None and not self._disk.process.dead:
            self._file.close()


class ProcessDisk:
    """The port of a disk for one process."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.files: dict[ProcessFile, None] = {}
        self.most_files = 1000
        self._scheduler = process.world.scheduler
        self._random = process.world.random("disk", process.name)

    @property
    def host_disk(self) -> SimulatedDisk:
        return self.process.host.disk

    def alive(self) -> ProcessDisk:
        """Check that the process runs, and let others run."""
        self._scheduler.preempt()
        self.process.check_alive()
        return self

    @contextlib.contextmanager
    def changing(self) -> Iterator[SimulatedDisk]:
        """As `alive`, for a change of the host's disk: the host may crash now, and the change may fail."""
        self.alive()
        self.process.host.changes_disk()
        self.process.check_alive()
        try:
            yield self.host_disk
        except OSError as error:
            if error.errno in (errno.EIO, errno.ENOSPC):
                self.process.host.disk_failed()
            raise

    def wait_for_sync(self) -> None:
        """Spend the time of a sync."""
        self.process.check_alive()
        if self._scheduler.current is not None:
            slow = self._random.random() < 0.01
            seconds = SYNC_SECONDS * self.process.host.sync_factor
            seconds *= self._random.uniform(0.1, 2.0) * (100 if slow else 1)
            self._scheduler.park(min(seconds, LONGEST_SYNC_SECONDS))

    def release(self) -> None:
        """The process has ended: its locks and descriptors end too."""
        for file in [*self.files]:
            file._file.close()
        self.files.clear()

    def open(self, path: str, *, write: bool = False, create: bool = False) -> ProcessFile:
        self.alive()
        if len(self.files) >= self.most_files:
            self.process.world.count("no descriptor")
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), path)
        return ProcessFile(self, self.host_disk.open(path, write=write, create=create))

    def read(self, path: str) -> bytes:
        return self.alive().host_disk.read(path)

    def lock(self, path: str) -> ProcessFile | None:
        file = self.alive().host_disk.lock(path)
        return None if file is None else ProcessFile(self, file)

    def locked(self, path: str) -> bool:
        return self.alive().host_disk.locked(path)

    def exists(self, path: str) -> bool:
        return self.alive().host_disk.exists(path)

    def identity(self, path: str) -> tuple[int, int, int]:
        return self.alive().host_disk.identity(path)

    def permissions(self, path: str) -> int:
        return self.alive().host_disk.permissions(path)

    def list(self, path: str) -> list[str]:
        return self.alive().host_disk.list(path)

    def make_directory(self, path: str) -> None:
        with self.changing() as disk:
            disk.make_directory(path)

    def rename(self, source: str, target: str) -> None:
        with self.changing() as disk:
            disk.rename(source, target)

    def remove(self, path: str) -> None:
        with self.changing() as disk:
            disk.remove(path)

    def sync_directory(self, path: str) -> None:
        self.wait_for_sync()
        with self.changing() as disk:
            disk.sync_directory(path)

    def free_bytes(self, path: str) -> int:
        disk = self.alive().host_disk
        if disk.capacity < ENDLESS:
            self.process.host.disk_failed()
        return disk.free_bytes(path)
