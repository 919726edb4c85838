"""Log readers: a few threads read all followed topics, and the loop takes what they have read.

No thread waits for a topic: the broker notifies its log reader of new messages, and a log reader without messages is
checked periodically. It stops reading while too much of what it read has not been taken. The loop is woken once for
many topics, and takes all messages of a topic together.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections import deque
from collections.abc import Callable
from typing import Any

from broker_io.batch import PlacedBatch, Width
from broker_io.environment import Thread, current
from broker_io.errors import Error, PositionTrimmed
from broker_io.port import Broker, NotifyingReader, Reader
from broker_io.position import Position
from broker_io.waits import Backoff, Waker
from txnbuffer.errors import ReplayStalled
from txnbuffer.recovery.restore import topic_deleted
from txnbuffer.service.door.connection import MIB

THREADS = 6
"""Threads for tasks that are short."""
SLOW_THREADS = 4
"""Threads for tasks that query a cluster and may take long, so that others do not wait for them."""

Task = Callable[[], None]


class ReaderPool:
    """Thread pools and a timer thread for the tasks of all log readers; no task starts after `stop`."""

    def __init__(self, name: str) -> None:
        environment = current()
        self._monotonic, threads = environment.clock.monotonic, environment.threads
        self._fast = threads.executor(THREADS, name)
        self._slow = threads.executor(SLOW_THREADS, f"{name}-aside")
        self._scheduled: list[tuple[float, int, Task]] = []
        self._numbers = itertools.count()
        self._changed = threads.condition()
        self._stopped = False
        self._clock: Thread | None = None
        self._threads = threads
        self._name = name

    def submit(self, task: Task, *, slow: bool = False) -> None:
        """Queue a short task, or one that may take long."""
        with self._changed:
            if not self._stopped:
                (self._slow if slow else self._fast).submit(task)

    def schedule(self, seconds: float, task: Task) -> None:
        """Run a task after some seconds in the timer thread; it must not block."""
        due = self._monotonic() + seconds
        with self._changed:
            if self._stopped:
                return
            heapq.heappush(self._scheduled, (due, next(self._numbers), task))
            if self._clock is None:
                self._clock = self._threads.thread(self._run, name=f"{self._name}-later", daemon=True)
                self._clock.start()
            elif self._scheduled[0][0] == due:
                self._changed.notify()

    def stop(self) -> None:
        """Wait for the running tasks; start no others."""
        with self._changed:
            self._stopped = True
            self._scheduled.clear()
            self._changed.notify()
        if self._clock is not None:
            self._clock.join()
        for pool in (self._fast, self._slow):
            pool.shutdown(cancel_futures=True)

    def _run(self) -> None:
        while (task := self._due()) is not None:
            task()

    def _due(self) -> Task | None:
        """Wait for the next due task; None after `stop`."""
        with self._changed:
            while not self._stopped:
                if not self._scheduled:
                    self._changed.wait()
                elif (missing := self._scheduled[0][0] - self._monotonic()) > 0:
                    self._changed.wait(missing)
                else:
                    return heapq.heappop(self._scheduled)[2]
        return None


HELD_BYTES = 64 * MIB
"""Approximate limit on messages that were read and not taken, for all topics together."""
LEAST_HELD = MIB
READ_MESSAGES = 8192
FEW = 512
"""After a read of fewer messages a log reader pauses, so that the loop gets larger batches."""
BATCH_DELAY = 0.003
OWN_BATCH_DELAY = 0.1
"""The pause, in seconds, for a log that is followed only to detect other writers."""
POLL = 0.02
"""Seconds between two reads if the reader does not notify of new messages."""
FIRST_CHECK, MAX_CHECK = 1.2, 12.0
"""Seconds without a message after which a log reader reads anyway; doubled each time.

