"""Opening the embedded log as its owner: lock, manifest, recovery.

Recovery applies the records of the journal that are not in the ledgers yet, and cuts torn tails off; any other damage
is an error.
"""

from __future__ import annotations

import contextlib
import errno
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from typing import NamedTuple

from broker_io.environment import Disk, Environment, File
from broker_io.errors import Damaged, NotAMember, ReadOnly, disk_error
from broker_io.filelog.log import layout
from broker_io.filelog.log.commit import FileTopic
from broker_io.filelog.log.journal_chain import FoundJournal, Journal, find_journal, record_damage
from broker_io.filelog.log.layout import (
    Lock,
    Manifest,
    Options,
    TopicEntry,
    load_manifest,
    replace_manifest,
    take_lock,
)
from broker_io.filelog.log.log import FileLog
from broker_io.filelog.log.numbers import NumberedOperation
from broker_io.filelog.log.operations import AppendBlocks, decode_operations
from broker_io.filelog.log.records import START, LogRecord
from broker_io.filelog.log.segment import whole_blocks
from broker_io.permissions import exposure

LOG = logging.getLogger(__name__)
MERGED_BYTES = 1024 * 1024
"""Bytes of appends to one topic that recovery applies at once."""


class OpenedLog(NamedTuple):
    """The engine of a directory, and the report of recovery, a sentence for each finding.

    `found` is the journal of a member of a pair, whose records after the mark of the manifest are not applied yet.
    """

    log: FileLog
    report: list[str]
    found: FoundJournal | None


def missing_segment(path: str) -> Damaged:
    return Damaged(path, 0, "a segment that the manifest names is missing: restore it from a copy")


def open_segment(disk: Disk, path: str, *, write: bool = False) -> File:
    """Open a segment that the manifest names. Raises Damaged if it is missing."""
    try:
        return disk.open(path, write=write)
    except FileNotFoundError:
        raise missing_segment(path) from None


def check_sizes(disk: Disk, directory: str, topic: TopicEntry) -> None:
    """Raises Damaged for a segment that is missing, too short, or, once closed, too long."""
    for ledger in topic.ledgers:
        path = layout.segment_path(directory, topic, ledger)
        with closing(open_segment(disk, path)) as file:
            size = file.size()
        if size < ledger.bytes or (size > ledger.bytes and ledger is not topic.ledgers[-1]):
            raise Damaged(path, min(size, ledger.bytes), f"the segment has {size} bytes instead of {ledger.bytes}")


def journal_operations(records: Iterable[LogRecord], path: str) -> list[NumberedOperation]:
    """The operations of records. Raises Damaged if a record has another content."""
    with record_damage(path):
        return [operation for record in records for operation in decode_operations(record.content)]


def open_log(
    environment: Environment,
    directory: str,
    options: Options,
    *,
    member: bool = False,
    locked: Callable[[], object] = bool,
) -> OpenedLog:
    """Open and lock a directory, creating it if it is missing, and recover its log.

    `locked` is called once the directory is locked. The store of a `member` of a pair is only opened: what is after the
    mark of its manifest may not be committed. Raises Locked, ForeignDirectory, UnsupportedFormat, Damaged, DiskFull or
    DiskFailed, ReadOnly, and NotAMember for such a store if it is not opened as one.
    """
    disk = environment.disk
    try:
        # Before the lock, so that nothing is written to a foreign directory.
        load_manifest(disk, directory)
        disk.make_directory(directory)
        lock = take_lock(environment, directory)
        try:
            locked()
            return open_locked(environment, directory, options, lock, member=member)
        except BaseException:
            lock.close()
            raise
    except OSError as error:
        if error.errno == errno.EROFS:
            raise ReadOnly(
                f"{error.filename or directory}: the file system is read-only: open the log with read_only=True, or "
                "mount the file system for writing"
            ) from error
        raise disk_error(error, directory, "the log can't be opened; nothing in it was lost") from error


def sync_names(disk: Disk, directory: str) -> None:
    """Make the name of a directory durable, and those of its parents, which may be new too."""
    path = directory.rstrip("/") or "/"
    disk.sync_directory(path)
    while path not in ("", ".", "/"):
        path = path.rpartition("/")[0] or ("/" if path.startswith("/") else ".")
        # A directory that this process may not read was not created by it, nor anything in it.
        with contextlib.suppress(PermissionError):
            disk.sync_directory(path)


