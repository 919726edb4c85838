"""Tails of topics that others write to: a few threads read them all, the loop takes what has come.

No thread waits for a topic: its reader tells when there is more, and now and then it is looked whether one that is
silent is well. A topic is not read while too much of what was read of it is not taken yet. The loop is woken once for
many, and takes all that has come of a topic together.

A few threads for what many things have to do now and then: each gets a turn when it is due.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from broker_io.batch import Batch, PlacedBatch, Width
from broker_io.errors import Error, PositionTrimmed
from broker_io.port import Broker, NotifyingReader, Reader
from broker_io.position import Position, Positions
from txnbuffer.errors import ReplayStalled
from txnbuffer.recovery.restore import topic_deleted
from txnbuffer.service.limits import MIB, weight

AT_ONCE = 8
"""Turns of things that have something to do."""
ASIDE = 4
"""Turns that may take long, as a cluster is asked: others do not wait for them."""

Turn = Callable[[], None]


class FollowerPool:
    """The threads; they end with `stop`, after which no turn begins."""

    def __init__(self, name: str) -> None:
        self._soon = ThreadPoolExecutor(AT_ONCE, name)
        self._aside = ThreadPoolExecutor(ASIDE, f"{name}-aside")
        self._later: list[tuple[float, int, Turn]] = []
        self._numbers = itertools.count()
        self._changed = threading.Condition()
        self._stopped = False
        self._clock: threading.Thread | None = None
        self._name = name

    def soon(self, turn: Turn) -> None:
        """Behind the turns that wait already."""
        self._submit(self._soon, turn)

    def aside(self, turn: Turn) -> None:
        """As `soon`, for what may take long."""
        self._submit(self._aside, turn)

    def later(self, seconds: float, turn: Turn) -> None:
        """In the one thread that knows the time: it must not wait for anything."""
        due = time.monotonic() + seconds
        with self._changed:
            if self._stopped:
                return
            heapq.heappush(self._later, (due, next(self._numbers), turn))
            if self._clock is None:
                self._clock = threading.Thread(target=self._run, name=f"{self._name}-later", daemon=True)
                self._clock.start()
            elif self._later[0][0] == due:
                self._changed.notify()

    def stop(self) -> None:
        """Wait for the turns that have begun; no other one begins."""
        with self._changed:
            self._stopped = True
            self._later.clear()
            self._changed.notify()
        if self._clock is not None:
            self._clock.join()
        for pool in (self._soon, self._aside):
            pool.shutdown(cancel_futures=True)

    def _submit(self, pool: ThreadPoolExecutor, turn: Turn) -> None:
        with self._changed:
            if not self._stopped:
                pool.submit(turn)

    def _run(self) -> None:
        while (turn := self._due()) is not None:
            turn()

    def _due(self) -> Turn | None:
        """The next turn, once it is due; None at the end."""
        with self._changed:
            while not self._stopped:
                if not self._later:
                    self._changed.wait()
                elif (missing := self._later[0][0] - time.monotonic()) > 0:
                    self._changed.wait(missing)
                else:
                    return heapq.heappop(self._later)[2]
        return None


HELD_BYTES = 64 * MIB
"""What has been read and not been taken, of all topics together, about."""
LEAST_HELD = MIB
READ_MESSAGES = 8192
FEW = 512
"""After fewer messages a topic is not read for a moment, so that the loop gets many at once."""
GATHER = 0.003
GATHER_OWN = 0.1
"""The same where nobody waits for what comes: a log that is followed only to see whether others write to it."""
POLL = 0.02
"""Seconds between two reads where a reader does not tell."""
FIRST_LOOK, LONGEST_LOOK = 1.2, 12.0
"""Seconds without a message after which a reader is asked in vain, for it looks then whether it is well; ever longer.

