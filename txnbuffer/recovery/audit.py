"""Audits of the latest value of each key: of a log against another copy of it, or against an earlier digest

Two copies are compared as of one seqno, which both have: by default the smaller one of their ends. The newest visible
record of each key up to there must have the same value in both. A key without a record equals a deleted one, because
compaction removes deletions.

Where compaction has emptied records, older states are incomplete: the newest record of a key up to a seqno may be
emptied because of a newer one that compaction has looked at, too. So a copy can be compared as of the end of what its
compaction has looked at, or later. Records that retention has trimmed from one copy are not compared: keys that have no
others are counted as unproven.

Without another copy the digest of two moments is compared, as of the same seqno: it is that of `broker_io.key_digest`
over the records with a value that are messages of their own. Those in record sets are never emptied. The same digest of
each ledger, as of the end of what compaction has looked at, is stored by each compaction. The log itself has to be read
for it, since a service keeps the seed of these secret.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from broker_io.batch import PlacedBatch
from broker_io.compaction import CompactionStateBroker, DigestingBroker, StoredDigests
from broker_io.environment import current
from broker_io.errors import TopicNotFound
from broker_io.key_digest import KeyDigest
from broker_io.port import Broker, Resource
from broker_io.position import NO_INDEX, Int64s, Position, before_ledger
from snapshots.errors import SnapshotMissing
from txnbuffer.buffer.visibility import PinnedVisibility
from txnbuffer.errors import InvalidRequest
from txnbuffer.follow import SequencedFollower, numbered_records, read_existing
from txnbuffer.progress import ProgressReporter, report
from txnbuffer.recordset import batch_slices, expand
from txnbuffer.recovery.newest_records import (
    NewestRecords,
    Rows,
    has_value,
    hashed_rows,
    newest_with_value,
    paired,
    rows_in,
)
from txnbuffer.recovery.restore import LOST, load

FIRST_DIFFERENCES = 10
MEMORY_BYTES = 256 * 1024 * 1024
NO_SEQNO = -1
"""The seqno of a record whose seqno is unknown."""
LAST_SEQNO = 2**63 - 1


@dataclass(slots=True)
class Tally:
    """One side: visible `records` that were read, and `keys` with a value."""

    records: int = 0
    keys: int = 0


class KeySide(NamedTuple):
    """The newest record of a key on one side; no seqno and no position if there is none."""

    seqno: int | None = None
    position: Position | None = None
    value: bytes | None = None


class KeyDifference(NamedTuple):
    """A key with another value in the copy than in the log. `what`: which of the two has a value, or `different`."""

    key: bytes
    what: str
    log: KeySide
    copy: KeySide


@dataclass(frozen=True, slots=True)
class KeyAudit:
    """The result of an audit as of the seqno `up_to`; `differences` has the first ones by their newest seqno.

    `unproven`: number of keys that only one side has, whose records were trimmed from the other.
    """

    up_to: int
    log: Tally
    copy: Tally
    different: int
    unproven: int
    differences: tuple[KeyDifference, ...]


class NumberedRecords(NamedTuple):
    """Visible records in the order of the log, without emptied ones, and their seqnos: int64[n]."""

    records: PlacedBatch
    seqnos: Int64s


class AuditCopy(Protocol):
    """The other copy of a topic. `start`: the seqno of its first record; `cleaned`: compaction has looked up to it."""

    @property
    def start(self) -> int: ...

    @property
    def cleaned(self) -> int: ...

    def collect(self, found: NewestRecords, seed: int, limit: int, on_records: Callable[[int], object]) -> int:
        """Add the visible records up to the seqno `limit`; return the seqno up to which these are all.

        `on_records` is called with numbers of records read. Raises what reading raises.
        """

    def record_at(self, position: Position) -> tuple[bytes | None, bytes | None]:
        """Key and value of a record that exists."""


class CommittedLog:
    """The committed records of a topic, pinned when it is opened: by `open`.

    `start` and `end`: the seqnos of its first and its last visible record. `last`: up to where it is decided.
    `cleaned`: the one up to which compaction has looked at it. `first_ledger`: the first one that was not trimmed.
    If the topic has had no transactions, it is not `registered`, and its first record has the seqno 1. `stored`:
    the digests that its last compaction has stored; None: the broker has none.
    """

    def __init__(self, broker: Broker, topic: str) -> None:
        """Raises what reading the snapshot and the log raises, and SnapshotMissing."""
        self.topic = topic
        self._broker = broker
        self.stored = _stored(broker, topic)
        self._cleaned = _cleaned_ledger(broker, topic) if self.stored is None else self.stored.cleaned
        loaded = load(broker, topic)
        self.registered, self.first_ledger = loaded.registered, loaded.first_ledger
        self.incarnation = loaded.incarnation
        sequencer = self._sequencer = loaded.sequencer
        with SequencedFollower(
            broker, topic, loaded.buffer, loaded.resume, decided_after=loaded.sequenced, sequencer=sequencer
        ) as log:
            log.replay()
            log.sequence_all()
        visibility = self._visibility = PinnedVisibility.of(loaded.buffer)
        self.last = visibility.max_read_position
        for placed in read_existing(broker, topic, log.taken, self.last):
            sequencer.advance(placed, loaded.buffer)
        if not loaded.registered and loaded.buffer.transactional:
            raise SnapshotMissing(topic, LOST)
        self.start, self.end = sequencer.oldest(loaded.first_ledger), sequencer.next_seqno - 1
        self.cleaned = sequencer.last_in(self._cleaned)

    def records(self, limit: int = LAST_SEQNO) -> Iterator[NumberedRecords]:
        """The visible records up to a seqno. Raises what reading the log raises, and UndecodableRecordSet."""
        next_seqno = self.start
        for placed in read_existing(self._broker, self.topic, before_ledger(self.first_ledger), self.last):
            for part in batch_slices(placed):
                records, seqnos, count, broken = numbered_records(part, self._visibility, next_seqno)
                next_seqno += count
                if broken is not None:
                    raise broken
                kept = slice(int(np.searchsorted(seqnos, limit, side="right")))
                yield NumberedRecords(records.take(kept), seqnos[kept])
                if next_seqno > limit:
                    return

    def collect(self, found: NewestRecords, seed: int, limit: int, on_records: Callable[[int], object]) -> int:
        """See `AuditCopy`."""
        reached = min(limit, self.end)
        for records, seqnos in self.records(reached):
            found.add(hashed_rows(records, seqnos, seed))
            on_records(len(records))
        self.check_unchanged(reached)
        return reached

    def check_unchanged(self, reached: int, *, stored: bool = False) -> None:
        """Raises InvalidRequest if compaction may have looked beyond a seqno since, or has `stored` other digests."""
        cleaned = _cleaned_ledger(self._broker, self.topic)
        if cleaned == self._cleaned:
            return
        if stored:
            raise InvalidRequest(f"topic {self.topic} was compacted during the audit: audit again")
        if self.last is None or cleaned >= self.last.ledger or self._sequencer.last_in(cleaned) > reached:
            raise InvalidRequest(
                f"topic {self.topic} was compacted during the audit, maybe beyond seqno {reached}: audit again"
            )

    def record_at(self, position: Position) -> tuple[bytes | None, bytes | None]:
        """See `AuditCopy`."""
        before = Position(position.ledger, position.entry - 1)
        return record_in(read_existing(self._broker, self.topic, before, position), position)


def _stored(broker: Broker, topic: str) -> StoredDigests | None:
    return broker.key_digests(topic) if isinstance(broker, DigestingBroker) else None


def _cleaned_ledger(broker: Broker, topic: str) -> int:
    return broker.compaction(topic).cleaned if isinstance(broker, CompactionStateBroker) else 0


def record_in(messages: Iterator[PlacedBatch], position: Position) -> tuple[bytes | None, bytes | None]:
    """Key and value of the record at a position of these messages. Raises TopicNotFound if it is gone."""
    for placed in messages:
        records = expand(placed.take(slice(placed.positions.search(position._replace(batch=NO_INDEX)), None)))
        row = records.positions.search(position)
        if row < len(records) and records.positions[row] == position:
            return records.messages.keys[row], records.messages.values[row]
    raise TopicNotFound(f"the record at {position} was trimmed or emptied during the audit: audit again")


def audit(
    log: CommittedLog,
    copy: AuditCopy,
    directory: str,
    *,
    up_to: int | None = None,
    memory_bytes: int = MEMORY_BYTES,
    first: int = FIRST_DIFFERENCES,
) -> KeyAudit:
    """Compare a log with another copy of its topic, as of a seqno (None: the last one that both have).

    `directory` is for temporary files. `first`: how many differences are named.

    Raises InvalidRequest if the copies can't be compared as of a seqno, and what reading them raises.
    """
    if isinstance(copy, CommittedLog):
        _check_seqnos(log, copy)
    seed = _seed()
    most_rows = rows_in(memory_bytes)
    with NewestRecords(most_rows, f"{directory}/log") as mine, NewestRecords(most_rows, f"{directory}/copy") as other:
        tallies = _Tallies(Tally(), Tally())
        limit = log.end if up_to is None else up_to
        _check_reached("log", log.end, limit)
        with report("audit of the copy", "records", limit) as progress:
            reached = copy.collect(other, seed, limit, _counter(tallies.copy, progress))
        if up_to is not None:
            _check_reached("copy", reached, up_to)
        _check_cleaned("copy", copy.cleaned, reached, "log")
        _check_cleaned("log", log.cleaned, reached, "copy")
        with report("audit of the log", "records", reached) as progress:
            log.collect(mine, seed, reached, _counter(tallies.log, progress))
        found = _Comparison(log.start, copy.start, first)
        for left, right in paired(mine, other, 2 * most_rows):
            found.add(left, right)
            tallies.log.keys += int(has_value(left).sum())
            tallies.copy.keys += int(has_value(right).sum())
    differences = tuple(_difference(log, copy, left, right) for left, right in found.first())
    return KeyAudit(reached, tallies.log, tallies.copy, found.different, found.unproven, differences)


def _seed() -> int:
    return int.from_bytes(current().randomness.token(8))


def _check_seqnos(log: CommittedLog, copy: CommittedLog) -> None:
    if not (log.registered and copy.registered) and log.first_ledger != copy.first_ledger:
        raise InvalidRequest(
            f"topic {log.topic} has had no transactions, so its records have no seqnos, and the first ledgers of one "
            "copy were trimmed: they can't be compared"
        )


def _check_reached(name: str, end: int, up_to: int) -> None:
    if end < up_to:
        raise InvalidRequest(f"the {name} ends at seqno {end}: it can't be audited as of {up_to}")


def _check_cleaned(name: str, cleaned: int, reached: int, other: str) -> None:
    if cleaned > reached:
        raise InvalidRequest(
            f"the {name} was compacted up to seqno {cleaned}, so its state as of seqno {reached} is incomplete: give a "
            f"{other} that has at least seqno {cleaned}"
        )


@dataclass(slots=True)
class _Tallies:
    """Counts the records of both sides."""

    log: Tally
    copy: Tally


def _counter(tally: Tally, progress: ProgressReporter) -> Callable[[int], None]:
    """A function that counts records."""

    def count(records: int) -> None:
        tally.records += records
        progress.update(tally.records)

    return count


class _Comparison:
    """Counts the different keys, and keeps the rows of the first ones."""

    def __init__(self, log_start: int, copy_start: int, first: int) -> None:
        self.different = self.unproven = 0
        self._starts = log_start, copy_start
        self._most = first
        self._first: list[tuple[Rows, Rows]] = []

    def add(self, left: Rows, right: Rows) -> None:
        """Compare pairs of the newest records of a key."""
        different = (left["value_high"] != right["value_high"]) | (left["value_low"] != right["value_low"])
        rows = np.flatnonzero(different)
        left, right = left[rows], right[rows]
        log_start, copy_start = self._starts
        trimmed = _trimmed(left, right, copy_start) | _trimmed(right, left, log_start)
        left, right = left[~trimmed], right[~trimmed]
        self.unproven += int(trimmed.sum())
        self.different += len(left)
        if len(left):
            self._keep(left, right)

    def _keep(self, left: Rows, right: Rows) -> None:
        kept, others = zip(*self._first, (left, right), strict=True)
        left, right = np.concatenate(kept), np.concatenate(others)
        order = np.argsort(np.maximum(left["seqno"], right["seqno"]), kind="stable")[: self._most]
        self._first = [(left[order], right[order])]

    def first(self) -> Iterator[tuple[np.void, np.void]]:
        for left, right in self._first:
            yield from zip(left, right, strict=True)


def _trimmed(rows: Rows, others: Rows, start: int) -> NDArray[np.bool_]:
    """bool[n]: which rows the other side lacks because its log begins with the seqno `start`."""
    missing: NDArray[np.bool_] = (others["seqno"] == 0) & (np.maximum(rows["seqno"], 1) < start)
    return missing


def _difference(log: CommittedLog, copy: AuditCopy, left: np.void, right: np.void) -> KeyDifference:
    key, mine = _side(log.record_at, left)
    same_key, other = _side(copy.record_at, right)
    what = "different"
    if mine.value is None:
        what = "in the copy only"
    elif other.value is None:
        what = "in the log only"
    return KeyDifference((key if same_key is None else same_key) or b"", what, mine, other)


def _side(
    record_at: Callable[[Position], tuple[bytes | None, bytes | None]], row: np.void
) -> tuple[bytes | None, KeySide]:
    seqno = int(row["seqno"])
    if not seqno:
        return None, KeySide()
    position = Position(int(row["ledger"]), int(row["entry"]), int(row["index"]))
    key, value = record_at(position)
    return key, KeySide(None if seqno == NO_SEQNO else seqno, position, value)


# --- digests ---

_DIGEST = re.compile(r"(\d{1,18})-(\d{1,18})-([0-9a-f]{48})")


class LogDigest(NamedTuple):
    """The digest of a log as of the seqno `end`, which began with the seqno `start`; text: START-END-DIGEST."""

    start: int
    end: int
    keys: KeyDigest

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse the output of `str`. Raises InvalidRequest."""
        found = _DIGEST.fullmatch(text)
        if found is None:
            count = len(text.rpartition("-")[2])
            raise InvalidRequest(
                f"{text!r:.100} is not a digest, START-END-DIGEST with two numbers and 48 hexadecimal digits (these "
                f"are {count} characters): copy one that `txnbuf audit` has printed"
            )
        start, end, keys = found.groups()
        return cls(int(start), int(end), KeyDigest.parse(keys))

    def __str__(self) -> str:
        return f"{self.start}-{self.end}-{self.keys}"