A little longer than the time after which a reader of a cluster that is read checks its connection.
"""
CHECKS_PER_SECOND = 20
"""Approximate limit on such checks of all topics."""
QUIET = 10.0
"""Seconds without a message after which the end of the topic is queried."""
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 5.0
"""Seconds between two attempts to read after a failure."""

Take = Callable[[PlacedBatch], None]
Fail = Callable[[BaseException], None]


class LogReader:
    """Reads one topic after `at`, in one thread at a time.

    On the loop `take` is called with the messages, and `fail` with the error that ended it. `problem`: the
    error of the last attempt to read, which is repeated. `paused`: not 0 while nothing may be taken. `incarnation`: the
    topic's, if no other topic of the same name may be read. `reader`: an open reader to start with. `batch_delay`:
    seconds of pause after few messages. `max_check_interval`: seconds between two checks while there are no messages.
    """

    def __init__(
        self,
        broker: Broker,
        name: str,
        at: Position,
        take: Take,
        fail: Fail,
        incarnation: str | None = None,
        reader: Reader | None = None,
    ) -> None:
        environment = current()
        self._monotonic = environment.clock.monotonic
        self.name = name
        self.take = take
        self.fail = fail
        self.paused = 0
        self.problem: Error | None = None
        self.failure: BaseException | None = None
        self.max_held = LEAST_HELD
        self.batch_delay = BATCH_DELAY
        self.max_check_interval = MAX_CHECK
        self._broker = broker
        self._at = at
        self._incarnation = incarnation
        self._reader = reader
        self._unchecked = reader is not None
        self._read_at = self._monotonic()
        self._ahead: Position | None = None
        self._received: list[PlacedBatch] = []
        self._held = 0
        self._failures, self._backoff = 0, Backoff(FIRST_PAUSE, LONGEST_PAUSE)
        self._check_after = FIRST_CHECK
        self._lock = environment.threads.lock()
        self._begun = False
        self._busy = True  # whether a read is running or scheduled
        self._notified = False  # whether new messages were reported while it was busy
        self._full = False  # whether it waits until something is taken
        self._ended = False
        self._notify: Callable[[LogReader], None]
        self._pool: ReaderPool

    def start(self, notify: Callable[[LogReader], None], pool: ReaderPool) -> None:
        """Start to read; `notify` is called in a thread when there is something to take."""
        self._notify, self._pool = notify, pool
        pool.submit(self._begin, slow=True)
        pool.schedule(FIRST_CHECK, self._check_when_due)

    def begin_now(self) -> None:
        """Begin now, if the first read still waits for those of many other topics."""
        if not self._begun:
            self._pool.submit(self._begin)

    def taken(self) -> list[PlacedBatch]:
        """Return all that was read since the last call, as few batches, each of one ledger."""
        with self._lock:
            received, self._received, self._held = self._received, [], 0
            full, self._full = self._full, False
        if full:
            self._pool.submit(self._turn)
        return merged(received)

    def stop(self) -> None:
        """Stop reading; a last task closes the reader."""
        self._ended = True
        with self._lock:
            idle, self._busy, self._full = self._full or not self._busy, True, False
        if idle:
            self._pool.submit(self.close, slow=True)

    @property
    def at(self) -> Position:
        """The last position that was read."""
        return self._at

    def take_reader(self) -> Reader | None:
        """Hand over the reader, if it is open, after `LogReaders.end_reads`; it continues after what was taken."""
        reader, self._reader = self._reader, None
        return reader

    def close(self) -> None:
        """Close the reader, which must not be in use."""
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.close()

    # In pool threads, one at a time, while it is busy

    def _begin(self) -> None:
        """Read for the first time."""
        with self._lock:
            begun, self._begun = self._begun, True
        if not begun:
            self._turn()

    def _turn(self) -> None:
        """Read once and schedule the next read."""
        with self._lock:
            self._notified = False  # the read that follows covers it
            self._full = self._held >= self.max_held and not self._ended
            if self._full:
                return
        if self._ended:
            self.close()
            return
        try:
            try:
                count = self._read()
            except Error as error:
                if not error.retryable:
                    raise
                self._try_again(error)
            else:
                if 0 < count < FEW:
                    self._pool.schedule(self.batch_delay, self._wait)
                else:
                    self._wait()
        except BaseException as error:
            self._end(error)

    def _read(self) -> int:
        """Read without waiting; return the number of messages."""
        if self._unchecked:
            self._check_incarnation()
            self._unchecked = False
        reader = self._reader
        if reader is None and isinstance(reader := self._open(), NotifyingReader):
            return 0  # it notifies of what there is; to read now would wait for it
        placed = reader.read(limit=READ_MESSAGES, timeout=0.0)
        if placed is None:
            self._report_delay()
            return 0
        self._at = placed.positions.last
        self._read_at = self._monotonic()
        self.problem = self._ahead = None
        self._failures, self._check_after = 0, FIRST_CHECK
        with self._lock:
            self._received.append(placed)
            self._held += placed.messages.weight
        self._notify(self)
        return len(placed)

    def _try_again(self, error: Error) -> None:
        self.problem = error
        self.close()
        self._failures += 1
        self._pool.schedule(self._backoff.after(self._failures), lambda: self._pool.submit(self._turn, slow=True))

    def _end(self, error: BaseException) -> None:
        self.close()
        if not self._ended:
            self._ended = True
            self.failure = error
            self._notify(self)

    def _wait(self) -> None:
        """Stay idle until there are new messages or a check is due."""
        reader = self._reader
        if reader is None or self._ended:
            self._pool.submit(self._turn, slow=True)
        elif isinstance(reader, NotifyingReader):
            reader.notify_when_readable(self._more)
            with self._lock:
                self._busy = continues = self._notified or self._ended
            if continues:
                self._pool.submit(self._turn)
        else:
            self._pool.schedule(POLL, lambda: self._pool.submit(self._turn))

    # In any thread, without blocking

    def _more(self) -> None:
        """Schedule a read: there may be new messages."""
        if self._has_turn():
            self._pool.submit(self._turn)

    def _check_when_due(self) -> None:
        if self._ended:
            return
        missing = self._read_at + self._check_after - self._monotonic()
        if missing <= 0:
            missing = self._check_after = min(2 * self._check_after, self.max_check_interval)
            if self._has_turn():
                self._pool.submit(self._turn, slow=True)
        self._pool.schedule(missing, self._check_when_due)

    def _has_turn(self) -> bool:
        """Become busy and return True; if busy already, note that another read is needed."""
        with self._lock:
            if self._busy:
                self._notified = True
                return False
            self._busy = True
            return True

    def _open(self) -> Reader:
        """Open a reader. Raises TopicNotFound also if another topic has the name now."""
        try:
            self._reader = self._broker.reader(self.name, self._at, inclusive=False)
        except PositionTrimmed:
            self._check_incarnation()
            raise
        self._check_incarnation()
        return self._reader

    def _check_incarnation(self) -> None:
        if self._incarnation is not None and self._broker.incarnation(self.name) != self._incarnation:
            raise topic_deleted(self.name)

    def _report_delay(self) -> None:
        """Name messages that exist and do not come."""
        if self._monotonic() < self._read_at + QUIET:
            return
        self._read_at = self._monotonic()
        end = self._broker.last_position(self.name)
        if end is None or end <= self._at:
            self.problem = self._ahead = None
            return
        if self._ahead is not None:  # seen twice, so the messages were not just written
            self.problem = ReplayStalled(
                f"topic {self.name!r} ends at {end}, but nothing comes after {self._at}: check the broker"
            )
        self._ahead = end


class LogReaders:
    """All log readers of one loop; `wake` makes the loop call `take`."""

    def __init__(self, loop: asyncio.AbstractEventLoop, wake: Callable[[], Any]) -> None:
        self.wake = wake
        self._waker = Waker(loop, wake)
        self._readers: list[LogReader] = []
        self._notified: deque[LogReader] = deque()
        self._pool = ReaderPool("txnbuffer-readers")

    def follow(self, reader: LogReader) -> LogReader:
        """Start a log reader."""
        self._readers.append(reader)
        self._divide_limits()
        reader.start(self._notify, self._pool)
        return reader

    def leave(self, reader: LogReader) -> None:
        """Stop and remove a log reader."""
        if reader in self._readers:
            self._readers.remove(reader)
            reader.stop()
            self._divide_limits()

    def take(self) -> None:
        """Deliver all that was read, except for paused log readers."""
        paused = []
        while self._notified:
            reader = self._notified.popleft()
            if reader.paused:
                paused.append(reader)
            else:
                self._take(reader)
        self._notified.extend(dict.fromkeys(paused))

    def end_reads(self) -> None:
        """Wait for the running reads and start no others; then `take`, and take over the readers or `stop`."""
        self._pool.stop()

    def stop(self) -> None:
        """Stop all log readers and wait for their threads."""
        for reader in self._readers:
            reader.stop()
        self._pool.stop()
        for reader in self._readers:
            reader.close()
        self._readers.clear()

    def _take(self, reader: LogReader) -> None:
        for placed in reader.taken():
            reader.take(placed)
        if reader.failure is not None and reader in self._readers:
            self.leave(reader)
            reader.fail(reader.failure)

    def _divide_limits(self) -> None:
        share = max(HELD_BYTES // max(len(self._readers), 1), LEAST_HELD)
        interval = max(MAX_CHECK, len(self._readers) / CHECKS_PER_SECOND)
        for reader in self._readers:
            reader.max_held, reader.max_check_interval = share, interval

    def _notify(self, reader: LogReader) -> None:
        """Called in a pool thread."""
        self._notified.append(reader)
        self._waker.wake()


def merged(batches: list[PlacedBatch]) -> list[PlacedBatch]:
    """Join consecutive batches of a log into few, each of one ledger and with a limited number of columns."""
    groups: list[list[PlacedBatch]] = []
    width = Width()
    for placed in batches:
        ledger = placed.positions.ledgers[0]
        if groups and groups[-1][-1].positions.ledgers[0] == ledger and not width.full:
            groups[-1].append(placed)
        else:
            groups.append([placed])
            width = Width()
        width.add(placed.messages.properties, len(placed))
    return [PlacedBatch.concat(group) for group in groups]
