"""Compaction of data topics: what a broker asks of its caller, who alone knows which records are committed

A compaction empties messages: their positions, publish times and the properties of the log protocol stay, so that the
log says of transactions what it said before. It looks at the closed ledgers up to one whose messages are all decided.
The caller says of each message by its properties whether it is retained (`RecordRetention`).

A deletion that is the newest message of its key may be purged: emptied, too, because nothing older of its key is left.
Readers that had read something older and have not read the deletion would keep it. So the caller says which deletions
all readers have read, and the log stores the newest ledger that had a purged one.

A log with more keys than one process should remember is compacted by tasks, of one ledger each, which other processes
can do. First each finds the newest message of each key in its ledger; of all messages whose keys have one digest, the
one with the highest ordinal survives. Then each rewrites its ledger with the bitmap of the survivors.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from broker_io.batch import Batch, PlacedBatch
from broker_io.key_digest import KeyDigest


class RecordRetention(enum.IntEnum):
    """How compaction treats a message."""

    RETAIN = 0
    """It stays: a marker, a message without a key, or one that is empty already."""
    LATEST = 1
    """It stays if it is the newest of its key."""
    RECORD_SET = 2
    """It stays, and contains records with unknown keys: no later deletion is purged."""
    EMPTY = 3
    """It is emptied."""


Retentions: TypeAlias = NDArray[np.int8]


class CompactionRules(Protocol):
    """What the caller knows of the messages of a topic. It is called in the order of the log."""

    def retentions(self, placed: PlacedBatch) -> Retentions:
        """int8[n]: a `RecordRetention` for each message of one ledger. The values of the messages are left out.

        Raises the error with which the compaction ends; nothing has changed then.
        """

    def emptied(self, messages: Batch, which: NDArray[np.bool_]) -> Batch:
        """The same messages, those of the mask without key, value and properties of the application."""


@dataclass(frozen=True, slots=True)
class CompactionRequest:
    """`upto`: the last ledger to look at; all its messages are decided.

    Deletions are purged in ledgers up to `purge_upto` if they were published before `purge_before_ms` (since 1970).
    A ledger is rewritten if its messages to empty are at least `least_dead` of those with content. `progress` is called
    with the bytes read and written since its last call; it may wait, and end the compaction by raising an error.
    `before_swap` is called once all is written, with the newest ledger of which deletions were purged (0: none), and
    may raise an error as well; the topic then stays as it was.
    """

    upto: int
    rules: CompactionRules
    purge_upto: int = 0
    purge_before_ms: int = 0
    least_dead: float = 0.0
    progress: Callable[[int], object] = int
    before_swap: Callable[[int], object] = int


class CompactionPolicy(NamedTuple):
    """When a topic is compacted; it is stored with the topic. Times in milliseconds.

    `dirty_ratio`: the bytes of ledgers that no compaction has looked at, to those of all closed ledgers, above 0 to 1.
    Messages younger than `least_lag_ms` are left alone; a topic that has unseen messages older than `most_lag_ms` is
    compacted whatever its ratio (0: no limit). Deletions stay for `grace_ms`.
    """

    dirty_ratio: float = 0.5
    least_lag_ms: int = 0
    most_lag_ms: int = 0
    grace_ms: int = 24 * 3600 * 1000


class CompactionState(NamedTuple):
    """Compaction has looked at all ledgers up to `cleaned`, and purged no deletion above `purged`; 0: at none.

    Without a `policy` the topic is compacted on request only.
    """

    cleaned: int = 0
    purged: int = 0
    policy: CompactionPolicy | None = None


@dataclass(slots=True)
class CompactionReport:
    """What a compaction did. `records`: messages with content before it; `emptied` of them were superseded or aborted,
    `purged` were deletions. `ledgers` were looked at, `rewritten` of them written again. `passes` over the keys.
    `bytes_before` and `bytes_after` of the ledgers; `bytes_read` and `bytes_written` in all.
    """

    records: int = 0
    emptied: int = 0
    purged: int = 0
    ledgers: int = 0
    rewritten: int = 0
    passes: int = 0
    bytes_before: int = 0
    bytes_after: int = 0
    bytes_read: int = 0
    bytes_written: int = 0


@runtime_checkable
class CompactionStateBroker(Protocol):
    """A broker that says how far a topic was compacted, even if it can't compact it."""

    def compaction(self, topic: str) -> CompactionState: ...


