"""A backup: the state of an embedded log at one moment in one file; writing it, checking it, restoring a log from it.

All numbers are little-endian. The file starts with 32 bytes:

    offset  size
         0     8  magic `TXBACKU` and the version, 1
         8     8  length of the manifest
        16     8  length of the whole file
        24     4  zero
        28     4  CRC32C of the 28 bytes before

The manifest follows, as the directory had it at a checkpoint (layout.py), and then each ledger, in the order of the
manifest: as many bytes of its segment as the manifest says, and 4 bytes, their CRC32C. The journal is not part of a
backup, as it was empty then, nor are the indexes, which a restore builds.

All checksums of the blocks are verified when a backup is written, checked and restored. So a backup never has a valid
checksum for damaged data, and a file that was cut or changed is noticed.

A restored log is an older state, and programs may have read what came after it. So that none of them takes new messages
for those of the lost log, no position comes back: each topic continues in a new ledger, whose number is a multiple of
2^20 above the one before, chosen at random. The owner of the log raises its epoch with it.

A restore writes the manifest last. Until then, the directory has files of a log and no manifest, and nothing opens it.
"""

from __future__ import annotations

import contextlib
import posixpath
import struct
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import NamedTuple

import google_crc32c

from broker_io.block import HEADER_BYTES, check_block, parse_header
from broker_io.environment import Disk, Environment, File, ReadableFile
from broker_io.errors import CallerError, Damaged, DiskFull, UnsupportedFormat, disk_error
from broker_io.filelog.log import layout
from broker_io.filelog.log.journal_chain import Journal
from broker_io.filelog.log.layout import (
    ALONE,
    MIB,
    LedgerEntry,
    Manifest,
    TopicEntry,
    damage_at,
    decode_manifest,
    encode_manifest,
    replace_manifest,
    take_lock,
    with_crc,
)
from broker_io.filelog.log.operations import continued, random_jump
from broker_io.filelog.log.recovery import open_segment, sync_names
from broker_io.filelog.log.segment import SparseIndex
from broker_io.port import BackupProgress, BackupReport

VERSION = 1
HEAD_BYTES = 32
_MAGIC = b"TXBACKU"
_HEAD = struct.Struct("<7sBQQ4x")
_CRC = struct.Struct("<I")

CHUNK_BYTES = MIB
WRITE_BYTES = MIB // 4
"""Larger writes are several times slower, as their bytes don't stay in the caches of the processor."""
SYNC_BYTES = 16 * MIB
"""A backup is synced after so many bytes, so that other writes don't wait for the disk for long."""
PARTIAL = ".partial"
"""What the name of an incomplete backup ends with."""
_UNCHANGED = "there is no new backup, and the log is as it was"


def report_of(manifest: Manifest, size: int) -> BackupReport:
    ledgers = [ledger for topic in manifest.topics for ledger in topic.ledgers]
    return BackupReport(len(manifest.topics), len(ledgers), sum(ledger.entries for ledger in ledgers), size)


def _ledgers(manifest: Manifest) -> Iterator[tuple[TopicEntry, LedgerEntry]]:
    return ((topic, ledger) for topic in manifest.topics for ledger in topic.ledgers)


# --- writing ---


def write_backup(disk: Disk, directory: str, manifest: Manifest, path: str, progress: BackupProgress) -> BackupReport:
    """Write the backup of a log, of which no file that the manifest names is removed meanwhile, to a new file.

    Raises CallerError if the file exists, Damaged that names a segment, DiskFull or DiskFailed, and what `progress`
    raises; then there is no backup.
    """
    if disk.exists(path):
        raise CallerError(f"{path} exists: choose another file: a backup is never overwritten")
    parent, partial = posixpath.dirname(path) or ".", path + PARTIAL
    text = encode_manifest(manifest)
    total = HEAD_BYTES + len(text) + sum(ledger.bytes + _CRC.size for _, ledger in _ledgers(manifest))
    try:
        if not disk.exists(parent):
            raise CallerError(f"there is no directory {parent} for the backup: create it first")
        if (free := disk.free_bytes(parent)) < total:
            raise DiskFull(f"{parent}: {free} bytes are free, and the backup has {total}: free some space")
        with closing(disk.open(partial, write=True, create=True)) as file:
            file.truncate(0)
            file.write(0, [with_crc(_HEAD.pack(_MAGIC, VERSION, len(text), total)), text])
            _write_ledgers(disk, directory, manifest, file, HEAD_BYTES + len(text), lambda done: progress(done, total))
            file.sync()
        disk.rename(partial, path)
        disk.sync_directory(parent)
    except BaseException as error:
        with contextlib.suppress(OSError):  # the next backup to this file overwrites it
            disk.remove(partial)
        if isinstance(error, OSError):
            raise disk_error(error, path, _UNCHANGED) from error
        raise
    return report_of(manifest, total)


