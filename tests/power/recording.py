"""What a program did to a directory, as recorder.c has recorded it, and the disks that power cuts may leave.

The program runs once, as a process of its own, and is not killed: a power cut at any moment is a prefix of the record.
`Replay` does the operations of a prefix again on a simulated disk, which knows what is synced, and
`SimulatedDisk.crash` returns what the disk may have after the cut: without what was not synced, with all of it, with a
prefix of it, or with any of its sectors and names. So one run has as many cuts as operations, each with several disks,
and the same seed cuts the same record in the same way. This is as strong as a library that holds back what is not
synced and drops it when the process is killed: the process could have been killed between any two operations, and what
it does later has no effect on what it had done before. It is stronger too, since a killed process cannot be cut again
elsewhere, and since a disk may also keep what was not synced.

Nobody can reorder operations of several threads here, because each is recorded while it happens and no other one does.
A sync is the exception: it makes durable what was written before it began, and only once it has ended. Whatever the
recorder does not know is noticed: `Replay.check` compares the replayed files with those of the directory.
"""

from __future__ import annotations

import ctypes
import os
import posixpath
import shutil
import struct
import subprocess
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple

from broker_io.testing import SimulatedDisk
from broker_io.testing.disk import SimulatedFile

SOURCE = Path(__file__).with_name("recorder.c")
SYNC_US = 500
"""How long a sync takes: so long that what is acknowledged before its end is noted before its end."""
_HEAD = struct.Struct("<IIQII")


class Kind(IntEnum):
    """As in recorder.c."""

    OPEN = 1
    OPEN_DIRECTORY = 2
    WRITE = 3
    RESIZE = 4
    RENAME = 5
    REMOVE = 6
    MAKE_DIRECTORY = 7
    SYNC_BEGINS = 8
    SYNC_ENDS = 9
    NOTE = 10


class Operation(NamedTuple):
    kind: Kind
    file: int
    at: int
    path: str
    """Of the file, or of the file that `file` was when it was opened."""
    target: str
    data: bytes


def compile_recorder(directory: Path) -> Path:
    """Compile the library. Raises RuntimeError if there is no compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise RuntimeError("power cuts need a C compiler, and there is no cc: install gcc and libc6-dev")
    library = directory / "recorder.so"
    subprocess.run(
        [compiler, "-Wall", "-Werror", "-O1", "-shared", "-fPIC", "-o", library, SOURCE, "-ldl"],
        check=True,
        timeout=120,
    )
    return library


def recorded(library: Path, directory: Path, record: Path, sync_us: int = SYNC_US) -> dict[str, str]:
    """The environment of a program whose operations below a directory are recorded."""
    return {
        "LD_PRELOAD": str(library),
        "POWER_DIRECTORY": str(directory),
        "POWER_RECORD": str(record),
        "POWER_SYNC_US": str(sync_us),
    }


def note(text: str) -> None:
    """Called by a program that is recorded: add a note to its record."""
    data = text.encode()
    ctypes.CDLL(None).power_note(data, ctypes.c_size_t(len(data)))


def read_record(record: Path) -> list[Operation]:
    """All operations of a record. Raises ValueError for one that cannot be replayed."""
    data, at = record.read_bytes(), 0
    operations: list[Operation] = []
    paths: dict[int, str] = {}
    while at < len(data):
        kind, file, where, named, size = _HEAD.unpack_from(data, at)
        at += _HEAD.size
        path, _, target = data[at : at + named].decode().partition("\0")
        at += named + size
        if kind in (Kind.OPEN, Kind.OPEN_DIRECTORY):
            paths[file] = path
            if where & os.O_DSYNC:
                raise ValueError(f"{path} was opened with O_DSYNC or O_SYNC: teach the recorder these writes")
        operations.append(Operation(Kind(kind), file, where, path or paths.get(file, ""), target, data[at - size : at]))
    return operations


def notes(operations: Iterable[Operation]) -> Iterator[str]:
    return (operation.data.decode() for operation in operations if operation.kind is Kind.NOTE)


class Replay:
    """A disk on which recorded operations happen again, the first `done` of them so far.

    `begun` is the disk before them, all of which is durable.
    """

    def __init__(self, operations: list[Operation], begun: SimulatedDisk) -> None:
        self.disk = begun.copy()
        self.done = 0
        self._operations = operations
        self._files: dict[int, SimulatedFile] = {}
        self._syncs: defaultdict[int, deque[list[Any]]] = defaultdict(deque)

    def go_to(self, number: int) -> SimulatedDisk:
        """Do the operations before this one."""
        while self.done < number:
            self._do(self._operations[self.done])
            self.done += 1
        return self.disk

    def check(self, directory: Path) -> None:
        """Raise AssertionError if the files are not those of the directory."""
        found, here = read_disk(directory), {path: self.disk.content(path) for path in self.disk.files()}
        wrong = sorted(path for path in found.keys() | here.keys() if found.get(path) != here.get(path))
        assert not wrong, f"the recorder does not know all that the program did to {', '.join(wrong)}"

    def _do(self, operation: Operation) -> None:
        kind, disk = operation.kind, self.disk
        if kind is Kind.OPEN:
            create, write = operation.at & os.O_CREAT, operation.at & (os.O_WRONLY | os.O_RDWR)
            self._files[operation.file] = disk.open(operation.path, write=bool(write), create=bool(create))
        elif kind is Kind.WRITE:
            self._files[operation.file].write(operation.at, [operation.data])
        elif kind is Kind.RESIZE:
            self._files[operation.file].truncate(operation.at)
        elif kind is Kind.RENAME:
            disk.rename(operation.path, operation.target)
        elif kind is Kind.REMOVE:
            disk.remove(operation.path)
        elif kind is Kind.MAKE_DIRECTORY:
            disk.make_directory(operation.path)
        elif kind is Kind.SYNC_BEGINS:
            self._syncs[operation.file].append(self._unsynced(operation))
        elif kind is Kind.SYNC_ENDS:
            self._end_sync(operation, {id(change) for change in self._syncs[operation.file].popleft()})

    def _unsynced(self, operation: Operation) -> list[Any]:
        """The changes that a sync of this file or directory makes durable, if it begins now."""
        if file := self._files.get(operation.file):
            return [*file.inode.pending]
        return [change for change in self.disk._tree._pending if operation.path in change.directories()]

    def _end_sync(self, operation: Operation, begun: set[int]) -> None:
        """Make changes durable that are not yet; `begun` are their identities."""
        file = self._files.get(operation.file)
        pending: list[Any] = file.inode.pending if file else self.disk._tree._pending
        later = [change for change in pending if id(change) not in begun]
        pending[:] = [change for change in pending if id(change) in begun]
        if file:
            file.inode.sync()
        else:
            self.disk._tree.sync(operation.path)
        pending[:] = later


def read_disk(directory: Path) -> dict[str, bytes]:
    """The content of all files below a directory, by path from there."""
    paths = [path for path in directory.rglob("*") if path.is_file()]
    return {f"/{path.relative_to(directory)}": path.read_bytes() for path in paths}


def write_disk(disk: SimulatedDisk, directory: Path, place: str = "/") -> None:
    """Write all files and directories of a disk into a new directory."""
    directory.mkdir(mode=0o700)
    for name in disk.list(place):
        path = posixpath.join(place, name)
        try:
            (directory / name).write_bytes(disk.read(path))
            (directory / name).chmod(0o600)
        except IsADirectoryError:
            write_disk(disk, directory / name, path)
