"""The frames of the session protocol as plain values, and the names of gRPC services, methods and metadata

Each side collects its messages and sends them in one frame, not record by record. `txnbuffer.rpc.client_frames` and
`txnbuffer.rpc.server_frames` have the bytes. The client numbers its requests, over all its connections; the service
answers them by number in any order.

Sends are numbered 1, 2, 3 … over the life of one connection, in the order of the frames and of `sends` in a frame. If
the connection is lost, the client opens another one, names its session and its open transactions, and repeats the sends
that were not acknowledged. The service skips records of a transaction whose `tb.seq` the topic already has; a gap
before them is a failure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from broker_io.batch import Batch
from txnbuffer.coordinator.messages import Begin, Commit, GroupHeartbeat, Result, State
from txnbuffer.errors import Error, MalformedFrame
from txnbuffer.model import TxnId

SESSION_VERSION = 2
"""The version of the session protocol: client and service must have the same."""

MAX_FRAME_BYTES = 64 * 1024 * 1024
"""The largest frame that is accepted; clients start another one long before."""

FRAME_BYTES = 8 * 1024 * 1024
"""A client starts another frame when its records have this many bytes."""
SEND_BYTES = 4 * 1024 * 1024
"""The most bytes of records in a send that has more than one record."""


class VersionMismatch(MalformedFrame):
    """Client and service have different versions of the session protocol; the message says which one to upgrade."""

    grpc_status = "FAILED_PRECONDITION"


def check_version(version: int) -> None:
    """Raises VersionMismatch if a client's version differs from this service's."""
    if version != SESSION_VERSION:
        which = "service" if version > SESSION_VERSION else "client"
        raise VersionMismatch(
            f"the client has version {version} of the session protocol, the service version {SESSION_VERSION}: "
            f"upgrade the {which}"
        )


class SessionHello(NamedTuple):
    """The first message of a connection: the session that it continues, or "", and the open transactions."""

    version: int
    session: str
    open: tuple[TxnId, ...] = ()


class Send(NamedTuple):
    """Records for one topic, in order: all of them plain messages, or all with `tb.v`, `tb.txn` and `tb.seq`."""

    topic: str
    batch: Batch


class Abort(NamedTuple):
    """Abort a transaction that may have written to these topics; after a commit this is a query."""

    request: int
    txn: TxnId
    topics: tuple[str, ...] = ()


class Query(NamedTuple):
    """Query the outcome of a transaction, or its state."""

    request: int
    txn: TxnId


class LeaseRequest(NamedTuple):
    """Lease `size` ids."""

    request: int
    size: int


class NamedRequest(NamedTuple):
    """Register the topic, open the producer, or join the consumer group of this name."""

    request: int
    name: str


class Deletion(NamedTuple):
    """Delete the producer of this name; its numbers up to `over` still count as finished."""

    request: int
    name: str
    over: int = 0


class IdBlock(NamedTuple):
    """Leased ids `first` to `first + size - 1` that the session returns unused."""

    first: int
    size: int


@dataclass(frozen=True, slots=True)
class ClientFrame:
    """A frame from client to service, which executes the parts in the order of the fields."""

    hello: SessionHello | None = None
    registers: tuple[NamedRequest, ...] = ()
    leases: tuple[LeaseRequest, ...] = ()
    open_names: tuple[NamedRequest, ...] = ()
    delete_names: tuple[Deletion, ...] = ()
    joins: tuple[NamedRequest, ...] = ()
    members: tuple[GroupHeartbeat, ...] = ()
    begins: tuple[Begin, ...] = ()
    sends: tuple[Send, ...] = ()
    commits: tuple[Commit, ...] = ()
    aborts: tuple[Abort, ...] = ()
    queries: tuple[Query, ...] = ()
    returned: tuple[IdBlock, ...] = ()
    bye: bool = False
    """The client closes its session and expects no more answers; the service ends the connection."""


class Welcome(NamedTuple):
    """The answer to SessionHello: the session's id, and the coordinator's shard and epoch.

    `states` has the state of each transaction that the client named, or an error. The service refuses messages of more
    than `max_message_bytes`.
    """

    session: str
    shard: int
    epoch: int
    max_message_bytes: int
    states: tuple[tuple[TxnId, State | Error], ...] = ()


class Failure(NamedTuple):
    """A send failed: the records of `txn` were not appended, or none of it if that is None.

    A transaction with a failed send can only abort.
    """

    send: int
    error: Error
    txn: TxnId | None = None


@dataclass(frozen=True, slots=True)
class ServerFrame:
    """A frame from service to client.

    `acknowledged`: all sends up to this number are settled: durable, except for the failures reported up to now.
    `settled`: these sends are settled, in any order. It is never sent: only a link that appends itself sets it.
    `credits`: the bytes (keys, values and properties) that the client may have unacknowledged; None: unchanged.
    `draining`: the service is shutting down; begin nothing there.
    `goodbye`: the service ends the connection, for this reason.
    """

    welcome: Welcome | None = None
    acknowledged: int = 0
    failures: tuple[Failure, ...] = ()
    answers: tuple[tuple[int, Result], ...] = ()
    credits: int | None = None
    draining: bool = False
    goodbye: Error | None = None
    settled: tuple[int, ...] = ()


SESSION_SERVICE = "txnbuffer.v1.Session"
SESSION_METHOD = "Talk"
STREAMS_SERVICE = "txnbuffer.v1.Streams"
STREAMS_METHOD = "Stream"
ADMIN_SERVICE = "txnbuffer.v1.Admin"
LOG_SERVICE = "txnbuffer.v1.Log"
LOG_KEY = "txnbuffer-log"
"""Metadata with the identity of a log, the incarnation of its decision log: in calls the expected one, in answers the
service's own."""
ERROR_NAME = "txnbuffer-error"
ERROR_FAULT = "txnbuffer-fault"
"""Trailing metadata with the class and the fault of an error; the status has its message as details."""
