"""Effects and events of change streams: what the two sides ask of the shell around them, as plain values."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from broker_io.errors import Error
from txnbuffer.mutations.batch import MutationBatch
from txnbuffer.streams.messages import EndReason
from txnbuffer.streams.token import ResumeToken

# Of the server's


class FindTopic(NamedTuple):
    """Tell `topic_found` what is known of the topic, or `topic_refused` why it can't be streamed from here."""

    stream: int
    topic: str


class OpenCursor(NamedTuple):
    """Register a cursor that gives the topic's snapshots behind `start`, up to the one that holds `end`.

    `floor`: the snapshot that the client holds in part ends there; nothing less than up to there completes it.
    """

    stream: int
    topic: str
    start: int
    end: int
    floor: int


class CloseCursor(NamedTuple):
    """The stream needs its cursor no more."""

    stream: int
    reason: EndReason


class EndConnection(NamedTuple):
    """End the connection once all that is to be sent is sent; on the client's side, at once."""

    error: Error


ServerEffect: TypeAlias = FindTopic | OpenCursor | CloseCursor | EndConnection


class StreamDemand(NamedTuple):
    """The stream can take so many mutations and bytes from its cursor now; the last one may go beyond the bytes."""

    stream: int
    items: int
    bytes: int


# Of the client's: `stream` is the handle that `open` gave, `token` where its reader is after the event


class StreamOpened(NamedTuple):
    """The stream flows, from `token` on; `high_seqno` is the topic's newest mutation."""

    stream: int
    token: ResumeToken
    high_seqno: int


class Delivered(NamedTuple):
    """Mutations to apply in order, the newest of a key wins. Tell `consumed` once they are done with."""

    stream: int
    mutations: MutationBatch
    bytes: int
    token: ResumeToken


class Completed(NamedTuple):
    """With all that was delivered the data is what the topic was at `token.seqno`."""

    stream: int
    token: ResumeToken
    high_seqno: int


class CaughtUp(NamedTuple):
    """The data is complete up to the newest mutation that there was."""

    stream: int
    token: ResumeToken


class RollBack(NamedTuple):
    """Undo everything behind a seqno at which the data was complete, `seqno` or a lower one; tell `rolled_back` which.

    0 always can be done: discard all.
    """

    stream: int
    seqno: int
    token: ResumeToken


class Interrupted(NamedTuple):
    """The stream ended unexpectedly, and will be opened again from `token`."""

    stream: int
    error: Error
    token: ResumeToken


class StreamEnded(NamedTuple):
    """The stream is over: it reached its end (no error), or it can't go on."""

    stream: int
    error: Error | None
    token: ResumeToken


ClientEvent: TypeAlias = (
    StreamOpened | Delivered | Completed | CaughtUp | RollBack | Interrupted | StreamEnded | EndConnection
)