class StoredComparison(NamedTuple):
    """A log compared with what its last compaction stored of so many ledgers; `different`: the numbers of some."""

    ledgers: int
    different: tuple[int, ...]


class DigestAudit(NamedTuple):
    """The digest of a log; `stored`: it was compared with those of its last compaction."""

    digest: LogDigest
    log: Tally
    stored: StoredComparison | None


def digest_of(
    log: CommittedLog,
    directory: str,
    *,
    like: LogDigest | None = None,
    memory_bytes: int = MEMORY_BYTES,
) -> DigestAudit:
    """The digest of a log, with the seed and the end of another digest.

    Without another one it has a new seed and the end of the log, and the log is compared with the digests that are
    stored with it. Raises InvalidRequest if the log can't have a digest as of that end, and what reading raises.
    """
    stored = log.stored if like is None else None
    if like is None:
        like = LogDigest(log.start, log.end, KeyDigest(_seed()))
    _check_reached("log", log.end, like.end)
    _check_cleaned("log", log.cleaned, like.end, "digest")
    if log.start > like.start:
        raise InvalidRequest(
            f"records up to seqno {log.start - 1} were trimmed since the digest was made: make another one"
        )
    most_rows = rows_in(memory_bytes)
    tally = Tally()
    digest, seed = KeyDigest(like.keys.seed), like.keys.seed
    with (
        NewestRecords(most_rows, f"{directory}/log") as found,
        _StoredCheck(log, stored, most_rows, directory) as kept,
        report("digest of the log", "records", like.end) as progress,
    ):
        count = _counter(tally, progress)
        for records, seqnos in log.records(like.end):
            alone = records.positions.indexes == NO_INDEX
            found.add(hashed_rows(records.take(alone), seqnos[alone], seed))
            kept.add(records.take(alone), seqnos[alone])
            count(len(records))
        log.check_unchanged(like.end, stored=kept.compares)
        for rows in newest_with_value(found, 2 * most_rows):
            tally.keys += len(rows)
            digest = digest.add(rows["key_high"], rows["ledger"], rows["entry"])
        return DigestAudit(LogDigest(log.start, like.end, digest), tally, kept.compared(2 * most_rows))


