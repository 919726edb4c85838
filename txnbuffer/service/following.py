"""Tails of topics that others write to: a thread reads each, the loop takes what has come.

A thread waits while too much of what it read is not taken yet. The loop is woken once for many, and takes all
that has come of a topic together.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from broker_io.batch import Batch, PlacedBatch, Width
from broker_io.errors import Error, PositionTrimmed
from broker_io.port import Broker, Reader
from broker_io.position import Position, Positions
from snapshots.losing import was_deleted
from txnbuffer.errors import TailStalled
from txnbuffer.service.limits import MIB, weight

HELD_BYTES = 64 * MIB
"""What has been read and not been taken, of all topics together, about."""
LEAST_HELD = MIB
READ_MESSAGES = 8192
READ_SECONDS = 0.5
"""So long a thread waits for messages before it looks whether it is to stop."""
FEW = 512
"""After fewer messages a thread pauses, so that the loop gets many at once."""
GATHER = 0.003
GATHER_OWN = 0.1
"""The same where nobody waits for what comes: a log that is followed only to see whether others write to it."""
QUIET = 10.0
"""Seconds without a message after which the end of the topic is asked for."""
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 5.0
"""Seconds between two tries to read where reading failed."""

Take = Callable[[PlacedBatch], None]
Fail = Callable[[BaseException], None]


class Follower:
    """Reads one topic behind `at` in a thread of its own.

    `take` gets the messages and `fail` what ended it, both on the loop. `problem`: why nothing comes at the
    moment; it is tried again. `paused`: nothing is taken for now. `incarnation`: that of the topic, if only that
    one is to be read. `gather`: seconds for which it pauses after few messages. `reader`: one to begin with, if there
    is one that goes on there.
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
        self._broker = broker
        self._at = at
        self._incarnation = incarnation
        self._reader = reader
        self._unchecked = reader is not None
        self._read_at = time.monotonic()
        self._ahead: Position | None = None
        self._came: list[PlacedBatch] = []
        self._held = 0
        self._room = threading.Condition()
        self._stopping = threading.Event()
        self._tell: Callable[[Follower], None]
        self._thread = threading.Thread(target=self._run, name=f"tail {name}", daemon=True)

    def start(self, tell: Callable[[Follower], None]) -> None:
        """Begin to read; `tell` is called in the thread when something has come."""
        self._tell = tell
        self._thread.start()

    def taken(self) -> list[PlacedBatch]:
        """All that has come, few batches of many messages, each of one ledger."""
        with self._room:
            came, self._came, self._held = self._came, [], 0
            self._room.notify_all()
        return gathered(came)

    def stop(self) -> None:
        """Let the thread end, which it does within `READ_SECONDS` or so."""
        self._stopping.set()
        with self._room:
            self._room.notify_all()

    def join(self) -> None:
        self._thread.join()

    # In the thread

    def _run(self) -> None:
        pause = FIRST_PAUSE
        try:
            while not self._stopping.is_set():
                try:
                    if self._read():
                        pause = FIRST_PAUSE
                except Error as error:
                    if not error.retryable:
                        raise
                    self.problem = error
                    self._close()
                    self._stopping.wait(pause)
                    pause = min(2 * pause, LONGEST_PAUSE)
        except BaseException as error:
            if not self._stopping.is_set():
                self.failure = error
                self._tell(self)
        finally:
            self._close()

    def _read(self) -> bool:
        """Read once; whether anything came."""
        if self._unchecked:
            self._check_incarnation()
            self._unchecked = False
        reader = self._reader or self._open()
        placed = reader.read(limit=READ_MESSAGES, timeout=READ_SECONDS)
        if placed is None:
            self._look()
            return False
        self._at = placed.positions.last
        self._read_at = time.monotonic()
        self.problem = self._ahead = None
        with self._room:
            self._room.wait_for(lambda: self._held < self.most or self._stopping.is_set())
            self._came.append(placed)
            self._held += weight(placed.messages)
        self._tell(self)
        if len(placed) < FEW:
            self._stopping.wait(self.gather)
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
            raise was_deleted(self.name)

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
            self.problem = TailStalled(
                f"topic {self.name!r} ends at {end}, but nothing comes behind {self._at}: "
                "another reader is opened; look whether the broker is well"
            )
        self._ahead = end
        self._close()

    def _close(self) -> None:
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.close()


class Following:
    """All followers of one loop; `wake` makes it call `take`."""

    def __init__(self, loop: asyncio.AbstractEventLoop, wake: Callable[[], Any]) -> None:
        self.wake = wake
        self._loop = loop
        self._followers: list[Follower] = []
        self._told: deque[Follower] = deque()
        self._woken = False

    def follow(self, follower: Follower) -> Follower:
        """Let it read from now on."""
        self._followers.append(follower)
        self._share()
        follower.start(self._tell)
        return follower

    def leave(self, follower: Follower) -> None:
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
        for follower in self._followers:
            follower.join()
        self._followers.clear()

    def _take(self, follower: Follower) -> None:
        for placed in follower.taken():
            follower.take(placed)
        if follower.failure is not None and follower in self._followers:
            self.leave(follower)
            follower.fail(follower.failure)

    def _share(self) -> None:
        share = max(HELD_BYTES // max(len(self._followers), 1), LEAST_HELD)
        for follower in self._followers:
            follower.most = share

    def _tell(self, follower: Follower) -> None:
        """In the thread of a follower."""
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
