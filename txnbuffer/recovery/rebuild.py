"""Rebuilding a topic's snapshot from its log, and comparing the two.

`fold_log` reads the log from its first ledger to its end, in any process, and writes nothing. Its result can be sent to
the owner, where `write` replaces the topic's snapshot with it, even a damaged one.

If the first ledgers are trimmed, the snapshot knows more than the log: which transactions ended there, and how many
records were visible. Then the two can't be compared as a whole. But a record that the snapshot shows and the rest of
the log hides proves the snapshot wrong: that record is aborted, late or a duplicate, whatever came before.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from broker_io.errors import TopicNotFound
from broker_io.port import Broker
from broker_io.position import EARLIEST, Position
from snapshots.errors import SnapshotError
from snapshots.format import MUTATIONS, SEGMENT, Stored, chain_start, versions_of
from snapshots.scan import SnapshotTable, TopicEntries, scan
from snapshots.shard_count import snapshot_topic_of
from snapshots.writer import MAX_ENTRY_BYTES, SnapshotOwnership, SnapshotWriter, commit
from txnbuffer.buffer.buffer import SEGMENT_SIZE, TransactionBuffer
from txnbuffer.buffer.visibility import PinnedVisibility, Sequencer, visible_counts
from txnbuffer.errors import counted
from txnbuffer.follow import LogFollower, read_existing
from txnbuffer.mutations.index import IndexColumns, SnapshotIndex
from txnbuffer.recovery.bounds import BoundsCheck, readable_bounds
from txnbuffer.recovery.codec import (
    BufferSegmentPayload,
    EncodedSegment,
    MutationsPayload,
    TopicState,
    decode_segment,
    decode_state,
    encode_segment,
    encode_state,
)
from txnbuffer.recovery.restore import LoadedTopic, kept_history, load, version_of
from txnbuffer.recovery.verify import diff_states, rebuild
from txnbuffer.streams.failover import FailoverLog

_ANY_EPOCH = 1
"""The epoch of encoded segments until the owner writes them with its own."""


@dataclass(frozen=True, slots=True, eq=False)
class FoldedLog:
    """The state of a topic by its log, up to the log's end when it was read.

    `state` and `segments` are in their stored form; `state` has all mutation snapshots whose bounds the log confirms.
    `differences`: from the existing snapshot, a line each; `problem`: why that can't be used, "" if it can. `trimmed`:
    the snapshot covers ledgers that are trimmed. `transactional` is False for a log that needs no snapshot.
    """

    topic: str
    incarnation: str
    transactional: bool
    applied: str
    aborts: int
    open_transactions: int
    visible_records: int
    state: bytes
    segments: tuple[bytes, ...]
    problem: str
    differences: tuple[str, ...]
    trimmed: bool

    @property
    def sound(self) -> bool:
        """Whether the snapshot agrees with the log."""
        return not self.differences and (not self.problem or not self.transactional)


def fold_log(broker: Broker, topic: str) -> FoldedLog:
    """Fold the log of a topic. Raises as `verify.rebuild`, and TopicNotFound."""
    incarnation, origin = broker.incarnation(topic), broker.ledgers(topic)[0].ledger
    bounds, lost = _stored_bounds(broker, topic, incarnation)
    loaded, problem, buffer, sequencer = _read_both(broker, topic, bounds, keeps_sealed=True)
    before = chain_start(topic, "")
    segments = tuple(
        encode_segment(EncodedSegment(topic, _ANY_EPOCH, before, segment)) for segment in buffer.segments.take_sealed()
    )
    index, wrong = bounds.index()
    columns = IndexColumns.of(index)
    state = TopicState(buffer.snapshot_state(), sequencer.snapshot_state(), origin, unsealed_index=columns)
    differences, trimmed = _differences(broker, loaded, buffer)
    differences += [] if trimmed else [*lost, *wrong]
    return FoldedLog(
        topic, incarnation, buffer.transactional or trimmed, str(buffer.applied), len(buffer.aborted),
        len(buffer.ongoing), sequencer.next_seqno - 1, encode_state(state), segments, problem,
        tuple(differences), trimmed,
    )  # fmt: skip


def compare(broker: Broker, topic: str) -> tuple[TransactionBuffer, Sequencer, list[str], bool]:
    """The state of a topic by its log alone, the differences of its snapshot, and whether that covers trimmed ledgers.

    The log after the snapshot is applied to it, so that both states are as of one position even while a service writes.
    """
    bounds, lost = _stored_bounds(broker, topic, broker.incarnation(topic))
    loaded, problem, rebuilt, sequencer = _read_both(broker, topic, bounds)
    if loaded is None:
        return rebuilt, sequencer, [problem], False
    differences, trimmed = _differences(broker, loaded, rebuilt)
    return rebuilt, sequencer, [*differences, *([] if trimmed else [*lost, *bounds.index()[1]])], trimmed


def _stored_bounds(broker: Broker, topic: str, incarnation: str) -> tuple[BoundsCheck, list[str]]:
    """The mutation snapshots in the topic's entries, to be checked, and why some are lost."""
    try:
        table = scan(broker, snapshot_topic_of(broker, topic), topic)
    except TopicNotFound:
        return BoundsCheck([]), []
    found, problems = readable_bounds(topic, incarnation, table.topics.get(topic, TopicEntries()))
    return BoundsCheck(found), problems


