"""What a member of a pair exchanges: messages with its peer, events from its shell, effects for its shell

A link is one connection of two members, with a number that neither uses again; it keeps the order of messages until it
breaks. Every message names the epoch in which its sender speaks and its store.
"""

from __future__ import annotations

import enum
from typing import NamedTuple, TypeAlias

from broker_io.errors import Error
from broker_io.filelog.log.records import Fork, LogRecord, Mark, Store
from broker_io.filelog.replication.lock import LockView, Swap


class CatchUp(enum.Enum):
    """How a backup gets the log of its primary: what follows its end; what follows its commit index, after a cut there;
    a copy; or a copy into another store, because this one applied what the primary does not have.
    """

    TAIL = "tail"
    CUT = "cut"
    COPY = "copy"
    REPLACE = "replace"


class Hello(NamedTuple):
    """Backup → primary: what it has. `epoch` is the lowest that it obeys; `partial`: it needs a copy in any case."""

    epoch: int
    store: Store
    end: Mark
    commit: Mark
    partial: bool


class Follow(NamedTuple):
    """Primary → backup: `after` is your end and in my log; the records after it will follow."""

    epoch: int
    store: Store
    after: Mark
    commit: int


class Rejoin(NamedTuple):
    """Primary → backup: you are not in sync and need `plan`; a cut is to be after the mark `after`."""

    epoch: int
    store: Store
    plan: CatchUp
    after: Mark


class CopyRequest(NamedTuple):
    """Backup → primary: I have synced that my store is partial; send the copy."""

    epoch: int
    store: Store


class CopyBegin(NamedTuple):
    """Primary → backup: a copy of everything up to record `at`, which has these forks, will follow, then its end."""

    epoch: int
    store: Store
    at: Mark
    forks: tuple[Fork, ...]


class Records(NamedTuple):
    """Primary → backup: the next records, and the commit index."""

    epoch: int
    store: Store
    records: tuple[LogRecord, ...]
    commit: int


class Durable(NamedTuple):
    """Backup → primary: everything up to a mark is synced here. `full`: its disk takes no more appends."""

    epoch: int
    store: Store
    mark: Mark
    applied: int
    full: bool


class RewriteFinished(NamedTuple):
    """An event: this store has the files that compaction `number` prepared; their length in bytes and digest."""

    number: int
    length: int
    digest: bytes


class RewriteDone(NamedTuple):
    """Backup → primary: the results of compactions that this store has, and that are not swapped yet."""

    epoch: int
    store: Store
    results: tuple[RewriteFinished, ...]


class DamagedTopics(NamedTuple):
    """Either → the other: the topics that have a damaged file at the sender."""

    epoch: int
    store: Store
    topics: tuple[str, ...]


Message: TypeAlias = Hello | Follow | Rejoin | CopyRequest | CopyBegin | Records | Durable | RewriteDone | DamagedTopics


class Start(NamedTuple):
    """The process has opened and locked its directory."""


class Tick(NamedTuple):
    """Time has passed; comes several times in a time to live."""


class LinkUp(NamedTuple):
    link: int


class LinkDown(NamedTuple):
    """A link has ended, or nothing came over it for a while."""

    link: int


class Received(NamedTuple):
    link: int
    message: Message


class LockRead(NamedTuple):
    """The lock as a read showed it that began after it was requested."""

    request: int
    view: LockView


class SwapAnswered(NamedTuple):
    """A swap was accepted or refused; `view` is the lock after that."""

    request: int
    accepted: bool
    view: LockView


class Renewed(NamedTuple):
    """The renewal that was sent at this time succeeded, or began a session with this number."""

    session: int
    sent: int


class SessionEnded(NamedTuple):
    """The lock says that the session has ended."""

    session: int


class AppendRequested(NamedTuple):
    """Everything that waits at the primary, as the content of one record."""

    content: bytes


class EpochContent(NamedTuple):
    """The operations with which an epoch begins, as bytes."""

    epoch: int
    content: bytes


class Synced(NamedTuple):
    """The journal is durable up to an lsn."""

    lsn: int


class Applied(NamedTuple):
    """Everything up to an lsn is applied, and readable here."""

    lsn: int


class PartialSynced(NamedTuple):
    """The mark that the store is partial was set or removed, durably."""

    partial: bool


class WasCut(NamedTuple):
    """The journal ends at an lsn, durably."""

    lsn: int


class Copied(NamedTuple):
    """The copy up to a mark is complete: every byte was compared and synced."""

    at: Mark


class Replaced(NamedTuple):
    """The directory was set aside; an empty store that is marked as partial has taken its place."""

    store: Store


class FilesMissing(NamedTuple):
    """What is to be applied needs a file that the peer does not have any more, so nothing after it can be applied."""