class _StoredCheck(Resource):
    """Compares the newest records of each ledger up to `cleaned` with the digests that are stored of it."""

    def __init__(self, log: CommittedLog, stored: StoredDigests | None, most_rows: int, directory: str) -> None:
        self._cleaned, ledgers = stored or (0, {})
        self._stored = {ledger: digest for ledger, digest in ledgers.items() if ledger >= log.first_ledger}
        self._seed = next((digest.seed for digest in self._stored.values()), 0)
        self._found = NewestRecords(most_rows, f"{directory}/stored")

    @property
    def compares(self) -> bool:
        """Whether there is a digest."""
        return bool(self._stored)

    def add(self, records: PlacedBatch, seqnos: Int64s) -> None:
        """Add visible records that are messages of their own, in the order of the log."""
        if self.compares:
            cleaned = records.positions.ledgers <= self._cleaned
            self._found.add(hashed_rows(records.take(cleaned), seqnos[cleaned], self._seed))

    def compared(self, most_rows: int) -> StoredComparison | None:
        """The comparison after all records were added; None if nothing is stored."""
        if not self.compares:
            return None
        found = dict.fromkeys(self._stored, KeyDigest(self._seed))
        for rows in newest_with_value(self._found, most_rows):
            rows = rows[np.argsort(rows["ledger"])]
            for part in np.split(rows, np.flatnonzero(np.diff(rows["ledger"])) + 1):
                if len(part) and (ledger := int(part["ledger"][0])) in found:
                    found[ledger] = found[ledger].add(part["key_high"], part["ledger"], part["entry"])
        different = tuple(ledger for ledger, digest in self._stored.items() if found[ledger] != digest)
        return StoredComparison(len(found), different)

    def close(self) -> None:
        self._found.close()
