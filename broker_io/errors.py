"""The root of the one error tree, and what a broker can raise.

Every error says whose fault it is, carries the exit code that `txnbuf` ends with, whether trying the
same again can help, and the name of the gRPC status that stands for it; its message names the thing
and tells what to do. `txnbuffer.errors` and `snapshots.errors` grow from here.

Errors over a wire: told on one side, raised on the other as the same class of the one tree.

An error is an Avro record: `name` of its class, `fault` (caller, peer, storage, environment), `message`, and
`details`, its attributes that are texts or whole numbers. A class that the receiver does not know becomes the
one of its fault. A gRPC call that fails ends with the gRPC status of the class, and has the record as trailing
metadata under `txnbuffer-error-bin`.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any, ClassVar


class Fault(enum.Enum):
    """Whose fault an error is, and so who can mend it."""

    CALLER = "caller"
    PEER = "peer"
    STORAGE = "storage"
    ENVIRONMENT = "environment"


class Error(Exception):
    """Root of every error that txnbuffer raises on purpose."""

    fault: ClassVar[Fault] = Fault.ENVIRONMENT
    exit_code: ClassVar[int] = 1
    retryable: ClassVar[bool] = False
    grpc_status: ClassVar[str] = "INTERNAL"


def as_error(error: BaseException) -> Error:
    """Any failure as one of the tree."""
    return error if isinstance(error, Error) else Error(f"unexpected: {error!r}")


class CallerError(Error):
    """The request can't be served as it stands; the caller has to change it."""

    fault = Fault.CALLER
    exit_code = 2
    grpc_status = "INVALID_ARGUMENT"


class PeerError(Error):
    """Another process took over, went away, or speaks differently."""

    fault = Fault.PEER
    exit_code = 3
    grpc_status = "UNAVAILABLE"


class StorageError(Error):
    """What is stored is damaged, or can't be stored."""

    fault = Fault.STORAGE
    exit_code = 4
    grpc_status = "DATA_LOSS"


class EnvironmentFault(Error):
    """This machine or installation lacks something."""

    fault = Fault.ENVIRONMENT
    exit_code = 5
    grpc_status = "FAILED_PRECONDITION"


class InvalidTopicName(CallerError):
    """A topic name that can't be."""


class InvalidAddress(CallerError):
    """A broker address whose scheme or path can't be understood."""


class UnknownOption(CallerError):
    """An option that this kind of broker does not have."""


class TopicNotFound(CallerError):
    """No topic of that name."""

    grpc_status = "NOT_FOUND"


class TopicPartitioned(TopicNotFound):
    """A name that stands for partitions, each of which is a topic of its own."""


class MessageTooLarge(CallerError):
    """A message over the size limit; nothing of its batch was appended."""


class InvalidMessage(CallerError):
    """A message or batch of messages that can't be stored as it stands; nothing of its batch was appended."""


class PositionTrimmed(CallerError):
    """A read from a position whose messages are gone; skipping them silently would be a hole."""

    grpc_status = "OUT_OF_RANGE"


class ProtectedTopic(CallerError):
    """A change asked of a topic that belongs to the service which was asked."""

    grpc_status = "PERMISSION_DENIED"


class TooManyStreams(CallerError):
    """A service has as many readers or writers open as it may."""

    retryable = True
    grpc_status = "RESOURCE_EXHAUSTED"


class MalformedMessage(CallerError):
    """Bytes that are no message of the log service; whoever sent them speaks another protocol."""


class NotAuthorized(CallerError):
    """Credentials that are wrong, or may not do what was asked."""

    grpc_status = "PERMISSION_DENIED"


class NotSupported(CallerError):
    """Something of the broker port that this backend can't do."""

    grpc_status = "UNIMPLEMENTED"


class Closed(CallerError):
    """A call on something that was closed."""

    grpc_status = "FAILED_PRECONDITION"


class ReadOnly(CallerError):
    """A change asked of a log that was opened for reading only."""

    grpc_status = "FAILED_PRECONDITION"


class Fenced(PeerError):
    """Another exclusive writer opened the topic: ownership is lost, open anew only on evidence."""

    grpc_status = "ABORTED"


class StillHeld(PeerError):
    """Another process holds the topic exclusively, and was still there after the wait; waiting on can help."""

    retryable = True
    grpc_status = "UNAVAILABLE"


class ServiceUnavailable(PeerError):
    """No service answers at the address, or not in time, or the connection broke; trying again can help."""

    retryable = True