A little more than those after which a reader of a cluster begins to doubt.
"""
LOOKS = 20
"""Of all topics together there are no more such looks a second, about."""
QUIET = 10.0
"""Seconds without a message after which the end of the topic is asked for."""
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 5.0
"""Seconds between two tries to read where reading failed."""

Take = Callable[[PlacedBatch], None]
Fail = Callable[[BaseException], None]


class LogFollower:
    """Reads one topic behind `at`, in one thread at a time.

    `take` gets the messages and `fail` what ended it, both on the loop. `problem`: why nothing comes at the
    moment; it is tried again. `paused`: nothing is taken for now. `incarnation`: that of the topic, if only that
    one is to be read. `gather`: seconds for which it is not read after few messages. `reader`: one to begin with, if
    there is one that goes on there. `longest_look`: seconds between two looks while nothing comes.
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
        self.name = name
        self.take = take
        self.fail = fail
        self.paused = 0
        self.problem: Error | None = None
        self.failure: BaseException | None = None
        self.most = LEAST_HELD
        self.gather = GATHER
        self.longest_look = LONGEST_LOOK
        self._broker = broker
        self._at = at
        self._incarnation = incarnation
        self._reader = reader
        self._unchecked = reader is not None
        self._read_at = time.monotonic()
        self._ahead: Position | None = None
        self._came: list[PlacedBatch] = []
        self._held = 0
        self._pause = FIRST_PAUSE
        self._look_after = FIRST_LOOK
        self._lock = threading.Lock()
        self._busy = True  # whether it has a turn, or will get one without being told
        self._told = False  # whether there was more while it was busy
        self._full = False  # whether it goes on once something is taken
        self._ended = False
        self._tell: Callable[[LogFollower], None]
        self._turns: FollowerPool

    def start(self, tell: Callable[[LogFollower], None], turns: FollowerPool) -> None:
        """Begin to read in turns; `tell` is called in a thread when something has come."""
        self._tell, self._turns = tell, turns
        turns.aside(self._turn)
        turns.later(FIRST_LOOK, self._time_to_look)

    def taken(self) -> list[PlacedBatch]:
        """All that has come, few batches of many messages, each of one ledger."""
        with self._lock:
            came, self._came, self._held = self._came, [], 0
            full, self._full = self._full, False
        if full:
            self._turns.soon(self._turn)
        return gathered(came)

    def stop(self) -> None:
        """Read no more; what it has open is closed in a turn, if there is another one."""
        self._ended = True
        with self._lock:
            idle, self._busy, self._full = self._full or not self._busy, True, False
        if idle:
            self._turns.aside(self.close)

    def close(self) -> None:
        """Let go of the reader, which nobody uses."""
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.close()

    # In threads, one at a time, while it is busy

    def _turn(self) -> None:
        """Read once, and see to the next turn."""
        with self._lock:
            self._told = False  # it is read now
            self._full = self._held >= self.most and not self._ended
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
                self._go_on(count)
        except BaseException as error:
            self._end(error)

    def _read(self) -> int:
        """Read what is there; how many messages came."""
        if self._unchecked:
            self._check_incarnation()
            self._unchecked = False
        reader = self._reader or self._open()
        placed = reader.read(limit=READ_MESSAGES, timeout=0.0)
        if placed is None:
            self._look()
            return 0
        self._at = placed.positions.last
        self._read_at = time.monotonic()
        self.problem = self._ahead = None
        self._pause, self._look_after = FIRST_PAUSE, FIRST_LOOK
        with self._lock:
            self._came.append(placed)
            self._held += weight(placed.messages)
        self._tell(self)
        return len(placed)

    def _go_on(self, count: int) -> None:
        if 0 < count < FEW:
            self._turns.later(self.gather, self._wait)
        else:
            self._wait()

    def _try_again(self, error: Error) -> None:
        self.problem = error
        self.close()
        pause, self._pause = self._pause, min(2 * self._pause, LONGEST_PAUSE)
        self._turns.later(pause, lambda: self._turns.aside(self._turn))

    def _end(self, error: BaseException) -> None:
        self.close()
        if not self._ended:
            self._ended = True
            self.failure = error
            self._tell(self)

    def _wait(self) -> None:
        """Have no turn until there is more, or it is time to look."""
        reader = self._reader
        if reader is None or self._ended:
            self._turns.aside(self._turn)
        elif isinstance(reader, NotifyingReader):
            reader.notify_when_readable(self._more)
            with self._lock:
                self._busy = goes_on = self._told or self._ended
            if goes_on:
                self._turns.soon(self._turn)
        else:
            self._turns.later(POLL, lambda: self._turns.soon(self._turn))

    # In any thread, and without waiting for anything

    def _more(self) -> None:
        """There may be more to read."""
        if self._has_turn():
            self._turns.soon(self._turn)

    def _time_to_look(self) -> None:
        if self._ended:
            return
        missing = self._read_at + self._look_after - time.monotonic()
        if missing <= 0:
            missing = self._look_after = min(2 * self._look_after, self.longest_look)
            if self._has_turn():
                self._turns.aside(self._turn)
        self._turns.later(missing, self._time_to_look)

    def _has_turn(self) -> bool:
        """Whether it may have a turn now; while it is busy, it will have had one after this."""
        with self._lock:
            if self._busy:
                self._told = True
                return False
            self._busy = True
            return True

    def _open(self) -> Reader:
        """Raises TopicNotFound also where another topic has the name now: that may hold nothing behind `at`."""
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

    def _look(self) -> None:
        """A reader that is silent may be dead: go on with another one where the log has more."""
        if time.monotonic() < self._read_at + QUIET:
            return
        self._read_at = time.monotonic()
        end = self._broker.last_position(self.name)
        if end is None or end <= self._at:
            self.problem = self._ahead = None
            return
        if self._ahead is not None:  # not for the first time, so it was not only just written
            self.problem = ReplayStalled(
                f"topic {self.name!r} ends at {end}, but nothing comes behind {self._at}: "
                "another reader is opened; look whether the broker is well"
            )
        self._ahead = end
        self.close()


