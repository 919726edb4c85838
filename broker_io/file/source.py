"""Where readers learn what there is to read: from the owner in this process, or from the files of another."""

from __future__ import annotations

import threading
from typing import Protocol

from broker_io.block import HEADER_BYTES, BadBlock, parse_header
from broker_io.environment import Disk, Environment, File
from broker_io.errors import Closed, ForeignDirectory, TopicNotFound
from broker_io.file import layout
from broker_io.file.manifest import LedgerEntry, TopicEntry, decode_manifest, load_manifest, read_file
from broker_io.file.options import disk_error
from broker_io.file.recovery import open_segment


class Source(Protocol):
    """What a reader needs to know.

    `follows` says that the open ledger of a topic may hold more than its entry says.
    """

    environment: Environment
    directory: str
    follows: bool

    def names(self) -> list[str]:
        """Names of all topics, sorted."""

    def named(self, name: str) -> TopicEntry:
        """Raises TopicNotFound or Closed."""

    def numbered(self, number: int, name: str) -> TopicEntry:
        """The topic as it is now. Raises TopicNotFound if it was deleted since, or Closed."""

    def grown(self, topic: TopicEntry) -> TopicEntry:
        """The topic with all that its open ledger holds by now."""

    def wait(self, seen: TopicEntry, pause: float, remaining: float) -> None:
        """Come back when the topic may have changed, or after `remaining` seconds, polling every `pause`."""


class Follower:
    """Reads a log that another process may own; takes no lock and writes nothing."""

    follows = True

    def __init__(self, environment: Environment, directory: str) -> None:
        self.environment = environment
        self.directory = directory
        self._disk: Disk = environment.disk
        self._path = layout.join(directory, layout.MANIFEST)
        self._file: File | None = None
        self._identity: tuple[int, int, int] | None = None
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
        ledger = topic.ledgers[-1]
        path = layout.segment_path(self.directory, topic.number, ledger.ledger, ledger.generation)
        file = open_segment(self._disk, path)
        try:
            return topic.with_open(_hop_to_end(file, ledger, topic.place(ledger)))
        finally:
            file.close()

    def wait(self, seen: TopicEntry, pause: float, remaining: float) -> None:
        self.environment.clock.sleep(min(pause, remaining))

    def close(self) -> None:
        with self._mutex:
            self._closed = True
            if self._file is not None:
                self._file.close()
            self._file = None


def _hop_to_end(file: File, ledger: LedgerEntry, place: int) -> LedgerEntry:
    """A ledger with the blocks that stand behind what the manifest has of it."""
    size = file.size()
    while ledger.bytes < size:
        try:
            header = parse_header(file.read(ledger.bytes, HEADER_BYTES), 0, place)
        except BadBlock:
            break
        if header.first_entry != ledger.entries or ledger.bytes + header.length > size:
            break
        ledger = ledger.grown(header.span, header.length, header.publish_time, header.publish_time)
    return ledger
