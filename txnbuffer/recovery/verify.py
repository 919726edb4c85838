"""Verifying snapshots without changing anything: each for consistency, and against the log.

To check a snapshot against the log, the log is folded up to the applied position and the two states are compared. That
requires the whole log: if ledgers were trimmed, the snapshot is checked for consistency only.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from broker_io.errors import Error, TopicNotFound
from broker_io.port import Broker, StoredBroker
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
    SEGMENT,
    SNAPSHOT_TOPIC,
    EndEntry,
    EntryKey,
    Stored,
    decode_end,
    is_internal,
    reaches,
)
from snapshots.scan import SnapshotTable, TopicEntries, scan
from snapshots.shard_count import shards_of
from snapshots.shards import Shard
from txnbuffer.buffer.buffer import SEGMENT_SIZE, TransactionBuffer
from txnbuffer.buffer.visibility import Sequencer
from txnbuffer.coordinator.decisions import TOPIC as DECISIONS
from txnbuffer.errors import DecisionsLost, counted
from txnbuffer.follow import LogFollower, SequencedFollower
from txnbuffer.mutations.index import EMPTY, SnapshotIndex
from txnbuffer.progress import report
from txnbuffer.recovery.bounds import BoundsCheck
from txnbuffer.recovery.codec import TopicState, decode_mutations, decode_segment
from txnbuffer.recovery.decision_log import Buffers, read_decisions, replayed_topics
from txnbuffer.recovery.restore import (
    LOST,
    StoredSnapshot,
    deletion_complete,
    holds_transactions,
    read_index,
    read_snapshot,
    restored_topics,
    resume_positions,
)


class Level(enum.Enum):
    OK = "ok"
    WARNING = "warning"
    ERROR = "error"


class Finding(NamedTuple):
    """One finding. `entry`: the key of the entry concerned; `position`: of that entry in the snapshot topic."""

    level: Level
    topic: str
    what: str
    entry: str | None = None
    position: Position | None = None


def verify(broker: Broker, topic: str | None = None) -> list[Finding]:
    """Check the snapshots of one data topic, or of all, logs without a snapshot, decision logs, and stored files.

    Raises TopicNotFound if the data topic does not exist, or if there is neither a data topic nor a snapshot topic.
    """
    count = shards_of(broker)
    shards = [shard for shard in map(Shard, range(count), [count] * count) if topic is None or shard.owns(topic)]
    findings = [*_stored(broker, topic)]
    broken = {finding.topic for finding in findings}
    decisions = [shard for shard in shards if shard.topic(DECISIONS) not in broken]
    if broken & {shard.topic(SNAPSHOT_TOPIC) for shard in shards}:
        return [*findings, *_decisions(broker, decisions, {})]  # what can't be read can't be compared
    known = [name for name in broker.topics() if not is_internal(name) and topic in (None, name)]
    tables = [(shard, _table(broker, shard.topic(SNAPSHOT_TOPIC), topic)) for shard in shards]
    if topic is None and not known and not any(table for _, table in tables):
        raise TopicNotFound(f"there is neither a data topic nor a topic {SNAPSHOT_TOPIC}: nothing is registered here")
    restored = [
        (name, table) for shard, table in tables if table for name in restored_topics(table) if shard.owns(name)
    ]
    with_snapshot = {name for name, _ in restored}
    if topic is not None and topic not in (*known, *with_snapshot):
        raise TopicNotFound(f"there is no data topic {topic!r} to verify")
    for shard, table in tables:
        findings += [] if table is None else _of_table(shard, table)
    others = sorted(set(known) - with_snapshot - broken)
    with report("verification", "topics", len(restored) + len(others)) as progress:
        for name, table in restored:
            findings += verify_topic(broker, table, name)
            progress.advance()
        for name in others:
            findings += _without_snapshot(broker, name, asked=topic is not None)
            progress.advance()
    buffers = {} if topic is not None else _folded(broker, count)
    return [*findings, *_decisions(broker, decisions, buffers)]


def _table(broker: Broker, snapshot_topic: str, topic: str | None) -> SnapshotTable | None:
    try:
        return scan(broker, snapshot_topic, topic)
    except TopicNotFound:
        return None


def _of_table(shard: Shard, table: SnapshotTable) -> Iterator[Finding]:
    name = shard.topic(SNAPSHOT_TOPIC)
    if table.zombies:
        what = f"entries of fenced owners, which are ignored: {table.zombies}"
        yield Finding(Level.WARNING, name, what)
    if table.foreign:
        yield Finding(Level.WARNING, name, f"keys that are not those of an entry: {len(table.foreign)}")
    for topic in restored_topics(table):
        if not shard.owns(topic):
            yield Finding(Level.WARNING, topic, f"{name} has a snapshot of it, which belongs to another shard")


def _stored(broker: Broker, topic: str | None) -> Iterator[Finding]:
    """Damaged files, with which no owner can open the logs."""
    damages = broker.damages() if isinstance(broker, StoredBroker) else {}
    for name, error in damages.items():
        if is_internal(name) or topic in (None, name):
            yield Finding(Level.ERROR, name, str(error))


def _folded(broker: Broker, shards: int) -> Buffers:
    try:
        return replayed_topics(broker, shards)
    except Error:
        return {}  # there is a finding for the unreadable topic already


def _decisions(broker: Broker, shards: Sequence[Shard], buffers: Buffers) -> Iterator[Finding]:
    """Whether the existing decision logs can be read, and hold all that topics refer to."""
    there = {*broker.topics()}
    for shard in shards:
        decisions = shard.topic(DECISIONS)
        if decisions not in there:
            continue
        try:
            lost = read_decisions(broker, shard, buffers).lost
        except Error as error:
            yield Finding(Level.ERROR, decisions, f"the decision log can't be read to its end: {error}")
        else:
            if lost is not None:
                yield Finding(Level.ERROR, decisions, str(DecisionsLost(decisions, lost)))


def _without_snapshot(broker: Broker, topic: str, *, asked: bool) -> Iterator[Finding]:
    """A topic gets a snapshot before its first transaction, so one with transactions but no snapshot has lost it."""
    try:
        if holds_transactions(broker, topic):
            yield Finding(Level.ERROR, topic, str(SnapshotMissing(topic, LOST)))
            return
    except Error as error:
        yield Finding(Level.ERROR, topic, f"it has no snapshot, and its log can't be read: {error}")
        return
    if asked:
        yield Finding(Level.WARNING, topic, "it has no snapshot, so it was never registered")


def verify_topic(broker: Broker, table: SnapshotTable, topic: str) -> list[Finding]:
    """Check one topic of a scan: each entry, the chain, the log after the snapshot, and the log before it."""
    entries = table.topics[topic]
    findings = [*_segments(topic, entries)]
    if deletion_complete(broker, topic, entries):
        what = "its snapshot was deleted on purpose: readers refuse its transactions until it is registered again"
        return [Finding(Level.WARNING, topic, what, str(EntryKey(topic, END)), entries.end and entries.end[0])]
    try:
        snapshot = read_snapshot(topic, entries)
        findings += _leftovers(topic, entries, snapshot.end)
        if snapshot.end.incarnation != broker.incarnation(topic):
            return [
                *findings,
                Finding(Level.WARNING, topic, "the topic was re-created: this snapshot is ignored"),
            ]
        resume_positions(topic, snapshot.state, broker.ledgers(topic))
    except TopicNotFound:
        return [*findings, Finding(Level.WARNING, topic, "the topic was deleted: its snapshot is ignored")]
    except (SnapshotError, Error) as error:
        return [*findings, _as_finding(topic, entries, error)]
    index = EMPTY
    try:
        index = read_index(topic, snapshot, entries).state
    except SnapshotError as error:
        finding = _as_finding(topic, entries, error)
        findings += [] if finding.entry in {one.entry for one in findings} else [finding]
    return findings + _against_log(broker, topic, entries, snapshot, SnapshotIndex(index))


def _as_finding(topic: str, entries: TopicEntries, error: Error) -> Finding:
    if isinstance(error, SnapshotDamaged):
        return Finding(Level.ERROR, topic, error.what, error.entry, _place(entries, error.entry))
    entry = error.entry if isinstance(error, UnsupportedSnapshot) else str(EntryKey(topic, END))
    return Finding(Level.ERROR, topic, str(error), entry, _place(entries, entry))


def _place(entries: TopicEntries, entry: str) -> Position | None:
    key = EntryKey.parse(entry.encode())
    if key is None:
        return None
    stored = entries.get(key)
    return None if stored is None else stored.position


def _segments(topic: str, entries: TopicEntries) -> Iterator[Finding]:
    """All unreadable segment entries, named or not; the check of a chain ends at the first one it needs."""
    end: EndEntry | None = None
    if entries.end is not None:
        try:
            end = decode_end(topic, entries.end)
        except SnapshotError:
            return  # reported with the end entry
    decoders: dict[str, Callable[[str, int, Stored], object]] = {SEGMENT: decode_segment, MUTATIONS: decode_mutations}
    for kind, decode in decoders.items():
        for number, stored in sorted(entries.numbered[kind].items()):
            try:
                decode(topic, number, stored)
            except SnapshotError as error:
                named = end is not None and number in end.numbers(kind)
                what = error.what if isinstance(error, SnapshotDamaged) else str(error)
                level = Level.ERROR if named else Level.WARNING
                yield Finding(level, topic, what, str(EntryKey(topic, kind, number)), stored.position)


def _leftovers(topic: str, entries: TopicEntries, end: EndEntry) -> Iterator[Finding]:
    for key in entries.keys(topic):
        if key.number not in end.numbers(key.kind) and (stored := entries.get(key)) is not None:
            what = "the end entry does not name it: a write or a clean-up was interrupted, the next one removes it"
            yield Finding(Level.WARNING, topic, what, str(key), stored.position)


def _against_log(
    broker: Broker, topic: str, entries: TopicEntries, snapshot: StoredSnapshot, index: SnapshotIndex
) -> list[Finding]:
    state: TopicState = snapshot.state
    end = str(EntryKey(topic, END))
    place = entries.end.position if entries.end is not None else None
    numbers = (
        f"snapshot {snapshot.end.snapshot_id}, {counted(len(snapshot.digests), 'segment')}, "
        f"{counted(len(index), 'mutation snapshot')}, applied to {state.buffer.applied}"
    )
    rebuilt: tuple[TransactionBuffer, Sequencer] | Error | None = None
    bounds = BoundsCheck(index)
    if not _is_trimmed(broker, topic, state):
        try:
            rebuilt = rebuild(
                broker, topic, segment_size=state.buffer.segment_size, until=state.buffer.applied, bounds=bounds
            )
        except Error as error:
            rebuilt = error
    if rebuilt is None or _is_trimmed(broker, topic, state):  # also if it was trimmed meanwhile
        what = f"{numbers}: consistent; not compared with the log, whose first ledgers were trimmed"
        return [Finding(Level.OK, topic, what, end, place), *_damage(broker, topic, snapshot)]
    if isinstance(rebuilt, Error):
        return [Finding(Level.ERROR, topic, f"the log can't be read again: {rebuilt}", end, place)]
    buffer, sequencer = rebuilt
    buffer.trim(state.buffer.first_ledger)
    differences = diff_states(snapshot.buffer, buffer) + _diff_numbers(state, sequencer) + bounds.index()[1]
    damage = _damage(broker, topic, snapshot)
    if differences:
        found = [Finding(Level.ERROR, topic, f"differs from the log: {what}", end, place) for what in differences]
        return found + damage
    return [Finding(Level.OK, topic, f"{numbers}: equal to the log", end, place), *damage]


def _is_trimmed(broker: Broker, topic: str, state: TopicState) -> bool:
    """Whether the first ledgers that a snapshot covers are gone."""
    return broker.ledgers(topic)[0].ledger != state.origin_ledger


def _damage(broker: Broker, topic: str, snapshot: StoredSnapshot) -> list[Finding]:
    """Commits, up to the end of the log, with another number of records in the topic than they declare."""
    buffer = snapshot.buffer
    resume, _ = resume_positions(topic, snapshot.state, broker.ledgers(topic))
    problems: list[Finding] = []
    try:
        with LogFollower(broker, topic, buffer, resume) as log:
            log.replay()
    except Error as error:
        problems.append(Finding(Level.ERROR, topic, f"the log can't be read to its end: {error}"))
    for txn, position, expected, accepted in buffer.damage:
        declared = counted(expected, "record")
        what = f"transaction {txn} committed at {position} with {declared}, but the topic has {accepted}"
        problems.append(Finding(Level.ERROR, topic, what))
    if buffer.counters.damaged > len(buffer.damage):
        problems.append(Finding(Level.ERROR, topic, f"damaged commits in total: {buffer.counters.damaged}"))
    return problems


def rebuild(
    broker: Broker,
    topic: str,
    *,
    segment_size: int = SEGMENT_SIZE,
    until: Position | None = None,
    keeps_sealed: bool = False,
    bounds: BoundsCheck | None = None,
) -> tuple[TransactionBuffer, Sequencer]:
    """Fold the log from its first ledger up to a position (None: an empty state), and sequence it.

    `bounds`: mutation snapshots to be checked.

    Raises ProtocolStopped, PositionTrimmed, Damaged, and AppliedPositionTrimmed if the log ends before `until`.
    """
    first = broker.ledgers(topic)[0].ledger
    start = before_ledger(first)
    buffer, sequencer = TransactionBuffer(segment_size), Sequencer()
    with SequencedFollower(broker, topic, buffer, start, decided_after=start, sequencer=sequencer) as log:
        log.keeps_sealed = keeps_sealed
        log.on_sequenced = None if bounds is None else partial(bounds.sequenced, buffer)
        if until is not None:
            if not reaches(broker.last_position(topic), until):
                raise AppliedPositionTrimmed(topic, until, first)
            log.replay(until, exactly=True)
        log.sequence_all()
    return buffer, sequencer


def diff_states(one: TransactionBuffer, other: TransactionBuffer) -> list[str]:
    """The differences of two buffers of one topic, a line each: state, aborted transactions, suppressed ranges."""
    differences = one.snapshot_state().differences(other.snapshot_state())
    for name, mine, theirs in (
        ("aborted", set(one.aborted.ids()), set(other.aborted.ids())),
        ("suppressed", set(one.suppressed.ranges()), set(other.suppressed.ranges())),
    ):
        for what, items in (("only in the first", mine - theirs), ("only in the second", theirs - mine)):
            if items:
                differences.append(f"{name}, {what}: {len(items)}, such as {min(items)}")
    return differences


def _diff_numbers(state: TopicState, sequencer: Sequencer) -> list[str]:
    """The snapshot may have fewer seqnos, but no different ones."""
    mine, theirs = state.sequencer, sequencer.snapshot_state()
    first_seqnos = dict(zip(theirs.ledgers.tolist(), theirs.first_seqnos.tolist(), strict=True))
    differences = [
        f"first seqno of ledger {ledger}: {seqno} != {first_seqnos.get(ledger)}"
        for ledger, seqno in zip(mine.ledgers.tolist(), mine.first_seqnos.tolist(), strict=True)
        if first_seqnos.get(ledger) != seqno
    ]
    if reaches(mine.position, theirs.position) and mine.next_seqno != theirs.next_seqno:
        differences.append(f"next seqno: {mine.next_seqno} != {theirs.next_seqno}")
    return differences
