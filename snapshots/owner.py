"""Ownership of the snapshot topic: one writer at a time, whose entries all carry its epoch.

A new owner opens the exclusive writer, which fences the one before; reads the topic up to its end for the last epoch;
writes a higher one under `__owner`; reads up to that entry, because an entry of the fenced owner may be in between; and
writes a higher epoch again if another owner's entry there has one as high. Only then does it write anything else.
`Fenced` at any append means that ownership is lost and that the fate of pending appends is unknown; a fenced owner
never fences back.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Self

from broker_io.batch import Batch, Message
from broker_io.errors import Error, Fenced, StillHeld
from broker_io.port import Broker, Writer, open_or_make
from broker_io.position import Position
from snapshots.errors import OwnershipLost
from snapshots.format import SNAPSHOT_TOPIC, owner_message
from snapshots.scan import Scan, SnapshotTable

COMPACT_BYTES = 64 * 1024 * 1024
"""Bytes written to the snapshot topic after which it is compacted."""
RENEW_SECONDS = 5.0
"""Seconds to wait until a failed writer of this process is gone."""


class SnapshotOwnership:
    """The right to write the snapshot topic, until `lost`; created by `acquire`.

    `written` counts the bytes in the topic at the start, and those appended since the last compaction.
    """

    def __init__(self, broker: Broker, topic: str) -> None:
        self.topic = topic
        self.epoch = 0
        self.lost = False
        self.written = sum(ledger.bytes for ledger in broker.ledgers(topic))
        self._broker = broker
        self._writer: Writer = broker.writer(topic, exclusive=True)

    def append(self, messages: Sequence[Message]) -> list[Position]:
        """Write messages, wait until they are durable, and return their positions.

        Raises OwnershipLost and errors of the broker; the messages may or may not be in the topic then.
        """
        if self.lost:
            raise OwnershipLost(self.topic, self.epoch)
        if not messages:
            return []
        self.written += sum(len(message.value or b"") for message in messages)
        try:
            return list(self._writer.append(Batch.of(messages)).result())
        except Fenced as error:
            self.lost = True
            raise OwnershipLost(self.topic, self.epoch) from error

    def compact(self) -> str | None:
        """Compact the topic if enough was written to it; return the error text if that failed, else None."""
        if self.written < COMPACT_BYTES:
            return None
        self.written = 0
        try:
            self._broker.compact(self.topic)
        except Error as error:
            return f"{self.topic} could not be compacted: {error}"
        return None

    def renew(self) -> SnapshotTable:
        """Find out which failed writes are durable: those in the returned table, and no others.

        Raises OwnershipLost, without fencing anyone, if there is another owner.
        """
        running = Scan(self._broker, self.topic)
        try:
            running.read_to_end()
            if self.lost or running.table.epoch > self.epoch:
                self.lost = True
                raise OwnershipLost(self.topic, self.epoch)
            self._writer.close()
            try:  # another holder owns it, even if it has written nothing yet: a fenced owner never fences back
                self._writer = self._broker.writer(self.topic, exclusive=True, wait=RENEW_SECONDS)
            except StillHeld as error:
                self.lost = True
                raise OwnershipLost(self.topic, self.epoch) from error
            self._announce(running)
        finally:
            running.close()
        return running.table

    def _announce(self, running: Scan) -> None:
        running.read_to_end()
        while True:
            epoch = running.table.epoch + 1
            known = running.table.position
            (own,) = self.append([owner_message(epoch)])
            # Only an acknowledged epoch belongs to this owner: another may have used one whose fate is unknown.
            self.epoch = epoch
            running.read_to(own)
            others = [other for at, other in running.table.owners if known < at < own]
            if max(others, default=0) < epoch:
                return

    def close(self) -> None:
        self._writer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def acquire(broker: Broker, topic: str = SNAPSHOT_TOPIC) -> tuple[SnapshotOwnership, SnapshotTable]:
    """Take ownership of the snapshot topic, creating it if it is missing, and scan it.

    Raises OwnershipLost if another owner takes it at the same time and is later.
    """
    ownership = open_or_make(broker, topic, lambda: SnapshotOwnership(broker, topic))
    running = Scan(broker, topic)
    try:
        ownership._announce(running)
    except BaseException:
        ownership.close()
        raise
    finally:
        running.close()
    return ownership, running.table