def open_locked(environment: Environment, directory: str, options: Options, lock: Lock, *, member: bool) -> OpenedLog:
    """As `open_log`, of a directory whose lock is held. May raise OSError."""
    disk = environment.disk
    manifest = load_manifest(disk, directory) or _create(environment, directory)
    if manifest.is_member and not member:
        raise NotAMember(
            f"{directory} is the store of a member of a pair: serve it with the lock of its pair, or open it read-only"
        )
    if exposed := exposure(disk, directory):
        LOG.warning(exposed)
    # A former owner that was killed may have renamed the manifest without syncing that: a loss of power would undo it.
    disk.sync_directory(directory)
    stored = stored_log(disk, directory, manifest)
    for topic in manifest.topics:
        check_sizes(disk, directory, topic)
    journal = Journal.open(environment, directory, stored.found)
    try:
        log = FileLog(environment, directory, options, manifest, journal, lock)
        report = [stored.torn] if stored.torn else []
        if not manifest.is_member:
            _recover(disk, log, stored, report)
        else:
            for opened in log.all_topics():
                _cut_tail(disk, opened)
        layout.remove_leftovers(disk, directory, log.manifest, range(log.manifest.journal, journal.number + 1))
        return OpenedLog(log, report, stored.found)
    except BaseException:
        journal.close()
        raise


class StoredLog(NamedTuple):
    """What the journal of a log has: the operations after the mark of its manifest; `torn` says what was dropped."""

    operations: list[NumberedOperation]
    torn: str
    found: FoundJournal


def stored_log(disk: Disk, directory: str, manifest: Manifest) -> StoredLog:
    """Read the journal that a manifest names. Raises Damaged, UnsupportedFormat, OSError."""
    path = layout.journal_path(directory, manifest.journal)
    found = find_journal(disk, directory, manifest)
    end = found.shown(manifest) if manifest.is_member else found.end.lsn
    records = [record for record in found.records if manifest.mark.lsn < record.lsn <= end]
    dropped = f"dropped {found.torn} bytes of an append that was never completed or acknowledged"
    torn = f"{found.files[-1].path}: {dropped}" if found.torn else ""
    return StoredLog(journal_operations(records, path), torn, found)


def _recover(disk: Disk, log: FileLog, stored: StoredLog, report: list[str]) -> None:
    """Apply what the journal has, and cut torn tails off; idempotent, so a crash meanwhile is harmless."""
    log.apply(list(_merged(stored.operations)))
    changed = bool(stored.operations or stored.torn or len(stored.found.files) > 1)
    log.applied = log.journal.end
    for topic in log.all_topics():
        changed |= _keep_tail(disk, topic, report)
    if changed:
        log.checkpoint()


def _merged(operations: Iterable[NumberedOperation]) -> Iterator[NumberedOperation]:
    """The appends in a journal by topic, with those that follow each other as one of about `MERGED_BYTES`."""
    batch: list[tuple[NumberedOperation, AppendBlocks]] = []
    end: tuple[int, ...] = ()
    size = 0
    for operation in sorted(operations, key=lambda operation: operation.topic):
        body = operation.body
        if not isinstance(body, AppendBlocks):
            continue  # a log without a pair has no others
        if batch and (size >= MERGED_BYTES or end != (operation.topic, *body[:3])):
            yield _joined(batch)
            batch, size = [], 0
        batch.append((operation, body))
        size += body.length
        end = operation.topic, body.ledger, body.generation, body.offset + body.length
    if batch:
        yield _joined(batch)


def _joined(batch: list[tuple[NumberedOperation, AppendBlocks]]) -> NumberedOperation:
    chunks = [chunk for _, body in batch for chunk in body.chunks]
    body = batch[0][1]._replace(length=sum([body.length for _, body in batch]), chunks=chunks)
    return batch[-1][0]._replace(body=body)


def _keep_tail(disk: Disk, topic: FileTopic, report: list[str]) -> bool:
    """Keep whole blocks after those of the journal, which lost its last record, and cut off the rest.

    Kept blocks are written again, as after a failed sync they may be in memory only. True if there was anything.
    """
    ledger, path = topic.entry.ledgers[-1], topic.segment.path
    with closing(open_segment(disk, path, write=True)) as file:
        size = file.size()
        if size == ledger.bytes:
            return False
        kept, _ = whole_blocks(file, ledger, size, topic.entry.place(ledger), contents=True)
        if kept != ledger:
            report.append(f"{path}: kept {kept.entries - ledger.entries} messages that the journal had lost")
            file.write(ledger.bytes, [file.read(ledger.bytes, kept.bytes - ledger.bytes)])
        if kept.bytes < size:
            report.append(f"{path}: cut off {size - kept.bytes} bytes of an incomplete block at offset {kept.bytes}")
            file.truncate(kept.bytes)
        file.sync()
    topic.entry = topic.entry.with_open(kept)
    return True


def _cut_tail(disk: Disk, topic: FileTopic) -> None:
    """Cut off what is not in the manifest: it is applied again once it is known to be committed."""
    size = topic.entry.ledgers[-1].bytes
    with closing(open_segment(disk, topic.segment.path, write=True)) as file:
        if file.size() > size:
            file.truncate(size)
            file.sync()


def _create(environment: Environment, directory: str) -> Manifest:
    token = environment.randomness.token
    mark = START._replace(chain=int.from_bytes(token(8), "little"))  # that of no other log
    manifest = Manifest(token(16).hex(), token(8).hex(), 1, 1, (), mark=mark)
    Journal.create(environment, directory, 1, mark).close()
    sync_names(environment.disk, directory)
    replace_manifest(environment.disk, directory, manifest)
    return manifest
