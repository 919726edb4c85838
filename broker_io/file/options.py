"""How an embedded log is kept, and how it names what the disk says."""

from __future__ import annotations

import errno
from dataclasses import dataclass

from broker_io.checking import OWN_PREFIX
from broker_io.errors import CallerError, DiskFailed, DiskFull, TooManyFiles
from broker_io.port import MAX_MESSAGE_BYTES

MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Options:
    """How a log is kept; sizes in bytes. Topics whose names begin with `compacted_prefix` may be compacted."""

    segment_bytes: int = 64 * MIB
    journal_bytes: int = 64 * MIB
    compress: bool = False
    watermark_bytes: int = 256 * MIB
    max_message_bytes: int = MAX_MESSAGE_BYTES
    compacted_prefix: str = OWN_PREFIX

    def check(self) -> None:
        """Raises CallerError that names the option which can't be."""
        for name, least, most in _BOUNDS:
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
                raise CallerError(f"{name} {value!r} can't be: give a whole number of bytes from {least} to {most}")


_BOUNDS = (
    ("segment_bytes", 1, 2**40),
    ("journal_bytes", 1, 2**32),
    ("watermark_bytes", 0, 2**60),
    ("max_message_bytes", 1, 2**30),
)
"""A journal is read into memory as a whole; the offsets in a block have 31 bits."""


def out_of_files(error: OSError) -> bool:
    """Whether an error says that there is no descriptor left, which is nothing that the disk did."""
    return error.errno in (errno.EMFILE, errno.ENFILE)


def disk_error(error: OSError, path: str, what: str) -> DiskFailed | TooManyFiles:
    """The named error for what the operating system said about a path; `what` says what that means."""
    if out_of_files(error):
        return TooManyFiles(f"{error.filename or path}: {error.strerror}: {what}; raise the limit (ulimit -n)")
    return disk_failure(error, path, what)


def disk_failure(error: OSError, path: str, what: str) -> DiskFailed:
    """Likewise where whatever was said stops the log."""
    kind = DiskFull if error.errno in (errno.ENOSPC, errno.EDQUOT) else DiskFailed
    return kind(f"{error.filename or path}: {error.strerror or error}: {what}")
