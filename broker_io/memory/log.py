"""The cluster of a memory broker, and what one process's connection to it consists of."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from itertools import count
from typing import Protocol

from broker_io.checking import OWN_PREFIX
from broker_io.environment import Clock, SystemClock
from broker_io.errors import Fenced, TopicNotFound
from broker_io.memory.faults import Faults
from broker_io.memory.topic import TopicLog
from broker_io.partitions import partitioned
from broker_io.port import check_topic_name
from broker_io.position import Position

POLL_SECONDS = 0.01


class AttachedWriter(Protocol):
    """What the log knows of a writer."""

    @property
    def connection(self) -> Connection: ...

    @property
    def exclusive(self) -> bool: ...

    def fence(self, error: Fenced) -> None: ...

    def close(self) -> None: ...


class MemoryLog:
    """The topics, and who writes them."""

    def __init__(
        self, *, clock: Clock, ledger_entries: int, max_message_bytes: int, compacted_prefix: str = OWN_PREFIX
    ) -> None:
        self.clock = clock
        self.max_message_bytes = max_message_bytes
        self.compacted_prefix = compacted_prefix
        self.topics: dict[str, TopicLog] = {}
        self.writers: dict[TopicLog, list[AttachedWriter]] = {}
        self.partitions: dict[str, int] = {}
        self.deleted: set[str] = set()
        self.changed = threading.Condition(threading.RLock())
        self._ledger_entries = ledger_entries
        self._ledgers = count(1)
        self._incarnations = count(1)

    def create(self, name: str) -> None:
        if name in self.partitions:
            raise partitioned(name)
        if name not in self.topics:
            incarnation = f"memory-{id(self):x}-{next(self._incarnations)}"
            log = TopicLog(incarnation, lambda: next(self._ledgers), self._ledger_entries)
            if name in self.deleted:  # a place in that one is none in this one
                log.lost = Position(log.ledgers[0].number, -1)
            self.topics[name] = log
            self.writers[log] = []

    def topic(self, name: str) -> TopicLog:
        log = self.topics.get(check_topic_name(name))
        if name in self.partitions:
            raise partitioned(name)
        if log is None:
            raise TopicNotFound(f"there is no topic {name!r}: create it first")
        return log

    def wait(self, seconds: float) -> None:
        """Wait, with the lock held, for an append or for a while."""
        if isinstance(self.clock, SystemClock):
            self.changed.wait(seconds)
        else:
            self.clock.sleep(min(seconds, POLL_SECONDS))


@dataclass(slots=True, eq=False)
class Connection:
    """What the readers and writers of one broker handle share."""

    log: MemoryLog
    faults: Faults
    closed: bool = False
