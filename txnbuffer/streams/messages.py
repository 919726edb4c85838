"""The messages of change streams between client and server, as plain values.

Seqnos are ordered within one topic and unrelated across topics. The messages of one stream stay in order, those of
different streams are interleaved. `txnbuffer.rpc` encodes them.
"""

from __future__ import annotations

import enum
from typing import NamedTuple, TypeAlias

from broker_io.errors import Error
from txnbuffer.errors import (
    BackfillFailed,
    StreamBranched,
    StreamClosed,
    StreamFenced,
    StreamTooSlow,
    StreamTopicDeleted,
    StreamTrimmed,
)
from txnbuffer.mutations.batch import MutationBatch
from txnbuffer.streams.failover import MAX_SEQNO, FailoverLog, Version

STREAM_VERSION = 1
"""Version of the stream protocol; a server refuses a client of a newer one."""

NO_END = MAX_SEQNO
"""The end of a stream that never ends."""


# From client to server


class StreamHello(NamedTuple):
    """The first word of a connection. Opening a second one of the same `name` closes the first ("": has no name).

    `noop_interval` in seconds: who hears nothing for that long asks, who hears nothing for two of them hangs up.
    """

    version: int
    name: str
    noop_interval: float


class RequestFlag(enum.IntFlag):
    """FROM_NOW, FROM_OLDEST: start behind the last, before the oldest mutation there is, whatever `start` says;
    TO_NOW: end with the last mutation there is; STRICT: an unknown version goes back to 0 even from there;
    IGNORE_PURGED: deletions that are forgotten don't matter.
    """

    NONE = 0
    FROM_NOW = 1
    FROM_OLDEST = 2
    TO_NOW = 4
    STRICT = 8
    IGNORE_PURGED = 16


class StreamRequest(NamedTuple):
    """Stream a topic's mutations behind `start`, up to the end of the snapshot that holds `end`.

    `stream` numbers it: 1, 2, 3 … over the life of the connection. The rest says what the client holds,
    as its resume token does; `cluster` and `incarnation` are "" where it does not know.
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
    """The client wants nothing more of the stream."""

    stream: int


class Grant(NamedTuple):
    """The stream may send until so many mutations and bytes were sent in all, its last one may go beyond.

    Bytes are those of keys and values. Both are totals since the stream was opened, so a grant that comes
    twice grants nothing more.
    """

    stream: int
    items: int
    bytes: int


class NoopAnswer(NamedTuple):
    """The client is alive."""


ClientMessage: TypeAlias = StreamHello | StreamRequest | CloseStream | Grant | NoopAnswer

# From server to client


class Ok(NamedTuple):
    """The stream is open, at these seqnos; `log` is the topic's, and the client's from now on.

    It always comes whole: a client that kept an older version of its own beside a new one could not know
    that history has left it.
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
    """No stream: the client must first undo all behind a seqno, or more; then it asks again."""

    stream: int
    seqno: int


class Refused(NamedTuple):
    """No stream, and why."""

    stream: int
    error: Error


class SnapshotFlag(enum.IntFlag):
    """DISK: read from the log; REPEATS: a key may stand in it more than once, the newest last."""

    NONE = 0
    DISK = 1
    REPEATS = 2


class SnapshotBegin(NamedTuple):
    """The snapshot `[start, end]` begins: each key is in it once, as of `end`.

    Within a snapshot it moves that one's end further on; `start` stays, and keys can then repeat.
    """

    stream: int
    start: int
    end: int
    flags: SnapshotFlag


class StreamMutations(NamedTuple):
    """Mutations of the snapshot that has begun."""

    stream: int
    mutations: MutationBatch


class SnapshotEnd(NamedTuple):
    """The snapshot is complete: what the client holds is what the topic was at `seqno`.

    `high_seqno` is the newest that there is by now.
    """

    stream: int
    seqno: int
    high_seqno: int


class EndReason(enum.IntEnum):
    """Why a stream ended. OK: it reached its end. The values are written."""

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
    """The server asks whether the client is alive, and is alive itself."""


class Goodbye(NamedTuple):
    """The server ends the connection, and why."""

    error: Error


ServerMessage: TypeAlias = (
    Ok | RollbackRequired | Refused | SnapshotBegin | StreamMutations | SnapshotEnd | StreamEnd | Noop | Goodbye
)

ERROR_OF: dict[EndReason, type[Error]] = {
    EndReason.CLOSED: StreamClosed,
    EndReason.STATE_CHANGED: StreamFenced,
    EndReason.DISCONNECTED: StreamClosed,
    EndReason.TOO_SLOW: StreamTooSlow,
    EndReason.BACKFILL_FAILED: BackfillFailed,
    EndReason.ROLLBACK: StreamBranched,
    EndReason.TRIMMED: StreamTrimmed,
    EndReason.DELETED: StreamTopicDeleted,
}
_ADVICE = {
    EndReason.CLOSED: "the service closed it; open it again",
    EndReason.STATE_CHANGED: "the service no longer owns the topic; open it again at the new owner",
    EndReason.DISCONNECTED: "the connection is lost; open it again",
    EndReason.TOO_SLOW: "its reader did not keep up; open it again, and read faster or with a larger window",
    EndReason.BACKFILL_FAILED: "the log could not be read; check the service's log output, then open it again",
    EndReason.ROLLBACK: "the topic's history branched; open it again to get the rollback seqno",
    EndReason.TRIMMED: "its next mutations were trimmed; start from the oldest mutation",
    EndReason.DELETED: "the topic was deleted; a new one of its name is read from the beginning",
}


def end_error(topic: str, reason: EndReason) -> Error | None:
    """What a stream that ended so is to its reader; None if it reached its end."""
    if reason is EndReason.OK:
        return None
    return ERROR_OF[reason](f"the stream of topic {topic} ended: {_ADVICE[reason]}")
