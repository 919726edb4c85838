"""The messages of change streams between client and server, and the effects and events of both sides, as plain values.

Seqnos are ordered within one topic and unrelated across topics. The messages of one stream are in order, those of
different streams are interleaved. `txnbuffer.rpc` encodes them.

Effects and events are requests of client and server to the shell around them.
"""

from __future__ import annotations

import enum
from typing import NamedTuple, TypeAlias

from broker_io.errors import Error
from txnbuffer.mutations.batch import MutationBatch
from txnbuffer.streams.failover import MAX_SEQNO, FailoverLog, ResumeToken, Version

NO_END = MAX_SEQNO
"""The end of a stream that never ends."""


# From client to server


class StreamHello(NamedTuple):
    """The first message of a connection. A second connection with the same `name` closes the first; "": no name.

    After `noop_interval` seconds without a message the server sends a noop; after two of them a side disconnects.
    """

    name: str
    noop_interval: float


class RequestFlag(enum.IntFlag):
    """Flags of a stream request. FROM_NOW, FROM_OLDEST: ignore `start`, and begin after the newest mutation, or before
    the oldest one; TO_NOW: end with the newest mutation; STRICT: an unknown version rolls back to 0 even if `start` is
    0; IGNORE_PURGED: ignore that deletions may have been missed.
    """

    NONE = 0
    FROM_NOW = 1
    FROM_OLDEST = 2
    TO_NOW = 4
    STRICT = 8
    IGNORE_PURGED = 16


class StreamRequest(NamedTuple):
    """Request a topic's mutations after `start`, up to the end of the snapshot that contains `end`.

    `stream` is its number: 1, 2, 3 … on a connection. The other fields are those of the client's resume token;
    `cluster` and `incarnation` are "" if unknown.
    """

    stream: int
    topic: str
    start: int
    end: int
    versions: tuple[Version, ...]
    snapshot_start: int
    snapshot_end: int
    flags: RequestFlag = RequestFlag.NONE
    cluster: str = ""
    incarnation: str = ""
    purge_seqno: int = 0


class CloseStream(NamedTuple):
    """The client closes the stream."""

    stream: int


class Grant(NamedTuple):
    """The total of mutations and bytes that the stream may send; its last mutation may exceed the bytes.

    Bytes are those of keys and values. Both are totals since the stream was opened, so a repeated grant has no effect.
    """

    stream: int
    items: int
    bytes: int


class NoopAnswer(NamedTuple):
    """The client is alive."""


ClientMessage: TypeAlias = StreamHello | StreamRequest | CloseStream | Grant | NoopAnswer

# From server to client


class Ok(NamedTuple):
    """The stream is open, at these seqnos; the client replaces its versions by `log`, the topic's failover log.

    The log is always complete: a client that kept versions of its own could not know that history has left them.
    """

    stream: int
    log: FailoverLog
    start: int
    snapshot_start: int
    snapshot_end: int
    end: int
    high_seqno: int
    purge_seqno: int
    cluster: str
    incarnation: str


class RollbackRequired(NamedTuple):
    """No stream: the client must first undo everything after `seqno`, or more, and then request it again."""

    stream: int
    seqno: int


class Refused(NamedTuple):
    """No stream, with the error."""

    stream: int
    error: Error


class SnapshotFlag(enum.IntFlag):
    """DISK: read from the log; REPEATS: a key may occur more than once, the newest last."""

    NONE = 0
    DISK = 1
    REPEATS = 2


class SnapshotBegin(NamedTuple):
    """The snapshot `[start, end]` begins: it has each key once, as of `end`.

    Within a snapshot, it moves its end forward; `start` is the same, and keys may then repeat.
    """

    stream: int
    start: int
    end: int
    flags: SnapshotFlag


class StreamMutations(NamedTuple):
    """Mutations of the current snapshot."""

    stream: int
    mutations: MutationBatch


class SnapshotEnd(NamedTuple):
    """The snapshot is complete: the client's data equals the topic at `seqno`.

    `high_seqno` is the newest mutation by now.
    """

    stream: int
    seqno: int
    high_seqno: int


class EndReason(enum.IntEnum):
    """Why a stream ended. OK: it reached its end. The values are part of the protocol."""

    OK = 0
    CLOSED = 1
    STATE_CHANGED = 2
    DISCONNECTED = 3
    TOO_SLOW = 4
    BACKFILL_FAILED = 5
    ROLLBACK = 6
    TRIMMED = 7
    DELETED = 8


class StreamEnd(NamedTuple):
    """The stream is over."""

    stream: int
    reason: EndReason


class Noop(NamedTuple):
    """The server is alive; the client must answer."""


class Goodbye(NamedTuple):
    """The server ends the connection, with the reason."""

    error: Error


ServerMessage: TypeAlias = (
    Ok | RollbackRequired | Refused | SnapshotBegin | StreamMutations | SnapshotEnd | StreamEnd | Noop | Goodbye
)

# Effects of the server


class FindTopic(NamedTuple):
    """Look up a topic; call `topic_found`, or `topic_refused` if it can't be streamed from here."""

    stream: int
    topic: str


class OpenCursor(NamedTuple):
    """Register a cursor for the topic's snapshots after `start`, up to the one that contains `end`.

    `floor`: the end of the snapshot that the client has in part; the first snapshot must not end before it.
    """

    stream: int
    topic: str
    start: int
    end: int
    floor: int


class CloseCursor(NamedTuple):
    """Close the cursor of a stream."""

    stream: int
    reason: EndReason


class EndConnection(NamedTuple):
    """End the connection: on the server after all pending messages are sent, on the client at once."""

    error: Error


ServerEffect: TypeAlias = FindTopic | OpenCursor | CloseCursor | EndConnection


class StreamDemand(NamedTuple):
    """The mutations and bytes that a stream can take from its cursor now; the last one may exceed the bytes."""

    stream: int
    items: int
    bytes: int


# Events of the client: `stream` is the handle returned by `open`, `token` the place of its reader after the event


class StreamOpened(NamedTuple):
    """The stream is open, from `token` on; `high_seqno` is the topic's newest mutation."""

    stream: int
    token: ResumeToken
    high_seqno: int


class Delivered(NamedTuple):
    """Mutations to apply in order; the newest of a key wins. Call `consumed` when they are processed."""

    stream: int
    mutations: MutationBatch
    bytes: int
    token: ResumeToken


class Completed(NamedTuple):
    """With everything delivered so far, the data equals the topic at `token.seqno`."""

    stream: int
    token: ResumeToken
    high_seqno: int


class CaughtUp(NamedTuple):
    """The data is complete up to the newest mutation known."""

    stream: int
    token: ResumeToken


class RollbackReceived(NamedTuple):
    """Undo everything after `seqno`, or a lower seqno at which the data was complete; call `rolled_back` with it.

    0 is always possible: discard all data.
    """

    stream: int
    seqno: int
    token: ResumeToken


class Interrupted(NamedTuple):
    """The stream was interrupted, and is opened again from `token`."""

    stream: int
    error: Error
    token: ResumeToken


class StreamEnded(NamedTuple):
    """The stream is over: it has reached its end (no error), or failed."""

    stream: int
    error: Error | None
    token: ResumeToken


ClientEvent: TypeAlias = (
    StreamOpened | Delivered | Completed | CaughtUp | RollbackReceived | Interrupted | StreamEnded | EndConnection
)
