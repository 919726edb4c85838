"""Restoring a topic's buffer from the entries of its snapshot, and distinguishing a lost snapshot from a deleted one.

`read_snapshot` checks that the entries belong together, `restore` that the log continues where the
snapshot ends. If the newest end entry is unusable, `restore` falls back: first to an older end entry whose segments
are all still in the raw snapshot topic, then to a replay of the whole data topic if it was never trimmed; otherwise it
raises the error. A fall-back only costs time: replaying the log from there leads to the same state.

A deletion leaves the end entry, marked `deleted` and without segments, as long as the data topic exists: the log still
holds transactions, and only that entry says why no snapshot covers them. The first recovery that finds the data topic
deleted or re-created removes the entry, and a registration replaces it. A log with transactions and no entry at all
has lost its snapshot.

The bounds of mutation snapshots are only places where reads of the log begin. If some of their entries are damaged, the
owner says so in `notes` and continues with those that the chain of digests still proves; readers do not need them.

`load` restores a topic in a reader process, while the owner keeps writing. A reader never writes. The entries that it
reads may not belong together, because the owner writes and the broker compacts meanwhile. So it reads on, and then
again from the start, a limited number of times, before it reports damage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from broker_io.compacted import CompactedReader
from broker_io.errors import PositionTrimmed, TopicNotFound
from broker_io.port import Broker, Ledger, Resource, first_written
from broker_io.position import Position, before_ledger
from snapshots.errors import (
    AppliedPositionTrimmed,
    SnapshotDamaged,
    SnapshotError,
    SnapshotMissing,
    UnsupportedSnapshot,
)
from snapshots.format import (
    END,
    MUTATIONS,
    OVERFLOW,
    SEGMENT,
    SNAPSHOT_TOPIC,
    BadRecord,
    ChainRange,
    EndEntry,
    EntryKey,
    Stored,
    chained,
    decode_end,
    digest,
    reaches,
    state_bytes,
)
from snapshots.scan import Scan, SnapshotTable, TopicEntries, scan
from snapshots.shard_count import snapshot_topic_of
from txnbuffer.buffer.buffer import SEGMENT_SIZE, TransactionBuffer
from txnbuffer.buffer.state import BufferSegment
from txnbuffer.buffer.visibility import Sequencer
from txnbuffer.errors import SegmentMismatch
from txnbuffer.mutations.index import EMPTY, IndexColumns, IndexSegment, IndexState, SnapshotIndex
from txnbuffer.protocol import any_transactional, is_epoch_marker
from txnbuffer.recovery.codec import (
    UNKNOWN_LEDGER,
    UUID_BYTES,
    TopicState,
    decode_mutations,
    decode_segment,
    decode_state,
)
from txnbuffer.streams.failover import FailoverLog, Version


@dataclass(frozen=True, slots=True, eq=False)
class StoredSnapshot:
    """One complete snapshot of one topic, checked. `digests`: the one after each segment of the buffer, by number."""

    end: EndEntry
    state: TopicState
    digests: dict[int, bytes]
    buffer: TransactionBuffer


@dataclass(frozen=True, slots=True, eq=False)
class StoredIndex:
    """The index of mutation snapshots of a stored snapshot.

    `digests` has the one after each segment, by number; it is empty if the segments have to be written again.
    `after`: the stored chain, if that can't be continued: then the segments have the numbers that follow it.
    """

    state: IndexState = EMPTY
    digests: dict[int, bytes] = field(default_factory=dict)
    after: ChainRange | None = None


@dataclass(slots=True, eq=False)
class LoadedTopic:
    """One topic as its snapshot has it, or one without a snapshot, whose whole log is to be replayed.

    Apply the log to `buffer` after `resume`, and sequence it after `sequenced` (both exclusive). `buffer` knows at
    once what is decided up to `resume`; the rest once it is applied up to the end of the log. The snapshot covers the
    ledgers from `origin_ledger` on; the log still has those from `first_ledger` on. `index` is empty for readers.
    `whole`: nothing was trimmed since the topic was created. `rewrite` has the segments of the snapshot if some are
    not live any more: they have to be written again before an end entry names them. `versions`: the stored failover
    log, not checked. `notes` are messages for operators.
    """

    topic: str
    incarnation: str
    snapshot: StoredSnapshot | None
    buffer: TransactionBuffer
    sequencer: Sequencer
    first_ledger: int
    origin_ledger: int
    following_ledger: int
    resume: Position
    sequenced: Position
    versions: tuple[Version, ...]
    index: StoredIndex = StoredIndex()
    cursors: dict[str, int] = field(default_factory=dict)
    rewrite: list[BufferSegment] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    whole: bool = False

    @property
    def registered(self) -> bool:
        """Whether it has a snapshot. Without one it has no transactions."""
        return self.snapshot is not None

    @property
    def numbered(self) -> bool:
        """Whether its records have seqnos.

        Without a snapshot they are counted from the start of the log, if that is the start of the topic: registering it
        counts them in the same way, and its owner registers it before anything is trimmed.
        """
        return self.registered or self.whole

    @property
    def failover(self) -> FailoverLog:
        """The versions of its history."""
        return stored_log(self.topic, self.incarnation, self.versions)

    def anchor(self, start: Position) -> tuple[int | None, Position]:
        """The nearest position at or before `start` whose seqno is known: `(seqno, position)`.

        The first visible record after `position` (exclusive) has that seqno. If none is known, the seqno is None and
        `position` is right before `start`.
        """
        lowest = before_ledger(self.first_ledger)
        usable = [(at, seqno) for at, seqno in self.known_seqnos() if at == lowest or at < start]
        if not usable:
            return None, max(lowest, Position(start.ledger, start.entry - 1))
        at, seqno = max(usable)
        return seqno, at

    def known_seqnos(self) -> list[tuple[Position, int]]:
        """The positions in the log after which the first visible record has a known seqno, and these seqnos."""
        lowest = before_ledger(self.first_ledger)
        known = [(before_ledger(ledger), seqno) for ledger, seqno in self.sequencer.first_seqnos.items()]
        if self.numbered:
            known.append((self.sequenced, self.sequencer.next_seqno))
        return [(at, seqno) for at, seqno in known if at >= lowest]


def read_snapshot(topic: str, entries: TopicEntries) -> StoredSnapshot:
    """The snapshot that the end entry names, complete and checked.

    Raises SnapshotMissing if there is no entry or the topic is being deleted, SnapshotDamaged, UnsupportedSnapshot.
    """
    if entries.end is None:
        if entries:
            raise SnapshotDamaged(topic, str(EntryKey(topic, END)), "it is missing, though other entries exist")
        raise SnapshotMissing(topic, "it was never registered, or it was deleted")
    end = decode_end(topic, entries.end)
    if end.deleted:
        raise SnapshotMissing(topic, "its deletion has begun")
    try:
        state = decode_state(state_bytes(topic, end, entries.numbered[OVERFLOW]))
    except BadRecord as error:
        raise SnapshotDamaged(topic, str(EntryKey(topic, END)), str(error)) from error
    named = state.buffer.segments
    if range(named.first, named.end) != end.numbers(SEGMENT):
        what = "its state and its head name different segments"
        raise SnapshotDamaged(topic, str(EntryKey(topic, END)), what)
    digests: dict[int, bytes] = {}
    try:
        buffer = TransactionBuffer.restore(state.buffer, _segments(topic, end, entries.numbered[SEGMENT], digests))
    except SegmentMismatch as error:
        raise SnapshotDamaged(topic, str(EntryKey(topic, END)), str(error)) from error
    return StoredSnapshot(end, state, digests, buffer)


def _segments(
    topic: str, end: EndEntry, found: dict[int, Stored], digests: dict[int, bytes]
) -> Iterator[BufferSegment]:
    """The segments one by one, since all of them at once are large; adds their digests to `digests`."""
    for entry in chained(topic, end, SEGMENT, found, decode_segment):
        digests[entry.segment.number] = entry.chain_after
        yield entry.segment


def read_index(topic: str, snapshot: StoredSnapshot, entries: TopicEntries) -> StoredIndex:
    """The index of mutation snapshots that an end entry names, checked. Raises SnapshotDamaged, UnsupportedSnapshot."""
    digests: dict[int, bytes] = {}
    segments: list[IndexSegment] = []
    for entry in chained(topic, snapshot.end, MUTATIONS, entries.numbered[MUTATIONS], decode_mutations):
        digests[entry.segment.number] = entry.chain_after
        segments.append(entry.segment)
    state = IndexState(snapshot.end.chains[MUTATIONS].first, tuple(segments), snapshot.state.unsealed_index)
    try:
        state.check()
    except ValueError as error:
        raise SnapshotDamaged(topic, str(EntryKey(topic, END)), str(error)) from error
    return StoredIndex(state, digests)


def resume_positions(topic: str, state: TopicState, ledgers: Sequence[Ledger]) -> tuple[Position, Position]:
    """The positions after which to apply and to sequence the log. Raises AppliedPositionTrimmed."""
    existing = {ledger.ledger for ledger in ledgers}
    applied, sequenced = state.buffer.applied, state.sequencer.position
    if applied is not None and applied.ledger in existing:
        resume = applied
    elif state.following_ledger in existing:
        resume = before_ledger(state.following_ledger)
    else:
        raise AppliedPositionTrimmed(topic, applied, ledgers[0].ledger)
    if reaches(sequenced, applied):
        return resume, resume
    if sequenced is None and state.origin_ledger in existing:
        return resume, before_ledger(state.origin_ledger)
    if sequenced is not None and sequenced.ledger in existing:
        return resume, sequenced
    raise AppliedPositionTrimmed(topic, sequenced, ledgers[0].ledger)


def restore(
    broker: Broker, table: SnapshotTable, topic: str, *, snapshot_topic: str = SNAPSHOT_TOPIC, owned: bool = True
) -> LoadedTopic:
    """Restore one topic from a scan; the log is not read yet.

    `owned`: for its owner, with the index of mutation snapshots, and falling back if the newest end entry is unusable.
    Others fall back only from that of an empty log whose ledger the cluster replaced, until its owner writes another.

    Raises SnapshotMissing (also if the topic was re-created since), SnapshotDamaged, UnsupportedSnapshot,
    AppliedPositionTrimmed, TopicNotFound.
    """
    incarnation = broker.incarnation(topic)
    ledgers = broker.ledgers(topic)
    entries = table.topics.get(topic, TopicEntries())
    try:
        restored = _restored(topic, incarnation, entries, ledgers)
        if not owned:
            restored.sequencer.begin_at(ledgers[0].ledger, first_written(ledgers))
        return _with_index(restored, entries) if owned else restored
    except (SnapshotDamaged, AppliedPositionTrimmed) as error:
        unused = partial(holds_only_epoch_markers, broker, topic)
        if owned:
            try:
                history = scan(broker, snapshot_topic, topic, raw=True).history or {}
            except PositionTrimmed:
                history = {}
            older = list(reversed(history.get(topic, ())))
            fallen_back = _from_older(topic, incarnation, older, ledgers, entries)
            fallen_back = fallen_back or _from_start(topic, incarnation, older, ledgers, entries, unused)
        elif isinstance(error, AppliedPositionTrimmed):
            fallen_back = _from_start(topic, incarnation, [entries], ledgers, entries, unused)
        else:
            raise
        if fallen_back is None:
            raise
        fallen_back.notes.insert(0, str(error))
        return fallen_back


def _restored(topic: str, incarnation: str, entries: TopicEntries, ledgers: Sequence[Ledger]) -> LoadedTopic:
    snapshot = read_snapshot(topic, entries)
    if snapshot.end.incarnation != incarnation:
        raise SnapshotMissing(topic, "the topic was deleted and re-created since")
    resume, sequenced = resume_positions(topic, snapshot.state, ledgers)
    return LoadedTopic(
        topic,
        incarnation,
        snapshot,
        snapshot.buffer,
        Sequencer.restore(snapshot.state.sequencer),
        ledgers[0].ledger,
        snapshot.state.origin_ledger,
        snapshot.state.following_ledger,
        resume,
        sequenced,
        snapshot.state.versions,
        cursors=dict(snapshot.state.cursors),
    )


def _with_index(restored: LoadedTopic, entries: TopicEntries) -> LoadedTopic:
    if restored.snapshot is not None:
        try:
            restored.index = read_index(restored.topic, restored.snapshot, entries)
        except SnapshotError as error:
            end = restored.snapshot.end
            restored.index = _renumbered(restored.topic, end, entries, restored.snapshot.state)
            restored.notes.append(
                f"{error}; {len(SnapshotIndex(restored.index.state))} mutation snapshots are left, "
                "and reads of the log for streams begin earlier than they could"
            )
    return restored


def _renumbered(topic: str, end: EndEntry, entries: TopicEntries, state: TopicState) -> StoredIndex:
    """The mutation snapshots whose segments are in the chain from one of its ends, in segments that follow it."""
    index = SnapshotIndex(EMPTY._replace(first=end.chains[MUTATIONS].next))
    for columns in (*_in_chain(topic, end, entries.numbered[MUTATIONS]), state.unsealed_index):
        for bounds in columns:
            if bounds.start > index.end:
                index.add(bounds)
    return StoredIndex(index.state(), after=end.chains[MUTATIONS])


def _in_chain(topic: str, end: EndEntry, found: dict[int, Stored]) -> list[IndexColumns]:
    """The columns of the segments before the first damaged one and after the last."""
    chain = end.chains[MUTATIONS]
    trusted: dict[int, IndexColumns] = {}
    for numbers, expected, backwards in (
        (chain.numbers, chain.before, False),
        (chain.numbers[::-1], chain.after, True),
    ):
        for number in numbers:
            try:
                entry = decode_mutations(topic, number, found[number])
            except (KeyError, SnapshotError):
                break
            near, far = entry.chain_before, entry.chain_after
            if backwards:
                near, far = far, near
            if near != expected:
                break
            expected = far
            trusted[number] = entry.segment.columns()
    return [trusted[number] for number in sorted(trusted)]


def fresh(
    topic: str, incarnation: str, ledgers: Sequence[Ledger], segment_size: int = SEGMENT_SIZE, branch: str = ""
) -> LoadedTopic:
    """A topic from the start of its log, without a snapshot; `branch` distinguishes the histories of one topic."""
    origin = ledgers[0].ledger
    start = before_ledger(origin)
    buffer, sequencer = TransactionBuffer(segment_size), Sequencer()
    first = Version(version_of(topic, incarnation, branch), 0)
    places = origin, origin, origin, start, start
    return LoadedTopic(topic, incarnation, None, buffer, sequencer, *places, (first,), whole=ledgers[0].original)


def _unregistered(broker: Broker, topic: str) -> LoadedTopic:
    """A topic that has had no transactions."""
    loaded = fresh(topic, broker.incarnation(topic), broker.ledgers(topic))
    loaded.buffer.unregistered = True
    return loaded


def kept_history(
    topic: str, incarnation: str, entries: TopicEntries, ledgers: Sequence[Ledger], sequencer: Sequencer, uuid: int
) -> tuple[FailoverLog, dict[str, int]] | None:
    """Failover log and durable cursors of a topic whose log was folded and sequenced again from its first ledger.

    If the log was never trimmed, its records get the same seqnos as before, up to the first missing record: there the
    version `uuid` begins. None if no end entry can be read or the start of the log is trimmed: then older seqnos are
    invalid.
    """
    state = _readable_state(topic, incarnation, entries)
    if state is None or state.origin_ledger != ledgers[0].ledger:
        return None
    common = sequencer.next_seqno - 1
    for ledger, first in zip(state.sequencer.ledgers.tolist(), state.sequencer.first_seqnos.tolist(), strict=True):
        if sequencer.first_seqnos.get(ledger) != first:
            common = min(common, first - 1)
    log = stored_log(topic, incarnation, state.versions)
    return log.created(uuid, common), {name: min(seqno, common) for name, seqno in state.cursors}


def stored_log(topic: str, incarnation: str, versions: Iterable[Version]) -> FailoverLog:
    """The failover log of stored versions; without any, it has one version that only depends on the incarnation."""
    return FailoverLog.sanitised(versions, version_of(topic, incarnation, ""))


def version_of(topic: str, incarnation: str, branch: str) -> int:
    """The uuid of a version of a topic's history; `branch` is unique for each, "" for the first."""
    return int.from_bytes(digest(f"{topic}\0{incarnation}\0{branch}".encode())[:UUID_BYTES], "big") or 1


