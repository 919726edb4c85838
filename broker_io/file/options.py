"""How an embedded log is kept, and how it names what the disk says."""

from __future__ import annotations

import errno
from dataclasses import dataclass

from broker_io.errors import DiskFailed, DiskFull
from broker_io.port import MAX_MESSAGE_BYTES

MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Options:
    """How a log is kept; sizes in bytes."""

    segment_bytes: int = 64 * MIB
    journal_bytes: int = 64 * MIB
    compress: bool = False
    watermark_bytes: int = 256 * MIB
    max_message_bytes: int = MAX_MESSAGE_BYTES


def disk_error(error: OSError, path: str, what: str) -> DiskFailed:
    """The named error for what the operating system said about a path; `what` says what that means."""
    kind = DiskFull if error.errno in (errno.ENOSPC, errno.EDQUOT) else DiskFailed
    return kind(f"{error.filename or path}: {error.strerror or error}: {what}")
