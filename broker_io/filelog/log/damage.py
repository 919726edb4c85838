"""The damage that is known of a log: what meets a damaged segment reports it here, once for all

Readers, the scrub, compactions, backups and copies report the error that they raise. A segment counts as damaged until
it is repaired, or the log no longer names it. What is not a segment that the log names is ignored: the file of an
attempt is removed by who made it, and the log is not opened with a damaged journal or manifest.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

from broker_io.environment import Mutex
from broker_io.errors import Damaged, Error
from broker_io.filelog.log import layout
from broker_io.filelog.log.layout import LedgerEntry, TopicEntry

_NAME = re.compile(r"(\d+)/(\d+)-(\d+)\.log")


class DamagedSegment(NamedTuple):
    """A segment, and what is wrong with it."""

    topic: TopicEntry
    ledger: LedgerEntry
    error: Error


class DamageRecord:
    """The damaged segments of a log; all calls are safe from any thread.

    `current` gives the state of a topic. `listeners` are called, in the thread of the report, when damage was found or
    repaired; they return at once. `repaired`: the segments that were.
    """

    def __init__(self, directory: str, current: Callable[[int], TopicEntry | None], mutex: Mutex) -> None:
        self.listeners: list[Callable[[], object]] = []
        self.repaired: list[str] = []
        self._topics = layout.join(directory, layout.TOPICS, "")
        self._current = current
        self._mutex = mutex
        self._errors: dict[str, Error] = {}

    def found(self, error: Error, path: str = "") -> bool:
        """Note an error about a file, which a Damaged names itself; whether it is a segment that the log names."""
        path = error.path if isinstance(error, Damaged) else path
        if self._segment(path) is None:
            return False
        with self._mutex:
            new = self._errors.setdefault(path, error) is error
        if new:
            self._notify()
        return True

    def mended(self, path: str) -> None:
        """A segment was repaired and verified."""
        with self._mutex:
            mended = self._errors.pop(path, None) is not None
            self.repaired += [path] if mended else []
        if mended:
            self._notify()

    def segments(self) -> list[DamagedSegment]:
        """All that is damaged, in the order in which it was found."""
        with self._mutex:
            errors = [*self._errors.items()]
        found = []
        for path, error in errors:
            segment = self._segment(path)
            if segment is not None:
                found.append(DamagedSegment(*segment, error))
            else:
                with self._mutex:
                    self._errors.pop(path, None)
        return found

    def topics(self) -> dict[str, Error]:
        """The damaged topics, each with its first error."""
        found: dict[str, Error] = {}
        for topic, _, error in self.segments():
            found.setdefault(topic.name, error)
        return found

    def _segment(self, path: str) -> tuple[TopicEntry, LedgerEntry] | None:
        """The topic and the ledger of a segment, if the log names it."""
        name = _NAME.fullmatch(path.removeprefix(self._topics)) if path.startswith(self._topics) else None
        topic = self._current(int(name[1])) if name is not None else None
        if name is None or topic is None:
            return None
        ledger = topic.find(int(name[2]))
        return (topic, ledger) if ledger is not None and ledger[:2] == (int(name[2]), int(name[3])) else None

    def _notify(self) -> None:
        for notify in [*self.listeners]:
            notify()