class SyncFailed(NamedTuple):
    """A write or sync failed: what is durable is unknown."""

    reason: str


class DiskSpace(NamedTuple):
    """The disk has crossed the watermark."""

    full: bool


class DamageNoted(NamedTuple):
    """The topics of which files of this store are damaged, as far as is known, in the order of their names."""

    topics: tuple[str, ...]


class Checkpointed(NamedTuple):
    """A manifest is durable; it and all synced segments hold everything up to a mark."""

    mark: Mark


class ReplacedFiles(NamedTuple):
    """Files with their sizes that no manifest names any more: of older generations, trimmed ledgers, deleted topics."""

    files: tuple[tuple[str, int], ...]


class SwitchRequested(NamedTuple):
    """An operator wants the backup to be live."""


class ForceRequested(NamedTuple):
    """An operator wants this store to be live although acknowledged records may be lost."""


Event: TypeAlias = (
    Start | Tick | LinkUp | LinkDown | Received | LockRead | SwapAnswered | Renewed | SessionEnded | AppendRequested
    | EpochContent | Synced | Applied | PartialSynced | WasCut | Copied | Replaced | FilesMissing | SyncFailed
    | DiskSpace | DamageNoted | Checkpointed | ReplacedFiles | RewriteFinished | SwitchRequested | ForceRequested
)  # fmt: skip


class ReadLock(NamedTuple):
    """Read the lock, linearizably: LockRead."""

    request: int


class SwapLock(NamedTuple):
    """Swap the record of the lock: SwapAnswered, or nothing if the answer is lost."""

    request: int
    swap: Swap


class Renew(NamedTuple):
    """Renew the session: Renewed with `sent`, SessionEnded, or nothing.

    If there is none, begin one, which ends the former session of the store and its lease.
    """

    session: int | None
    sent: int


class EndSession(NamedTuple):
    """End a session and its lease, if that can be done; it is not renewed any more."""

    session: int


class SendMessage(NamedTuple):
    """Send a message to the peer."""

    link: int
    message: Message


class SendStored(NamedTuple):
    """Read the records after lsn `first` up to `last` from the journal and send them as `template` with records."""

    link: int
    template: Records
    first: int
    last: int


class SendCopy(NamedTuple):
    """Send a message and the files as of its record, which is applied; remove none of them meanwhile."""

    link: int
    begin: CopyBegin


class BreakLink(NamedTuple):
    """Close a link; nothing that arrives over it counts any more."""

    link: int


class WriteRecords(NamedTuple):
    """Write records to the journal and sync it: Synced. `synced`: how far it is synced, for the records' envelopes."""

    records: tuple[LogRecord, ...]
    synced: int


class NoteCommit(NamedTuple):
    """Write a commit index to the journal when convenient; it need not be synced."""

    lsn: int


class Apply(NamedTuple):
    """Apply everything up to an lsn, in order of its numbers: Applied."""

    lsn: int


class AnswerClients(NamedTuple):
    """Answer the clients whose appends are in records up to an lsn."""

    lsn: int


class BuildEpoch(NamedTuple):
    """Make the operations that begin an epoch: EpochContent.

    If `forced` they have, for each topic, a roll to a ledger 2^20 above the last one, so that no position is used
    again, and a new partition version from the seqno at the cut.
    """

    epoch: int
    before: Mark
    forced: bool


class MarkPartial(NamedTuple):
    """Write and sync whether the store is partial: PartialSynced."""

    partial: bool


class Cut(NamedTuple):
    """Cut the journal after an lsn: WasCut."""

    lsn: int


class Replace(NamedTuple):
    """Set the directory aside, with what was to be applied, and begin a new store: Replaced."""


class DropJournal(NamedTuple):
    """Remove the journal files whose records are all up to an lsn."""

    lsn: int


class RemoveFiles(NamedTuple):
    """Remove replaced files."""

    names: tuple[str, ...]


class AppendSwap(NamedTuple):
    """Append the operation that puts a compaction's result in place."""

    result: RewriteFinished


class Serve(NamedTuple):
    """This member is live: accept clients."""


class StepDown(NamedTuple):
    """This member is not live any more: close to clients; the fate of appends that have no answer is unknown."""

    reason: str


class Stop(NamedTuple):
    """End the process, with the error if there is one."""

    reason: str
    error: Error | None = None


Effect: TypeAlias = (
    ReadLock | SwapLock | Renew | EndSession | SendMessage | SendStored | SendCopy | BreakLink | WriteRecords
    | NoteCommit | Apply | AnswerClients | DropJournal | RemoveFiles | AppendSwap | BuildEpoch | MarkPartial | Cut
    | Replace | Serve | StepDown | Stop
)  # fmt: skip
