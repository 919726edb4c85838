"""The frames of the session protocol as plain values

Each side collects many messages in one frame; `txnbuffer.rpc.session_encoding` encodes and decodes them. The client
numbers its requests over all connections of its session; the service answers them by number, in any order.

Sends are numbered 1, 2, 3 … over one connection, in the order of the frames and of `sends` in a frame. If the
connection is lost, the client opens another one, names its session and its open transactions, and repeats the sends
that were not acknowledged. The service skips records of a transaction whose `tb.seq` the topic already has; if records
before them are missing, the send fails.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from broker_io.batch import Batch
from txnbuffer.coordinator.messages import Begin, Commit, GroupHeartbeat, Result, State
from txnbuffer.errors import Error
from txnbuffer.model import TxnId

FRAME_BYTES = 8 * 1024 * 1024
"""A client starts a new frame when the sends of one have this many bytes."""
SEND_BYTES = 4 * 1024 * 1024
"""Maximum bytes of a send that has more than one record."""


class SessionHello(NamedTuple):
    """The first message of a connection: the session to continue, "" for a new one, and its open transactions."""

    session: str
    open: tuple[TxnId, ...] = ()


class Send(NamedTuple):
    """Messages for one topic, in order: either all ordinary, or all with `tb.v`, `tb.txn` and `tb.seq`."""

    topic: str
    batch: Batch


class Abort(NamedTuple):
    """Abort a transaction that may have written to these topics. If it has ended, the answer is its outcome."""

    request: int
    txn: TxnId
    topics: tuple[str, ...] = ()


class Query(NamedTuple):
    """Ask for the outcome of a transaction, or for its state."""

    request: int
    txn: TxnId


class LeaseRequest(NamedTuple):
    """Lease `size` transaction ids."""

    request: int
    size: int


class NamedRequest(NamedTuple):
    """Register a topic, open a producer name, or start a new generation of a consumer group."""

    request: int
    name: str


class Deletion(NamedTuple):
    """Delete a producer name; its numbers up to `over` still count as committed."""

    request: int
    name: str
    over: int = 0


class IdBlock(NamedTuple):
    """The leased ids `first` to `first + size - 1`, which the session returns unused."""

    first: int
    size: int


@dataclass(frozen=True, slots=True)
class ClientFrame:
    """A frame from client to service. The service executes the fields in this order."""

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

    @property
    def rows(self) -> int:
        """The number of rows in all fields."""
        return (
            len(self.registers) + len(self.leases) + len(self.open_names) + len(self.delete_names) + len(self.joins)
            + len(self.members) + len(self.begins) + len(self.sends) + len(self.commits) + len(self.aborts)
            + len(self.queries) + len(self.returned)
        )  # fmt: skip

    def split(self) -> Iterator[tuple[str, Any, ClientFrame]]:
        """Yield the rows in this order, each with the name of its field and a frame that has only this row."""
        for name in ROW_FIELDS:
            for row in getattr(self, name):
                part: dict[str, Any] = {name: (row,)}
                yield name, row, ClientFrame(**part)


ROW_FIELDS = tuple(field.name for field in fields(ClientFrame) if field.name not in ("hello", "bye"))


class Welcome(NamedTuple):
    """The answer to SessionHello: the id of the session, and the shard and epoch of the coordinator.

    `states`: the state of each transaction that the client named, or an error. The service rejects messages of more
    than `max_message_bytes`.
    """

    session: str
    shard: int
    epoch: int
    max_message_bytes: int
    states: tuple[tuple[TxnId, State | Error], ...] = ()


class Failure(NamedTuple):
    """A send failed: the records of transaction `txn` were not appended; None: no record was appended.

    A transaction with a failed send can only abort.
    """

    send: int
    error: Error
    txn: TxnId | None = None


@dataclass(frozen=True, slots=True)
class ServerFrame:
    """A frame from service to client.

    - `acknowledged`: all sends up to this number are settled: durable, or reported as failures in this or an earlier
      frame.
    - `credits`: how many bytes of keys, values and properties the client may have unacknowledged; None: unchanged.
    - `draining`: the service is shutting down and accepts no new transactions.
    - `goodbye`: the error because of which the service ends the connection. `settled`: it has taken only the sends
      that it has acknowledged by now.
    """

    welcome: Welcome | None = None
    acknowledged: int = 0
    failures: tuple[Failure, ...] = ()
    answers: tuple[tuple[int, Result], ...] = ()
    credits: int | None = None
    draining: bool = False
    goodbye: Error | None = None
    settled: bool = False