def _write_ledgers(
    disk: Disk, directory: str, manifest: Manifest, file: File, at: int, progress: Callable[[int], None]
) -> None:
    synced = at
    progress(at)
    for topic, ledger in _ledgers(manifest):
        path, crc = layout.segment_path(directory, topic, ledger), 0
        with closing(open_segment(disk, path)) as segment:
            for chunk in checked_chunks(segment, path, 0, ledger.bytes, topic.place(ledger)):
                _write(file, at, chunk)
                crc, at = google_crc32c.extend(crc, chunk), at + len(chunk)
                if at - synced >= SYNC_BYTES:
                    file.sync()
                    synced = at
                progress(at)
        file.write(at, [_CRC.pack(crc)])
        at += _CRC.size


def _write(file: File, at: int, data: bytes) -> None:
    for start in range(0, len(data), WRITE_BYTES):
        file.write(at + start, [memoryview(data)[start : start + WRITE_BYTES]])


def checked_chunks(
    file: ReadableFile, path: str, start: int, size: int, place: int, index: SparseIndex | None = None
) -> Iterator[bytes]:
    """The blocks in `size` bytes of a file, in chunks of whole blocks with verified checksums; an index gets them.

    Raises Damaged, UnsupportedFormat, OSError.
    """
    at, need = 0, HEADER_BYTES
    while at < size:
        wanted = min(max(CHUNK_BYTES, need), size - at)
        data = file.read(start + at, wanted)
        if len(data) < wanted:
            raise Damaged(path, start + at + len(data), f"the file ends within the {size} bytes of a ledger")
        whole, need = _whole_blocks(data, path, start + at, place, index, at)
        if need > size - at - whole > 0:
            raise Damaged(path, start + at + whole, f"a block does not end within the {size} bytes of its ledger")
        if whole:
            yield data[:whole]
            at, need = at + whole, HEADER_BYTES


def _whole_blocks(
    data: bytes, path: str, start: int, place: int, index: SparseIndex | None, offset: int
) -> tuple[int, int]:
    """How many bytes are whole blocks, and how many the next block has at least."""
    at = 0
    while at + HEADER_BYTES <= len(data):
        with damage_at(path, start + at):
            header = parse_header(data, at, place)
            if at + header.length > len(data):
                return at, header.length
            check_block(data, at, header)
        if index is not None:
            index.add(header.first_entry, offset + at, header.publish_time)
        at += header.length
    return at, HEADER_BYTES


# --- reading ---


class StoredLedger(NamedTuple):
    """One ledger of a backup; its blocks begin at `offset` of the file."""

    topic: TopicEntry
    ledger: LedgerEntry
    offset: int


class Backup:
    """A backup that is open for reading: its manifest, and its ledgers in order."""

    def __init__(self, file: ReadableFile, path: str) -> None:
        """Raises Damaged, UnsupportedFormat, OSError."""
        self.path = path
        self._file = file
        head = file.read(0, HEAD_BYTES)
        if len(head) < HEAD_BYTES or not head.startswith(_MAGIC):
            raise Damaged(path, 0, "this is not a backup: name a file that `txnbuf backup` wrote")
        if with_crc(head[:-4]) != head:
            raise Damaged(path, 0, "the head of the backup is damaged: use another copy of it")
        _, version, length, self.bytes = _HEAD.unpack_from(head)
        if version != VERSION:
            raise UnsupportedFormat(
                f"{path}: a backup of format version {version}; this release reads version {VERSION}: use the release "
                "that wrote it, or a newer one"
            )
        if (size := file.size()) != self.bytes:
            raise Damaged(path, min(size, self.bytes), f"the backup has {size} bytes instead of {self.bytes}")
        self.manifest = decode_manifest(file.read(HEAD_BYTES, length), path)
        self.ledgers: list[StoredLedger] = []
        at = HEAD_BYTES + length
        for topic, ledger in _ledgers(self.manifest):
            if type(ledger.bytes) is not int or ledger.bytes < 0:
                raise Damaged(path, HEAD_BYTES, f"a ledger with {ledger.bytes!r} bytes is impossible")
            self.ledgers.append(StoredLedger(topic, ledger, at))
            at += ledger.bytes + _CRC.size
        if at != self.bytes:
            raise Damaged(path, 0, f"its ledgers end at {at}, and the file at {self.bytes}")

    def chunks(self, stored: StoredLedger, index: SparseIndex | None = None) -> Iterator[bytes]:
        """The blocks of a ledger in chunks; an index gets them. Raises Damaged, UnsupportedFormat, OSError."""
        topic, ledger, at = stored
        crc = 0
        for chunk in checked_chunks(self._file, self.path, at, ledger.bytes, topic.place(ledger), index):
            crc = google_crc32c.extend(crc, chunk)
            yield chunk
        if self._file.read(at + ledger.bytes, _CRC.size) != _CRC.pack(crc):
            raise Damaged(self.path, at, f"the checksum of ledger {ledger.ledger} of topic {topic.name!r} is wrong")


