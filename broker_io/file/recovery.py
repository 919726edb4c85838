"""Opening the embedded log as its owner: lock, manifest, recovery.

Recovery replays the journal into the segments and cuts torn tails off; any other damage is an error.
"""

from __future__ import annotations

import contextlib
from contextlib import closing
from dataclasses import dataclass, field

from broker_io.environment import Disk, Environment, File, read_file
from broker_io.errors import Damaged, disk_error
from broker_io.file import layout
from broker_io.file.journal_v1 import FILE_HEAD_BYTES, JournalBlock, JournalV1, Replay, read_journal
from broker_io.file.layout import (
    LedgerEntry,
    Lock,
    Manifest,
    Options,
    TopicEntry,
    load_manifest,
    replace_manifest,
    take_lock,
)
from broker_io.file.log import FileLog
from broker_io.file.segment import whole_blocks


@dataclass(slots=True)
class Recovered:
    """The durable topics after recovery, the report of repairs, and whether a checkpoint is due."""

    topics: list[TopicEntry] = field(default_factory=list)
    report: list[str] = field(default_factory=list)
    changed: bool = False
    mark: bytes = b""


def recover(disk: Disk, directory: str, manifest: Manifest) -> Recovered:
    """Restore every segment to its end by the manifest and the journal. Raises Damaged or OSError.

    It is idempotent, so a crash during recovery is harmless.
    """
    result = Recovered()
    path = layout.journal_path(directory, manifest.journal)
    replay = read_journal(_read(disk, path), manifest.journal, path)
    result.mark = replay.mark
    result.changed = replay.size > FILE_HEAD_BYTES
    if replay.end < replay.size:
        result.report.append(
            f"{path}: dropped {replay.size - replay.end} bytes of an append that was never completed or acknowledged"
        )
    waiting = by_topic(replay, manifest, path)
    for topic in manifest.topics:
        check_sizes(disk, directory, topic)
        result.topics.append(_recover_open(disk, directory, topic, waiting.get(topic.number, []), path, result))
    return result


def _read(disk: Disk, path: str) -> bytes:
    try:
        with closing(disk.open(path)) as file:
            return read_file(file)
    except FileNotFoundError:
        raise missing_journal(path) from None


def missing_journal(path: str) -> Damaged:
    return Damaged(path, 0, "the journal that the manifest names is missing: restore it from a copy")


def missing_segment(path: str) -> Damaged:
    return Damaged(path, 0, "a segment that the manifest names is missing: restore it from a copy")


def by_topic(replay: Replay, manifest: Manifest, path: str) -> dict[int, list[JournalBlock]]:
    """The blocks of each topic, without those of topics that were deleted since."""
    blocks: dict[int, list[JournalBlock]] = {}
    for block in replay.blocks:
        if block.placed.topic >= manifest.next_topic:
            raise Damaged(path, 0, f"the journal names topic {block.placed.topic}, which was never created")
        blocks.setdefault(block.placed.topic, []).append(block)
    return blocks


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


def _recover_open(
    disk: Disk, directory: str, topic: TopicEntry, blocks: list[JournalBlock], journal: str, result: Recovered
) -> TopicEntry:
    ledger = topic.ledgers[-1]
    path = layout.segment_path(directory, topic, ledger)
    with closing(open_segment(disk, path, write=True)) as file:
        place = topic.place(ledger)
        replayed = _replay(file, ledger, place, blocks, journal)
        after = _cut_tail(file, path, replayed, place, result)
        if after != ledger:
            file.sync()
            result.changed = True
    return topic.with_open(after)


def _replay(file: File, ledger: LedgerEntry, place: int, blocks: list[JournalBlock], journal: str) -> LedgerEntry:
    """Write the blocks of the journal to their segment again.

    This includes bytes that are already there: after a failed sync they may be in memory only, and reach the disk only
    if they are written again.
    """
    for block in blocks:
        placed, data = block.placed, block.data
        ledger = with_journal_block(ledger, block, place, journal)
        file.write(placed.offset, [data])
    return ledger