class ClusterRefused(PeerError):
    """A cluster refuses a request; `status` is that of its REST interface, or 0, and `reason` what it says."""

    grpc_status = "FAILED_PRECONDITION"

    def __init__(self, message: str, status: int, reason: str) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason


class AppendUnknown(PeerError):
    """The connection broke while an append was under way: it may stand in the log or not; open another writer."""

    retryable = True


class EntryTooLarge(AppendUnknown):
    """Of messages that were sent together one is too large for the cluster: each may stand in the log or not."""


class Damaged(StorageError):
    """Bytes that are not what was written; names the file and the offset."""

    def __init__(self, path: str, offset: int, what: str) -> None:
        super().__init__(f"{path}, offset {offset}: {what}")
        self.path = path
        self.offset = offset
        self.what = what


class ForeignDirectory(StorageError):
    """A directory that holds something else than an embedded log."""

    grpc_status = "FAILED_PRECONDITION"


class UnsupportedFormat(StorageError):
    """A file of another format version than this release reads."""

    grpc_status = "FAILED_PRECONDITION"


class DiskFailed(StorageError):
    """A write or fsync failed: the log has stopped; nothing acknowledged is lost, reopen to go on."""

    grpc_status = "UNAVAILABLE"


class DiskFull(DiskFailed):
    """No space was left: the log has stopped; nothing acknowledged is lost, free space and reopen."""

    grpc_status = "RESOURCE_EXHAUSTED"


class DiskWatermark(StorageError):
    """Less free space than the watermark: appends are refused until there is more; nothing stopped."""

    retryable = True
    grpc_status = "RESOURCE_EXHAUSTED"


class Locked(EnvironmentFault):
    """Another process owns the directory."""

    grpc_status = "ALREADY_EXISTS"


class UnsafePolicy(EnvironmentFault):
    """A policy of the cluster would drop messages that are still needed; nothing was written."""


class TooManyFiles(EnvironmentFault):
    """The process or the machine has no file descriptor left; nothing was changed and nothing has stopped."""

    retryable = True
    grpc_status = "RESOURCE_EXHAUSTED"


class MissingDependency(EnvironmentFault):
    """An optional package is not installed."""


ERROR_TRAILER = "txnbuffer-error-bin"
LONGEST_MESSAGE = 2000
"""Characters of a message that travel: metadata has a limit of some kilobytes."""

ERROR_SCHEMA = {
    "type": "record",
    "name": "Error",
    "fields": [
        {"name": "name", "type": "string"},
        {"name": "fault", "type": "string"},
        {"name": "message", "type": "string"},
        {"name": "details", "type": {"type": "map", "values": ["long", "string"]}},
    ],
}

_OF_FAULT: dict[str, type[Error]] = {
    Fault.CALLER.value: CallerError,
    Fault.PEER.value: PeerError,
    Fault.STORAGE.value: StorageError,
    Fault.ENVIRONMENT.value: EnvironmentFault,
}


def detail(value: object) -> int | str | None:
    """An attribute of an error as it travels; None if it doesn't."""
    if isinstance(value, str):
        return _short(value)
    return value if type(value) is int and -(2**63) <= value < 2**63 else None


def error_to_fields(error: Error, as_detail: Callable[[object], int | str | None] = detail) -> dict[str, Any]:
    """The record of an error; `as_detail` makes of each attribute what travels."""
    details = {name: as_detail(value) for name, value in vars(error).items()}
    return {
        "name": type(error).__name__,
        "fault": error.fault.value,
        "message": _short(str(error)),
        "details": {name: value for name, value in details.items() if value is not None},
    }


def error_from_fields(fields: dict[str, Any]) -> Error:
    """The error of a record. Raises ValueError if it is none."""
    kind = _classes().get(fields["name"]) or _OF_FAULT.get(fields["fault"])
    if kind is None:
        raise ValueError(f"an error has the fault {fields['fault']!r}")
    error = kind.__new__(kind)
    Exception.__init__(error, fields["message"])
    for name, value in fields["details"].items():
        if not hasattr(kind, name):  # what a class has of its own is not the peer's to say
            setattr(error, name, value)
    return error


def _short(text: str) -> str:
    clean = text.encode(errors="replace").decode()
    return clean if len(clean) <= LONGEST_MESSAGE else clean[: LONGEST_MESSAGE - 1] + "…"


def _classes() -> dict[str, type[Error]]:
    found: dict[str, type[Error]] = {}
    waiting: list[type[Error]] = [Error]
    while waiting:
        kind = waiting.pop()
        found.setdefault(kind.__name__, kind)
        waiting += kind.__subclasses__()
    return found