@contextlib.contextmanager
def open_backup(disk: Disk, path: str) -> Iterator[Backup]:
    """Raises CallerError if there is no such file, Damaged or UnsupportedFormat; an OSError about it is DiskFailed."""
    try:
        with closing(disk.open(path)) as file:
            yield Backup(file, path)
    except FileNotFoundError as error:
        raise CallerError(f"there is no file {path}: name a backup") from error
    except OSError as error:
        raise disk_error(error, path, "the backup can't be read") from error


def check_backup(disk: Disk, path: str, progress: BackupProgress) -> BackupReport:
    """Verify all of a backup. Raises as `open_backup`, and what `progress` raises."""
    with open_backup(disk, path) as backup:
        done = 0
        for stored in backup.ledgers:
            for chunk in backup.chunks(stored):
                done += len(chunk)
                progress(done, backup.bytes)
        return report_of(backup.manifest, backup.bytes)


# --- restoring ---


def restored_manifest(manifest: Manifest, jump: int) -> Manifest:
    """The manifest of a log restored from that of a backup: each topic continues in a new ledger, after a jump >= 1.

    It belongs to no pair: as the store of one it would be taken for what that store has now.
    """
    topics = []
    for topic in manifest.topics:
        last = topic.ledgers[-1]
        opened = LedgerEntry(continued(last.ledger, jump), first_time=last.last_time, last_time=last.last_time)
        topics.append(topic._replace(ledgers=(*topic.ledgers, opened)))
    return manifest._replace(
        journal=manifest.journal + 1,
        topics=tuple(topics),
        next_ledger=continued(manifest.next_ledger, jump),
        pair=ALONE,
    )


def restore_backup(environment: Environment, path: str, directory: str, progress: BackupProgress) -> BackupReport:
    """Restore a log from a backup into a missing or empty directory.

    Raises CallerError if the directory has files, Locked, as `open_backup`, DiskFull or DiskFailed, and what `progress`
    raises. After any error but the first, the directory holds no log.
    """
    disk = environment.disk
    with open_backup(disk, path) as backup:
        try:
            _check_empty(disk, directory)
            disk.make_directory(directory)
            if (free := disk.free_bytes(directory)) < backup.bytes:
                raise DiskFull(
                    f"{directory}: {free} bytes are free, and the backup has {backup.bytes}: free some space"
                )
            with closing(take_lock(environment, directory)):
                _check_empty(disk, directory)
                _restore(environment, backup, directory, progress)
        except (FileExistsError, NotADirectoryError) as error:
            raise CallerError(f"{directory} can't be a directory: name one that is missing or empty") from error
        except OSError as error:
            raise disk_error(error, directory, "the log was not restored: remove the directory") from error
        return report_of(backup.manifest, backup.bytes)


def _check_empty(disk: Disk, directory: str) -> None:
    names = [name for name in disk.list(directory) if name != layout.LOCK] if disk.exists(directory) else []
    if names:
        raise CallerError(
            f"{directory} contains {names[0]!r}: name an empty or missing directory; if an interrupted restore has "
            "left it, remove it"
        )


def _restore(environment: Environment, backup: Backup, directory: str, progress: BackupProgress) -> None:
    disk = environment.disk
    manifest = restored_manifest(backup.manifest, random_jump(environment.randomness))
    topics = layout.join(directory, layout.TOPICS)
    disk.make_directory(topics)
    sync_names(disk, directory)  # from here on the directory is not missing, not empty, and no log
    done = 0
    for stored in backup.ledgers:
        target = layout.segment_path(directory, stored.topic, stored.ledger)
        disk.make_directory(layout.topic_path(directory, stored.topic.number))
        index, size = SparseIndex(), 0
        with closing(disk.open(target, write=True, create=True)) as file:
            for chunk in backup.chunks(stored, index):
                _write(file, size, chunk)
                size, done = size + len(chunk), done + len(chunk)
                progress(done, backup.bytes)
            file.sync()
        index.save(disk, layout.index_path(target))
    for topic in manifest.topics:
        opened = layout.segment_path(directory, topic, topic.ledgers[-1])
        with closing(disk.open(opened, write=True, create=True)) as file:
            file.sync()
        disk.sync_directory(layout.topic_path(directory, topic.number))
    disk.sync_directory(topics)
    Journal.create(environment, directory, manifest.journal, manifest.mark).close()
    disk.sync_directory(directory)
    replace_manifest(disk, directory, manifest)
