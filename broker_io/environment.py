"""The world as ports: clock, disk, randomness, threads and network of the current environment.

Everything but the edges of a program reaches the operating system only through these ports, so that a deterministic
simulator can drive the same code. `current` is the environment of the running code: the real machine of
`broker_io.system`, or the one of `use`. Threads, executors and tasks inherit it from the code that starts them.

asyncio is not among the ports: the event loop is one itself, with its time, its sleeps and its worker threads.
`broker_io.testing` has a simulated disk.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from broker_io.errors import UsedAfterFork
from broker_io.system import (
    SystemClock,
    SystemDisk,
    SystemNetwork,
    SystemRandomness,
    SystemThreads,
    process_id,
)

if TYPE_CHECKING:
    import socket

T = TypeVar("T")
Sent = TypeVar("Sent")


class Clock(Protocol):
    def now_ms(self) -> int:
        """Milliseconds since 1970 in UTC; may jump."""

    def monotonic(self) -> float:
        """Seconds from some start; never goes back."""

    def boottime_ns(self) -> int:
        """Nanoseconds from some start, including the time in which the machine was suspended; never goes back."""

    def sleep(self, seconds: float) -> None: ...


class Randomness(Protocol):
    def token(self, size: int) -> bytes:
        """`size` unpredictable bytes."""

    def below(self, end: int) -> int:
        """A number from 0 to before `end`; it may be predictable."""

    def uniform(self, low: float, high: float) -> float:
        """A number from `low` to `high`; it may be predictable."""


class ReadableFile(Protocol):
    """One open file. Every call raises OSError as the operating system does."""

    def read(self, offset: int, size: int) -> bytes:
        """Up to `size` bytes from `offset`; fewer only at the end of the file."""

    def size(self) -> int: ...

    def close(self) -> None: ...


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
    """Files by path. Created, renamed and removed names are durable after `sync_directory`.

    What is created belongs to its user alone, and to the group of a directory that only its group may use as well.
    """

    def open(self, path: str, *, write: bool = False, create: bool = False) -> File: ...

    def lock(self, path: str) -> File | None:
        """Lock a file for this process, creating it if it is missing; None if another process holds it."""

    def locked(self, path: str) -> bool:
        """Whether a process holds the lock of a file; a missing file is not locked. May disturb `lock` for a moment."""

    def read(self, path: str) -> bytes:
        """All bytes of a file, which may be a pipe."""

    def exists(self, path: str) -> bool: ...

    def identity(self, path: str) -> tuple[int, int, int]:
        """A value that changes when another file gets this name."""

    def permissions(self, path: str) -> int:
        """Who may read and change a file or a directory: the nine bits of its mode."""

    def list(self, path: str) -> list[str]:
        """Names in a directory, sorted."""

    def make_directory(self, path: str) -> None:
        """Create a directory and its parents unless they exist."""

    def rename(self, source: str, target: str) -> None: ...

    def remove(self, path: str) -> None: ...

    def sync_directory(self, path: str) -> None: ...

    def free_bytes(self, path: str) -> int: ...


class Mutex(Protocol):
    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool: ...

    def release(self) -> None: ...

    def __enter__(self) -> bool: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Condition(Mutex, Protocol):
    """A condition with a reentrant lock of its own."""

    def wait(self, timeout: float | None = None) -> bool: ...

    def wait_for(self, predicate: Callable[[], T], timeout: float | None = None) -> T: ...

    def notify(self, n: int = 1) -> None: ...

    def notify_all(self) -> None: ...


class ThreadEvent(Protocol):
    def is_set(self) -> bool: ...

    def set(self) -> None: ...

    def clear(self) -> None: ...

    def wait(self, timeout: float | None = None) -> bool: ...


class ThreadQueue(Protocol[Sent]):
    """A queue without a limit; `queue.Empty` as in the standard library."""

    def put(self, item: Sent) -> None: ...

    def get(self, block: bool = True, timeout: float | None = None) -> Sent: ...

    def get_nowait(self) -> Sent: ...


class Thread(Protocol):
    def start(self) -> None: ...

    def join(self, timeout: float | None = None) -> None: ...

    def is_current(self) -> bool:
        """Whether the calling code runs in this thread."""


class Timer(Protocol):
    def start(self) -> None: ...

    def cancel(self) -> None: ...


class Threads(Protocol):
    """Threads run in a copy of the context in which they, or the executor that they belong to, were started."""

    def thread(self, work: Callable[[], object], *, name: str | None = None, daemon: bool = False) -> Thread:
        """A thread that is not started yet."""

    def timer(self, seconds: float, call: Callable[[], object]) -> Timer:
        """A daemon thread that calls something some seconds after its start."""

    def at_exit(self, call: Callable[[], object]) -> None:
        """Call something when the main thread has ended, while executors still work. RuntimeError: they do not."""

    def executor(self, workers: int, name: str) -> Executor: ...

    def lock(self) -> Mutex: ...

    def reentrant_lock(self) -> Mutex: ...

    def condition(self) -> Condition: ...

    def event(self) -> ThreadEvent: ...

    def queue(self) -> ThreadQueue[Any]: ...


class Network(Protocol):
    """Sockets that neither asyncio nor a client library opens. The calls raise OSError."""

    def host_name(self) -> str: ...

    def probe(self, host: str, port: int, seconds: float) -> None:
        """Return if the address accepts connections."""

    def ask(self, host: str, port: int, request: bytes, seconds: float) -> bytes:
        """The first bytes of the answer; none if the address accepts the connection, but does not answer."""

    def listen(self, host: str, port: int, most: int = 0, of_address: int = 0) -> socket.socket:
        """A socket that listens at an address.

        It closes connections above `most`, and above `of_address` of one address, as it accepts them; 0: no limit.
        """

    def trim(self, port: int, of_address: int) -> int:
        """Shut down connections to a port of this process above `of_address` of one address, the newest; how many."""

    def descriptors(self) -> int:
        """Let this process open as many files as it may, up to 65,536; how many that are. 0: any number."""

    def check_free(self, host: str, port: int) -> None:
        """Return if a server can listen at the address."""


@dataclass(frozen=True, slots=True)
class Environment:
    """All ports; the defaults are the real machine."""

    clock: Clock = field(default_factory=SystemClock)
    disk: Disk = field(default_factory=SystemDisk)
    randomness: Randomness = field(default_factory=SystemRandomness)
    threads: Threads = field(default_factory=SystemThreads)
    network: Network = field(default_factory=SystemNetwork)
    process: str = field(default_factory=process_id)
    """The text that identifies the process on its host, also in lock files: the process id."""


_machine = Environment()
_current: ContextVar[Environment | None] = ContextVar("environment", default=None)


def current() -> Environment:
    """The environment of the running code. What lives for long asks once, when it is created."""
    return _current.get() or _machine


@contextlib.contextmanager
def use(environment: Environment) -> Iterator[None]:
    """Make an environment the current one for a block, and for all that is started there."""
    token = _current.set(environment)
    try:
        yield
    finally:
        _current.reset(token)


class _Grpc:
    """Whether this process has used gRPC, and whether a process had when it forked this one."""

    used = inherited = False


def _forked() -> None:
    global _machine
    _machine = Environment()
    _Grpc.inherited |= _Grpc.used


os.register_at_fork(after_in_child=_forked)

AFTER_GRPC = (
    "start the process with spawn or forkserver instead, as multiprocessing.get_context('spawn') does, or fork it "
    "before its parent first uses a service"
)


def grpc_inherited() -> bool:
    """Return whether gRPC was used before this process was forked: none of its connections here would get ready."""
    return _Grpc.inherited


def use_grpc() -> None:
    """Call this before gRPC is used. Raises UsedAfterFork."""
    if _Grpc.inherited:
        raise UsedAfterFork(f"gRPC was used before this process was forked, and cannot be used in it: {AFTER_GRPC}")
    _Grpc.used = True
    set_up_grpc()


def set_up_grpc() -> None:
    """Call this before gRPC is imported.

    Its fork handlers are for programs that use gRPC in the child. They sometimes crash it, and a child that only starts
    another program, such as Spark's JVM, must not depend on them. It writes no lines of its own to stderr, which are
    for programmers of gRPC; errors of calls have the same reasons.
    """
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    # Event loops of several threads share the queue of gRPC, and asyncio reports that another one was faster.
    logging.getLogger("asyncio").addFilter(_not_of_grpc)


def _not_of_grpc(record: logging.LogRecord) -> bool:
    return "PollerCompletionQueue" not in record.getMessage()
