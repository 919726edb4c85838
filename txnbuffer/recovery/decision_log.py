"""Checking and resetting the decision log of a shard, by comparing it with the topics whose transactions it decides.

A reset appends two entries: an owner whose epoch is above any that a topic has seen, and a low-water mark far above any
id that a topic has seen. New ids are leased above it. Decisions without a marker are lost with the log: their
transactions abort, as do the open ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from broker_io.batch import Batch
from broker_io.compacted import CompactedReader
from broker_io.errors import PositionTrimmed, StillHeld, TopicNotFound
from broker_io.port import Broker, Writer
from snapshots.format import SNAPSHOT_TOPIC
from snapshots.scan import scan
from snapshots.shards import Shard
from txnbuffer.buffer.buffer import TransactionBuffer
from txnbuffer.coordinator.decisions import TOPIC as DECISIONS
from txnbuffer.coordinator.history import History
from txnbuffer.coordinator.takeover import data_loss_evidence, missing_owner_evidence, recovery_entries
from txnbuffer.follow import LogFollower
from txnbuffer.recovery.restore import load, restored_topics

Buffers = dict[str, TransactionBuffer]


class Decisions(NamedTuple):
    """The decision log `topic` of a shard, and the buffers of all topics, applied up to their ends.

    `lost` describes evidence that entries of the log are lost; None if there is none.
    """

    topic: str
    history: History
    buffers: Buffers
    lost: str | None

    def open_transactions(self, shard: Shard) -> dict[int, set[str]]:
        """Ids of this shard with undecided records, each with the topics that have such records."""
        found: dict[int, set[str]] = {}
        for topic, buffer in self.buffers.items():
            for opened in buffer.ongoing.values():
                if opened.txn.most == shard.number:
                    found.setdefault(opened.txn.least, set()).add(topic)
        return found

    def partly_committed(self, shard: Shard) -> list[int]:
        """The ids of `open_transactions` that committed on another topic."""
        known = [buffer.coordinators.get(shard.number) for buffer in self.buffers.values()]
        return [
            least
            for least in sorted(self.open_transactions(shard))
            if any(state is not None and least in state.committed for state in known)
        ]


def read_decisions(broker: Broker, shard: Shard, buffers: Buffers | None = None) -> Decisions:
    """Fold the topics of all shards, which may have transactions of this one; then read its decision log.

    In this order the log has the decision of each marker that was read. `buffers`: a fresh result of `replayed_topics`.

    Raises as `replayed_topics`, and UnreadableDecision.
    """
    decisions = shard.topic(DECISIONS)
    if buffers is None:
        buffers = replayed_topics(broker, shard.of)
    history, gone = read_history(broker, decisions)
    lost = (
        gone or missing_owner_evidence(history) or data_loss_evidence(history, history.epoch + 1, shard.number, buffers)
    )
    return Decisions(decisions, history, buffers, lost)


def reset_decisions(broker: Broker, shard: Shard, owner: str) -> Decisions:
    """If a log has lost entries, continue it above all known epochs and ids; return its state before.

    Raises StillHeld, and changes nothing, while a service owns it; and as `read_decisions`.
    """
    broker.create_topic(shard.topic(DECISIONS))
    with exclusive_writer(broker, shard) as writer:
        found = read_decisions(broker, shard)
        if found.lost is not None and writer is not None:
            entries = recovery_entries(found.history, shard.number, found.buffers, owner)
            writer.append(Batch.of(entries)).result()
        return found


@contextmanager
def exclusive_writer(broker: Broker, shard: Shard) -> Iterator[Writer | None]:
    """The decision log's exclusive writer, which keeps services from taking over; None if the log does not exist.

    Raises StillHeld while a service owns it.
    """
    decisions = shard.topic(DECISIONS)
    try:
        writer = broker.writer(decisions, exclusive=True, wait=0.0)
    except TopicNotFound:
        yield None
        return
    except StillHeld:
        text = f"a service owns {decisions}: stop the service and its standbys, then try again"
        raise StillHeld(text) from None
    with writer:
        yield writer


def replayed_topics(broker: Broker, shards: int) -> Buffers:
    """The buffers of the topics of all shards, applied up to their ends.

    Raises SnapshotError for an unusable snapshot, which must be repaired first, and errors of readers.
    """
    buffers: Buffers = {}
    owners = (Shard(number, shards) for number in range(shards))
    for owner in owners:
        try:
            names = restored_topics(scan(broker, owner.topic(SNAPSHOT_TOPIC)))
        except TopicNotFound:
            continue
        there = {*broker.topics()}
        for name in names:
            if name not in there or not owner.owns(name) or not (loaded := load(broker, name)).registered:
                continue
            with LogFollower(broker, name, loaded.buffer, loaded.resume) as log:
                log.replay()
            buffers[name] = loaded.buffer
    return buffers


def read_history(broker: Broker, decisions: str) -> tuple[History, str | None]:
    """The state of a decision log, and why it can't be read to its end; None if it can.

    Raises UnreadableDecision, and ServiceUnavailable if messages before the end do not come.
    """
    history = History()
    try:
        with CompactedReader(broker, decisions) as reader:
            end = broker.last_position(decisions)
            for placed in reader.read_to_end(end, lambda: missing_owner_evidence(history) is None):
                for message in placed.messages:
                    history.apply(message)
    except TopicNotFound:
        return history, None
    if end is None:
        return history, None
    try:
        broker.reader(decisions, end, inclusive=False).close()
    except PositionTrimmed as error:
        return history, str(error)
    return history, None