class StoredDigests(NamedTuple):
    """The digests that compaction stored of each ledger up to `cleaned` that it has looked at, by number.

    Each has those messages of its ledger that have a value and are the newest of their key in all these ledgers; not
    messages in visible record sets. A ledger is missing if it was trimmed, if compaction could not compare all of its
    keys, or if an older release compacted it. The seed of the digests is the secret of the log.
    """

    cleaned: int
    ledgers: dict[int, KeyDigest]


@runtime_checkable
class DigestingBroker(Protocol):
    """A broker that has the digests, and the secret, of its log."""

    def key_digests(self, topic: str) -> StoredDigests: ...


@runtime_checkable
class CompactingBroker(CompactionStateBroker, Protocol):
    """A broker that compacts data topics."""

    def compact_records(self, topic: str, request: CompactionRequest) -> CompactionReport:
        """Compact a topic while it is read and appended to. Either all of it happens or, if it fails, nothing.

        Raises Damaged that names the file, errors of the disk, and what `request` raises.
        """

    def set_compaction_policy(self, topic: str, policy: CompactionPolicy | None) -> None:
        """Store a policy with the topic, or remove it; durable when this returns."""


ROW_BITS = 40
"""An ordinal has the number of the ledger in its upper bits, then the row, and in its lowest bit `purgeable`."""
Ordinals: TypeAlias = NDArray[np.int64]


class NewestRows(NamedTuple):
    """The newest message of each key in a ledger: digests of the keys (int64[n, 2]) and ordinals.

    `record_sets`: the ledger has visible record sets, so deletions in later ledgers stay.
    """

    digests: NDArray[np.int64]
    ordinals: Ordinals
    record_sets: bool


class Survivors(NamedTuple):
    """Bitmaps of the messages of a ledger (`np.packbits`, zeros at the end left out): those that are the newest of
    their key in the log, and of these the deletions that are purged.
    """

    newest: bytes = b""
    purged: bytes = b""

    @classmethod
    def of(cls, ordinals: Ordinals) -> Survivors:
        """The survivors of one ledger; all deletions that may be purged are."""
        rows = (ordinals >> 1) & (2**ROW_BITS - 1)
        return cls(_bitmap(rows), _bitmap(rows[ordinals & 1 == 1]))


def _bitmap(rows: Ordinals) -> bytes:
    mask = np.zeros(int(rows.max()) + 1 if len(rows) else 0, np.bool_)
    mask[rows] = True
    return np.packbits(mask).tobytes()


class LedgerPart(NamedTuple):
    """What compaction did with a ledger, in numbers of messages and bytes.

    `digest` of the newest messages of their keys, as the broker stores it; `written` is what it adopts.
    """

    records: int
    emptied: int
    purged: int
    bytes_read: int
    digest: str
    written: Any


class CompactionTasks(Protocol):
    """The tasks of one compaction, for ledgers that are numbered from 0. It can be pickled."""

    @property
    def topic(self) -> str: ...

    @property
    def count(self) -> int:
        """The number of ledgers."""

    def newest(self, ledger: int) -> NewestRows:
        """Find the newest messages of a ledger.

        Raises Damaged, UnsupportedFormat, NotSupported where the files of the log are not, OSError, and what the rules
        raise.
        """

    def rewrite(self, ledger: int, survivors: Survivors, attempt: str) -> LedgerPart:
        """Write a ledger that loses messages. Each run has an `attempt` of its own: only one of them is adopted.

        Raises as `newest`.
        """


@runtime_checkable
class TaskingBroker(CompactingBroker, Protocol):
    """A broker whose compactions other processes can do."""

    def compact_in_tasks(
        self, topic: str, request: CompactionRequest, run: Callable[[CompactionTasks], Sequence[LedgerPart]]
    ) -> CompactionReport:
        """Compact a topic as `compact_records`. `run` runs the tasks, and returns the parts of all ledgers in order.

        All ledgers that lose messages are rewritten, whatever `least_dead` is. Raises what `run` raises, too.
        """
