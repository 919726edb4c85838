"""A simulated disk that can lose power, and a deterministic clock and source of randomness.

It is the `Disk` port with a crash, an error or flipped bits at any operation. A write is visible at once and durable
after `sync`; created, renamed and removed names are durable after `sync_directory` of their directory. The root
directory exists. `crash` returns the disk after a power loss, `kill` the disk after the end of the process alone. The
old disk then raises `Crash` from every call.
"""

from __future__ import annotations

import enum
import errno
import os
import posixpath
import random
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from enum import Enum
from posixpath import dirname
from typing import Final, Literal, NamedTuple, TypeAlias

__all__ = ["Crash", "Operation", "SimulatedDisk", "SimulatedFile", "Unsynced"]


SECTOR = 512
"""Bytes that a disk writes atomically."""


class Unsynced(enum.Enum):
    """What a power loss leaves of unsynced changes."""

    LOST = "lost"
    KEPT = "kept"
    PREFIX = "prefix"
    """A prefix of the changes of each file, and of those of the directories."""
    SECTORS = "sectors"
    """Any sectors of each file, and any changes of the directories."""


@dataclass(frozen=True, slots=True)
class Write:
    offset: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Truncate:
    size: int


Change = Write | Truncate


@dataclass(slots=True, eq=False)
class Inode:
    """One file. `stable` is the synced content, `pending` the changes since, `data` the content with these changes.

    Changes that a failed sync dropped are in `data` only: a process still reads them, a power loss loses them.
    """

    number: int
    data: bytearray = field(default_factory=bytearray)
    stable: bytes = b""
    pending: list[Change] = field(default_factory=list)
    version: int = 0

    def change(self, change: Change) -> None:
        self.pending.append(change)
        self.version += 1
        _apply(self.data, change)

    def sync(self) -> None:
        if self.pending:
            data = bytearray(self.stable)
            for change in self.pending:
                _apply(data, change)
            self.stable = bytes(data)
            self.pending.clear()

    def fail_to_sync(self) -> None:
        """Drop the pending changes, as an operating system does: no later sync writes them."""
        self.pending.clear()

    def copy(self) -> Inode:
        return Inode(self.number, bytearray(self.data), self.stable, [*self.pending], self.version)

    def after_power_loss(self, unsynced: Unsynced, choose: random.Random) -> Inode:
        """The file after a power loss; all of it is stable."""
        data = bytearray(self.stable)
        if unsynced is Unsynced.KEPT:
            data = bytearray(self.data)
        elif unsynced is Unsynced.PREFIX:
            self._apply_prefix(data, choose)
        elif unsynced is Unsynced.SECTORS:
            self._apply_sectors(data, choose)
        return Inode(self.number, data, bytes(data), version=self.version + 1)

    def _apply_prefix(self, data: bytearray, choose: random.Random) -> None:
        whole = choose.randint(0, len(self.pending))
        for change in self.pending[:whole]:
            _apply(data, change)
        if whole < len(self.pending) and isinstance(torn := self.pending[whole], Write):
            _apply(data, Write(torn.offset, torn.data[: choose.randint(0, len(torn.data))]))

    def _apply_sectors(self, data: bytearray, choose: random.Random) -> None:
        for change in self.pending:
            if isinstance(change, Truncate):
                if choose.random() < 0.5:
                    _apply(data, change)
                continue
            grown_to = len(data)
            for sector in _sectors(change):
                if choose.random() < 0.5:
                    _apply(data, sector)
                elif choose.random() < 0.5:  # the size was written, the bytes were not
                    grown_to = max(grown_to, sector.offset + len(sector.data))
            data.extend(bytes(max(0, grown_to - len(data))))


