"""The decision log as a new owner, or a standby, reads it: what compaction left, and all behind that as it comes.

Compaction may drop a delete together with what it deletes. Who read the entry before and comes to that place
later would keep it for ever; so behind the end that it first found, this reads the raw log, which drops nothing unseen.
"""

from __future__ import annotations

import time

from broker_io.batch import PlacedBatch
from broker_io.errors import PositionTrimmed, StorageError
from broker_io.port import Broker, Reader
from broker_io.position import EARLIEST, Position
from txnbuffer.coordinator.entries import OWNER_KEY, TOPIC, Owner, decode
from txnbuffer.coordinator.history import History
from txnbuffer.errors import DecisionsLost

PATIENCE = 0.25
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
        self.at = EARLIEST if end is None else end
        # Opened before the rest is read: what is trimmed behind here from now on is named, not missed.
        try:
            self._reader: Reader = broker.reader(topic, self.at, inclusive=False)
        except PositionTrimmed as error:
            raise DecisionsLost(topic, str(error)) from None
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
        highest, deadline = 0, time.monotonic() + READ_TIMEOUT
        while self.at < own:
            placed = self._reader.read(timeout=SILENCE)
            if placed is not None:
                before = placed.take(slice(0, placed.positions.search(own)))
                self._apply(before)
                highest = max(highest, newest_owner(before) or 0)
                self.at = placed.positions.last
            elif time.monotonic() > deadline:
                raise StorageError(
                    f"{self.topic}: our entry at {own} did not come back within {READ_TIMEOUT:.0f} s, nothing comes "
                    f"behind {self.at}; look whether the broker is well and start again"
                )
            else:
                self._reader.close()
                self._reader = self._broker.reader(self.topic, self.at, inclusive=False)
        return highest

    def close(self) -> None:
        self._reader.close()

    def _read_compacted(self, end: Position) -> None:
        at, silent = EARLIEST, False
        reader = self._broker.reader(self.topic, compacted=True)
        try:
            while at < end:
                placed = reader.read(timeout=PATIENCE)
                if placed is not None:
                    self._apply(placed)
                    at, silent = placed.positions.last, False
                elif silent:
                    return
                else:  # at the end of what is left, or dead: only another reader can tell
                    reader.close()
                    reader = self._broker.reader(self.topic, at, inclusive=False, compacted=True)
                    silent = True
        finally:
            reader.close()

    def _apply(self, placed: PlacedBatch) -> None:
        for message in placed.messages:
            self.history.apply(message)


def newest_owner(placed: PlacedBatch) -> int | None:
    """The highest epoch of the `owner` entries among messages; None if there are none."""
    if _OWNER not in bytes(placed.messages.keys.data):
        return None
    entries = (decode(message) for message in placed.messages if message.key == _OWNER)
    return max((entry.epoch for entry in entries if isinstance(entry, Owner)), default=None)