class LogFollowers:
    """All followers of one loop; `wake` makes it call `take`."""

    def __init__(self, loop: asyncio.AbstractEventLoop, wake: Callable[[], Any]) -> None:
        self.wake = wake
        self._loop = loop
        self._followers: list[LogFollower] = []
        self._told: deque[LogFollower] = deque()
        self._woken = False
        self._turns = FollowerPool("txnbuffer-tails")

    def follow(self, follower: LogFollower) -> LogFollower:
        """Let it read from now on."""
        self._followers.append(follower)
        self._share()
        follower.start(self._tell, self._turns)
        return follower

    def leave(self, follower: LogFollower) -> None:
        """Read a topic no more."""
        if follower in self._followers:
            self._followers.remove(follower)
            follower.stop()
            self._share()

    def take(self) -> None:
        """Hand over all that has come of those that are not paused."""
        self._woken = False
        paused = []
        while self._told:
            follower = self._told.popleft()
            if follower.paused:
                paused.append(follower)
            else:
                self._take(follower)
        self._told.extend(dict.fromkeys(paused))

    def stop(self) -> None:
        """End all threads. Waits for them."""
        for follower in self._followers:
            follower.stop()
        self._turns.stop()
        for follower in self._followers:
            follower.close()
        self._followers.clear()

    def _take(self, follower: LogFollower) -> None:
        for placed in follower.taken():
            follower.take(placed)
        if follower.failure is not None and follower in self._followers:
            self.leave(follower)
            follower.fail(follower.failure)

    def _share(self) -> None:
        share = max(HELD_BYTES // max(len(self._followers), 1), LEAST_HELD)
        look = max(LONGEST_LOOK, len(self._followers) / LOOKS)
        for follower in self._followers:
            follower.most, follower.longest_look = share, look

    def _tell(self, follower: LogFollower) -> None:
        """In a thread."""
        self._told.append(follower)
        if not self._woken:
            self._woken = True
            self._loop.call_soon_threadsafe(self.wake)


def gathered(batches: list[PlacedBatch]) -> list[PlacedBatch]:
    """Batches of one log in its order as few batches, each of one ledger and not too wide."""
    runs: list[list[PlacedBatch]] = []
    width = Width()
    for placed in batches:
        ledger = placed.positions.ledgers[0]
        if runs and runs[-1][-1].positions.ledgers[0] == ledger and not width.full:
            runs[-1].append(placed)
        else:
            runs.append([placed])
            width = Width()
        width.add(placed.messages.properties, len(placed))
    return [run[0] if len(run) == 1 else _joined(run) for run in runs]


def _joined(run: list[PlacedBatch]) -> PlacedBatch:
    places = [placed.positions for placed in run]
    positions = Positions(
        np.concatenate([one.ledgers for one in places]),
        np.concatenate([one.entries for one in places]),
        np.concatenate([one.indexes for one in places]),
    )
    times = np.concatenate([placed.publish_times for placed in run])
    return PlacedBatch(positions, times, Batch.concat([placed.messages for placed in run]))
