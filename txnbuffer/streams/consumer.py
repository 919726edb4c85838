"""One stream at the client, over all connections on which it is opened."""

from __future__ import annotations

import numpy as np

from broker_io.errors import Error
from txnbuffer.errors import InvalidRequest
from txnbuffer.mutations.batch import MutationBatch
from txnbuffer.streams.credits import Window
from txnbuffer.streams.effects import (
    CaughtUp,
    ClientEvent,
    Completed,
    Delivered,
    Ended,
    Interrupted,
    Opened,
    RollBack,
)
from txnbuffer.streams.errors import ForeignToken, StreamViolation
from txnbuffer.streams.messages import (
    EndReason,
    Grant,
    Ok,
    Refused,
    RequestFlag,
    Rollback,
    SnapshotBegin,
    SnapshotEnd,
    StreamEnd,
    StreamMutations,
    StreamRequest,
    end_error,
)
from txnbuffer.streams.states import Consuming, Event, consumed
from txnbuffer.streams.token import ResumeToken

StreamMessage = Ok | Rollback | Refused | SnapshotBegin | StreamMutations | SnapshotEnd | StreamEnd

_ONCE = RequestFlag.FROM_NOW | RequestFlag.FROM_OLDEST | RequestFlag.TO_NOW
"""What a request says only until it was answered once."""


