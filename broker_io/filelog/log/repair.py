"""Repairing a damaged segment by the bytes of another copy of the log

The bytes are written into another file, synced, and verified by the checksums of their blocks, which also name the
segment. Then a closed ledger gets the file by a rename. Into that of the open ledger, to which blocks are appended
meanwhile, what differs is written; a crash in between leaves damage, which is found again. So a crash never makes
anything worse: the next owner removes a file that the log does not name.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import closing

from broker_io.environment import Disk
from broker_io.errors import Damaged, Error, UnsupportedFormat
from broker_io.filelog.log import layout
from broker_io.filelog.log.damage import DamagedSegment
from broker_io.filelog.log.layout import MIB, LedgerEntry, readable
from broker_io.filelog.log.log import FileLog
from broker_io.filelog.log.segment import check_blocks

ATTEMPT = "repair"
READ_BYTES = MIB


def is_whole(disk: Disk, directory: str, segment: DamagedSegment) -> bool:
    """Whether a segment has all its blocks, as after a read that failed once. May raise OSError."""
    topic, ledger, _ = segment
    try:
        path = layout.segment_path(directory, topic, ledger)
        return check_blocks(disk, path, ledger.bytes, topic.place(ledger)) == ledger.bytes
    except (Damaged, UnsupportedFormat, FileNotFoundError):
        return False


def fetch_segment(disk: Disk, directory: str, segment: DamagedSegment, read: Callable[[int, int], bytes]) -> str:
    """Write what `read` gives of a segment into another file, and verify it; its path.

    Raises Damaged if that is damaged too, OSError, and what `read` raises; then there is no file.
    """
    topic, ledger, _ = segment
    path = layout.segment_path(directory, topic, ledger, ATTEMPT)
    try:
        with closing(disk.open(path, write=True, create=True)) as file:
            file.truncate(0)
            at = 0
            while at < ledger.bytes:
                data = read(at, min(READ_BYTES, ledger.bytes - at))
                if not data:
                    raise Damaged(path, at, f"the other copy ends there, and has to have {ledger.bytes} bytes")
                file.write(at, [data])
                at += len(data)
            file.sync()
        check_blocks(disk, path, ledger.bytes, topic.place(ledger))
    except BaseException as error:
        discard_fetched(disk, path)
        if isinstance(error, Damaged | UnsupportedFormat):
            raise Damaged(path, 0, f"the other copy of it is damaged as well ({error})") from None
        raise
    return path


def discard_fetched(disk: Disk, path: str) -> None:
    with contextlib.suppress(OSError):  # the next opening removes it
        disk.remove(path)


def put_in_place(log: FileLog, disk: Disk, directory: str, segment: DamagedSegment, fetched: str) -> bool:
    """Let a segment have the verified bytes of another file; False if the log does not name it any more.

    Raises DiskFailed, after which the log has stopped, and OSError.
    """
    topic, ledger, _ = segment
    path = layout.segment_path(directory, topic, ledger)
    with log.changing:
        entry = log.current(topic.number)
        present = None if entry is None else entry.find(ledger.ledger)
        if entry is None or present is None or present[:2] != ledger[:2]:
            discard_fetched(disk, fetched)
            return False
        closed = present is not entry.ledgers[-1]
        if closed and present.bytes == ledger.bytes:
            disk.rename(fetched, path)
            with log.guard(path, midway=True):
                disk.sync_directory(layout.topic_path(directory, topic.number))
    if not closed:
        with log.guard(path, midway=True):
            _write_differences(disk, path, ledger, fetched)
    discard_fetched(disk, fetched)
    whole = is_whole(disk, directory, DamagedSegment(entry, present, segment.error))
    if whole:
        log.damage.mended(path)
    return whole


def _write_differences(disk: Disk, path: str, ledger: LedgerEntry, fetched: str) -> None:
    with closing(disk.open(path, write=True)) as file, closing(disk.open(fetched)) as good:
        for at in range(0, ledger.bytes, READ_BYTES):
            data, stored = good.read(at, min(READ_BYTES, ledger.bytes - at)), b""
            with contextlib.suppress(Error), readable(path):
                stored = file.read(at, len(data))
            if stored != data:
                file.write(at, [data])
        file.sync()
