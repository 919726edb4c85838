"""The source of readers in the process that owns the log."""

from __future__ import annotations

import threading

from broker_io.environment import Environment, ReadableFile
from broker_io.errors import Closed, TopicNotFound
from broker_io.file import layout
from broker_io.file.log import FileLog
from broker_io.file.manifest import LedgerEntry, TopicEntry
from broker_io.file.source import Kept

LONGEST_WAIT = 3600.0


class Owned:
    """Tells readers what the engine holds; `tell` wakes those that wait."""

    follows = False

    def __init__(self, environment: Environment, directory: str, log: FileLog, *, committer: bool) -> None:
        self.environment = environment
        self.directory = directory
        self.closed = False
        self.kept = Kept()
        self.grew = threading.Condition()
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
            raise TopicNotFound(f"topic {name!r} of {self.directory} was deleted while it was read: open it anew")
        return topic.entry

    def grown(self, topic: TopicEntry) -> TopicEntry:
        return topic

    def segment(self, topic: TopicEntry, ledger: LedgerEntry) -> ReadableFile:
        return self.environment.disk.open(
            layout.segment_path(self.directory, topic.number, ledger.ledger, ledger.generation)
        )

    def abandoned(self) -> None:
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

    def tell(self) -> None:
        """Wake the readers that wait."""
        with self.grew:
            self.grew.notify_all()
