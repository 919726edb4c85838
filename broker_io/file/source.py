"""Where readers learn what there is to read: from the owner in this process, or from the files of another."""

from __future__ import annotations

import threading
from typing import Protocol

from broker_io.block import HEADER_BYTES, BadBlock, parse_header
from broker_io.environment import Disk, Environment, File, ReadableFile, read_file
from broker_io.errors import Closed, Damaged, ForeignDirectory, TopicNotFound
from broker_io.file import layout
from broker_io.file.abandoned import Abandoned
from broker_io.file.manifest import LedgerEntry, Manifest, TopicEntry, decode_manifest, load_manifest
from broker_io.file.options import disk_error
from broker_io.file.recovery import missing_journal

DOUBT_SECONDS = 1.0
"""How long bytes at the end of a live segment may be no block before they count as damage."""
DOUBT_PAUSE = 0.010
UNFINISHED = "a block ends before it is whole"
MENDS = "if the owner of the log is gone, opening it for writing mends an unclean end"


KEPT_FILES = 64
"""Files that the readers of one broker keep open while nobody reads; beyond it each read opens and closes its own."""


class Kept:
    """Counts the files that readers keep open."""

    def __init__(self) -> None:
        self._count = 0
        self._mutex = threading.Lock()

    def take(self) -> bool:
        """Whether one more may be kept."""
        with self._mutex:
            if self._count >= KEPT_FILES:
                return False
            self._count += 1
            return True

    def give_back(self) -> None:
        with self._mutex:
            self._count -= 1


class Source(Protocol):
    """What a reader needs to know.

    `follows` says that the open ledger of a topic may hold more than its entry says.
    """

    environment: Environment
    directory: str
    follows: bool
    kept: Kept

    def names(self) -> list[str]:
        """Names of all topics, sorted."""

    def named(self, name: str) -> TopicEntry:
        """Raises TopicNotFound or Closed."""

    def numbered(self, number: int, name: str) -> TopicEntry:
        """The topic as it is now. Raises TopicNotFound if it was deleted since, or Closed."""

    def grown(self, topic: TopicEntry) -> TopicEntry:
        """The topic with all that its open ledger holds by now."""

    def segment(self, topic: TopicEntry, ledger: LedgerEntry) -> ReadableFile:
        """Open the file of a ledger for reading. Raises OSError."""

    def abandoned(self) -> Abandoned | None:
        """What stands in the journal only, the same object until that changes; None if somebody owns the log."""

    def wait(self, seen: TopicEntry, pause: float, remaining: float) -> None:
        """Come back when the topic may have changed, or after `remaining` seconds, polling every `pause`."""


class Follower:
    """Reads a log that another process may own; takes no lock and writes nothing."""

    follows = True

    def __init__(self, environment: Environment, directory: str) -> None:
        self.environment = environment
        self.directory = directory
        self.kept = Kept()
        self._disk: Disk = environment.disk
        self._path = layout.join(directory, layout.MANIFEST)
        self._file: File | None = None
        self._identity: tuple[int, int, int] | None = None
        self._manifest: Manifest
        self._abandoned: Abandoned | None = None
        self._numbers: dict[str, int] = {}
        self._topics: dict[int, TopicEntry] = {}
        self._closed = False
        self._mutex = threading.Lock()
        self._load()

    def _load(self) -> None:
        try:
            if load_manifest(self._disk, self.directory) is None:
                raise ForeignDirectory(f"{self.directory} holds no log yet: open it for writing once, or mend the path")
            self._refresh()
        except OSError as error:
            raise disk_error(error, self.directory, "the log can't be read") from error

    def _refresh(self) -> None:
        """Read the manifest again if another one took its place.

        The file stays open meanwhile, so that the next manifest can't be one of the same identity.
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
        self._manifest, self._abandoned = manifest, None
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
            raise TopicNotFound(f"topic {name!r} of {self.directory} was deleted while it was read: open it anew")
        return topic

    def grown(self, topic: TopicEntry) -> TopicEntry:
        """Raises Damaged where what stands behind the last block is neither the next nor becomes it, or OSError."""
        ledger = topic.ledgers[-1]
        clock = self.environment.clock
        deadline = clock.monotonic() + DOUBT_SECONDS
        abandoned = self.abandoned()
        while True:
            file = self.segment(topic, ledger)
            try:
                end, doubt = _hop_to_end(file, ledger, topic.place(ledger))
            finally:
                file.close()
            before, abandoned = abandoned, self.abandoned()
            if doubt is None or (doubt == UNFINISHED and abandoned is None):
                return topic.with_open(end)
            if (abandoned is not None and before is abandoned) or clock.monotonic() >= deadline:
                path = layout.segment_path(self.directory, topic.number, ledger.ledger, ledger.generation)
                raise Damaged(path, end.bytes, f"{doubt}; {MENDS}")
            if abandoned is None:
                clock.sleep(DOUBT_PAUSE)

    def segment(self, topic: TopicEntry, ledger: LedgerEntry) -> ReadableFile:
        path = layout.segment_path(self.directory, topic.number, ledger.ledger, ledger.generation)
        file, abandoned = self._disk.open(path), self._abandoned
        return file if abandoned is None else abandoned.over(file, topic, ledger)

    def abandoned(self) -> Abandoned | None:
        """Raises Damaged for a journal that the next owner would refuse, or OSError."""
        with self._mutex:
            while not self._owned():
                self._reload()
                path = layout.journal_path(self.directory, self._manifest.journal)
                try:
                    return self._read_abandoned(path)
                except FileNotFoundError:
                    # An owner that came and went has begun another journal, and said so in the manifest.
                    if self._disk.identity(self._path) == self._identity and not self._owned():
                        raise missing_journal(path) from None
        return None

    def _owned(self) -> bool:
        try:
            return self._disk.locked(layout.join(self.directory, layout.LOCK))
        except PermissionError:
            return True  # nobody can tell, and a log that has an owner is only waited for

    def _read_abandoned(self, path: str) -> Abandoned:
        file = self._disk.open(path)
        try:
            if self._abandoned is None or self._abandoned.size != file.size():
                self._abandoned = Abandoned(read_file(file), path, self._manifest)
        finally:
            file.close()
        return self._abandoned

    def wait(self, seen: TopicEntry, pause: float, remaining: float) -> None:
        self.environment.clock.sleep(min(pause, remaining))

    def close(self) -> None:
        with self._mutex:
            self._closed = True
            if self._file is not None:
                self._file.close()
            self._file = None


def _hop_to_end(file: ReadableFile, ledger: LedgerEntry, place: int) -> tuple[LedgerEntry, str | None]:
    """A ledger with the blocks that stand behind what the manifest has of it, and why more bytes are none."""
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
