"""Sources of readers: what the owner in this process has, or the files of a log that another process may own.

If no process owns the log, a reader sees it as its next owner will find it, and writes nothing. The next owner writes
the blocks of the journal to their segments again (see recovery.py); the reader lays them over the segments in memory.
So it sees all that was acknowledged, even if a crash of the machine lost segments that were not synced yet.
"""

from __future__ import annotations

import bisect
from typing import NamedTuple, Protocol

from broker_io.block import HEADER_BYTES, BadBlock, parse_header
from broker_io.environment import Disk, Environment, File, Mutex, ReadableFile, read_file
from broker_io.errors import Closed, Damaged, ForeignDirectory, TopicNotFound
from broker_io.file import layout
from broker_io.file.journal import read_journal
from broker_io.file.layout import LedgerEntry, Manifest, TopicEntry, decode_manifest, disk_error, load_manifest
from broker_io.file.log import FileLog
from broker_io.file.recovery import by_topic, missing_journal, with_journal_block


class SegmentPatch(NamedTuple):
    """Bytes for an offset of a segment."""

    offset: int
    data: bytes


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


class OfflineJournal:
    """The blocks that the journal of a log without an owner adds to its segments; `size` is its bytes."""

    def __init__(self, journal: bytes, path: str, manifest: Manifest) -> None:
        """Raises Damaged or UnsupportedFormat for a journal that an owner would reject."""
        replay = read_journal(journal, manifest.journal, path)
        self.size = replay.size
        self._pieces: dict[tuple[int, int, int], list[SegmentPatch]] = {}
        waiting = by_topic(replay, manifest, path)
        for topic in manifest.topics:
            ledger = topic.ledgers[-1]
            place = topic.place(ledger)
            for block in waiting.get(topic.number, ()):
                ledger = with_journal_block(ledger, block, place, path)
                pieces = self._pieces.setdefault((topic.number, ledger.ledger, ledger.generation), [])
                pieces.append(SegmentPatch(block.placed.offset, block.data))

    def over(self, segment: ReadableFile, topic: TopicEntry, ledger: LedgerEntry) -> ReadableFile:
        """A segment as the next owner will restore it; closing it closes the segment."""
        pieces = self._pieces.get((topic.number, ledger.ledger, ledger.generation))
        return Overlay(segment, pieces) if pieces else segment


TORN_TAIL_SECONDS = 1.0
"""Seconds after which bytes at the end of a live segment that are not a block count as damage."""
TORN_TAIL_PAUSE = 0.010
UNFINISHED = "a block is incomplete"
REPAIR_HINT = "if the owner of the log is gone, open it for writing once: that repairs an unclean end"


MAX_OPEN_FILES = 64
"""Files that the readers of one broker keep open between reads; above this limit each read opens and closes its own."""


class OpenFiles:
    """Count of the files that readers keep open."""

    def __init__(self, mutex: Mutex) -> None:
        self._count = 0
        self._mutex = mutex

    def take(self) -> bool:
        """Count one more file, if that is allowed."""
        with self._mutex:
            if self._count >= MAX_OPEN_FILES:
                return False
            self._count += 1
            return True

    def give_back(self) -> None:
        with self._mutex:
            self._count -= 1


class SegmentSource(Protocol):
    """The topics and files of a log for readers.

    `read_only`: this process does not own the log, so the open ledger of a topic may be longer than its entry says.
    """

    environment: Environment
    directory: str
    read_only: bool
    open_files: OpenFiles

    def names(self) -> list[str]:
        """Names of all topics, sorted."""

    def named(self, name: str) -> TopicEntry:
        """Raises TopicNotFound or Closed."""

    def numbered(self, number: int, name: str) -> TopicEntry:
        """The current state of a topic. Raises TopicNotFound if it was deleted since, or Closed."""

    def grown(self, topic: TopicEntry) -> TopicEntry:
        """The topic with the current length of its open ledger."""

    def segment(self, topic: TopicEntry, ledger: LedgerEntry) -> ReadableFile:
        """Open the file of a ledger for reading. Raises OSError."""

    def offline_journal(self) -> OfflineJournal | None:
        """The journal of a log without an owner, the same object until it changes; None if the log has an owner."""

    def wait(self, seen: TopicEntry, pause: float, remaining: float) -> None:
        """Wait until the topic may have changed, or for `remaining` seconds, polling every `pause`."""


