"""A disk in memory that can lose power: the `Disk` port with a crash, an error or bad bits at any operation.

What is written is seen by every process at once and is stable after `sync`; names that were made,
moved or removed are stable after `sync_directory` of a directory they stand in. The root directory
exists. `crash` gives the disk as it is found after power loss, `kill` as after the death of the
process alone; the old one answers every call with `Crash` from then on, as no code runs after death.
"""

from __future__ import annotations

import errno
import random
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from broker_io.testing.inode import Inode, Truncate, Unsynced, Write
from broker_io.testing.tree import DIRECTORY, Tree, normal, os_error

__all__ = ["Crash", "Operation", "SimulatedDisk", "SimulatedFile", "Unsynced"]


class Crash(BaseException):
    """The process stopped here. Not an Exception, so that nothing handles it by accident."""


class Operation(NamedTuple):
    """One thing done to the disk, as `history` keeps it: `size` in bytes, 0 where there are none."""

    kind: str
    path: str
    size: int = 0


@dataclass(slots=True)
class _Plan:
    """What happens at an operation instead of it: a crash (no error number) or an OSError."""

    error: int | None
    written: int


class SimulatedDisk:
    """Files in memory. `capacity` in bytes: a write beyond it is cut short with ENOSPC."""

    def __init__(self, *, capacity: int = 1 << 40) -> None:
        self.capacity = capacity
        self.history: list[Operation] = []
        self.dead = False
        self._tree = Tree()
        self._locked: set[Inode] = set()
        self._plans: dict[int, _Plan] = {}
        self._mutex = threading.RLock()

    # What a test asks for.

    def stop_at(self, operation: int, *, written: int = 0) -> None:
        """Crash instead of doing operation number `operation` (1 is the first one still to come).

        If that is a write, its first `written` bytes are done.
        """
        self._plans[len(self.history) + operation] = _Plan(None, written)

    def fail_at(self, operation: int, error: int, *, written: int = 0) -> None:
        """Fail operation number `operation` (1 is the next) with an error number, likewise."""
        self._plans[len(self.history) + operation] = _Plan(error, written)

    def crash(self, unsynced: Unsynced, seed: int = 0) -> SimulatedDisk:
        """The disk after power loss; `seed` decides where `unsynced` leaves a choice."""
        with self._mutex:
            found = SimulatedDisk(capacity=self.capacity)
            choose = random.Random(seed)  # noqa: S311 - it has to be repeatable
            found._tree = self._tree.after_power_loss(unsynced, choose)
            return found

    def kill(self) -> SimulatedDisk:
        """The disk after the process died: all that was written is there, and still unsynced."""
        with self._mutex:
            self.dead = True
            return self.copy()

    def copy(self) -> SimulatedDisk:
        """The same disk once more, to try several things with; nobody holds a lock there."""
        with self._mutex:
            other = SimulatedDisk(capacity=self.capacity)
            other._tree = self._tree.copy()
            return other

    def files(self) -> dict[str, int]:
        """Sizes of all files by path, sorted."""
        with self._mutex:
            return {path: len(inode.data) for path, inode in sorted(self._tree.files())}

    def content(self, path: str) -> bytes:
        with self._mutex:
            return bytes(self._tree.file(path).data)

    def put(self, path: str, data: bytes) -> None:
        """Set what is stored in an existing file, as rot or a restore does."""
        with self._mutex:
            inode = self._tree.file(path)
            inode.data, inode.stable, inode.pending = bytearray(data), data, []
            inode.version += 1

    def flip(self, path: str, bit: int) -> None:
        """Turn one bit of a file, counted from its first byte's lowest."""
        data = bytearray(self.content(path))
        data[bit // 8] ^= 1 << bit % 8
        self.put(path, bytes(data))

    # The port.

    def open(self, path: str, *, write: bool = False, create: bool = False) -> SimulatedFile:
        with self._mutex:
            self._check_alive()
            found = self._tree.find(path)
            if found is DIRECTORY:
                raise os_error(errno.EISDIR, path)
            if found is None:
                if not create:
                    raise os_error(errno.ENOENT, path)
                self._tree.check_parent(path)
                self._count("create", path)
                found = self._tree.create(path)
            return SimulatedFile(self, path, found, writable=write)

    def lock(self, path: str) -> SimulatedFile | None:
        with self._mutex:
            file = self.open(path, write=True, create=True)
            if file.inode in self._locked:
                return None
            self._locked.add(file.inode)
            file.locks = True
            return file

    def locked(self, path: str) -> bool:
        with self._mutex:
            self._check_alive()
            return self._tree.find(path) in self._locked

    def exists(self, path: str) -> bool:
        with self._mutex:
            self._check_alive()
            return self._tree.find(path) is not None

    def identity(self, path: str) -> tuple[int, int, int]:
        with self._mutex:
            self._check_alive()
            inode = self._tree.file(path)
            return 0, inode.number, inode.version

    def list(self, path: str) -> list[str]:
        with self._mutex:
            self._check_alive()
            return self._tree.names(path)

    def make_directory(self, path: str) -> None:
        with self._mutex:
            self._check_alive()
            for missing in self._tree.missing_directories(path):
                self._count("make_directory", missing)
                self._tree.create_directory(missing)

    def rename(self, source: str, target: str) -> None:
        with self._mutex:
            self._check_alive()
            self._tree.file(source)
            self._tree.check_parent(target)
            self._count("rename", target)
            self._tree.rename(source, target)

    def remove(self, path: str) -> None:
        with self._mutex:
            self._check_alive()
            if self._tree.find(path) is not None:
                self._count("remove", path)
                self._tree.remove(path)

    def sync_directory(self, path: str) -> None:
        with self._mutex:
            self._check_alive()
            self._tree.names(path)
            self._count("sync_directory", path)
            self._tree.sync(path)

    def free_bytes(self, path: str) -> int:
        with self._mutex:
            self._check_alive()
            if self._tree.find(path) is None:
                raise os_error(errno.ENOENT, path)
            return self._free()

    def _free(self) -> int:
        return max(0, self.capacity - sum(len(inode.data) for _, inode in self._tree.files()))

    # What an open file does to it.

    def _write(self, file: SimulatedFile, offset: int, data: bytes) -> None:
        with self._mutex:
            fits = max(0, self._free() + max(0, len(file.inode.data) - offset))
            plan = self._note("write", file.path, len(data))
            done = data[: min(fits, plan.written if plan else len(data))]
            if done:
                file.inode.change(Write(offset, done))
            self._go_wrong(plan, file.path)
            if fits < len(data):
                raise os_error(errno.ENOSPC, file.path)

    def _sync(self, file: SimulatedFile) -> None:
        with self._mutex:
            plan = self._note("sync", file.path)
            if plan is not None and plan.error is not None:
                file.inode.fail_to_sync()
            self._go_wrong(plan, file.path)
            file.inode.sync()

    def _truncate(self, file: SimulatedFile, size: int) -> None:
        with self._mutex:
            self._count("truncate", file.path, size)
            file.inode.change(Truncate(size))

    def _unlock(self, inode: Inode) -> None:
        with self._mutex:
            self._locked.discard(inode)

    def _count(self, kind: str, path: str, size: int = 0) -> None:
        """Note an operation that is done wholly or not at all."""
        self._go_wrong(self._note(kind, path, size), path)

    def _note(self, kind: str, path: str, size: int = 0) -> _Plan | None:
        """Put an operation into the history; the answer says how it goes wrong, if it does."""
        self._check_alive()
        self.history.append(Operation(kind, normal(path), size))
        return self._plans.pop(len(self.history), None)

    def _go_wrong(self, plan: _Plan | None, path: str) -> None:
        if plan is None:
            return
        if plan.error is None:
            self.dead = True
            raise Crash(f"stopped at operation {len(self.history)}, on {path}")
        raise os_error(plan.error, path)

    def _check_alive(self) -> None:
        if self.dead:
            raise Crash("the process that used this disk is gone")


class SimulatedFile:
    """One open file of a simulated disk."""

    def __init__(self, disk: SimulatedDisk, path: str, inode: Inode, *, writable: bool) -> None:
        self.path = path
        self.inode = inode
        self.locks = False
        self._disk = disk
        self._writable = writable
        self._closed = False

    def read(self, offset: int, size: int) -> bytes:
        with self._disk._mutex:
            self._check()
            return bytes(self.inode.data[offset : offset + size])

    def write(self, offset: int, chunks: Sequence[bytes | memoryview]) -> None:
        self._check(writing=True)
        self._disk._write(self, offset, b"".join(chunks))

    def sync(self) -> None:
        self._check()
        self._disk._sync(self)

    def truncate(self, size: int) -> None:
        self._check(writing=True)
        self._disk._truncate(self, size)

    def size(self) -> int:
        self._check()
        return len(self.inode.data)

    def close(self) -> None:
        if not self._disk.dead:
            self._check()
        self._closed = True
        if self.locks:
            self._disk._unlock(self.inode)

    def _check(self, *, writing: bool = False) -> None:
        self._disk._check_alive()
        if self._closed or (writing and not self._writable):
            raise os_error(errno.EBADF, self.path)
