"""A lock beside a file: one process fills it at a time."""

from __future__ import annotations

import fcntl
import os

from txnbuffer.sinks.errors import SinkFailed, SinkLocked

SUFFIX = "-writer"


def lock_beside(path: str) -> int:
    """A descriptor that holds the lock, an empty file `path-writer`, until it is closed.

    Raises SinkLocked, SinkFailed.
    """
    descriptor = -1
    try:
        descriptor = os.open(os.path.realpath(path) + SUFFIX, os.O_RDWR | os.O_CREAT, 0o644)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if descriptor >= 0:
            os.close(descriptor)
        if isinstance(error, BlockingIOError):
            raise SinkLocked(f"{path} is written by another process: stop that one, or name another file") from None
        raise SinkFailed(f"{path} can't be written: {error.strerror}") from error
    return descriptor


def stays(path: str, found: os.stat_result) -> bool:
    """Whether a path still names the file that was found there."""
    try:
        return os.path.samestat(os.stat(path), found)
    except OSError:
        return False