def _from_older(
    topic: str,
    incarnation: str,
    older: Iterable[TopicEntries],
    ledgers: Sequence[Ledger],
    live: TopicEntries,
) -> LoadedTopic | None:
    for entries in older:
        try:
            restored = _with_index(_restored(topic, incarnation, entries, ledgers), entries)
        except SnapshotError:
            continue
        if (snapshot := restored.snapshot) is not None:
            restored.notes.append(f"topic {topic}: recovered from the older snapshot {snapshot.end.snapshot_id}")
            if not _alive(SEGMENT, snapshot.end, entries, live):
                named = entries.numbered[SEGMENT]
                numbers = snapshot.end.numbers(SEGMENT)
                restored.rewrite = [decode_segment(topic, number, named[number]).segment for number in numbers]
            if not _alive(MUTATIONS, snapshot.end, entries, live):
                restored.index = replace(restored.index, digests={})
        return restored
    return None


def _alive(kind: str, end: EndEntry, entries: TopicEntries, live: TopicEntries) -> bool:
    """Whether the segments of an older end entry, which are among `entries`, are all live."""
    return all(live.numbered[kind].get(number) == entries.numbered[kind].get(number) for number in end.numbers(kind))


def _from_start(
    topic: str,
    incarnation: str,
    older: Iterable[TopicEntries],
    ledgers: Sequence[Ledger],
    live: TopicEntries,
    unused: Callable[[], bool],
) -> LoadedTopic | None:
    """A replay of the whole log, if a readable end entry proves that the log was never trimmed.

    `unused` says whether nothing was written to the log yet: the cluster may have replaced its empty first ledger.
    """
    for entries in older:
        if (state := _readable_state(topic, incarnation, entries)) is None:
            continue
        whole = state.origin_ledger == ledgers[0].ledger and state.origin_ledger != UNKNOWN_LEDGER
        if not whole and not (state.buffer.applied is None and unused()):
            return None
        restored = fresh(topic, incarnation, ledgers, state.buffer.segment_size)
        restored.versions = state.versions
        restored.cursors = dict(state.cursors)
        if (end := readable_end(topic, entries)) is not None:
            restored.index = _renumbered(topic, end, live, state)
        restored.notes.append(f"topic {topic}: replayed from the start of its log, which was never trimmed")
        return restored
    return None


