"""The world as ports: clock, disk and randomness.

The embedded log reaches the operating system only through these ports, so that a deterministic simulator can
drive the same code. The `System…` classes use the operating system; `broker_io.testing` has a simulated disk.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol


class Clock(Protocol):
    def now_ms(self) -> int:
        """Milliseconds since 1970 in UTC; may jump."""

    def monotonic(self) -> float:
        """Seconds from some start; never goes back."""

    def sleep(self, seconds: float) -> None: ...


class Randomness(Protocol):
    def token(self, size: int) -> bytes:
        """`size` unpredictable bytes."""


class ReadableFile(Protocol):
    """One open file. Every call raises OSError as the operating system does."""

    def read(self, offset: int, size: int) -> bytes:
        """Up to `size` bytes from `offset`; fewer only at the end of the file."""

    def size(self) -> int: ...

    def close(self) -> None: ...


def disable_grpc_fork_handlers() -> None:
    """Call this before gRPC is first used.

    Its fork handlers are for programs that use gRPC in the child. They sometimes crash it, and a child that only starts
    another program, such as Spark's JVM, must not depend on them.
    """
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")


def read_file(file: ReadableFile) -> bytes:
    """Return all that a file holds."""
    return file.read(0, file.size())


class File(ReadableFile, Protocol):
    """One open file that can be written if it was opened for writing."""

    def write(self, offset: int, chunks: Sequence[bytes | memoryview]) -> None:
        """Write all chunks consecutively from `offset`."""

    def sync(self) -> None:
        """Return once the data and the size of the file are durable."""

    def truncate(self, size: int) -> None: ...


class Disk(Protocol):
    """Files by path. Created, renamed and removed names are durable after `sync_directory`."""

    def open(self, path: str, *, write: bool = False, create: bool = False) -> File: ...

    def lock(self, path: str) -> File | None:
        """Lock a file for this process, creating it if it is missing; None if another process holds it."""

    def locked(self, path: str) -> bool:
        """Whether a process holds the lock of a file; a missing file is not locked. May disturb `lock` for a moment."""

    def exists(self, path: str) -> bool: ...

    def identity(self, path: str) -> tuple[int, int, int]:
        """A value that changes when another file gets this name."""

    def list(self, path: str) -> list[str]:
        """Names in a directory, sorted."""

    def make_directory(self, path: str) -> None:
        """Create a directory and its parents unless they exist."""

    def rename(self, source: str, target: str) -> None: ...

    def remove(self, path: str) -> None: ...

    def sync_directory(self, path: str) -> None: ...

    def free_bytes(self, path: str) -> int: ...


class SystemClock:
    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def monotonic(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


class SystemRandomness:
    def token(self, size: int) -> bytes:
        return secrets.token_bytes(size)


WRITEV_MAX = 1024
"""Chunks that one system call accepts on every known platform."""


class SystemFile:
    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def read(self, offset: int, size: int) -> bytes:
        data = os.pread(self._descriptor, size, offset)
        if len(data) == size or not data:
            return data
        chunks = [data]
        missing = size - len(data)
        while missing and (data := os.pread(self._descriptor, missing, offset + size - missing)):
            chunks.append(data)
            missing -= len(data)
        return b"".join(chunks)

    def write(self, offset: int, chunks: Sequence[bytes | memoryview]) -> None:
        for start in range(0, len(chunks), WRITEV_MAX):
            group = list(chunks[start : start + WRITEV_MAX])
            length = sum(map(len, group))
            written = os.pwritev(self._descriptor, group, offset)
            if written < length:
                rest = memoryview(b"".join(group))
                while written < length:
                    written += os.pwrite(self._descriptor, rest[written:], offset + written)
            offset += length

    def sync(self) -> None:
        os.fdatasync(self._descriptor)

    def truncate(self, size: int) -> None:
        os.ftruncate(self._descriptor, size)

    def size(self) -> int:
        return os.fstat(self._descriptor).st_size

    def close(self) -> None:
        os.close(self._descriptor)


class SystemLock(SystemFile):
    """A file that this process has locked. A forked child closes it, or the lock would outlive this process."""

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor)
        _LOCKS.add(self)

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


_LOCKS: weakref.WeakSet[SystemLock] = weakref.WeakSet()


def _forked() -> None:
    for lock in _LOCKS:
        lock.close()


os.register_at_fork(after_in_child=_forked)


class SystemDisk:
    def open(self, path: str, *, write: bool = False, create: bool = False) -> SystemFile:
        flags = os.O_CLOEXEC | (os.O_RDWR if write else os.O_RDONLY) | (os.O_CREAT if create else 0)
        return SystemFile(os.open(path, flags, 0o644))

    def lock(self, path: str) -> SystemLock | None:
        import fcntl

        descriptor = os.open(path, os.O_CLOEXEC | os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            if isinstance(error, BlockingIOError):
                return None
            raise
        return SystemLock(descriptor)

    def locked(self, path: str) -> bool:
        import fcntl

        try:
            descriptor = os.open(path, os.O_CLOEXEC | os.O_RDONLY)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(descriptor)
        return False

    def exists(self, path: str) -> bool:
        return os.path.exists(path)

    def identity(self, path: str) -> tuple[int, int, int]:
        status = os.stat(path)
        return status.st_dev, status.st_ino, status.st_mtime_ns

    def list(self, path: str) -> list[str]:
        return sorted(os.listdir(path))

    def make_directory(self, path: str) -> None:
        os.makedirs(path, exist_ok=True)

    def rename(self, source: str, target: str) -> None:
        os.rename(source, target)

    def remove(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.remove(path)

    def sync_directory(self, path: str) -> None:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def free_bytes(self, path: str) -> int:
        return shutil.disk_usage(path).free


@dataclass(frozen=True, slots=True)
class Environment:
    """The ports of the embedded log; the defaults are the real machine."""

    clock: Clock = field(default_factory=SystemClock)
    disk: Disk = field(default_factory=SystemDisk)
    randomness: Randomness = field(default_factory=SystemRandomness)
    process: str = field(default_factory=lambda: str(os.getpid()))
    """The text that a lock file holds about its owner: the process id."""
