"""The lock of a directory: one owner at a time, and a note of who that is."""

from __future__ import annotations

from broker_io.environment import Disk, Environment, File, read_file
from broker_io.errors import Locked
from broker_io.file import layout

TRIES, PAUSE = 20, 0.005
"""Readers that look whether a log has an owner hold its lock for a moment."""

HOLDER_BYTES = 32
"""A lock file is written over, never cut: padded to this, what it says is always whole."""


class Lock:
    """A lock that this process holds."""

    def __init__(self, disk: Disk, path: str, file: File) -> None:
        self._disk = disk
        self._path = path
        self._file = file
        self._identity = disk.identity(path)[:2]

    def is_in_place(self) -> bool:
        """Whether others who look for the lock find this one; else they may own the log too. May raise OSError."""
        try:
            return self._disk.identity(self._path)[:2] == self._identity
        except FileNotFoundError:
            return False

    def close(self) -> None:
        """Let go of the directory."""
        self._file.close()


def take_lock(environment: Environment, directory: str) -> Lock:
    """Raises Locked, or OSError."""
    disk, path = environment.disk, layout.join(directory, layout.LOCK)
    file = disk.lock(path)
    for _ in range(TRIES):
        if file is not None:
            break
        environment.clock.sleep(PAUSE)
        file = disk.lock(path)
    if file is None:
        raise _locked(environment, directory, _holder(disk, path))
    try:
        file.write(0, [f"{environment.process:<{HOLDER_BYTES}}".encode()])
        return Lock(disk, path, file)
    except BaseException:
        file.close()
        raise


def _locked(environment: Environment, directory: str, holder: str) -> Locked:
    if holder == environment.process:
        what = f"already, by process {holder}, as this one is called too: close it there"
    else:
        what = f"by another process{f' ({holder})' if holder else ''}: stop that one"
    return Locked(f"{directory} is owned {what}, or open the log read-only")


def _holder(disk: Disk, path: str) -> str:
    file = disk.open(path)
    try:
        return read_file(file).decode(errors="replace").strip()
    finally:
        file.close()
