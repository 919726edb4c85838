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
    """An entry of the snapshot is missing, torn or of another snapshot; `entry` is its key."""

    def __init__(self, topic: str, entry: str, what: str) -> None:
        super().__init__(
            topic,
            f"snapshot of topic {topic}, entry {entry}: {what}. Check with `txnbuf verify ADDRESS`; "
            f"`txnbuf recover ADDRESS {topic} --write` rebuilds it from the log",
        )
        self.entry = entry
        self.what = what


class SnapshotMissing(SnapshotError):
    """The end entry is missing though it must exist, and there is nothing else to recover from."""

    def __init__(self, topic: str, what: str) -> None:
        super().__init__(
            topic,
            f"topic {topic} has no snapshot: {what}. Check with `txnbuf verify ADDRESS`; "
            f"`txnbuf recover ADDRESS {topic} --write` rebuilds it from the rest of the log",
        )


class AppliedPositionTrimmed(SnapshotError):
    """The log after the end of the snapshot was trimmed, so messages may be missing."""

    def __init__(self, topic: str, applied: Position | None, first_ledger: int) -> None:
        where = "the start of its log" if applied is None else str(applied)
        super().__init__(
            topic,
            f"the snapshot of topic {topic} ends at {where}, but its log now begins with ledger {first_ledger} and "
            f"messages between may be missing. Check with `txnbuf verify ADDRESS`; "
            f"`txnbuf recover ADDRESS {topic} --write` accepts the gap",
        )
        self.applied = applied
        self.first_ledger = first_ledger


class UnsupportedSnapshot(SnapshotError, grpc_status="FAILED_PRECONDITION"):
    """An entry of a newer format version."""

    def __init__(self, topic: str, entry: str, version: str) -> None:
        super().__init__(
            topic,
            f"snapshot entry {entry} has format version {version}, which this release can't read: "
            f"use the release that wrote it, or a newer one",
        )
        self.entry = entry


class OwnershipLost(Fenced):
    """Another owner took the snapshot topic; this process must stop writing and never fence back."""

    def __init__(self, topic: str, epoch: int) -> None:
        super().__init__(
            f"another owner took {topic} from epoch {epoch}: this process can't write any more. "
            f"Stop it, or restart it once the other owner is gone"
        )
        self.epoch = epoch


class NotRegistered(CallerError, grpc_status="FAILED_PRECONDITION"):
    """A topic that this owner does not follow; register it first."""


class TopicDamaged(Damaged):
    """A topic with a damaged log; `needed` if the service can't run without the topic."""

    def __init__(self, topic: str, error: Error, *, needed: bool = False) -> None:
        found = (error.path, error.offset, error.what) if isinstance(error, Damaged) else ("", 0, str(error))
        super().__init__(*found)
        what = "the service can't run without it" if needed else "the service stopped writing to it, but not to others"
        message = (
            f"topic {topic!r} is damaged: {error}; {what}. `txnbuf verify ADDRESS` shows all damage: stop the service, "
            "restore the whole directory from its newest copy, and start the service again"
        )
        self.args = (message,)
        self.topic = topic


def stopped_by(topic: str, error: Error) -> Error:
    """The error that stopped a topic, as one that names the topic and says what to do."""
    known = isinstance(error, TopicDamaged) or not isinstance(error, Damaged)
    return error if known else TopicDamaged(topic, error)