class FileFollower:
    """Reads a log that another process may own; takes no lock and writes nothing."""

    read_only = True

    def __init__(self, environment: Environment, directory: str) -> None:
        self.environment = environment
        self.directory = directory
        self.open_files = OpenFiles(environment.threads.lock())
        self._disk: Disk = environment.disk
        self._path = layout.join(directory, layout.MANIFEST)
        self._file: File | None = None
        self._identity: tuple[int, int, int] | None = None
        self._manifest: Manifest
        self._offline: OfflineJournal | None = None
        self._numbers: dict[str, int] = {}
        self._topics: dict[int, TopicEntry] = {}
        self._closed = False
        self._mutex = environment.threads.lock()
        self._load()

    def _load(self) -> None:
        try:
            if load_manifest(self._disk, self.directory) is None:
                raise ForeignDirectory(
                    f"{self.directory} contains no log: start a service or a client on it first, or correct the path"
                )
            self._refresh()
        except OSError as error:
            raise disk_error(error, self.directory, "the log can't be read") from error

    def _refresh(self) -> None:
        """Read the manifest again if it was replaced.

        The file stays open, so that the next manifest can't get the same identity.
        """
        with self._mutex:
            self._reload()

    def _reload(self) -> None:
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
        self._topics = {topic.number: topic for topic in manifest.topics}
        self._numbers = {topic.name: topic.number for topic in manifest.topics}

    def _check(self) -> None:
        if self._closed:
            raise Closed(f"the log {self.directory} was closed in this process: open it again")
        try:
            self._refresh()
        except OSError as error:
            raise disk_error(error, self._path, "the log can't be read") from error

    def names(self) -> list[str]:
        self._check()
        return sorted(self._numbers)

    def named(self, name: str) -> TopicEntry:
        self._check()
        if name not in self._numbers:
            raise TopicNotFound(f"there is no topic {name!r} in {self.directory}: its owner has to create it first")
        return self._topics[self._numbers[name]]

    def numbered(self, number: int, name: str) -> TopicEntry:
        self._check()
        topic = self._topics.get(number)
        if topic is None:
            raise TopicNotFound(
                f"topic {name!r} of {self.directory} was deleted while it was read: open another reader"
            )
        return topic

    def grown(self, topic: TopicEntry) -> TopicEntry:
        """Raises Damaged for bytes after the last block that do not become the next block, or OSError."""
        ledger = topic.ledgers[-1]
        clock = self.environment.clock
        deadline = clock.monotonic() + TORN_TAIL_SECONDS
        offline = self.offline_journal()
        while True:
            file = self.segment(topic, ledger)
            try:
                end, torn = _find_end(file, ledger, topic.place(ledger))
            finally:
                file.close()
            before, offline = offline, self.offline_journal()
            if torn is None or (torn == UNFINISHED and offline is None):
                return topic.with_open(end)
            if (offline is not None and before is offline) or clock.monotonic() >= deadline:
                path = layout.segment_path(self.directory, topic.number, ledger.ledger, ledger.generation)
                raise Damaged(path, end.bytes, f"{torn}; {REPAIR_HINT}")
            if offline is None:
                clock.sleep(TORN_TAIL_PAUSE)

    def segment(self, topic: TopicEntry, ledger: LedgerEntry) -> ReadableFile:
        path = layout.segment_path(self.directory, topic.number, ledger.ledger, ledger.generation)
        file, offline = self._disk.open(path), self._offline
        return file if offline is None else offline.over(file, topic, ledger)

    def offline_journal(self) -> OfflineJournal | None:
        """Raises Damaged for a journal that the next owner would reject, or OSError."""
        with self._mutex:
            while not self._owned():
                self._reload()
                path = layout.journal_path(self.directory, self._manifest.journal)
                try:
                    return self._read_offline(path)
                except FileNotFoundError:
                    # Another owner may have opened and closed the log meanwhile: the manifest names its journal.
                    if self._disk.identity(self._path) == self._identity and not self._owned():
                        raise missing_journal(path) from None
        return None

    def _owned(self) -> bool:
        try:
            return self._disk.locked(layout.join(self.directory, layout.LOCK))
        except PermissionError:
            return True  # unknown; readers of a log with an owner only wait

    def _read_offline(self, path: str) -> OfflineJournal:
        file = self._disk.open(path)
        try:
            if self._offline is None or self._offline.size != file.size():
                self._offline = OfflineJournal(read_file(file), path, self._manifest)
        finally:
            file.close()
        return self._offline

    def wait(self, seen: TopicEntry, pause: float, remaining: float) -> None:
        self.environment.clock.sleep(min(pause, remaining))

    def close(self) -> None:
        with self._mutex:
            self._closed = True
            if self._file is not None:
                self._file.close()
            self._file = None


