"""The real machine behind the ports of `broker_io.environment`."""

from __future__ import annotations

import _thread
import contextlib
import contextvars
import ipaddress
import operator
import os
import queue
import random
import secrets
import shutil
import socket
import stat
import threading
import time
import weakref
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

T = TypeVar("T")


_BOOTTIME = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


class SystemClock:
    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000

    monotonic, sleep = staticmethod(time.monotonic), staticmethod(time.sleep)

    def boottime_ns(self) -> int:
        return time.clock_gettime_ns(_BOOTTIME)


class SystemRandomness:
    token = staticmethod(secrets.token_bytes)

    def below(self, end: int) -> int:
        return random.randrange(end)  # noqa: S311  it only spreads load

    def uniform(self, low: float, high: float) -> float:
        return random.uniform(low, high)  # noqa: S311  it only spreads load


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


def _rights_of_group(path: str) -> int:
    """What the group may do with a new file or directory: as with the directory it is in, if that is closed to others.

    So the permissions of a log's directory decide whether a group reads the log. 0755 is only what mkdir gives.
    """
    mode = os.stat(os.path.dirname(path) or ".").st_mode
    return 0 if mode & stat.S_IRWXO else mode & stat.S_IRWXG


class SystemDisk:
    def open(self, path: str, *, write: bool = False, create: bool = False) -> SystemFile:
        flags = os.O_CLOEXEC | (os.O_RDWR if write else os.O_RDONLY)
        if not create:
            return SystemFile(os.open(path, flags))
        return SystemFile(os.open(path, flags | os.O_CREAT, 0o600 | (_rights_of_group(path) & 0o060)))

    def lock(self, path: str) -> SystemLock | None:
        import fcntl

        mode = 0o600 | (_rights_of_group(path) & 0o060)
        descriptor = os.open(path, os.O_CLOEXEC | os.O_RDWR | os.O_CREAT, mode)
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

    def read(self, path: str) -> bytes:
        with open(path, "rb") as file:
            return file.read()

    exists = staticmethod(os.path.exists)

    def identity(self, path: str) -> tuple[int, int, int]:
        status = os.stat(path)
        return status.st_dev, status.st_ino, status.st_mtime_ns

    def permissions(self, path: str) -> int:
        return os.stat(path).st_mode & 0o777

    def list(self, path: str) -> list[str]:
        return sorted(os.listdir(path))

    def make_directory(self, path: str) -> None:
        if os.path.isdir(path):
            return
        if parent := os.path.dirname(path.rstrip("/")):
            self.make_directory(parent)
        os.makedirs(path, 0o700 | _rights_of_group(path.rstrip("/")), exist_ok=True)

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


class ContextThread(threading.Thread):
    """A thread that runs in a copy of the context of its starter.

    A third thread starts it: a signal handler that raises in `Thread.start` could leave a lock taken, or release one
    that is not.
    """

    _starter: contextvars.Context

    def start(self) -> None:
        self._starter = contextvars.copy_context()
        started: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()
        _thread.start_new_thread(self._start, (super().start, started))
        error = started.get()
        if error is not None:
            raise error

    @staticmethod
    def _start(start: Callable[[], None], started: queue.SimpleQueue[Exception | None]) -> None:
        try:
            start()
        except Exception as error:
            started.put(error)
        else:
            started.put(None)

    def run(self) -> None:
        self._starter.run(super().run)

    def is_current(self) -> bool:
        return threading.current_thread() is self


class ContextTimer(ContextThread, threading.Timer):
    """A timer whose call runs in a copy of the context of its starter."""


def _enter(context: contextvars.Context) -> None:
    for variable, value in context.items():
        variable.set(value)


class SystemEvent:
    """An event that no waiter can block: `threading.Event` stays locked if a signal handler raises at a bad moment."""

    def __init__(self) -> None:
        self._set = False
        self._waiting: deque[threading.Lock] = deque()

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        self._set = True
        while self._waiting:
            with contextlib.suppress(IndexError):  # another thread sets it as well
                self._waiting.popleft().release()

    def clear(self) -> None:
        self._set = False

    def wait(self, timeout: float | None = None) -> bool:
        if self._set:
            return True
        lock = threading.Lock()
        lock.acquire()
        self._waiting.append(lock)
        woken = self._set or lock.acquire(timeout=-1 if timeout is None else max(timeout, 0.0))
        with contextlib.suppress(ValueError):
            self._waiting.remove(lock)
        return woken or self._set


class SystemCondition(threading.Condition):
    """A condition whose block takes and releases the lock in C, so that a signal handler cannot raise in between."""

    if not TYPE_CHECKING:
        __enter__ = property(operator.attrgetter("_lock.__enter__"))
        __exit__ = property(operator.attrgetter("_lock.__exit__"))


