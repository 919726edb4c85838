"""Files of an embedded log, its options and its lock.

    DIR/lock                                      locked by the owner; holds its pid as text
    DIR/manifest                                  which files count, and how far (see manifest.py)
    DIR/manifest.new                              a manifest that is being written
    DIR/journal-<n>                               what was appended since the last checkpoint (journal.py)
    DIR/topics/<topic>/<ledger>-<generation>.log    one ledger of a topic: blocks, nothing else (segment.py)
    DIR/topics/<topic>/<ledger>-<generation>.index  sparse index of it, may be missing (segment.py)

Topic directories are named by number; topic names are in the manifest only, so any name suits any file system. Files
that the manifest does not name are leftovers of an unfinished change; the next owner removes them.

One process at a time owns a directory: it holds the lock and writes its pid there.
"""

from __future__ import annotations

import errno
import re
from dataclasses import dataclass

from broker_io.environment import Disk, Environment, File, read_file
from broker_io.errors import CallerError, DiskFailed, DiskFull, Locked, TooManyFiles
from broker_io.port import MAX_MESSAGE_BYTES, OWN_PREFIX

MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Options:
    """Options of a log; sizes in bytes. Topics whose names begin with `compacted_prefix` may be compacted."""

    segment_bytes: int = 64 * MIB
    journal_bytes: int = 64 * MIB
    compress: bool = False
    watermark_bytes: int = 256 * MIB
    max_message_bytes: int = MAX_MESSAGE_BYTES
    compacted_prefix: str = OWN_PREFIX

    def check(self) -> None:
        """Raises CallerError that names the invalid option."""
        for name, least, most in _BOUNDS:
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
                raise CallerError(f"{name} {value!r} is invalid: give a number of bytes from {least} to {most}")


_BOUNDS = (
    ("segment_bytes", 1, 2**40),
    ("journal_bytes", 1, 2**32),
    ("watermark_bytes", 0, 2**60),
    ("max_message_bytes", 1, 2**30),
)
"""A journal is read into memory as a whole; the offsets in a block have 31 bits."""


def out_of_files(error: OSError) -> bool:
    """Whether an error means that no file descriptor is left, which is no fault of the disk."""
    return error.errno in (errno.EMFILE, errno.ENFILE)


def disk_error(error: OSError, path: str, what: str) -> DiskFailed | TooManyFiles:
    """The error of the tree for an OSError about a path; `what` describes the consequence."""
    if out_of_files(error):
        return TooManyFiles(f"{error.filename or path}: {error.strerror}: {what}; raise the limit (ulimit -n)")
    return disk_failure(error, path, what)


def disk_failure(error: OSError, path: str, what: str) -> DiskFailed:
    """As `disk_error`, for an OSError that stops the log."""
    kind = DiskFull if error.errno in (errno.ENOSPC, errno.EDQUOT) else DiskFailed
    return kind(f"{error.filename or path}: {error.strerror or error}: {what}")


LOCK = "lock"
MANIFEST = "manifest"
NEW_MANIFEST = "manifest.new"
TOPICS = "topics"

_JOURNAL = re.compile(r"journal-(0|[1-9]\d*)")
_FIRST_JOURNAL = "journal-1"


def join(directory: str, *names: str) -> str:
    return "/".join((directory.rstrip("/") or "", *names))


def journal_path(directory: str, number: int) -> str:
    return join(directory, f"journal-{number}")


def topic_path(directory: str, topic: int) -> str:
    return join(directory, TOPICS, str(topic))


def segment_path(directory: str, topic: int, ledger: int, generation: int) -> str:
    return join(directory, TOPICS, str(topic), f"{ledger}-{generation}.log")


def index_path(segment: str) -> str:
    """The path of the index of a segment."""
    return segment.removesuffix(".log") + ".index"


def is_log_file(name: str) -> bool:
    """Whether the directory of a log may contain this name."""
    return name in (LOCK, MANIFEST, NEW_MANIFEST, TOPICS) or _JOURNAL.fullmatch(name) is not None


def may_be_unfinished(names: list[str]) -> bool:
    """Whether a directory without a manifest contains only the start of a log that was being created."""
    return set(names) <= {LOCK, NEW_MANIFEST, _FIRST_JOURNAL}


def remove_leftovers(disk: Disk, directory: str, journal: int, segments: dict[int, set[str]]) -> None:
    """Remove files that the manifest does not name: it keeps one journal and the segment files of each topic."""
    for name in disk.list(directory):
        if name == NEW_MANIFEST or (_JOURNAL.fullmatch(name) and name != f"journal-{journal}"):
            disk.remove(join(directory, name))
    if not disk.exists(join(directory, TOPICS)):
        return
    kept = {str(topic): files for topic, files in segments.items()}
    for topic in disk.list(join(directory, TOPICS)):
        named = kept.get(topic, set())
        for name in disk.list(join(directory, TOPICS, topic)):
            if name not in named and name.removesuffix(".index") + ".log" not in named:
                disk.remove(join(directory, TOPICS, topic, name))


LOCK_ATTEMPTS, LOCK_PAUSE = 20, 0.005
"""Attempts to lock: readers that check whether a log has an owner hold its lock for a moment."""

HOLDER_BYTES = 32
"""A lock file is overwritten, never truncated; its text is padded to this size, so it is always complete."""


class Lock:
    """A lock that this process holds."""

    def __init__(self, disk: Disk, path: str, file: File) -> None:
        self._disk = disk
        self._path = path
        self._file = file
        self._identity = disk.identity(path)[:2]

    def is_in_place(self) -> bool:
        """Whether the lock file is still this one; if not, another process may own the log too. May raise OSError."""
        try:
            return self._disk.identity(self._path)[:2] == self._identity
        except FileNotFoundError:
            return False

    def close(self) -> None:
        """Release the directory."""
        self._file.close()


def take_lock(environment: Environment, directory: str) -> Lock:
    """Raises Locked, or OSError."""
    disk, path = environment.disk, join(directory, LOCK)
    file = disk.lock(path)
    for _ in range(LOCK_ATTEMPTS):
        if file is not None:
            break
        environment.clock.sleep(LOCK_PAUSE)
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
        what = f"process {holder}, which is also the id of this one: close it there"
    else:
        what = f"another process{f' ({holder})' if holder else ''}: stop that process"
    return Locked(f"{directory} is owned by {what}, or open the log read-only")


def _holder(disk: Disk, path: str) -> str:
    file = disk.open(path)
    try:
        return read_file(file).decode(errors="replace").strip()
    finally:
        file.close()