def _find_end(file: ReadableFile, ledger: LedgerEntry, place: int) -> tuple[LedgerEntry, str | None]:
    """A ledger extended by the blocks after its end in the manifest, and why the remaining bytes are no block."""
    size = file.size()
    while ledger.bytes < size:
        if ledger.bytes + HEADER_BYTES > size:
            return ledger, UNFINISHED
        try:
            header = parse_header(file.read(ledger.bytes, HEADER_BYTES), 0, place)
        except BadBlock as error:
            return ledger, str(error)
        if header.first_entry != ledger.entries:
            return ledger, f"a block begins with entry {header.first_entry} instead of {ledger.entries}"
        if ledger.bytes + header.length > size:
            return ledger, UNFINISHED
        ledger = ledger.grown(header.span, header.length, header.publish_time, header.publish_time)
    return ledger, None


LONGEST_WAIT = 3600.0


class EngineSource:
    """The source of readers in the process that owns the log; `notify` wakes waiting readers."""

    read_only = False

    def __init__(self, environment: Environment, directory: str, log: FileLog, *, committer: bool) -> None:
        self.environment = environment
        self.directory = directory
        self.closed = False
        self.open_files = OpenFiles(environment.threads.lock())
        self.grew = environment.threads.condition()
        self._log = log
        self._waits = committer

    def check(self) -> None:
        if self.closed:
            raise Closed(f"the log {self.directory} was closed in this process: open it again")

    def names(self) -> list[str]:
        self.check()
        return self._log.names()

    def named(self, name: str) -> TopicEntry:
        self.check()
        return self._log.topic(name).entry

    def numbered(self, number: int, name: str) -> TopicEntry:
        self.check()
        topic = self._log.by_number(number)
        if topic is None:
            raise TopicNotFound(
                f"topic {name!r} of {self.directory} was deleted while it was read: open another reader"
            )
        return topic.entry

    def grown(self, topic: TopicEntry) -> TopicEntry:
        return topic

    def segment(self, topic: TopicEntry, ledger: LedgerEntry) -> ReadableFile:
        return self.environment.disk.open(
            layout.segment_path(self.directory, topic.number, ledger.ledger, ledger.generation)
        )

    def offline_journal(self) -> None:
        return None

    def wait(self, seen: TopicEntry, pause: float, remaining: float) -> None:
        if not self._waits:
            self.environment.clock.sleep(min(pause, remaining))
            return
        with self.grew:
            self.grew.wait_for(lambda: self._changed(seen), min(remaining, LONGEST_WAIT))

    def _changed(self, seen: TopicEntry) -> bool:
        topic = self._log.by_number(seen.number)
        return self.closed or topic is None or topic.entry is not seen

    def notify(self) -> None:
        """Wake waiting readers."""
        with self.grew:
            self.grew.notify_all()