def _read_both(
    broker: Broker, topic: str, bounds: BoundsCheck, *, keeps_sealed: bool = False
) -> tuple[LoadedTopic | None, str, TransactionBuffer, Sequencer]:
    """The result of `from_snapshot`, and buffer and sequencer by the log alone, as of the same position."""
    loaded, problem = from_snapshot(broker, topic)
    segment_size = SEGMENT_SIZE if loaded is None else loaded.buffer.segments.segment_size
    until = broker.last_position(topic) if loaded is None else loaded.buffer.applied
    return (
        loaded,
        problem,
        *rebuild(broker, topic, segment_size=segment_size, until=until, keeps_sealed=keeps_sealed, bounds=bounds),
    )


def from_snapshot(broker: Broker, topic: str) -> tuple[LoadedTopic | None, str]:
    """A topic loaded from its snapshot and applied up to the end of its log; or None, and why it can't be."""
    try:
        loaded = load(broker, topic)
    except SnapshotError as error:
        return None, str(error)
    if not loaded.registered:
        return None, "the topic has no snapshot"
    with LogFollower(broker, topic, loaded.buffer, loaded.resume) as log:
        log.replay()
    return loaded, ""


def _differences(broker: Broker, loaded: LoadedTopic | None, rebuilt: TransactionBuffer) -> tuple[list[str], bool]:
    """The differences between snapshot and log, and whether the snapshot covers trimmed ledgers."""
    if loaded is None:
        return [], False
    if broker.ledgers(loaded.topic)[0].ledger != loaded.origin_ledger:
        return _shown_wrongly(broker, loaded, rebuilt), True
    rebuilt.trim(loaded.buffer.first_ledger)
    return diff_states(loaded.buffer, rebuilt), False


def _shown_wrongly(broker: Broker, loaded: LoadedTopic, rebuilt: TransactionBuffer) -> list[str]:
    """Records that are visible according to the snapshot but not according to the log."""
    buffer = loaded.buffer
    shown = PinnedVisibility(buffer.aborted, buffer.suppressed, buffer.decided_position)
    known = PinnedVisibility(rebuilt.aborted, rebuilt.suppressed, buffer.decided_position)
    count, first = 0, None
    for placed in read_existing(broker, loaded.topic, EARLIEST, buffer.decided_position):
        wrong = np.maximum(visible_counts(placed, shown) - visible_counts(placed, known), 0)
        count += int(wrong.sum())
        if first is None and wrong.any():
            first = placed.positions[int(np.argmax(wrong > 0))]
    return [] if first is None else [f"shown, and hidden by the log: {counted(count, 'record')}, such as {first}"]


def write(broker: Broker, ownership: SnapshotOwnership, table: SnapshotTable, found: FoldedLog, now_ms: int) -> None:
    """Write a folded log as the topic's snapshot, as the owner.

    Raises TopicNotFound if the topic was re-created since, OwnershipLost, and errors of the broker.
    """
    topic, ledgers = found.topic, broker.ledgers(found.topic)
    if broker.incarnation(topic) != found.incarnation:
        raise TopicNotFound(f"topic {topic} was deleted and re-created while its log was read: try again")
    entries = table.topics.get(topic, TopicEntries())
    state = decode_state(found.state)
    branch = f"{ownership.epoch}-{now_ms}"  # seqnos start again: older ones cannot be continued
    uuid = version_of(topic, found.incarnation, branch)
    kept = kept_history(topic, found.incarnation, entries, ledgers, Sequencer.restore(state.sequencer), uuid)
    failover, cursors = kept or (FailoverLog.initial(uuid), {})
    index = SnapshotIndex()
    for entry in state.unsealed_index if kept is not None else ():
        index.add(entry)
    mutations = index.state()
    state = replace(
        state,
        versions=failover.versions,
        unsealed_index=mutations.unsealed,
        cursors=tuple(sorted(cursors.items())),
    )
    writer = SnapshotWriter(topic, found.incarnation, min(MAX_ENTRY_BYTES, broker.max_message_bytes))
    writer.found(entries)
    writer.chains[MUTATIONS].add(map(MutationsPayload, mutations.segments))
    for number, data in enumerate(found.segments, 1):
        stored = Stored(Position(0, 0), versions_of(SEGMENT)[-1], SEGMENT, _ANY_EPOCH, data)
        writer.chains[SEGMENT].add([BufferSegmentPayload(decode_segment(topic, number, stored).segment)])
    commit(ownership, [(writer, writer.plan(ownership.epoch, encode_state(state)))])
