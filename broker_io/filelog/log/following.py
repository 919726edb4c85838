"""A broker that follows the files of a log, which another process may own.

If no process owns the log, it shows the log as its next owner will find it, and writes nothing. The next owner writes
the blocks of the journal to their segments again (see recovery.py); this broker lays them over the segments in memory.
So readers see all that was acknowledged, even if a crash of the machine lost segments that were not synced yet.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
from collections.abc import Callable
from contextlib import closing
from functools import partial
from typing import Never

from broker_io.environment import Disk, Environment, File, ReadableFile, read_file
from broker_io.errors import Damaged, Error, ForeignDirectory, ReadOnly, TopicNotFound, disk_error
from broker_io.filelog.log import layout
from broker_io.filelog.log.journal_chain import journal_identity, missing_journal, record_damage
from broker_io.filelog.log.layout import LedgerEntry, Manifest, PairEntry, TopicEntry, decode_manifest, load_manifest
from broker_io.filelog.log.numbers import NumberedOperation
from broker_io.filelog.log.operations import SwapFiles
from broker_io.filelog.log.reader import REPAIR_HINT, TORN_TAIL_SECONDS, ReadingBroker
from broker_io.filelog.log.recovery import check_sizes, stored_log
from broker_io.filelog.log.redo import SegmentKey, SegmentPatch, redo
from broker_io.filelog.log.segment import UNFINISHED, whole_blocks

TORN_TAIL_PAUSE = 0.010


class Overlay:
    """A segment overlaid with consecutive patches."""

    def __init__(self, segment: ReadableFile, pieces: list[SegmentPatch]) -> None:
        self._segment = segment
        self._pieces = pieces
        self._start = pieces[0].offset
        self._end = pieces[-1].offset + len(pieces[-1].data)

    def read(self, offset: int, size: int) -> bytes:
        found: list[bytes] = []
        while size > 0 and (data := self._read_part(offset, size)):
            found.append(data)
            offset, size = offset + len(data), size - len(data)
        return b"".join(found)

    def _read_part(self, offset: int, size: int) -> bytes:
        if offset < self._start:
            return self._segment.read(offset, min(size, self._start - offset))
        if offset >= self._end:
            return self._segment.read(offset, size)
        piece = self._pieces[bisect.bisect_right(self._pieces, offset, key=lambda piece: piece.offset) - 1]
        inside = offset - piece.offset
        return piece.data[inside : inside + size]

    def size(self) -> int:
        return max(self._segment.size(), self._end)

    def close(self) -> None:
        self._segment.close()


class PrefixFile:
    """The first bytes of a segment; none of a ledger that the next owner will make."""

    def __init__(self, segment: ReadableFile | None, size: int) -> None:
        self._segment, self._size = segment, size

    def read(self, offset: int, size: int) -> bytes:
        size = min(size, self._size - offset)
        return self._segment.read(offset, size) if self._segment is not None and size > 0 else b""

    def size(self) -> int:
        return self._size

    def close(self) -> None:
        if self._segment is not None:
            self._segment.close()


class OfflineJournal:
    """What the journal of a log without an owner adds to its manifest and segments.

    `topics`: how they will be, if the directory is the store of a member of a pair; only what is known to be committed
    counts. `identity` changes with the journal.
    """

    def __init__(self, disk: Disk, directory: str, manifest: Manifest, identity: object) -> None:
        """Raises Damaged or UnsupportedFormat for a journal that an owner would reject, OSError."""
        stored = stored_log(disk, directory, manifest)
        self.identity = identity
        self._stored = _sizes(manifest)
        operations = stored.operations
        if manifest.is_member:
            operations = list(itertools.takewhile(partial(_has_files, disk, directory, manifest.pair), operations))
        with record_damage(layout.journal_path(directory, manifest.journal)):
            redone, self._patches = redo(manifest, operations)
        self.topics = redone.topics if manifest.is_member else None
        self._sizes = _sizes(redone)

    def over(self, open_segment: Callable[[], ReadableFile], topic: TopicEntry, ledger: LedgerEntry) -> ReadableFile:
        """A segment as the next owner will restore it; closing it closes the segment."""
        key = topic.number, ledger.ledger, ledger.generation
        size = self._sizes.get(key)
        is_new = self.topics is not None and key not in self._stored and not ledger.generation
        segment = None if is_new else open_segment()
        if segment is None or (self.topics is not None and size is not None):
            segment = PrefixFile(segment, size or 0)  # what is after that may not be whole
        return Overlay(segment, self._patches[key]) if key in self._patches else segment


def _sizes(manifest: Manifest) -> dict[SegmentKey, int]:
    return {
        (topic.number, ledger.ledger, ledger.generation): ledger.bytes
        for topic in manifest.topics
        for ledger in topic.ledgers
    }


def _has_files(disk: Disk, directory: str, pair: PairEntry, operation: NumberedOperation) -> bool:
    """Whether an operation can be redone here: a backup may still lack the files that a compaction has prepared."""
    body = operation.body
    if not isinstance(body, SwapFiles) or operation.manifest <= pair.structures:
        return True
    topic = layout.topic_path(directory, operation.topic)
    return all(disk.exists(layout.join(topic, f"{ledger.ledger}-{ledger.generation}.log")) for ledger in body.ledgers)


class FollowingBroker(ReadingBroker):
    """Takes no lock and writes nothing; calls that would change the log raise ReadOnly."""

    read_only = True

    def __init__(self, environment: Environment, directory: str) -> None:
        super().__init__(environment, directory)
        self.report: list[str] = []
        self._disk: Disk = environment.disk
        self._path = layout.join(directory, layout.MANIFEST)
        self._file: File | None = None
        self._identity: tuple[int, int, int] | None = None
        self._manifest: Manifest
        self._offline: OfflineJournal | None = None
        self._numbers: dict[str, int] = {}
        self._topics: dict[int, TopicEntry] = {}
        self._mutex = environment.threads.lock()
        self._load()

    def _load(self) -> None:
        try:
            if load_manifest(self._disk, self.directory) is None:
                raise ForeignDirectory(
                    f"{self.directory} contains no log: start a service or a client on it first, or correct the path"
                )
            self._reload()
        except OSError as error:
            raise disk_error(error, self.directory, "the log can't be read") from error

    def _reload(self) -> None:
        """Read the manifest again if it was replaced.

        The file stays open, so that the next manifest can't get the same identity.
        """
        identity = self._disk.identity(self._path)
        if identity == self._identity:
            return
        file = self._disk.open(self._path)
        try:
            manifest = decode_manifest(read_file(file), self._path)
        except BaseException:
            file.close()
            raise
        if self._file is not None:
            self._file.close()
        self._file, self._identity = file, identity
        self._manifest, self._offline = manifest, None
        self._show(manifest.topics)

    def _show(self, topics: tuple[TopicEntry, ...]) -> None:
        self._topics = {topic.number: topic for topic in topics}
        self._numbers = {topic.name: topic.number for topic in topics}

    def check(self) -> None:
        super().check()
        try:
            with self._mutex:
                self._reload()
            if self._manifest.is_member:
                self.offline_journal()  # it may have topics and ledgers that the manifest lacks
        except OSError as error:
            raise disk_error(error, self._path, "the log can't be read") from error

    @property
    def seed(self) -> int:
        return int(self._manifest.secret, 16)

    def topics(self) -> list[str]:
        self.check()
        return sorted(self._numbers)

    def named(self, name: str) -> TopicEntry:
        self.check()
        if name not in self._numbers:
            raise TopicNotFound(f"there is no topic {name!r} in {self.directory}: its owner has to create it first")
        return self._topics[self._numbers[name]]

    def current(self, number: int) -> TopicEntry | None:
        return self._topics.get(number)

    def grown(self, topic: TopicEntry) -> TopicEntry:
        """Raises Damaged for bytes after the last block that do not become the next block, or OSError."""
        ledger = topic.ledgers[-1]
        clock = self.environment.clock
        deadline = clock.monotonic() + TORN_TAIL_SECONDS
        offline = self.offline_journal()
        if offline is not None and offline.topics is not None:
            return self._topics.get(topic.number, topic)
        while True:
            with closing(self.segment(topic, ledger)) as file:
                end, torn = whole_blocks(file, ledger, file.size(), topic.place(ledger), contents=False)
            before, offline = offline, self.offline_journal()
            if torn is None or (torn == UNFINISHED and offline is None):
                return topic.with_open(end)
            if (offline is not None and before is offline) or clock.monotonic() >= deadline:
                path = layout.segment_path(self.directory, topic, ledger)
                raise Damaged(path, end.bytes, f"{torn}; {REPAIR_HINT}")
            if offline is None:
                clock.sleep(TORN_TAIL_PAUSE)

    def segment(self, topic: TopicEntry, ledger: LedgerEntry) -> ReadableFile:
        offline, opened = self._offline, partial(super().segment, topic, ledger)
        return opened() if offline is None else offline.over(opened, topic, ledger)

    def offline_journal(self) -> OfflineJournal | None:
        """Raises Damaged for a journal that the next owner would reject, or OSError."""
        with self._mutex:
            while not self._owned():
                self._reload()
                try:
                    return self._read_offline()
                except FileNotFoundError:
                    # Another owner may have opened and closed the log meanwhile: the manifest names its journal.
                    if self._disk.identity(self._path) == self._identity and not self._owned():
                        path = layout.journal_path(self.directory, self._manifest.journal)
                        raise missing_journal(path) from None
        return None

    def _owned(self) -> bool:
        try:
            return self._disk.locked(layout.join(self.directory, layout.LOCK))
        except PermissionError:
            return True  # unknown; readers of a log with an owner only wait

    def _read_offline(self) -> OfflineJournal:
        identity = journal_identity(self._disk, self.directory, self._manifest)
        if self._offline is None or self._offline.identity != identity:
            self._offline = OfflineJournal(self._disk, self.directory, self._manifest, identity)
            if self._offline.topics is not None:
                self._show(self._offline.topics)
        return self._offline

    def damages(self) -> dict[str, Error]:
        """See `StoredBroker`."""
        found = {}
        for name in self.topics():
            with contextlib.suppress(TopicNotFound):  # deleted meanwhile
                if (error := self._damage(name)) is not None:
                    found[name] = error
        return found

    def _damage(self, name: str) -> Error | None:
        while True:
            seen = self.named(name)
            try:
                self._ask(name, self._check_files)
            except Error as error:
                if self.named(name) is seen:
                    return error  # else its files were trimmed or rewritten meanwhile
            else:
                return None

    def _check_files(self, topic: TopicEntry) -> None:
        for stored in self._manifest.topics:
            if stored.number == topic.number:
                check_sizes(self.environment.disk, self.directory, stored)
        self.grown(topic)

    def _refuse(self, *_: object, **__: object) -> Never:
        raise ReadOnly(f"the log {self.directory} is open read-only: change it through its owner")

    create_topic = delete_topic = writer = roll = trim = compact = _refuse

    def close(self) -> None:
        with self._mutex:
            self.closed = True
            if self._file is not None:
                self._file.close()
            self._file = None
