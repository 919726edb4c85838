"""Making tails: from a snapshot that was restored, or from the start of what a log holds."""

from __future__ import annotations

from broker_io.environment import Clock
from broker_io.errors import Error
from broker_io.port import Broker, Ledger
from snapshots.errors import SnapshotMissing
from snapshots.policy import SnapshotPolicy
from snapshots.table import TopicEntries
from snapshots.writer import SnapshotWriter
from txnbuffer.recovery.losing import LOST
from txnbuffer.recovery.parts import PartPayload
from txnbuffer.recovery.recovery import Restored, fresh, kept_history
from txnbuffer.recovery.tailing import Tail


class TailMaker:
    """`entries` are what the snapshot topic holds of a topic, whatever state that is in."""

    def __init__(
        self, broker: Broker, clock: Clock, policy: SnapshotPolicy, part_size: int, max_entry_bytes: int
    ) -> None:
        self._broker = broker
        self._clock = clock
        self._policy = policy
        self._part_size = part_size
        self._max_entry_bytes = max_entry_bytes

    def whole(self, topic: str, entries: TopicEntries, epoch: int) -> Tail:
        """From the start of the log. Raises TopicNotFound."""
        return self._whole(topic, entries, epoch, self._broker.ledgers(topic))

    def begun(self, topic: str, epoch: int, deleted: str | None) -> Tail:
        """Up to the end of the log of a topic that has no snapshot, made if missing.

        Raises SnapshotMissing if it holds transactions, unless it is the incarnation that was `deleted`.
        """
        self._broker.create_topic(topic)
        ledgers = self._broker.ledgers(topic)
        tail = self._whole(topic, TopicEntries(), epoch, ledgers)
        try:
            if any(ledger.entries for ledger in ledgers):
                tail.replay()
            if tail.buffer.transactional and deleted != tail.writer.incarnation:
                raise SnapshotMissing(topic, LOST)
        except Error:
            tail.close()
            raise
        return tail

    def _whole(self, topic: str, entries: TopicEntries, epoch: int, ledgers: list[Ledger]) -> Tail:
        branch = f"{epoch}-{self._clock.now_ms()}"  # seqnos begin anew: nobody goes on from older ones
        incarnation = self._broker.incarnation(topic)
        return self.restored(fresh(topic, incarnation, ledgers, self._part_size, branch), entries)

    def keep_history(self, tail: Tail, former: TopicEntries) -> None:
        """Let readers of a topic whose log was folded anew go on from what it still has of its history."""
        incarnation, ledgers = tail.writer.incarnation, self._broker.ledgers(tail.topic)
        uuid = tail.failover.current.uuid
        kept = kept_history(tail.topic, incarnation, former, ledgers, tail.numbering.sequencer, uuid)
        if kept is not None:
            tail.failover, tail.cursors = kept

    def restored(self, restored: Restored, entries: TopicEntries) -> Tail:
        """From where a snapshot ends."""
        writer = self.writer(restored.topic, restored.incarnation, entries)
        if restored.snapshot is not None:
            writer.adopt(restored.snapshot.end, {} if restored.rewrite else restored.snapshot.chain)
            writer.add(map(PartPayload, restored.rewrite))
        return Tail(self._broker, restored, writer, self._policy, self._clock)

    def writer(self, topic: str, incarnation: str, entries: TopicEntries) -> SnapshotWriter:
        """What writes the topic's snapshots from here on."""
        writer = SnapshotWriter(topic, incarnation, self._max_entry_bytes)
        writer.found(entries)
        return writer
