"""A pair's lock in a file, for tests on one machine

The file has the state of the lock as `lock_state` describes it. A change writes another file, syncs it, and renames it
to the first one, all under an exclusive lock (flock) of a third one: `PATH`, `PATH.new`, `PATH.lock`.

The lock has no clock, and it is only as available as the machine, so it is no lock for two of them. It refuses network
file systems, on which locks of files may be those of one machine only.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from broker_io.environment import current
from broker_io.errors import InvalidAddress, LockUnavailable
from broker_io.filelog.log.records import Store
from broker_io.filelog.pair.lock_state import LockState
from broker_io.filelog.replication.lock import LockView, Swap
from broker_io.port import Resource

TIMEOUT = 2.0
"""Seconds that a call waits for other processes."""
PAUSE = 0.005
NETWORK = (
    "9p", "afs", "beegfs", "ceph", "cifs", "fuse", "gfs2", "glusterfs", "gpfs", "lustre", "ncpfs", "nfs", "ocfs2",
    "orangefs", "smb", "virtiofs",
)  # fmt: skip
"""What types of file systems that other machines may use begin with; behind FUSE there may be anything."""
MOUNTS = "/proc/self/mountinfo"


class FileLock(Resource):
    """The lock of a pair in a file; `PairLock` describes the calls."""

    clocked = False

    def __init__(self, path: str) -> None:
        """Use the lock in this file, which need not exist. Raises InvalidAddress on a network file system."""
        environment = current()
        self._disk, self._clock, self._path = environment.disk, environment.clock, path
        directory = os.path.dirname(path) or "."
        if not self._disk.exists(directory):
            raise InvalidAddress(f"{path} can't be a lock: create the directory {directory}")
        if self._disk.exists(MOUNTS):
            kind = file_system(self._disk.read(MOUNTS).decode(errors="replace"), self._disk.identity(directory)[0])
            if kind.startswith(NETWORK):
                raise InvalidAddress(f"{path} is on a network file system ({kind}): use a lock in etcd")

    def read(self) -> LockView:
        with self._held() as state:
            return state.view()

    def swap(self, swap: Swap) -> tuple[bool, LockView]:
        with self._held() as state:
            accepted = state.swap(swap)
            if accepted:
                self._write(state)
            return accepted, state.view()

    def renew(self, store: Store, session: int | None, ttl: float) -> int | None:
        with self._held() as state:
            found = state.renew(store, session)
            if found is not None:
                self._write(state)
            return found

    def end_session(self, session: int) -> None:
        with self._held() as state:
            state.end(session)
            self._write(state)

    def close(self) -> None:
        """Nothing is open between calls."""

    @contextlib.contextmanager
    def _held(self) -> Iterator[LockState]:
        """The state, while no other process can change it. Raises LockUnavailable."""
        disk, until = self._disk, self._clock.monotonic() + TIMEOUT
        try:
            while (held := disk.lock(f"{self._path}.lock")) is None:
                if self._clock.monotonic() > until:
                    raise LockUnavailable(f"{self._path}: another process has locked it for {TIMEOUT:g} s")
                self._clock.sleep(PAUSE)
            with contextlib.closing(held):
                yield LockState.decode(disk.read(self._path), self._path) if disk.exists(self._path) else LockState()
        except OSError as error:
            raise LockUnavailable(f"{error.filename or self._path}: {error.strerror or error}") from error

    def _write(self, state: LockState) -> None:
        data, new = state.encode(), f"{self._path}.new"
        file = self._disk.open(new, write=True, create=True)
        with contextlib.closing(file):
            file.truncate(0)
            file.write(0, [data])
            file.sync()
        self._disk.rename(new, self._path)
        self._disk.sync_directory(os.path.dirname(self._path) or ".")


def file_system(mounts: str, device: int) -> str:
    """The type of the file system with this device number, by `/proc/self/mountinfo`; empty if it is not known."""
    major, minor = device >> 8 & 0xFFF | device >> 32 & ~0xFFF, device & 0xFF | device >> 12 & ~0xFF
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        if after and before.split()[2:3] == [f"{major}:{minor}"]:
            return after.split()[0]
    return ""
