"""What a sink can meet; the tree's root is `broker_io.errors`."""

from __future__ import annotations

from broker_io.errors import CallerError, EnvironmentFault, StorageError


class ForeignSink(CallerError):
    """A sink that holds something else than what it is to be filled with; nothing of it was changed."""

    grpc_status = "FAILED_PRECONDITION"


class SinkFailed(StorageError):
    """A sink can't be read or written; what it held before stands, and filling it goes on from there."""

    grpc_status = "UNAVAILABLE"


class SinkFull(SinkFailed):
    """No space was left for a sink; what it held before stands, and filling it goes on from there."""

    grpc_status = "RESOURCE_EXHAUSTED"


class SinkLocked(EnvironmentFault):
    """Somebody else fills the sink, or writes to it."""

    retryable = True
    grpc_status = "ALREADY_EXISTS"
