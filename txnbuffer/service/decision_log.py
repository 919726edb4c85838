"""The decision log as a new owner, or a standby, reads it: what compaction left, and all behind that as it comes.

Compaction may drop a delete together with what it deletes. Who read the entry before and comes to that place
later would keep it for ever; so behind the end that it first found, this reads the raw log, which drops nothing unseen.

Where the end of what compaction left is, only silence tells, and a broker that has just come back is silent too. So
whoever has written its own entry, which is always there, looks once more what comes behind the last one that was read.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import closing

from broker_io.batch import PlacedBatch
from broker_io.errors import PositionTrimmed, StorageError
from broker_io.port import Broker, Reader
from broker_io.position import EARLIEST, Position
from txnbuffer.coordinator.decisions import OWNER_KEY, TOPIC, Owner, decode
from txnbuffer.coordinator.history import History
from txnbuffer.coordinator.takeover import missing_owner_evidence
from txnbuffer.errors import DecisionsLost

MAX_WAIT = 0.25
"""Seconds without a message after which the rest up to the end is taken to be compacted away."""
SILENCE = 2.0
"""Seconds without a message that is there, after which another reader is asked for it."""
READ_TIMEOUT = 30.0
"""Seconds in which a message that was acknowledged must be read."""

_OWNER = OWNER_KEY.encode()


class DecisionLog:
    """`history` is what the log says up to `at`. Made once all that was there at first is read."""

    def __init__(self, broker: Broker, topic: str = TOPIC) -> None:
        self.history = History()
        self.topic = topic
        self._broker = broker
        end = broker.last_position(topic)
        self.at = self._end = EARLIEST if end is None else end
        # Opened before the rest is read: what is trimmed behind here from now on is named, not missed.
        try:
            self._reader: Reader = broker.reader(topic, self.at, inclusive=False)
        except PositionTrimmed as error:
            raise DecisionsLost(topic, str(error)) from None
        self._silent_at: Position | None = None  # where silence was taken for the end of what compaction left
        if end is not None:
            self._read_compacted(end)

    def read(self, timeout: float) -> bool:
        """Read some of what is new; whether anything came in `timeout` seconds. Raises what a reader raises."""
        placed = self._reader.read(timeout=timeout)
        if placed is None:
            return False
        self._apply(placed)
        self.at = placed.positions.last
        return True

    def read_to(self, own: Position) -> int:
        """Read up to our own `owner` entry; the highest epoch of other owners' entries before it."""
        highest = self._read_raw(own)
        if self._silent_at is not None and self._was_cut_short(self._silent_at, own):
            highest = max(highest, self._read_anew(own))
        self._silent_at = None
        return highest

    def _read_raw(self, own: Position) -> int:
        highest, deadline = 0, time.monotonic() + READ_TIMEOUT
        while self.at < own:
            placed = self._reader.read(timeout=SILENCE)
            if placed is not None:
                before = placed.take(slice(0, placed.positions.search(own)))
                self._apply(before)
                highest = max(highest, newest_owner(before) or 0)
                self.at = placed.positions.last
            elif time.monotonic() > deadline:
                raise self._missing(own, self.at)
            else:
                self._reader.close()
                self._reader = self._broker.reader(self.topic, self.at, inclusive=False)
        return highest

    def close(self) -> None:
        self._reader.close()

    def _read_compacted(self, end: Position) -> None:
        at, silent, deadline = EARLIEST, False, time.monotonic() + READ_TIMEOUT
        reader = self._broker.reader(self.topic, compacted=True)
        try:
            while at < end:
                placed = reader.read(timeout=MAX_WAIT)
                if placed is not None:
                    self._apply(placed)
                    at, silent = placed.positions.last, False
                elif silent and (missing_owner_evidence(self.history) is None or time.monotonic() > deadline):
                    self._silent_at = at
                    return
                else:  # at the end of what is left, or dead: only another reader can tell
                    reader.close()
                    reader = self._broker.reader(self.topic, at, inclusive=False, compacted=True)
                    silent = True
        finally:
            reader.close()

    def _was_cut_short(self, silent_at: Position, own: Position) -> bool:
        """Whether compaction left more, up to the end that was found at first, than came before the silence."""
        with closing(self._left_behind(silent_at, own)) as left:
            return next(left).positions.first <= self._end

    def _read_anew(self, own: Position) -> int:
        """Read all of it once more; the highest epoch of other owners' entries before our own."""
        self._reader.close()
        self.history, self.at = History(), self._end
        self._reader = self._broker.reader(self.topic, self._end, inclusive=False)
        with closing(self._left_behind(EARLIEST, own)) as left:
            for placed in left:
                within = placed.positions.search(self._end, right=True)
                self._apply(placed.take(slice(0, within)))
                if within < len(placed.positions):
                    break
        return max(self.history.epoch, self._read_raw(own))

    def _left_behind(self, at: Position, own: Position) -> Generator[PlacedBatch, None, None]:
        """What compaction left behind a place, up to our own entry, which is there: silence is not the end."""
        deadline = time.monotonic() + READ_TIMEOUT
        while at < own:
            with self._broker.reader(self.topic, at, inclusive=False, compacted=True) as reader:
                while at < own and (placed := reader.read(timeout=SILENCE)) is not None:
                    at, deadline = placed.positions.last, time.monotonic() + READ_TIMEOUT
                    yield placed
            if at < own and time.monotonic() > deadline:
                raise self._missing(own, at)

    def _missing(self, own: Position, at: Position) -> StorageError:
        return StorageError(
            f"{self.topic}: our entry at {own} did not come back within {READ_TIMEOUT:.0f} s, nothing comes "
            f"behind {at}; look whether the broker is well and start again"
        )

    def _apply(self, placed: PlacedBatch) -> None:
        for message in placed.messages:
            self.history.apply(message)


def newest_owner(placed: PlacedBatch) -> int | None:
    """The highest epoch of the `owner` entries among messages; None if there are none."""
    if _OWNER not in bytes(placed.messages.keys.data):
        return None
    entries = (decode(message) for message in placed.messages if message.key == _OWNER)
    return max((entry.epoch for entry in entries if isinstance(entry, Owner)), default=None)
