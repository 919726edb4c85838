"""Errors of snapshots; each message names the command that helps."""

from __future__ import annotations

from broker_io.errors import CallerError, Damaged, Error, Fenced, StorageError
from broker_io.position import Position


class SnapshotError(StorageError):
    """Root of the errors that leave a topic without its snapshot; `topic` is the data topic."""

    def __init__(self, topic: str, message: str) -> None:
        super().__init__(message)
        self.topic = topic


class SnapshotDamaged(SnapshotError):
    """An entry of the snapshot is missing, torn or doesn't belong; `entry` is its key."""

    def __init__(self, topic: str, entry: str, what: str) -> None:
        super().__init__(
            topic,
            f"snapshot of topic {topic}, entry {entry}: {what}. Look closer with `txnbuf verify ADDRESS`; "
            f"`txnbuf recover ADDRESS {topic} --write` builds it anew from the log",
        )
        self.entry = entry
        self.what = what


class SnapshotMissing(SnapshotError):
    """There is no end entry where one must be, and nothing else to recover from."""

    def __init__(self, topic: str, what: str) -> None:
        super().__init__(
            topic,
            f"topic {topic} has no snapshot: {what}. Look closer with `txnbuf verify ADDRESS`; "
            f"`txnbuf recover ADDRESS {topic} --write` makes one from what the log still holds",
        )


class AppliedPositionTrimmed(SnapshotError):
    """The log is gone behind the position where the snapshot ends, so what followed can't be known."""

    def __init__(self, topic: str, applied: Position | None, first_ledger: int) -> None:
        where = "the start of its log" if applied is None else str(applied)
        super().__init__(
            topic,
            f"the snapshot of topic {topic} ends at {where}, but its log now begins with ledger {first_ledger} and "
            f"nothing proves that no message is missing between. Look closer with `txnbuf verify ADDRESS`; "
            f"`txnbuf recover ADDRESS {topic} --write` accepts the hole",
        )
        self.applied = applied
        self.first_ledger = first_ledger


class UnsupportedSnapshot(SnapshotError):
    """An entry written by a newer release."""

    grpc_status = "FAILED_PRECONDITION"

    def __init__(self, topic: str, entry: str, version: str) -> None:
        super().__init__(
            topic,
            f"snapshot entry {entry} has format version {version}, which this release can't read: "
            f"use the release that wrote it, or a newer one",
        )
        self.entry = entry


class OwnershipLost(Fenced):
    """Another owner has taken the snapshot topic; this process must stop writing and never fence back."""

    def __init__(self, topic: str, epoch: int) -> None:
        super().__init__(
            f"another owner has taken {topic} from epoch {epoch}: nothing more can be written here. "
            f"Stop this process, or start it anew once the other one is gone"
        )
        self.epoch = epoch


class NotRegistered(CallerError):
    """A topic that this owner doesn't tail; register it first."""

    grpc_status = "FAILED_PRECONDITION"


class TopicDamaged(Damaged):
    """A topic whose log is not what was written; `needed` where the service can't do without it."""

    def __init__(self, topic: str, error: Error, *, needed: bool = False) -> None:
        found = (error.path, error.offset, error.what) if isinstance(error, Damaged) else ("", 0, str(error))
        super().__init__(*found)
        what = "the service can't do without it" if needed else "nothing more is written to it, other topics go on"
        told = f"topic {topic!r} is damaged: {error}; {what}. `txnbuf verify ADDRESS` shows all that is wrong: stop"
        todo = "the service, put the whole directory back from its newest copy, and start it again"
        self.args = (f"{told} {todo}",)
        self.topic = topic


def stopped_by(topic: str, error: Error) -> Error:
    """The error that stands for what stopped a topic: one that says which topic it is, and what to do."""
    known = isinstance(error, TopicDamaged) or not isinstance(error, Damaged)
    return error if known else TopicDamaged(topic, error)
