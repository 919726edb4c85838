"""What a node sends: at once, and in the order of the effects

Messages go to the link in the thread that made them. Records that are read from the journal, and copies, take longer:
a thread sends them, and what follows them on the link waits for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

from broker_io.environment import Mutex, Threads
from broker_io.errors import DiskFailed, Error
from broker_io.filelog.log.records import LogRecord
from broker_io.filelog.pair.port import PairLink, PairStore
from broker_io.filelog.pair.tasks import TaskQueue
from broker_io.filelog.replication.messages import SendCopy, SendMessage, SendStored

Sending: TypeAlias = SendMessage | SendStored | SendCopy

BATCH_BYTES = 1024 * 1024
BATCH_RECORDS = 1024


@dataclass(eq=False)
class LinkOutbox:
    """What waits to be sent over a link. `slow`: the thread is at work on it."""

    link: PairLink
    waiting: deque[Sending] = field(default_factory=deque)
    slow: bool = False


class PeerSender:
    """Sends over the present link; `mutex` is the node's, which callers of the methods without a thread hold."""

    def __init__(
        self,
        threads: Threads,
        mutex: Mutex,
        store: PairStore,
        durable: Callable[[], int],
        fail: Callable[[Exception], None],
        broken: Callable[[int, str], None],
    ) -> None:
        self._mutex = mutex
        self._store = store
        self._durable = durable
        self._fail = fail
        self._broken = broken
        self._current: LinkOutbox | None = None
        self._tasks: TaskQueue[LinkOutbox] = TaskQueue(threads)
        self._synced = threads.event()

    @property
    def number(self) -> int | None:
        """The number of the present link."""
        return None if self._current is None else self._current.link.number

    def up(self, link: PairLink) -> None:
        """Use a link from now on."""
        if self._current is not None:
            self.end(self._current.link.number)
        self._current = LinkOutbox(link)

    def end(self, number: int) -> None:
        """Close a link, if it is the present one."""
        current = self._current
        if current is not None and current.link.number == number:
            self._current = None
            current.waiting.clear()
            current.link.close()
            self._synced.set()

    def send(self, effect: Sending) -> None:
        current = self._current
        if current is None or current.link.number != effect.link:
            return
        if not current.slow and isinstance(effect, SendMessage):
            current.link.send(effect.message)
            return
        current.waiting.append(effect)
        if not current.slow:
            current.slow = True
            self._tasks.put(current)

    def synced(self) -> None:
        """More of the journal is durable."""
        self._synced.set()

    # --- the thread ---

    def run(self) -> None:
        """Send what takes longer until the sender is closed."""
        while (outbox := self._tasks.take()) is not None:
            try:
                while (effect := self._next(outbox)) is not None:
                    self._send_slowly(outbox, effect)
            except DiskFailed as error:
                self._fail(error)
            except Error as error:
                self._broken(outbox.link.number, str(error))
            except Exception as error:
                self._fail(error)

    def _next(self, outbox: LinkOutbox) -> SendStored | SendCopy | None:
        """The next effect that takes longer; sends messages before it."""
        with self._mutex:
            while outbox is self._current and outbox.waiting:
                effect = outbox.waiting.popleft()
                if not isinstance(effect, SendMessage):
                    return effect
                outbox.link.send(effect.message)
            outbox.slow = False
            return None

    def _send_slowly(self, outbox: LinkOutbox, effect: SendStored | SendCopy) -> None:
        if isinstance(effect, SendCopy):
            copy = self._store.begin_copy()
            begin = effect.begin._replace(at=copy.mark, forks=copy.forks)
            with self._mutex:
                if outbox is self._current:
                    outbox.link.send_copy(begin, copy)
                    return
            copy.close()
            return
        if not self._wait_for(outbox, effect.last):
            return
        for records in _batches(self._store.read(effect.first, effect.last)):
            with self._mutex:
                if outbox is not self._current:
                    return
                outbox.link.send(effect.template._replace(records=records))

    def _wait_for(self, outbox: LinkOutbox, lsn: int) -> bool:
        """Wait until records up to an lsn are in the journal; whether the link is still there."""
        while True:
            self._synced.clear()
            with self._mutex:
                if outbox is not self._current:
                    return False
                if self._durable() >= lsn:
                    return True
            self._synced.wait()

    def wait_idle(self) -> None:
        """Wait until the thread reads nothing for a link that has ended."""
        self._tasks.wait_idle()

    def close(self) -> None:
        with self._mutex:
            if self._current is not None:
                self.end(self._current.link.number)
        self._tasks.close()
        self._synced.set()


def _batches(records: Iterator[LogRecord]) -> Iterator[tuple[LogRecord, ...]]:
    batch: list[LogRecord] = []
    size = 0
    for record in records:
        batch.append(record)
        size += len(record.content)
        if size >= BATCH_BYTES or len(batch) >= BATCH_RECORDS:
            yield tuple(batch)
            batch, size = [], 0
    if batch:
        yield tuple(batch)