def _readable_state(topic: str, incarnation: str, entries: TopicEntries) -> TopicState | None:
    """The state in the end entry; None if that is unreadable, marked as deleted, or of another incarnation."""
    end = readable_end(topic, entries)
    if end is None or end.deleted or end.incarnation != incarnation:
        return None
    try:
        return decode_state(state_bytes(topic, end, entries.numbered[OVERFLOW]))
    except (SnapshotError, BadRecord):
        return None


def restored_topics(table: SnapshotTable) -> list[str]:
    """The data topics that have entries, sorted."""
    return sorted(topic for topic, entries in table.topics.items() if entries)


def readable_end(topic: str, entries: TopicEntries) -> EndEntry | None:
    """The end entry; None if there is no readable one."""
    if entries.end is None:
        return None
    try:
        return decode_end(topic, entries.end)
    except SnapshotError:
        return None


def deletion_complete(broker: Broker, topic: str, entries: TopicEntries) -> bool:
    """Whether a deletion is complete: only the `deleted` end entry of the existing topic is left."""
    end = readable_end(topic, entries)
    if end is None or not end.deleted or any(entries.numbered.values()):
        return False
    return exists(broker, topic, end.incarnation)


def exists(broker: Broker, topic: str, incarnation: str) -> bool:
    """Whether this incarnation of the topic exists."""
    try:
        return broker.incarnation(topic) == incarnation
    except TopicNotFound:
        return False