class Consumer:
    """`handle` is the user's number for it, `stream` the one on the connection, 0 while it has none there."""

    __slots__ = (
        "caught_up", "delay", "end", "flags", "handle", "high", "reopen", "retry_at", "rollback_to", "state", "stream",
        "token", "window",
    )  # fmt: skip

    def __init__(
        self, handle: int, token: ResumeToken, window: Window, end: int, flags: RequestFlag, *, reopen: bool
    ) -> None:
        self.handle = handle
        self.token = token
        self.window = window
        self.end = end
        self.flags = flags
        self.reopen = reopen
        self.state = Consuming.WAITING
        self.stream = 0
        self.high = token.seqno
        self.caught_up = False
        self.rollback_to = 0
        self.retry_at = self.delay = 0.0

    def request(self, stream: int) -> tuple[StreamRequest, Grant] | Ended:
        """Ask for it under a number; or nothing is left to ask for."""
        token = self.token
        if token.complete and token.seqno >= self.end and not self.flags & _ONCE:
            self.state = consumed(self.state, Event.REACHED_END)
            return Ended(self.handle, None, token)
        self.state = consumed(self.state, Event.REQUEST)
        self.stream = stream
        end = self.end if token.complete else max(self.end, token.snapshot_end)
        request = StreamRequest(
            *(stream, token.topic, token.seqno, end, token.versions, token.snapshot_start, token.snapshot_end),
            *(self.flags, token.cluster, token.incarnation, token.purge_seqno),
        )
        return request, Grant(stream, *self.window.opened())

    def receive(self, message: StreamMessage) -> list[ClientEvent]:
        """What a message of the server means. Raises StreamViolation where it breaks the protocol."""
        match message:
            case StreamMutations(_, mutations):
                return self._mutations(mutations)
            case SnapshotBegin():
                return self._snapshot_begins(message)
            case SnapshotEnd():
                return self._snapshot_ends(message)
            case Ok():
                return self._opened(message)
            case Rollback(_, seqno):
                return self._rollback(seqno)
            case Refused(_, error):
                return self._stopped(Event.REFUSED_NOW, error)
            case StreamEnd(_, reason):
                return self._ended(reason)

    def rolled_back(self, seqno: int) -> None:
        """The data is what it was at a seqno. Raises InvalidRequest if that was not asked for."""
        if self.state is not Consuming.ROLLING_BACK or not 0 <= seqno <= self.rollback_to:
            raise InvalidRequest(
                f"topic {self.token.topic} was rolled back to seqno {seqno} where "
                + (f"0 to {self.rollback_to} will do" if self.state is Consuming.ROLLING_BACK else "nothing was asked")
            )
        self.state = consumed(self.state, Event.ROLLED_BACK)
        self.token = self.token.rolled_back(seqno)

    def disconnected(self) -> list[ClientEvent]:
        """The connection is lost; whatever comes of it now is no longer looked at."""
        on_the_wire = self.state in (Consuming.REQUESTED, Consuming.BETWEEN, Consuming.INSIDE)
        self.state = consumed(self.state, Event.DISCONNECTED)
        self.stream = 0
        error = end_error(self.token.topic, EndReason.DISCONNECTED)
        return self.fail(error) if on_the_wire and error and not self.reopen else []

    def fail(self, error: Error) -> list[ClientEvent]:
        """It can't go on."""
        self.state = consumed(self.state, Event.FAILED)
        self.stream = 0
        return [Ended(self.handle, error, self.token)]

    # --- messages ---

    def _opened(self, ok: Ok) -> list[ClientEvent]:
        self.state = consumed(self.state, Event.OK)
        before, token = self.token, self.token
        if token.cluster not in ("", ok.cluster):
            raise ForeignToken(f"topic {token.topic} is of cluster {ok.cluster}, its resume token of {token.cluster}")
        anew = self.flags & (RequestFlag.FROM_NOW | RequestFlag.FROM_OLDEST)
        if not anew and (ok.start != token.seqno or (token.seqno and token.incarnation not in ("", ok.incarnation))):
            raise StreamViolation(f"a stream of topic {token.topic} starts elsewhere than was asked; report it")
        self.token = token = ResumeToken(
            *(token.topic, ok.cluster, ok.incarnation, ok.log.versions),
            *(ok.start, ok.snapshot_start, ok.snapshot_end, ok.purge_seqno),
        )
        self.end = ok.end if self.flags & RequestFlag.TO_NOW else self.end
        self.flags &= ~_ONCE
        self.high = ok.high_seqno
        self.caught_up = False
        events: list[ClientEvent] = [Opened(self.handle, token, self.high)]
        if before.seqno > before.snapshot_start and token.complete and not anew:
            events.append(Completed(self.handle, token, self.high))
        return events + self._perhaps_caught_up()

    def _snapshot_begins(self, begin: SnapshotBegin) -> list[ClientEvent]:
        self.state = consumed(self.state, Event.SNAPSHOT_BEGIN)
        token = self.token
        if begin.start > token.seqno + 1 or begin.end < (token.seqno + 1 if token.complete else token.snapshot_end):
            raise StreamViolation(f"the snapshot [{begin.start}, {begin.end}] does not follow {token}; report it")
        self.token = token.entered(begin.end)
        self.high = max(self.high, begin.end)
        return []

    def _mutations(self, mutations: MutationBatch) -> list[ClientEvent]:
        self.state = consumed(self.state, Event.MUTATIONS)
        seqnos, token = mutations.seqnos, self.token
        first, last = int(seqnos[0]), int(seqnos[-1])
        ascending = len(seqnos) == 1 or bool((np.diff(seqnos) > 0).all())
        if not (ascending and token.seqno < first <= last <= token.snapshot_end):
            raise StreamViolation(f"mutations {first} to {last} do not follow {token}; report it")
        size = mutations.payload()
        self.window.received(len(mutations), size)
        self.delay = 0.0
        self.token = token.reached(last)
        return [Delivered(self.handle, mutations, size, self.token)]

    def _snapshot_ends(self, end: SnapshotEnd) -> list[ClientEvent]:
        self.state = consumed(self.state, Event.SNAPSHOT_END)
        if end.seqno != self.token.snapshot_end:
            raise StreamViolation(f"a snapshot ends at {end.seqno} where {self.token} was announced; report it")
        self.token = self.token.completed(end.seqno)
        self.high = max(self.high, end.high_seqno)
        self.delay = 0.0
        return [Completed(self.handle, self.token, self.high), *self._perhaps_caught_up()]

    def _perhaps_caught_up(self) -> list[ClientEvent]:
        was, self.caught_up = self.caught_up, self.token.complete and self.token.seqno >= self.high
        return [CaughtUp(self.handle, self.token)] if self.caught_up and not was else []

    def _rollback(self, seqno: int) -> list[ClientEvent]:
        self.state = consumed(self.state, Event.ROLLBACK)
        if not 0 <= seqno < max(self.token.seqno, len(self.token.versions[:1])):
            raise StreamViolation(f"a rollback to {seqno} leaves nothing to undo of {self.token}; report it")
        self.rollback_to = seqno
        self.stream = 0
        return [RollBack(self.handle, seqno, self.token)]

    def _ended(self, reason: EndReason) -> list[ClientEvent]:
        error = end_error(self.token.topic, reason)
        if error is not None:
            return self._stopped(Event.ENDED, error)
        state = consumed(self.state, Event.REACHED_END)
        if not self.token.complete or self.token.seqno < self.end:
            raise StreamViolation(f"a stream ends at {self.token}, before seqno {self.end}; report it")
        self.state = state
        self.stream = 0
        return [Ended(self.handle, None, self.token)]

    def _stopped(self, event: Event, error: Error) -> list[ClientEvent]:
        """It ended before its end, or was refused: it is opened again if that can help."""
        if not (self.reopen and error.retryable):
            consumed(self.state, event)
            return self.fail(error)
        self.state = consumed(self.state, event)
        self.stream = 0
        return [Interrupted(self.handle, error, self.token)]