class SystemThreads:
    def thread(self, work: Callable[[], object], *, name: str | None = None, daemon: bool = False) -> ContextThread:
        return ContextThread(target=work, name=name, daemon=daemon)

    def timer(self, seconds: float, call: Callable[[], object]) -> ContextTimer:
        timer = ContextTimer(seconds, call)
        timer.daemon = True
        return timer

    def at_exit(self, call: Callable[[], object]) -> None:
        # The executors stop in a call that was registered before, and these calls are made in reverse order. `atexit`
        # would be too late.
        threading._register_atexit(call)  # type: ignore[attr-defined]  # private, but all versions have it

    def executor(self, workers: int, name: str) -> Executor:
        return ThreadPoolExecutor(workers, name, _enter, (contextvars.copy_context(),))

    lock, reentrant_lock = staticmethod(threading.Lock), staticmethod(threading.RLock)
    event, queue = SystemEvent, queue.SimpleQueue

    def condition(self) -> SystemCondition:
        return SystemCondition()


DESCRIPTORS = "/dev/fd"
"""The directory with the descriptors of this process."""
MOST_DESCRIPTORS = 65_536
SUBNET = 64
"""Bits of an IPv6 address that count as one address: one client usually has all that begin with them."""


def client_address(host: str) -> str:
    """The address that limits count connections of a client for: one of IPv4, or the subnet of one of IPv6."""
    address = ipaddress.ip_address(host.partition("%")[0])
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((address, SUBNET), strict=False))


class _Listener(socket.socket):
    """Accepts at most `most` connections at a time, and `of_address` of one address; 0: any number."""

    def __init__(self, listening: socket.socket, most: int, of_address: int) -> None:
        super().__init__(fileno=listening.detach())
        self._limits = (most, of_address)
        self._of_client: Counter[str] = Counter()

    def accept(self) -> tuple[socket.socket, Any]:
        """The next connection that no limit refuses."""
        most, of_address = self._limits
        while True:
            connection, address = super().accept()
            client = client_address(address[0])
            if 0 < most <= self._of_client.total() or 0 < of_address <= self._of_client[client]:
                connection.close()
                continue
            self._of_client[client] += 1
            return _Accepted(connection, self._of_client, client), address


class _Accepted(socket.socket):
    """A connection that is counted until it is closed."""

    def __init__(self, connection: socket.socket, counted: Counter[str], client: str) -> None:
        super().__init__(fileno=connection.detach())
        self._counted, self._client = counted, client

    def close(self) -> None:
        if self.fileno() >= 0:
            self._counted[self._client] -= 1
            if not self._counted[self._client]:
                del self._counted[self._client]
        super().close()


def _accepted_from(descriptor: int, port: int) -> str | None:
    """The client of a connection to a port of this process; None for another descriptor."""
    connection: socket.socket | None = None
    try:
        connection = socket.socket(fileno=descriptor)
        if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.getsockname()[1] == port:
            return client_address(connection.getpeername()[0])
    except OSError:  # no socket, or closed meanwhile
        pass
    finally:
        if connection is not None:
            connection.detach()  # it belongs to somebody else
    return None


def _shut_down(descriptor: int, port: int, client: str) -> bool:
    """Shut down the connection of a client, whose owner then sees its end; False if the descriptor is another one."""
    try:
        own = os.dup(descriptor)  # or another file could get the number in between
    except OSError:
        return False
    if _accepted_from(own, port) != client:
        os.close(own)
        return False
    with socket.socket(fileno=own) as connection, contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    return True


class SystemNetwork:
    def host_name(self) -> str:
        return socket.gethostname()

    def probe(self, host: str, port: int, seconds: float) -> None:
        socket.create_connection((host, port), seconds).close()

    def ask(self, host: str, port: int, request: bytes, seconds: float) -> bytes:
        with socket.create_connection((host, port), seconds) as connection:
            try:
                connection.sendall(request)
                return connection.recv(4096)
            except OSError:  # also the timeout
                return b""

    def listen(self, host: str, port: int, most: int = 0, of_address: int = 0) -> socket.socket:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return _Listener(socket.create_server((host, port), family=family), most, of_address)

    def trim(self, port: int, of_address: int) -> int:
        names = os.listdir(DESCRIPTORS)
        if len(names) <= of_address:
            return 0
        found: dict[str, list[int]] = defaultdict(list)
        for descriptor in sorted(map(int, names)):
            if (client := _accepted_from(descriptor, port)) is not None:
                found[client].append(descriptor)
        excess = [(one, client) for client, each in found.items() for one in each[of_address:]]
        return sum(_shut_down(descriptor, port, client) for descriptor, client in excess)

    def descriptors(self) -> int:
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if resource.RLIM_INFINITY in (soft, hard):
            hard = MOST_DESCRIPTORS
        wanted = max(soft, min(hard, MOST_DESCRIPTORS))
        if soft != wanted:
            with contextlib.suppress(ValueError, OSError):  # macOS allows less than it says
                resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
                soft = wanted
        return soft

    def check_free(self, host: str, port: int) -> None:
        family, kind, protocol, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as trial:
            trial.bind(place)


def process_id() -> str:
    return str(os.getpid())
