"""What a change stream can meet; the tree's root is `broker_io.errors`."""

from __future__ import annotations

from broker_io.errors import CallerError, PeerError, StorageError


class UnreadableToken(CallerError):
    """A text that is no resume token of this release."""


class ForeignToken(CallerError):
    """A resume token of another topic or another cluster."""

    grpc_status = "FAILED_PRECONDITION"


class SeqnoOutOfRange(CallerError):
    """A stream was asked for with seqnos that contradict each other, or that the topic has not reached."""

    grpc_status = "OUT_OF_RANGE"


class StreamExists(CallerError):
    """A stream was asked for under a number that the connection has used."""

    grpc_status = "ALREADY_EXISTS"


class StreamMemoryExhausted(CallerError):
    """The service has no memory for another stream now."""

    retryable = True
    grpc_status = "RESOURCE_EXHAUSTED"


class StreamTrimmed(CallerError):
    """The mutations that the stream needs next are no longer in the log."""

    grpc_status = "OUT_OF_RANGE"


class StreamTooSlow(CallerError):
    """The stream was ended because its reader did not keep up."""

    retryable = True
    grpc_status = "RESOURCE_EXHAUSTED"


class StreamClosed(PeerError):
    """The service closed the stream."""

    retryable = True


class StreamFenced(PeerError):
    """The service that had the stream no longer owns its topic."""

    retryable = True
    grpc_status = "ABORTED"


class StreamBranched(PeerError):
    """The topic's history branched under the stream; opening it anew tells how far to go back."""

    retryable = True
    grpc_status = "ABORTED"


class StreamTopicDeleted(CallerError):
    """The topic of the stream was deleted."""

    grpc_status = "NOT_FOUND"


class UnknownCursor(CallerError):
    """A topic has no durable cursor of that name: it was removed, dropped for what it held, or never made."""

    grpc_status = "NOT_FOUND"


class TooManyCursors(CallerError):
    """A topic has as many durable cursors as it may."""

    grpc_status = "RESOURCE_EXHAUSTED"


class TokensFailed(StorageError):
    """A store of resume tokens can't be read or written; the token it had before stands."""

    grpc_status = "UNAVAILABLE"


class BackfillFailed(StorageError):
    """What the stream needed could not be read from the log."""

    retryable = True
    grpc_status = "UNAVAILABLE"


class StreamViolation(PeerError):
    """The other side of a stream does not keep to the protocol."""

    grpc_status = "INTERNAL"


class ConnectionSilent(PeerError):
    """Nothing was heard from the other side of a connection for too long."""

    retryable = True


class ConnectionSuperseded(PeerError):
    """Another connection of the same name was opened: this one must not go on."""

    grpc_status = "ABORTED"