LOST = "its log holds transactions, so it had one"


def holds_transactions(broker: Broker, topic: str) -> bool:
    """Whether a log without a snapshot holds a transactional message; then it had a snapshot.

    Raises as a reader, and ServiceUnavailable if messages do not come: silence is no evidence.
    """
    try:
        end = broker.last_position(topic)
        if end is None or _is_trimmed(broker, topic, end):
            return False
        with CompactedReader(broker, topic, compacted=False) as log:
            return any(any_transactional(placed.messages) for placed in log.read_to(end))
    except TopicNotFound:
        return False


def holds_only_epoch_markers(broker: Broker, topic: str) -> bool:
    """Whether all messages that a log ever had are epoch markers, as in that of a topic that was only registered.

    Raises as a reader, and ServiceUnavailable if messages do not come.
    """
    end = broker.last_position(topic)
    if end is None:
        return True
    if _is_trimmed(broker, topic, end):
        return False
    with CompactedReader(broker, topic, compacted=False) as log:
        return all(is_epoch_marker(message) for placed in log.read_to(end) for message in placed.messages)


def _is_trimmed(broker: Broker, topic: str, position: Position) -> bool:
    return all(ledger.ledger != position.ledger for ledger in broker.ledgers(topic))


def topic_deleted(topic: str) -> TopicNotFound:
    """The error for a registered topic that was deleted, even if it was re-created."""
    return TopicNotFound(f"topic {topic!r} was deleted; if it was re-created, register it again")