def with_journal_block(ledger: LedgerEntry, block: JournalBlock, place: int, journal: str) -> LedgerEntry:
    """A ledger extended by a block of the journal. Raises Damaged if the block does not follow."""
    placed, header = block.placed, block.header
    found = (placed.ledger, placed.generation, placed.offset, header.first_entry, header.place)
    if found != (ledger.ledger, ledger.generation, ledger.bytes, ledger.entries, place):
        raise Damaged(journal, 0, f"the journal has a block for {placed}, which does not follow {ledger}")
    return ledger.grown(header.span, header.length, header.publish_time, header.publish_time)


def _cut_tail(file: File, path: str, ledger: LedgerEntry, place: int, result: Recovered) -> LedgerEntry:
    """Keep whole blocks after those of the journal, which lost its last record, and cut off the rest.

    Kept blocks are written again for the reason given in `_replay`.
    """
    size = file.size()
    if size == ledger.bytes:
        return ledger
    kept, _ = whole_blocks(file, ledger, size, place, contents=True)
    if kept != ledger:
        result.report.append(f"{path}: kept {kept.entries - ledger.entries} messages that the journal had lost")
        file.write(ledger.bytes, [file.read(ledger.bytes, kept.bytes - ledger.bytes)])
    if kept.bytes < size:
        result.report.append(f"{path}: cut off {size - kept.bytes} bytes of an incomplete block at offset {kept.bytes}")
        file.truncate(kept.bytes)
        file.sync()
        result.changed = True
    return kept


def open_log(environment: Environment, directory: str, options: Options) -> tuple[FileLog, list[str]]:
    """The engine of a directory, created if it is missing, and the report of recovery, a sentence for each finding.

    Raises Locked, ForeignDirectory, UnsupportedFormat, Damaged, DiskFull or DiskFailed.
    """
    disk = environment.disk
    try:
        # Before the lock, so that nothing is written to a foreign directory.
        load_manifest(disk, directory)
        disk.make_directory(directory)
        lock = take_lock(environment, directory)
        try:
            return _open_locked(environment, directory, options, lock)
        except BaseException:
            lock.close()
            raise
    except OSError as error:
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


def _open_locked(environment: Environment, directory: str, options: Options, lock: Lock) -> tuple[FileLog, list[str]]:
    disk = environment.disk
    manifest = load_manifest(disk, directory) or _create(environment, directory)
    # A former owner that was killed may have renamed the manifest without syncing that: a loss of power would undo it.
    disk.sync_directory(directory)
    recovered = recover(disk, directory, manifest)
    manifest, journal = _start_journal(environment, directory, manifest, recovered)
    try:
        layout.remove_leftovers(disk, directory, manifest)
        return FileLog(environment, directory, options, manifest, journal, lock), recovered.report
    except BaseException:
        journal.close()
        raise


def _create(environment: Environment, directory: str) -> Manifest:
    token = environment.randomness.token
    manifest = Manifest(token(16).hex(), token(8).hex(), 1, 1, ())
    JournalV1.create(environment.disk, layout.journal_path(directory, 1), 1, token(8)).close()
    sync_names(environment.disk, directory)
    replace_manifest(environment.disk, directory, manifest)
    return manifest


def _start_journal(
    environment: Environment, directory: str, manifest: Manifest, recovered: Recovered
) -> tuple[Manifest, JournalV1]:
    """Write a new manifest and journal after recovery, unless nothing has changed."""
    disk, number = environment.disk, manifest.journal
    if not recovered.changed:
        path = layout.journal_path(directory, number)
        return manifest, JournalV1(disk.open(path, write=True), path, number, recovered.mark)
    number += 1
    journal = JournalV1.create(disk, layout.journal_path(directory, number), number, environment.randomness.token(8))
    disk.sync_directory(directory)
    manifest = manifest._replace(journal=number, topics=tuple(recovered.topics))
    replace_manifest(disk, directory, manifest)
    return manifest, journal
