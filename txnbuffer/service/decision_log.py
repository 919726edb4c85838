"""Reading the decision log, as a new owner or a standby: the compacted part first, then the raw log.

Compaction may drop a delete together with the entry that it deletes. A reader that saw the entry earlier would then
keep it forever. So after the end that it found first, this reader reads the raw log, from which nothing is dropped.

Only a read without messages shows the end of the compacted part, but a broker that has just restarted returns none
either. So once the new owner has written its own entry, it checks what follows the last compacted entry that it read.

In cluster mode the owner follows the log, to detect the next owner and the deletion of the log.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Generator
from contextlib import closing

from broker_io.batch import PlacedBatch
from broker_io.errors import ClusterRefused, Error, PositionTrimmed, StorageError, TopicNotFound
from broker_io.port import Broker, Reader
from broker_io.position import EARLIEST, Position
from txnbuffer.coordinator.coordinator import Coordinator
from txnbuffer.coordinator.decisions import OWNER_KEY, TOPIC, Owner, decode
from txnbuffer.coordinator.history import History
from txnbuffer.coordinator.messages import CoordinatorConfig
from txnbuffer.coordinator.takeover import missing_owner_evidence
from txnbuffer.errors import DecisionsLost, LogDeleted
from txnbuffer.service.log_readers import OWN_BATCH_DELAY, LogReader, LogReaders

MAX_WAIT = 0.25
"""Seconds without a message after which the rest of the compacted part counts as empty."""
REOPEN_AFTER = 2.0
"""Seconds without an expected message after which another reader is opened."""
READ_TIMEOUT = 30.0
"""Seconds within which an acknowledged message must be read."""

_OWNER = OWNER_KEY.encode()


class DecisionLog:
    """`history` is the state of the log up to `at`; the constructor reads up to the end that it finds."""

    def __init__(self, broker: Broker, topic: str = TOPIC) -> None:
        self.history = History()
        self.topic = topic
        self._broker = broker
        end = broker.last_position(topic)
        self.at = self._end = EARLIEST if end is None else end
        # Opened before the compacted part is read, so that trimming after this point is noticed.
        try:
            self._reader: Reader = broker.reader(topic, self.at, inclusive=False)
        except PositionTrimmed as error:
            raise DecisionsLost(topic, str(error)) from None
        self._silent_at: Position | None = (
            None  # where a read without messages counted as the end of the compacted part
        )
        if end is not None:
            self._read_compacted(end)

    def read(self, timeout: float) -> bool:
        """Read new entries; return whether any came within `timeout` seconds. Raises as `Reader.read`."""
        placed = self._reader.read(timeout=timeout)
        if placed is None:
            return False
        self._apply(placed)
        self.at = placed.positions.last
        return True

    def read_to(self, own: Position) -> int:
        """Read up to this owner's own entry; return the highest epoch of other owners' entries before it."""
        highest = self._read_raw(own)
        if self._silent_at is not None and self._was_cut_short(self._silent_at, own):
            highest = max(highest, self._read_again(own))
        self._silent_at = None
        return highest

    def _read_raw(self, own: Position) -> int:
        highest, deadline = 0, time.monotonic() + READ_TIMEOUT
        while self.at < own:
            placed = self._reader.read(timeout=REOPEN_AFTER)
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
                else:  # the end of the compacted part, or a dead reader: another reader shows which
                    reader.close()
                    reader = self._broker.reader(self.topic, at, inclusive=False, compacted=True)
                    silent = True
        finally:
            reader.close()

    def _was_cut_short(self, silent_at: Position, own: Position) -> bool:
        """Whether the compacted part has more entries, up to the end found first, than were read."""
        with closing(self._compacted_after(silent_at, own)) as left:
            return next(left).positions.first <= self._end

    def _read_again(self, own: Position) -> int:
        """Read the whole log again; return the highest epoch of other owners' entries before `own`."""
        self._reader.close()
        self.history, self.at = History(), self._end
        self._reader = self._broker.reader(self.topic, self._end, inclusive=False)
        with closing(self._compacted_after(EARLIEST, own)) as left:
            for placed in left:
                within = placed.positions.search(self._end, right=True)
                self._apply(placed.take(slice(0, within)))
                if within < len(placed.positions):
                    break
        return max(self.history.epoch, self._read_raw(own))

    def _compacted_after(self, at: Position, own: Position) -> Generator[PlacedBatch, None, None]:
        """Yield the compacted log after a position up to `own`, which exists: no message does not mean the end."""
        deadline = time.monotonic() + READ_TIMEOUT
        while at < own:
            with self._broker.reader(self.topic, at, inclusive=False, compacted=True) as reader:
                while at < own and (placed := reader.read(timeout=REOPEN_AFTER)) is not None:
                    at, deadline = placed.positions.last, time.monotonic() + READ_TIMEOUT
                    yield placed
            if at < own and time.monotonic() > deadline:
                raise self._missing(own, at)

    def _missing(self, own: Position, at: Position) -> StorageError:
        return StorageError(
            f"topic {self.topic!r}: the entry just written at {own} could not be read within {READ_TIMEOUT:.0f} s, "
            f"nothing follows {at}; check the broker and start again"
        )

    def _apply(self, placed: PlacedBatch) -> None:
        for message in placed.messages:
            self.history.apply(message)


def newest_owner(placed: PlacedBatch) -> int | None:
    """The highest epoch of the `owner` entries in a batch; None if there are none."""
    if _OWNER not in bytes(placed.messages.keys.data):
        return None
    entries = (decode(message) for message in placed.messages if message.key == _OWNER)
    return max((entry.epoch for entry in entries if isinstance(entry, Owner)), default=None)


CLUSTER_CONFIG = CoordinatorConfig(one_phase=False, verify_counts=False)
"""The coordinator's configuration in cluster mode."""
CHECK_INTERVAL = 2.0
"""Seconds between two checks that the decision log exists."""
MISSED = 2
"""Consecutive checks that must find it missing before it counts as deleted."""
NOT_FOUND = 404
"""The HTTP status of the admin interface for a missing topic."""


def as_log_deleted(error: Error) -> Error:
    """LogDeleted for an error in cluster mode that says that an internal topic is missing; other errors as they are."""
    gone = isinstance(error, TopicNotFound) or (isinstance(error, ClusterRefused) and error.status == NOT_FOUND)
    return LogDeleted(str(error)) if gone else error


def follow_decisions(
    followers: LogReaders,
    broker: Broker,
    decisions: str,
    at: Position,
    coordinator: Coordinator,
    fail: Callable[[BaseException], None],
) -> None:
    """Follow the decision log after a position: the entry of another owner ends this one."""

    def decisions_came(placed: PlacedBatch) -> None:
        epoch = newest_owner(placed)
        if epoch is not None:
            coordinator.newer_epoch_seen(epoch, "the decision log")

    followers.follow(LogReader(broker, decisions, at, decisions_came, fail)).batch_delay = OWN_BATCH_DELAY


async def watch_log(broker: Broker, decisions: str, log: str, fail: Callable[[BaseException], None]) -> None:
    """Fail once the log was deleted or created again: appends in flight to it might wait for a long time."""
    missed = 0
    while missed < MISSED:
        await asyncio.sleep(CHECK_INTERVAL)
        try:
            name = await asyncio.to_thread(broker.incarnation, decisions)
        except TopicNotFound:
            name = ""
        except Error:
            continue  # this check failed
        missed = 0 if name == log else missed + 1
    fail(TopicNotFound(f"topic {decisions!r} was deleted"))