ATTEMPTS = 5
"""Attempts to read a snapshot whose entries do not belong together."""


def load(broker: Broker, topic: str, *, snapshot_topic: str | None = None) -> LoadedTopic:
    """One topic as its newest snapshot has it; writes nothing. `snapshot_topic`: that of the topic's shard if None.

    Raises TopicNotFound, SnapshotDamaged, UnsupportedSnapshot, AppliedPositionTrimmed.
    """
    for attempt in range(1, ATTEMPTS + 1):
        with SnapshotLoader(broker, [topic]) as snapshots:
            try:
                return snapshots.attempt(topic, snapshot_topic or snapshot_topic_of(broker, topic))
            except UnsupportedSnapshot:
                raise
            except (SnapshotError, PositionTrimmed):
                if attempt == ATTEMPTS:
                    raise
    raise AssertionError("the last attempt returns or raises")


class SnapshotLoader(Resource):
    """Loads many topics with one scan of each snapshot topic, which is continued before each load.

    The entries of a topic are dropped when it is loaded; loading it again reads the snapshot topic again.
    """

    def __init__(self, broker: Broker, topics: Iterable[str]) -> None:
        self._broker = broker
        self._wanted = {*topics}
        self._scans: dict[str, Scan] = {}

    def load(self, topic: str) -> LoadedTopic:
        """As the function `load`, which is called if the scanned entries do not belong together."""
        if topic not in self._wanted:
            return load(self._broker, topic)
        snapshot_topic = snapshot_topic_of(self._broker, topic)
        try:
            return self.attempt(topic, snapshot_topic)
        except UnsupportedSnapshot:
            raise
        except SnapshotError:
            return load(self._broker, topic, snapshot_topic=snapshot_topic)
        except PositionTrimmed:
            if (running := self._scans.pop(snapshot_topic, None)) is not None:
                running.close()
            return load(self._broker, topic, snapshot_topic=snapshot_topic)
        finally:
            self._wanted.discard(topic)
            for running in self._scans.values():
                running.table.topics.pop(topic, None)

    def attempt(self, topic: str, snapshot_topic: str) -> LoadedTopic:
        """Load a topic from the scan as it is now. Raises as `load`, and PositionTrimmed if the scan is too slow."""
        broker = self._broker
        broker.incarnation(topic)  # a missing data topic is distinguished from a missing snapshot topic
        if snapshot_topic not in self._scans:
            try:
                self._scans[snapshot_topic] = Scan(broker, snapshot_topic, self._wanted)
            except TopicNotFound:
                return _unregistered(broker, topic)
        running = self._scans[snapshot_topic]
        running.read_to_end()
        try:
            return restore(broker, running.table, topic, snapshot_topic=snapshot_topic, owned=False)
        except SnapshotError:
            running.read_to_end()  # a compaction may have hidden what a newer end entry replaced
        try:
            return restore(broker, running.table, topic, snapshot_topic=snapshot_topic, owned=False)
        except SnapshotMissing:
            return _unregistered(broker, topic)

    def close(self) -> None:
        for running in self._scans.values():
            running.close()
