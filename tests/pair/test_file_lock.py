"""A lock in a file, and what it stores."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
from golden_files import committed
from pair_lock_contract import MARKS, TTL, A, B, LockContract, OpenLocks, begin, claim
from pair_parts import LockServer, MemoryLock

from broker_io.environment import current
from broker_io.errors import InvalidAddress, LockUnavailable, StorageError, UnsupportedFormat
from broker_io.filelog.pair import file_lock
from broker_io.filelog.pair.file_lock import FileLock, file_system
from broker_io.filelog.pair.lock_state import LockState
from broker_io.filelog.replication.lease import LockLease
from broker_io.filelog.replication.lock import LockRecord


class TestFileLock(LockContract):
    @pytest.fixture
    def open_lock(self, tmp_path: Path) -> Iterator[OpenLocks]:
        locks = OpenLocks(lambda name: FileLock(str(tmp_path / name)))
        yield locks
        locks.close()


@pytest.mark.parametrize("clocked", [False, True])
class TestMemoryLock(LockContract):
    """The lock that tests of nodes have."""

    @pytest.fixture
    def open_lock(self, clocked: bool) -> OpenLocks:
        servers: defaultdict[str, LockServer] = defaultdict(lambda: LockServer(TTL, clocked=clocked))
        return OpenLocks(lambda name: MemoryLock(servers[name]))


STATE = LockState(
    LockRecord(7, 3, A, (A, B), MARKS[1], MARKS[0]), 5, LockLease(A, 5, 12), sessions={A: 5, B: 4}, begun=6
)


def test_golden_lock_of_a_file() -> None:
    data = committed("pair/lock-file.json", STATE.encode())
    assert LockState.decode(data, "here") == STATE


@pytest.mark.parametrize("changes", [{"lease": None}, {"session": 0}])
def test_states_are_read_as_they_were_written(changes: dict[str, None]) -> None:
    state = LockState(**{**vars(STATE), **changes})
    assert LockState.decode(state.encode(), "here") == state


@pytest.mark.parametrize(
    ("old", "new", "error"),
    [
        (b'"format":1', b'"format":2', UnsupportedFormat),
        (b'"version":7', b'"version":-7', StorageError),
        (b'"epoch":3', b'"epoch":true', StorageError),
        (b'"reached":[', b'"reached":[1,', StorageError),
        (b'"in_sync":["0a', b'"in_sync":["0', StorageError),
        (b'"lease":["', b'"lease":[1,"', StorageError),
        (b'"begun":6', b'"begun":18446744073709551616', StorageError),
        (b"{", b"[", StorageError),
    ],
)
def test_damaged_state_names_its_place(old: bytes, new: bytes, error: type[StorageError]) -> None:
    assert old in STATE.encode()
    with pytest.raises(error, match="here: "):
        LockState.decode(STATE.encode().replace(old, new, 1), "here")


def test_state_outlives_processes(tmp_path: Path) -> None:
    path = str(tmp_path / "lock")
    script = (
        "import sys; sys.path.insert(0, 'tests')\n"
        "from pair_lock_contract import *\nfrom broker_io.filelog.pair.file_lock import FileLock\n"
        f"lock = FileLock({path!r}); print(lock.swap(claim(lock.read(), A, begin(lock, A)))[0])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"
    view = FileLock(path).read()
    assert view.record.live == A
    assert view.lease == LockLease(A, 1, 0)


def test_lock_that_another_process_holds_is_unavailable_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_lock, "TIMEOUT", 0.1)
    lock = FileLock(str(tmp_path / "lock"))
    held = current().disk.lock(str(tmp_path / "lock.lock"))
    assert held is not None
    with contextlib.closing(held), pytest.raises(LockUnavailable, match="another process"):
        lock.read()
    assert begin(lock, A) == 1


def test_errors_of_the_disk_are_unavailability(tmp_path: Path) -> None:
    lock = FileLock(str(tmp_path / "lock"))
    (tmp_path / "lock.new").mkdir()
    with pytest.raises(LockUnavailable, match=r"lock\.new"):
        begin(lock, A)
    assert lock.read().lease is None


def test_directory_must_exist(tmp_path: Path) -> None:
    with pytest.raises(InvalidAddress, match="create the directory"):
        FileLock(str(tmp_path / "missing" / "lock"))


MOUNT = "36 1 {} / /mnt rw,noatime shared:1 - {} server:/export rw,vers=4.2\n"


@pytest.mark.parametrize("kind", ["nfs4", "cifs", "fuse.sshfs", "ceph"])
def test_network_file_systems_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    device = tmp_path.stat().st_dev
    mounts = tmp_path / "mountinfo"
    number = f"{os.major(device)}:{os.minor(device)}"
    mounts.write_text(MOUNT.format("7:1", "ext4") + MOUNT.format(number, kind))
    monkeypatch.setattr(file_lock, "MOUNTS", str(mounts))
    with pytest.raises(InvalidAddress, match=f"network file system .{kind}"):
        FileLock(str(tmp_path / "lock"))
    mounts.write_text(MOUNT.format(number, "xfs"))
    FileLock(str(tmp_path / "lock"))


def test_file_system_of_a_device() -> None:
    mounts = MOUNT.format("0:45", "nfs4") + MOUNT.format("259:1048577", "ext4") + "torn"
    assert file_system(mounts, 45) == "nfs4"
    assert file_system(mounts, os.makedev(259, 1048577)) == "ext4"
    assert file_system(mounts, 46) == ""


def test_claim_names_the_next_version() -> None:
    assert claim(STATE.view(), B, 4).record.version == 8
