"""A topic that a standby keeps warm: restored from its snapshot, its log applied as it grows, and nothing written.

The owner writes newer snapshots meanwhile, which hold what is not in the log, such as cursors. So the messages since
the snapshot are kept, and a newer snapshot is restored as a recovery would restore it, with these messages instead of a
reader. The state is therefore that of a cold recovery: the same code, snapshot and messages.

`take_over` trusts only what one query for the end of the log proves. Positions are unique in a cluster, so if the log
ends where the standby is, the topic is the same one and nothing is missing; else the reader of the standby reads the
rest, and reports a topic that was created again or trimmed. Whatever is in doubt is recovered cold.
"""

from __future__ import annotations

from broker_io.batch import PlacedBatch
from broker_io.environment import Clock
from broker_io.errors import Error
from broker_io.port import Broker
from snapshots.errors import SnapshotMissing
from snapshots.format import reaches
from snapshots.scan import SnapshotTable, TopicEntries
from snapshots.writer import MAX_ENTRY_BYTES
from txnbuffer.buffer.state import Effect
from txnbuffer.recovery.followed_topic import DEFAULT_POLICY, FollowedTopic, LogTail, SnapshotPolicy
from txnbuffer.recovery.restore import LoadedTopic, restore

LEAST_BYTES = 64 * 1024
"""Bytes that a topic takes at least: its buffer, its reader, and what the client library reads ahead."""
REST_TIMEOUT = 2.0
"""Seconds within which the rest of a log must come at a takeover, else the topic is restored from its snapshot."""


class WarmTopic:
    """One topic, of one thread at a time. `entries`: of its snapshot, as when it was restored."""

    def __init__(self, broker: Broker, restored: LoadedTopic, entries: TopicEntries, clock: Clock) -> None:
        self.topic = restored.topic
        self.incarnation = restored.incarnation
        self.entries = entries.as_of_end()
        self.followed = FollowedTopic.restored(broker, restored, entries, MAX_ENTRY_BYTES, DEFAULT_POLICY, clock)
        self.followed.held_limit = LEAST_BYTES
        self.tail = self.followed.tail = LogTail(restored.resume)
        self._broker = broker
        self._stored_bytes = _stored_bytes(entries)

    @classmethod
    def load(cls, broker: Broker, table: SnapshotTable, topic: str, snapshot_topic: str, clock: Clock) -> WarmTopic:
        """Restore a topic and apply its log up to its present end.

        Raises as `restore` and `LogFollower.replay`, and SnapshotMissing if the newest snapshot can't be used.
        """
        restored = restore(broker, table, topic, snapshot_topic=snapshot_topic)
        if not continues_snapshot(restored):
            raise SnapshotMissing(topic, "its newest snapshot can't be used")
        loaded = cls(broker, restored, table.topics[topic], clock)
        try:
            loaded.followed.catch_up()
        except Error:
            loaded.close()
            raise
        return loaded

    def apply(self, placed: PlacedBatch) -> None:
        """Apply the next messages, which a reader returned that `take_reader` has handed over. Raises as `read`."""
        self.followed.apply(placed)
        if not self.followed.has_backlog:
            self.followed.sequence_held()

    def renewed(self, table: SnapshotTable, snapshot_topic: str, clock: Clock) -> WarmTopic | None:
        """The topic restored from its newer snapshot, with the kept messages applied; None if they do not continue it.

        It has no reader yet. Raises as `restore`.
        """
        restored = restore(self._broker, table, self.topic, snapshot_topic=snapshot_topic)
        rest = self._rest(restored)
        if rest is None:
            return None
        newer = WarmTopic(self._broker, restored, table.topics[self.topic], clock)
        for placed in rest:
            newer.followed.apply(placed)
        return newer

    def _rest(self, restored: LoadedTopic) -> list[PlacedBatch] | None:
        """The kept messages that continue a newer snapshot; None if they do not, or if it can't be trusted."""
        if not continues_snapshot(restored) or restored.incarnation != self.incarnation:
            return None
        return self.tail.after(restored.resume)

    @property
    def bytes(self) -> int:
        """Approximate bytes in memory."""
        return LEAST_BYTES + 2 * self._stored_bytes + self.tail.bytes

    def is_of(self, entries: TopicEntries) -> bool:
        """Whether these are the entries from which it was restored."""
        return self.entries.end == entries.end and self.entries.numbered == entries.numbered

    def close(self) -> None:
        self.followed.close()

    def take_over(
        self, table: SnapshotTable, snapshot_topic: str, max_entry_bytes: int, policy: SnapshotPolicy, clock: Clock
    ) -> tuple[FollowedTopic, list[Effect]] | None:
        """The topic for its owner, with its log applied up to the end, and what this applied; None if in doubt.

        The owner has read `table` after the fence. An unusable topic is closed.
        """
        try:
            taken = self._taken_over(table, snapshot_topic, max_entry_bytes, policy, clock)
        except Error:
            taken = None
        if taken is None:
            self.close()
        return taken

    def _taken_over(
        self, table: SnapshotTable, snapshot_topic: str, max_entry_bytes: int, policy: SnapshotPolicy, clock: Clock
    ) -> tuple[FollowedTopic, list[Effect]] | None:
        end = self._broker.last_position(self.topic)
        at = self.followed.at
        if end is None or end < at:
            return None
        effects: list[Effect] = []
        entries = table.topics[self.topic]
        if not self.is_of(entries):
            restored = restore(self._broker, table, self.topic, snapshot_topic=snapshot_topic)
            rest = self._rest(restored)
            if rest is None:
                return None
            newer = FollowedTopic.restored(self._broker, restored, entries, max_entry_bytes, policy, clock)
            newer.return_reader(self.followed.take_reader())
            self.followed.close()
            self.followed = newer
            for placed in rest:
                effects += newer.apply(placed)
        followed = self.followed
        followed.tail = None
        followed.due.policy = policy
        followed.writer.max_entry_bytes = max_entry_bytes
        if followed.at != at:
            return None
        effects += followed.catch_up(end, REST_TIMEOUT)
        if not reaches(followed.at, end):
            return None
        return followed, effects


def continues_snapshot(restored: LoadedTopic) -> bool:
    """Whether a topic was restored from its newest snapshot, without falling back."""
    return restored.snapshot is not None and not restored.notes and not restored.rewrite


def _stored_bytes(entries: TopicEntries) -> int:
    stored = [entries.end, *(one for found in entries.numbered.values() for one in found.values())]
    return sum(len(one.value or b"") for one in stored if one is not None)
