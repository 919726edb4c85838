"""Reading the decision log, as a new owner or a standby: the compacted part first, then the raw log.

Compaction may drop a delete together with the entry that it deletes. A reader that saw the entry earlier would then
keep it forever. So after the end that it found first, this reader reads the raw log, from which nothing is dropped.

Where only silence showed the end of the compacted part (`broker_io.compacted`), the new owner, once it has written its
own entry, checks what follows the last compacted entry that it read.
"""

from __future__ import annotations

from broker_io.batch import PlacedBatch
from broker_io.compacted import CompactedReader
from broker_io.errors import ClusterRefused, Error, PositionTrimmed, TopicNotFound
from broker_io.port import Broker
from broker_io.position import EARLIEST, Position
from txnbuffer.coordinator.decisions import OWNER_KEY, Owner, decode
from txnbuffer.coordinator.decisions import TOPIC as DECISIONS
from txnbuffer.coordinator.history import History
from txnbuffer.coordinator.takeover import missing_owner_evidence
from txnbuffer.errors import DecisionsLost, LogDeleted

_OWNER = OWNER_KEY.encode()


class DecisionLog:
    """`history`: the state of the log up to `at`; the constructor reads up to the end that it finds."""

    def __init__(self, broker: Broker, topic: str = DECISIONS) -> None:
        self.history = History()
        self.topic = topic
        self._broker = broker
        end = broker.last_position(topic)
        self._end = EARLIEST if end is None else end
        # Opened before the compacted part is read, so that trimming after this point is noticed.
        try:
            self._raw = CompactedReader(broker, topic, self._end, compacted=False)
        except PositionTrimmed as error:
            raise DecisionsLost(topic, str(error)) from None
        with CompactedReader(broker, topic) as compacted:
            for placed in compacted.read_to_end(end, lambda: missing_owner_evidence(self.history) is None):
                self._apply(placed)
        self._unproven = compacted.unproven

    @property
    def at(self) -> Position:
        """The position up to which the log was read."""
        return self._raw.at

    def read(self, timeout: float) -> bool:
        """Read new entries; return whether any came within `timeout` seconds. Raises as `Reader.read`."""
        placed = self._raw.read(timeout)
        if placed is None:
            return False
        self._apply(placed)
        return True

    def read_to(self, own: Position) -> int:
        """Read up to this owner's own entry; return the highest epoch of other owners' entries before it."""
        highest = self._read_raw(own)
        if self._unproven is not None and self._was_cut_short(self._unproven, own):
            highest = max(highest, self._read_again(own))
        self._unproven = None
        return highest

    def close(self) -> None:
        self._raw.close()

    def _read_raw(self, own: Position) -> int:
        highest = 0
        for placed in self._raw.read_to(own):
            before = placed.take(slice(0, placed.positions.search(own)))
            self._apply(before)
            highest = max(highest, newest_owner(before) or 0)
        return highest

    def _was_cut_short(self, unproven: Position, own: Position) -> bool:
        """Whether the compacted part has more entries, up to the end found first, than were read."""
        with CompactedReader(self._broker, self.topic, unproven) as left:
            return next(left.read_to(own)).positions.first <= self._end

    def _read_again(self, own: Position) -> int:
        """Read the whole log again; return the highest epoch of other owners' entries before `own`."""
        self._raw.close()
        self.history = History()
        self._raw = CompactedReader(self._broker, self.topic, self._end, compacted=False)
        with CompactedReader(self._broker, self.topic) as whole:
            for placed in whole.read_to(own):
                self._apply(placed.take(slice(0, placed.positions.search(self._end, right=True))))
        return max(self.history.epoch, self._read_raw(own))

    def _apply(self, placed: PlacedBatch) -> None:
        for message in placed.messages:
            self.history.apply(message)


def newest_owner(placed: PlacedBatch) -> int | None:
    """The highest epoch of the `owner` entries in a batch; None if there are none."""
    if _OWNER not in bytes(placed.messages.keys.data):
        return None
    entries = (decode(message) for message in placed.messages if message.key == _OWNER)
    return max((entry.epoch for entry in entries if isinstance(entry, Owner)), default=None)


NOT_FOUND = 404
"""The HTTP status of the admin interface for a missing topic."""


def as_log_deleted(error: Error) -> Error:
    """LogDeleted for an error in cluster mode that says that an internal topic is missing; other errors as they are."""
    gone = isinstance(error, TopicNotFound) or (isinstance(error, ClusterRefused) and error.status == NOT_FOUND)
    return LogDeleted(str(error)) if gone else error
