"""The root of the error tree, and the errors of brokers.

Every error states whose fault it is, the exit code of `txnbuf`, whether a retry can help, and the name of its
gRPC status. Its message names what is wrong and says what to do. `txnbuffer.errors` and `snapshots.errors`
extend this tree.

`broker_io.rpc.encoding` sends errors to other processes. A failed gRPC call ends with the gRPC status of the class and
has the error as trailing metadata under `txnbuffer-error-bin`.
"""

from __future__ import annotations

import copyreg
import enum
import errno
import pickle
from collections.abc import Callable
from typing import Any, ClassVar, Self


class Fault(enum.Enum):
    """Whose fault an error is, and so who can fix it."""

    CALLER = "caller"
    PEER = "peer"
    STORAGE = "storage"
    ENVIRONMENT = "environment"


class Error(Exception):
    """Root of every error that txnbuffer raises on purpose.

    Errors can be copied and pickled, with their attributes, cause and notes.
    """

    fault: ClassVar[Fault] = Fault.ENVIRONMENT
    exit_code: ClassVar[int] = 1
    retryable: ClassVar[bool] = False
    grpc_status: ClassVar[str] = "INTERNAL"

    def __init_subclass__(cls, *, retryable: bool | None = None, grpc_status: str | None = None) -> None:
        super().__init_subclass__()
        if retryable is not None:
            cls.retryable = retryable
        if grpc_status is not None:
            cls.grpc_status = grpc_status

    def __reduce__(self) -> tuple[Callable[..., Self], tuple[object, ...], dict[str, Any]]:
        """The class and its text, because the arguments of most constructors are no texts, and then the rest."""
        hidden = self.__suppress_context__
        state = {**vars(self), "__cause__": _Cause(self.__cause__), "__suppress_context__": hidden}
        return copyreg.__newobj__, (type(self), *self.args), state  # type: ignore[attr-defined]  # missing in typeshed

    def __setstate__(self, state: dict[str, Any] | None) -> None:
        """The attributes, and after them the cause, which would hide the context."""
        rest = dict(state or {})
        self.__cause__ = rest.pop("__cause__").error
        super().__setstate__(rest)


class _Cause:
    """The cause of an error. If it can't be pickled or read back, an error with its text takes its place."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error

    def __reduce__(self) -> tuple[Callable[..., _Cause], tuple[bytes, str]]:
        text = f"{type(self.error).__name__}: {self.error}"
        try:
            return _read_cause, (pickle.dumps(self.error), text)
        except Exception:
            return _read_cause, (pickle.dumps(Error(text)), text)


def _read_cause(pickled: bytes, text: str) -> _Cause:
    try:
        return _Cause(pickle.loads(pickled))  # noqa: S301  # a part of what the caller unpickles anyway
    except Exception:
        return _Cause(Error(text))


def as_error(error: BaseException) -> Error:
    """Any exception as an error of the tree."""
    return error if isinstance(error, Error) else Error(f"unexpected: {error!r}")


class CallerError(Error):
    """The request can't be served as it is; the caller has to change it."""

    fault = Fault.CALLER
    exit_code = 2
    grpc_status = "INVALID_ARGUMENT"


class PeerError(Error):
    """Another process took over, is unavailable, or has another version."""

    fault = Fault.PEER
    exit_code = 3
    grpc_status = "UNAVAILABLE"


class StorageError(Error):
    """Stored data is damaged, or data can't be stored."""

    fault = Fault.STORAGE
    exit_code = 4
    grpc_status = "DATA_LOSS"


class EnvironmentFault(Error):
    """This machine or installation lacks something that is required."""

    fault = Fault.ENVIRONMENT
    exit_code = 5
    grpc_status = "FAILED_PRECONDITION"


class InvalidTopicName(CallerError):
    """An invalid topic name."""


class InvalidAddress(CallerError):
    """A broker address with an invalid scheme or path."""


class UnknownOption(CallerError):
    """An option that this backend does not have."""


class TopicNotFound(CallerError, grpc_status="NOT_FOUND"):
    """A topic that does not exist."""


class TopicPartitioned(TopicNotFound):
    """The name of a partitioned topic; only its partitions are topics."""


class MessageTooLarge(CallerError):
    """A message over the size limit; nothing of its batch was appended."""


class InvalidMessage(CallerError):
    """A message or batch that can't be stored as it is; nothing of the batch was appended."""


class PositionTrimmed(CallerError, grpc_status="OUT_OF_RANGE"):
    """A read from a position whose messages were trimmed; the reader does not skip them silently."""


class LogRestored(CallerError):
    """The log lacks what this client or reader has read: an older copy was restored, or a promotion was forced."""


class ProtectedTopic(CallerError, grpc_status="PERMISSION_DENIED"):
    """A change of a topic that belongs to the service."""


class LimitExceeded(CallerError, retryable=True, grpc_status="RESOURCE_EXHAUSTED"):
    """A limit refuses a request, of which nothing was done: retry it after `retry_after` seconds.

    `limit`: the setting, such as "limits.sessions", or "overload" while the service has more to do than it can.
    """

    DEFAULT_RETRY = 1.0

    def __init__(self, message: str, limit: str = "", retry_after: float = DEFAULT_RETRY) -> None:
        super().__init__(message)
        self.limit = limit
        self.retry_after_ms = max(round(retry_after * 1000), 1)

    @property
    def retry_after(self) -> float:
        """Seconds after which a retry can succeed."""
        return float(vars(self).get("retry_after_ms", 1000 * self.DEFAULT_RETRY)) / 1000


class TooManyStreams(LimitExceeded):
    """The service has reached its limit of open readers, writers or change streams."""


