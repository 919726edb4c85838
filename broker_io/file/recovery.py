"""Opening a log after whatever happened to it: journal replayed, torn tails cut, everything else an error.

Opening the directory of an embedded log as its owner: lock, manifest, recovery.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field

from broker_io.environment import Disk, Environment, File, read_file
from broker_io.errors import Damaged
from broker_io.file import layout
from broker_io.file.journal import FILE_HEAD_BYTES, Journal, JournalBlock, Replay, read_journal
from broker_io.file.layout import Lock, Options, disk_error, take_lock
from broker_io.file.log import FileLog
from broker_io.file.manifest import LedgerEntry, Manifest, TopicEntry, load_manifest, replace_manifest
from broker_io.file.segment import whole_blocks


@dataclass(slots=True)
class Recovered:
    """Topics as they are now, all on stable storage; what was found amiss; whether a checkpoint is due."""

    topics: list[TopicEntry] = field(default_factory=list)
    report: list[str] = field(default_factory=list)
    changed: bool = False
    mark: bytes = b""


def recover(disk: Disk, directory: str, manifest: Manifest) -> Recovered:
    """Bring every segment to where the manifest and its journal say it was. Raises Damaged or OSError.

    Doing it again after a crash in the middle of it gives the same.
    """
    result = Recovered()
    path = layout.journal_path(directory, manifest.journal)
    replay = read_journal(_read(disk, path), manifest.journal, path)
    result.mark = replay.mark
    result.changed = replay.size > FILE_HEAD_BYTES
    if replay.end < replay.size:
        result.report.append(
            f"{path}: dropped {replay.size - replay.end} bytes of an append that was never finished or acknowledged"
        )
    waiting = by_topic(replay, manifest, path)
    for topic in manifest.topics:
        check_sizes(disk, directory, topic)
        result.topics.append(_recover_open(disk, directory, topic, waiting.get(topic.number, []), path, result))
    return result


def _read(disk: Disk, path: str) -> bytes:
    try:
        file = disk.open(path)
    except FileNotFoundError:
        raise missing_journal(path) from None
    try:
        return read_file(file)
    finally:
        file.close()


def missing_journal(path: str) -> Damaged:
    return Damaged(path, 0, "the journal that the manifest names is missing: restore it from a copy")


def missing_segment(path: str) -> Damaged:
    return Damaged(path, 0, "a segment that the manifest names is missing: restore it from a copy")


def by_topic(replay: Replay, manifest: Manifest, path: str) -> dict[int, list[JournalBlock]]:
    """Blocks of each topic; those of a topic that was deleted since are left out."""
    blocks: dict[int, list[JournalBlock]] = {}
    for block in replay.blocks:
        if block.placed.topic >= manifest.next_topic:
            raise Damaged(path, 0, f"the journal names topic {block.placed.topic}, which the manifest never made")
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
        path = layout.segment_path(directory, topic.number, ledger.ledger, ledger.generation)
        file = open_segment(disk, path)
        try:
            size = file.size()
        finally:
            file.close()
        if size < ledger.bytes or (size > ledger.bytes and ledger is not topic.ledgers[-1]):
            raise Damaged(path, min(size, ledger.bytes), f"the segment has {size} bytes instead of {ledger.bytes}")


def _recover_open(
    disk: Disk, directory: str, topic: TopicEntry, blocks: list[JournalBlock], journal: str, result: Recovered
) -> TopicEntry:
    ledger = topic.ledgers[-1]
    path = layout.segment_path(directory, topic.number, ledger.ledger, ledger.generation)
    file = open_segment(disk, path, write=True)
    try:
        place = topic.place(ledger)
        replayed = _replay(file, ledger, place, blocks, journal)
        after = _cut_tail(file, path, replayed, place, result)
        if after != ledger:
            file.sync()
            result.changed = True
    finally:
        file.close()
    return topic.with_open(after)


def _replay(file: File, ledger: LedgerEntry, place: int, blocks: list[JournalBlock], journal: str) -> LedgerEntry:
    """Write again what the journal has of one segment.

    Also where the same bytes are read from it: after a failed sync they may be in memory only, and are
    not written out unless they are written anew.
    """
    for block in blocks:
        placed, data = block.placed, block.data
        ledger = with_journal_block(ledger, block, place, journal)
        file.write(placed.offset, [data])
    return ledger


def with_journal_block(ledger: LedgerEntry, block: JournalBlock, place: int, journal: str) -> LedgerEntry:
    """A ledger with the next block that its journal has of it. Raises Damaged if that is not the next one."""
    placed, header = block.placed, block.header
    found = (placed.ledger, placed.generation, placed.offset, header.first_entry, header.place)
    if found != (ledger.ledger, ledger.generation, ledger.bytes, ledger.entries, place):
        raise Damaged(journal, 0, f"the journal has a block for {placed}, which does not follow {ledger}")
    return ledger.grown(header.span, header.length, header.publish_time, header.publish_time)


def _cut_tail(file: File, path: str, ledger: LedgerEntry, place: int, result: Recovered) -> LedgerEntry:
    """Keep whole blocks behind what the journal had (it lost its last record) and cut what is none.

    What is kept is written anew for the same reason as in `_replay`.
    """
    size = file.size()
    if size == ledger.bytes:
        return ledger
    end, entries, last = whole_blocks(file, ledger.bytes, size, ledger.entries, place)
    if last is not None:
        result.report.append(f"{path}: kept {entries - ledger.entries} messages that the journal had lost")
        file.write(ledger.bytes, [file.read(ledger.bytes, end - ledger.bytes)])
        ledger = ledger.grown(entries - ledger.entries, end - ledger.bytes, ledger.last_time, last.publish_time)
    if end < size:
        result.report.append(f"{path}: cut off {size - end} bytes of a block that was never finished at offset {end}")
        file.truncate(end)
        file.sync()
        result.changed = True
    return ledger


def open_log(environment: Environment, directory: str, options: Options) -> tuple[FileLog, list[str]]:
    """The engine on a directory, made if missing, and what was found amiss in it, a sentence each.

    Raises Locked, ForeignDirectory, UnsupportedFormat, Damaged, DiskFull or DiskFailed.
    """
    disk = environment.disk
    try:
        # Before the lock, so that nothing is written to a directory that is somebody else's.
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


def _sync_names(disk: Disk, directory: str) -> None:
    """Make the name of a directory durable, and those of all above it, which may be as new."""
    path = directory.rstrip("/") or "/"
    disk.sync_directory(path)
    while path not in ("", ".", "/"):
        path = path.rpartition("/")[0] or ("/" if path.startswith("/") else ".")
        # One that we may not even read we have not made, nor anything in it.
        with contextlib.suppress(PermissionError):
            disk.sync_directory(path)


def _open_locked(environment: Environment, directory: str, options: Options, lock: Lock) -> tuple[FileLog, list[str]]:
    disk = environment.disk
    manifest = load_manifest(disk, directory) or _create(environment, directory)
    recovered = recover(disk, directory, manifest)
    manifest, journal = _start_journal(environment, directory, manifest, recovered)
    try:
        layout.remove_leftovers(disk, directory, manifest.journal, _segments(manifest))
        return FileLog(environment, directory, options, manifest, journal, lock), recovered.report
    except BaseException:
        journal.close()
        raise


def _create(environment: Environment, directory: str) -> Manifest:
    token = environment.randomness.token
    manifest = Manifest(token(16).hex(), token(8).hex(), 1, 1, ())
    Journal.create(environment.disk, layout.journal_path(directory, 1), 1, token(8)).close()
    _sync_names(environment.disk, directory)
    replace_manifest(environment.disk, directory, manifest)
    return manifest


def _start_journal(
    environment: Environment, directory: str, manifest: Manifest, recovered: Recovered
) -> tuple[Manifest, Journal]:
    """Make what recovery found the new starting point; nothing is written if nothing had changed."""
    disk, number = environment.disk, manifest.journal
    if not recovered.changed:
        path = layout.journal_path(directory, number)
        return manifest, Journal.open_empty(disk, path, number, recovered.mark)
    number += 1
    journal = Journal.create(disk, layout.journal_path(directory, number), number, environment.randomness.token(8))
    disk.sync_directory(directory)
    manifest = manifest._replace(journal=number, topics=tuple(recovered.topics))
    replace_manifest(disk, directory, manifest)
    return manifest, journal


def _segments(manifest: Manifest) -> dict[int, set[str]]:
    return {
        topic.number: {f"{ledger.ledger}-{ledger.generation}.log" for ledger in topic.ledgers}
        for topic in manifest.topics
    }
