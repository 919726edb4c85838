"""What a client and a service tell each other over a session's connection, as plain values.

Both sides collect what has to be said and say it in one frame; nothing is sent a record or a
transaction at a time. `txnbuffer.wire` has the bytes. Requests are numbered by the client, once for
all its connections, and answered by that number in any order.

Sends are numbered 1, 2, 3 … over the life of one connection, in the order of the frames and of
`sends` within a frame. After a connection is lost the client opens another one, names its session and
what it has open, and sends again what was not acknowledged: records of a transaction whose `tb.seq`
the topic already has are left out by the service, a gap before them is a failure.

Names under which the service is asked over gRPC.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from broker_io.batch import Batch
from txnbuffer.coordinator.messages import Begin, Commit, GroupHeartbeat, Result, State
from txnbuffer.errors import Error, MalformedFrame
from txnbuffer.model import TxnId

SESSION_VERSION = 2
"""Version of the session protocol: client and service have to speak the same."""

MAX_FRAME_BYTES = 64 * 1024 * 1024
"""No frame is longer; clients begin another one long before."""

FRAME_BYTES = 8 * 1024 * 1024
"""A frame takes no more sends once it has so many bytes of records."""
SEND_BYTES = 4 * 1024 * 1024
"""So many bytes of records a send has at most, or one record."""


class VersionMismatch(MalformedFrame):
    """A client and a service of other versions of the session protocol met; the message says who is to be upgraded."""

    grpc_status = "FAILED_PRECONDITION"


def check_version(version: int) -> None:
    """Raises VersionMismatch where a client speaks another version than this service."""
    if version != SESSION_VERSION:
        which = "service" if version > SESSION_VERSION else "client"
        raise VersionMismatch(
            f"the client speaks version {version} of the session protocol, the service version {SESSION_VERSION}: "
            f"upgrade the {which}"
        )


class SessionHello(NamedTuple):
    """The first word of a connection: which session it goes on with ("": a new one), what it has open there."""

    version: int
    session: str
    open: tuple[TxnId, ...] = ()


class Send(NamedTuple):
    """Records for one topic, in order: all of them ordinary, or all with `tb.v`, `tb.txn` and `tb.seq`."""

    topic: str
    batch: Batch


class Abort(NamedTuple):
    """Abort a transaction that may have written to these topics; after a commit this is a query."""

    request: int
    txn: TxnId
    topics: tuple[str, ...] = ()


class Query(NamedTuple):
    """Ask how a transaction ended, or how far it has come."""

    request: int
    txn: TxnId


class LeaseRequest(NamedTuple):
    """Lease `size` ids."""

    request: int
    size: int


class NamedRequest(NamedTuple):
    """Register the topic, open the producer, or join the consumer group, of that name."""

    request: int
    name: str


class Deletion(NamedTuple):
    """Forget the producer of that name; its numbers up to `over` are over all the same."""

    request: int
    name: str
    over: int = 0


class IdBlock(NamedTuple):
    """Leased ids `first` to `first + size - 1` that the session gives back unused."""

    first: int
    size: int


@dataclass(frozen=True, slots=True)
class ClientFrame:
    """From client to service; the service takes the parts in the order of the fields."""

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
    """The client goes and wants nothing any more; the service ends the connection."""


class Welcome(NamedTuple):
    """The answer to hello: the session's id, the coordinator's shard and epoch, and `states`, which is what
    became of each transaction that was named, or why that can't be told. Messages of more than
    `max_message_bytes` will be refused.
    """

    session: str
    shard: int
    epoch: int
    max_message_bytes: int
    states: tuple[tuple[TxnId, State | Error], ...] = ()


class Failure(NamedTuple):
    """What was not appended of a send: the records of `txn`, or all of it where that is None.

    A transaction with a failed send can only abort.
    """

    send: int
    error: Error
    txn: TxnId | None = None


@dataclass(frozen=True, slots=True)
class ServerFrame:
    """From service to client.

    `acknowledged`: all sends up to this number are settled: durable, but for the failures told up to now.
    `settled`: these are, whatever those before them; said by a link that appends by itself, and never sent.
    `credits`: bytes (keys, values and properties) that the client may have unacknowledged; None: as before.
    `draining`: the service is about to stop; begin nothing here.
    `goodbye`: the service ends the connection, and why.
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
"""Metadata that names the log which a call is meant for, and which is served, by its decision log's incarnation."""
ERROR_NAME = "txnbuffer-error"
ERROR_FAULT = "txnbuffer-fault"
"""Trailing metadata with the class and the fault of the error whose message is the status's details."""