class VersionMismatch(CallerError, grpc_status="FAILED_PRECONDITION"):
    """Client and service have different versions of the protocol; the message says which side to upgrade."""


class MalformedMessage(CallerError):
    """Bytes that are not a message of the log service; the sender uses another protocol."""


class NotAuthorized(CallerError, grpc_status="PERMISSION_DENIED"):
    """Credentials that are wrong, or lack the permission."""


class Unauthenticated(NotAuthorized, grpc_status="UNAUTHENTICATED"):
    """Credentials that are missing, unknown, expired or revoked."""


class NotSupported(CallerError, grpc_status="UNIMPLEMENTED"):
    """An operation of the broker port that this backend can't do."""


class Closed(CallerError, grpc_status="FAILED_PRECONDITION"):
    """A call on a closed object."""


class UsedAfterFork(CallerError, grpc_status="FAILED_PRECONDITION"):
    """A forked child used a client of its parent, or a service after its parent had used one."""


class ReadOnly(CallerError, grpc_status="FAILED_PRECONDITION"):
    """A change of a log that was opened read-only."""


class Fenced(PeerError, grpc_status="ABORTED"):
    """Another exclusive writer opened the topic: ownership is lost; reopen only on evidence that it is gone."""


class StillHeld(PeerError, retryable=True, grpc_status="UNAVAILABLE"):
    """Another process still held the topic exclusively after the wait; a longer wait can help."""


class ServiceUnavailable(PeerError, retryable=True):
    """The service did not answer, or not in time, or the connection broke; a retry can help."""


class UntrustedService(ServiceUnavailable):
    """The certificate of a service does not verify: the CA certificate, the host name or the address is wrong."""


class ClusterRefused(PeerError, grpc_status="FAILED_PRECONDITION"):
    """A cluster rejects a request; `status` is the HTTP status, or 0, and `reason` the cluster's text."""

    def __init__(self, message: str, status: int, reason: str) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason


class AppendUnknown(PeerError, retryable=True):
    """The connection broke during an append, which may or may not be in the log; open another writer."""


class NotLive(ServiceUnavailable):
    """A request to a member of a pair that is not live; the other one may be."""


class LockUnavailable(PeerError, retryable=True):
    """The lock of a pair did not answer: what was asked of it may or may not have happened."""


class NotInSync(PeerError, retryable=True, grpc_status="FAILED_PRECONDITION"):
    """The backup of a pair is not in sync, so it can't take over, or nothing can be written; wait until it is."""


class EntryTooLarge(AppendUnknown):
    """One of several messages that were sent together is too large; each may or may not be in the log."""


class Damaged(StorageError):
    """Bytes that differ from what was written; names the file and the offset."""

    def __init__(self, path: str, offset: int, what: str) -> None:
        super().__init__(f"{path}, offset {offset}: {what}")
        self.path = path
        self.offset = offset
        self.what = what


class ForeignDirectory(StorageError, grpc_status="FAILED_PRECONDITION"):
    """A directory that does not contain an embedded log."""


class UnsupportedFormat(StorageError, grpc_status="FAILED_PRECONDITION"):
    """A file whose format version this release does not read."""


class NotAMember(StorageError):
    """A directory is the store of a member of a pair, and was opened for writing without the pair."""


class NotPromotable(StorageError, grpc_status="FAILED_PRECONDITION"):
    """A store that must never be live, because parts of its log are missing."""


class DiskFailed(StorageError, grpc_status="UNAVAILABLE"):
    """A write or fsync failed, so the log has stopped; nothing acknowledged is lost, reopen the log."""


class DiskFull(DiskFailed, grpc_status="RESOURCE_EXHAUSTED"):
    """No space was left, so the log has stopped; nothing acknowledged is lost, free space and reopen the log."""


class DiskWatermark(StorageError, retryable=True, grpc_status="RESOURCE_EXHAUSTED"):
    """Less free space than the watermark: appends are rejected until there is more; the log has not stopped."""


class Locked(EnvironmentFault, grpc_status="ALREADY_EXISTS"):
    """Another process owns the directory."""


class UnsafePolicy(EnvironmentFault):
    """A policy of the cluster could drop messages that are still needed; nothing was written."""


class TooManyFiles(EnvironmentFault, retryable=True, grpc_status="RESOURCE_EXHAUSTED"):
    """The process or the machine has no file descriptor left; nothing was changed, the log has not stopped."""


class MissingDependency(EnvironmentFault):
    """An optional package is not installed."""


def out_of_files(error: OSError) -> bool:
    """Whether an error means that no file descriptor is left, which is no fault of the disk."""
    return error.errno in (errno.EMFILE, errno.ENFILE)


def disk_error(error: OSError, path: str, what: str, remedy: str = "") -> DiskFailed | TooManyFiles:
    """The error of the tree for an OSError about a path.

    `what` describes the consequence, `remedy` what to do if there are file descriptors.
    """
    if out_of_files(error):
        return TooManyFiles(_disk_text(error, path, what, remedy))
    return disk_failure(error, path, what, remedy)


def disk_failure(error: OSError, path: str, what: str, remedy: str = "") -> DiskFailed:
    """As `disk_error`, for an OSError that stops the log."""
    kind = DiskFull if error.errno in (errno.ENOSPC, errno.EDQUOT) else DiskFailed
    return kind(_disk_text(error, path, what, remedy))


def _disk_text(error: OSError, path: str, what: str, remedy: str) -> str:
    remedy = "raise the limit (ulimit -n)" if out_of_files(error) else remedy
    return f"{error.filename or path}: {error.strerror or error}: {what}{remedy and f'; {remedy}'}"