def _sectors(write: Write) -> list[Write]:
    end = write.offset + len(write.data)
    starts = [write.offset, *range((write.offset // SECTOR + 1) * SECTOR, end, SECTOR)]
    stops = [*starts[1:], end]
    return [Write(a, write.data[a - write.offset : b - write.offset]) for a, b in zip(starts, stops, strict=True)]


def _apply(data: bytearray, change: Change) -> None:
    if isinstance(change, Truncate):
        del data[change.size :]
        data.extend(bytes(change.size - len(data)))
    elif change.data:
        data.extend(bytes(max(0, change.offset - len(data))))
        data[change.offset : change.offset + len(change.data)] = change.data


class _Directory(Enum):
    DIRECTORY = "directory"


DIRECTORY: Final = _Directory.DIRECTORY
Node: TypeAlias = Inode | Literal[_Directory.DIRECTORY]
Names: TypeAlias = dict[str, Node]

ROOTS = ("/", "")


def normal(path: str) -> str:
    text = posixpath.normpath(path)
    return "" if text == "." else text


def os_error(number: int, path: str) -> OSError:
    return OSError(number, os.strerror(number), path)


@dataclass(frozen=True, slots=True)
class NameChange:
    """One change of names: `removed` is removed, then `path` names `node`; each may be None."""

    removed: str | None
    path: str | None
    node: Node | None

    def directories(self) -> set[str]:
        return {dirname(path) for path in (self.removed, self.path) if path is not None}

    def apply(self, names: Names) -> None:
        if self.removed is not None:
            names.pop(self.removed, None)
        if self.path is not None and self.node is not None:
            names[self.path] = self.node


class Tree:
    """The names of a disk: `_now` as processes see them, `_stable` as synced, `_pending` the unsynced changes."""

    def __init__(self) -> None:
        self._now: Names = dict.fromkeys(ROOTS, DIRECTORY)
        self._stable: Names = dict(self._now)
        self._pending: list[NameChange] = []
        self._made = 0

    def find(self, path: str) -> Node | None:
        return self._now.get(normal(path))

    def file(self, path: str) -> Inode:
        found = self.find(path)
        if not isinstance(found, Inode):
            raise os_error(errno.ENOENT if found is None else errno.EISDIR, path)
        return found

    def files(self) -> Iterator[tuple[str, Inode]]:
        return ((path, node) for path, node in self._now.items() if isinstance(node, Inode))

    def names(self, path: str) -> list[str]:
        """Names in a directory, sorted."""
        place = normal(path)
        if self.find(place) is not DIRECTORY:
            raise os_error(errno.ENOENT if self.find(place) is None else errno.ENOTDIR, path)
        return sorted(posixpath.basename(name) for name in self._now if name not in ROOTS and dirname(name) == place)

    def check_parent(self, path: str) -> None:
        if self._now.get(dirname(normal(path))) is not DIRECTORY:
            raise os_error(errno.ENOENT, path)

    def missing_directories(self, path: str) -> list[str]:
        """The missing directories on the way to this one and itself, outermost first."""
        missing: list[str] = []
        place = normal(path)
        while (found := self._now.get(place)) is None:
            missing.append(place)
            place = dirname(place)
        if found is not DIRECTORY:
            raise os_error(errno.ENOTDIR, path)
        return missing[::-1]

    def create(self, path: str) -> Inode:
        self._made += 1
        inode = Inode(self._made)
        self._change(NameChange(None, normal(path), inode))
        return inode

    def create_directory(self, path: str) -> None:
        self._change(NameChange(None, normal(path), DIRECTORY))

    def rename(self, source: str, target: str) -> None:
        self._change(NameChange(normal(source), normal(target), self.file(source)))

    def remove(self, path: str) -> None:
        self.file(path)
        self._change(NameChange(normal(path), None, None))

    def sync(self, path: str) -> None:
        """Make the changes of one directory durable."""
        place = normal(path)
        for change in [change for change in self._pending if place in change.directories()]:
            change.apply(self._stable)
            self._pending.remove(change)

    def copy(self) -> Tree:
        copies: dict[int, Inode] = {}

        def copied(node: Node) -> Node:
            return copies.setdefault(node.number, node.copy()) if isinstance(node, Inode) else node

        other = Tree()
        other._made = self._made
        other._now = {path: copied(node) for path, node in self._now.items()}
        other._stable = {path: copied(node) for path, node in self._stable.items()}
        other._pending = [
            NameChange(change.removed, change.path, None if change.node is None else copied(change.node))
            for change in self._pending
        ]
        return other

    def after_power_loss(self, unsynced: Unsynced, choose: random.Random) -> Tree:
        names = dict(self._stable)
        for change in _kept(self._pending, unsynced, choose):
            change.apply(names)
        other = Tree()
        other._made = self._made
        for path in sorted(names):
            node = names[path]
            if path in ROOTS or other._now.get(dirname(path)) is DIRECTORY:  # else its directory was lost
                other._now[path] = node.after_power_loss(unsynced, choose) if isinstance(node, Inode) else node
        other._stable = dict(other._now)
        return other

    def _change(self, change: NameChange) -> None:
        change.apply(self._now)
        self._pending.append(change)


def _kept(pending: list[NameChange], unsynced: Unsynced, choose: random.Random) -> Iterable[NameChange]:
    if unsynced is Unsynced.LOST:
        return []
    if unsynced is Unsynced.KEPT:
        return pending
    if unsynced is Unsynced.PREFIX:
        return pending[: choose.randint(0, len(pending))]
    return [change for change in pending if choose.random() < 0.5]


class Crash(BaseException):
    """The process stopped here. It is no Exception, so that no handler catches it by accident."""


class Operation(NamedTuple):
    """One operation in `history`; `size` in bytes, 0 for operations without data."""

    kind: str
    path: str
    size: int = 0


@dataclass(slots=True)
class _Plan:
    """The fault that replaces an operation: a crash (no error number) or an OSError."""

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

    # --- faults ---

    def stop_at(self, operation: int, *, written: int = 0) -> None:
        """Crash at operation number `operation`; 1 is the next one.

        If it is a write, its first `written` bytes are written.
        """
        self._plans[len(self.history) + operation] = _Plan(None, written)

    def fail_at(self, operation: int, error: int, *, written: int = 0) -> None:
        """Fail operation number `operation` with an error number; as `stop_at` otherwise."""
        self._plans[len(self.history) + operation] = _Plan(error, written)

    def crash(self, unsynced: Unsynced, seed: int = 0) -> SimulatedDisk:
        """The disk after a power loss; `seed` decides where `unsynced` leaves a choice."""
        with self._mutex:
            found = SimulatedDisk(capacity=self.capacity)
            choose = random.Random(seed)  # noqa: S311 - it has to be deterministic
            found._tree = self._tree.after_power_loss(unsynced, choose)
            return found

    def kill(self) -> SimulatedDisk:
        """The disk after the process ended: all writes are visible, unsynced ones stay unsynced."""
        with self._mutex:
            self.dead = True
            return self.copy()

    def copy(self) -> SimulatedDisk:
        """A copy of the disk without locks."""
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
        """Replace the stored content of an existing file, as corruption or a restore does."""
        with self._mutex:
            inode = self._tree.file(path)
            inode.data, inode.stable, inode.pending = bytearray(data), data, []
            inode.version += 1

    def flip(self, path: str, bit: int) -> None:
        """Flip one bit of a file; bit 0 is the lowest of the first byte."""
        data = bytearray(self.content(path))
        data[bit // 8] ^= 1 << bit % 8
        self.put(path, bytes(data))

    # --- the port ---

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

    def read(self, path: str) -> bytes:
        with closing(self.open(path)) as file:
            return file.read(0, file.size())

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

    def permissions(self, path: str) -> int:
        with self._mutex:
            self._check_alive()
            if self._tree.find(path) is None:
                raise os_error(errno.ENOENT, path)
        return 0o600

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

    # --- operations and their faults ---

    def _count(self, kind: str, path: str, size: int = 0) -> None:
        """Record an atomic operation, or raise its fault."""
        self._go_wrong(self._note(kind, path, size), path)

    def _note(self, kind: str, path: str, size: int = 0) -> _Plan | None:
        """Record an operation in the history; return its fault, if it has one."""
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
            raise Crash("the process of this disk has ended")


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
        disk, data = self._disk, b"".join(chunks)
        with disk._mutex:
            self._check(writing=True)
            fits = max(0, disk._free() + max(0, len(self.inode.data) - offset))
            plan = disk._note("write", self.path, len(data))
            done = data[: min(fits, plan.written if plan else len(data))]
            if done:
                self.inode.change(Write(offset, done))
            disk._go_wrong(plan, self.path)
            if fits < len(data):
                raise os_error(errno.ENOSPC, self.path)

    def sync(self) -> None:
        with self._disk._mutex:
            self._check()
            plan = self._disk._note("sync", self.path)
            if plan is not None and plan.error is not None:
                self.inode.fail_to_sync()
            self._disk._go_wrong(plan, self.path)
            self.inode.sync()

    def truncate(self, size: int) -> None:
        with self._disk._mutex:
            self._check(writing=True)
            self._disk._count("truncate", self.path, size)
            self.inode.change(Truncate(size))

    def size(self) -> int:
        self._check()
        return len(self.inode.data)

    def close(self) -> None:
        if not self._disk.dead:
            self._check()
        self._closed = True
        if self.locks:
            with self._disk._mutex:
                self._disk._locked.discard(self.inode)

    def _check(self, *, writing: bool = False) -> None:
        self._disk._check_alive()
        if self._closed or (writing and not self._writable):
            raise os_error(errno.EBADF, self.path)


START_MS = 1_700_000_000_000


class SimulatedClock:
    """Time that moves only by `sleep` and `advance`."""

    def __init__(self, now_ms: int = START_MS) -> None:
        self._now = now_ms / 1000
        self._monotonic = 0.0

    def now_ms(self) -> int:
        return round(self._now * 1000)

    def monotonic(self) -> float:
        return self._monotonic

    def boottime_ns(self) -> int:
        return round(self._monotonic * 1e9)

    def sleep(self, seconds: float) -> None:
        self.advance(seconds)

    def advance(self, seconds: float) -> None:
        """Move both clocks forward."""
        self._now += seconds
        self._monotonic += seconds

    def set_ms(self, now_ms: int) -> None:
        """Set the wall clock, as an operator or NTP does; `monotonic` is unaffected."""
        self._now = now_ms / 1000


class SeededRandomness:
    """Values that are the same for the same seed, or those of `source`."""

    def __init__(self, seed: int = 0, source: random.Random | None = None) -> None:
        self._random = source or random.Random(seed)  # noqa: S311 - it has to be deterministic

    def token(self, size: int) -> bytes:
        return self._random.randbytes(size)

    def below(self, end: int) -> int:
        return self._random.randrange(end)

    def uniform(self, low: float, high: float) -> float:
        return self._random.uniform(low, high)
