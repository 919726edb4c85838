"""A relay: what committed in a topic, appended to a clean one, exactly once; `relay_marks` tells what that gets.

The durable cursor of a relay: what is not in the target yet is kept in the source's log.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from broker_io.batch import Batch
from broker_io.errors import Error, ServiceUnavailable
from broker_io.port import Broker
from broker_io.position import Int64s, Position
from txnbuffer.client.reader import CommittedReader
from txnbuffer.client.records import RecordBatch
from txnbuffer.client.routing import Start
from txnbuffer.errors import (
    MutationsTrimmed,
    OutcomeUnknown,
    RelayBranched,
    RelayTargetTaken,
    SeqnoGap,
    SeqnoOutOfRange,
    TransactionAborted,
    UnknownCursor,
)
from txnbuffer.recovery.load import LoadedTopic, load
from txnbuffer.sinks.relay_targets import RelayMark, RelaySource, marked
from txnbuffer.streams.failover import MAX_SEQNO

REST = 1.0
"""Seconds between two moves: each is a question to the service."""

AGAIN = 60.0
"""Seconds after which it is told where it stood before: a service that crashed may have forgotten its last moves."""

Ask = Callable[[Broker, str, dict[str, Any]], Any]
"""Asks the service that owns a broker's topics; raises what it answers."""


class RelayCursor:
    """A cursor of the service that owns the source; one of that name is made if the topic has none."""

    def __init__(self, ask: Ask, topic: str, name: str) -> None:
        self._ask = ask
        self._topic = topic
        self._name = name
        self._broker: Broker
        self._landed = self._told = 0
        self._moved = -math.inf

    def begin(self, broker: Broker, seqno: int | None) -> None:
        """Hold what stands behind a seqno, None: all there is. Raises what the service does."""
        self._broker = broker
        at = "beginning" if seqno is None else seqno
        try:
            self._move("AddCursor", at)
        except SeqnoOutOfRange:
            self._move("AddCursor", "beginning")  # the service has not read as far as the relay has
        self._landed = seqno or 0  # one that was there may stand before it

    def landed(self, seqno: int | None) -> None:
        """All up to a seqno is durable in the target. Raises UnknownCursor."""
        if seqno is not None:
            self._landed = seqno
        self.follow()

    def follow(self) -> None:
        """Called again and again, also while nothing comes. Raises UnknownCursor."""
        if time.monotonic() - self._moved >= REST:
            self._follow()

    def close(self) -> None:
        """Move it a last time, if the service answers: else more is kept than need be."""
        with contextlib.suppress(Error):
            self._follow()

    def _follow(self) -> None:
        now = time.monotonic()
        if self._landed > self._told or (self._landed and now - self._moved >= AGAIN):
            self._moved = now
            landed = self._landed
            try:
                self._move("AdvanceCursor", landed)
            except UnknownCursor:
                raise
            except Error:
                return  # the next move makes up for it
            self._told = landed

    def _move(self, method: str, at: int | str) -> None:
        self._ask(self._broker, method, {"topic": self._topic, "cursor": self._name, "at": at})


RECORDS = 2000
"""Records in one append."""
UNDER_WAY = 4
"""Appends that are not acknowledged yet."""
POLL = 0.25
"""Seconds of one wait, so that whoever asks the relay to stop is heard."""
LAST_WAIT = 10.0
"""Seconds that a relay which is told to stop waits for what is under way; its patience, if that is less."""
FIRST_PAUSE, LONGEST_PAUSE = 0.05, 2.0
PASSING = (TransactionAborted, OutcomeUnknown)
"""Besides what says so itself: the target tells what became of it."""


class Target(Protocol):
    """A topic that is relayed to."""

    def open(self) -> RelayMark | None:
        """Be the only relay that writes, from now on; what the last message says, None if there is none.

        May be called again, after anything failed. Raises RelayTargetTaken.
        """

    def append(self, batch: Batch, seqno: int | None) -> Future[Any]:
        """Add messages, of which the last has a seqno; they are durable once the future has a result.

        A failed append leaves a prefix. The future fails with Fenced once another relay has opened the target.
        """

    def landed(self, outcome: Any) -> None:
        """An append is durable; `outcome` is what its future gave."""

    def close(self) -> None: ...


@dataclass(slots=True)
class Relayed:
    """How far a relay has come: `records` in this run, and the last of them; `resumed` of an earlier run, or None."""

    records: int = 0
    seqno: int | None = None
    position: Position | None = None
    resumed: Position | None = None


class _Beginning(NamedTuple):
    """Where to read on: what follows seqno `after` is to be relayed, `rollback` is told with the first of it."""

    start: Start
    after: int | None
    source: RelaySource
    rollback: int | None = None


class Relay:
    """`run` it. `source` opens the broker with the topic.

    `resend`: go on after the source's history branched, from where it did. `max_unavailable`: seconds
    without progress after which a transient error is raised. `tell` hears of every append that is durable. `cursor`
    keeps in the source's log what is not.
    """

    def __init__(
        self,
        source: Callable[[], Broker],
        topic: str,
        target: Target,
        *,
        resend: bool = False,
        max_unavailable: float = 60.0,
        tell: Callable[[Relayed], None] | None = None,
        cursor: RelayCursor | None = None,
    ) -> None:
        self.relayed = Relayed()
        self._open_source = source
        self._topic = topic
        self._target = target
        self._resend = resend
        self._max_unavailable = max_unavailable
        self._tell = tell
        self._cursor = cursor
        self._progress = 0.0
        self._under_way: deque[tuple[Future[Any], Relayed]] = deque()

    def run(self, *, follow: bool = True, stop: Callable[[], bool] = lambda: False) -> Relayed:
        """Relay for ever, or up to the present end; until `stop` says so. How far it has come.

        Told to stop it waits for what is under way, but not for long if the target does not answer. Raises what
        reading the source and writing the target raise, RelayTargetTaken, RelayBranched; whatever is raised, running
        it again goes on.
        """
        pause = FIRST_PAUSE
        self._progress = time.monotonic()
        while True:
            before = self._progress
            try:
                with ExitStack() as stack:
                    stack.callback(self._target.close)
                    self._attempt(stack, follow=follow, stop=stop)
            except Error as error:
                passes = error.retryable or isinstance(error, PASSING)
                if not passes or (time.monotonic() - self._progress > self._max_unavailable and not stop()):
                    raise
            else:
                return self.relayed
            if stop():
                return self.relayed
            pause = FIRST_PAUSE if self._progress > before else min(2 * pause, LONGEST_PAUSE)
            time.sleep(pause)

    @property
    def unacknowledged(self) -> int:
        """Records that are under way; if it was told to stop they may stand there or not, and the next relay asks."""
        return sum(sent.records for _, sent in [*self._under_way])

    def _attempt(self, stack: ExitStack, *, follow: bool, stop: Callable[[], bool]) -> None:
        broker = stack.enter_context(self._open_source())
        mark = self._target.open()
        self._under_way.clear()  # of what was not acknowledged before the mark tells
        begin = self._beginning(broker, mark)
        if self._cursor is not None:
            self._cursor.begin(broker, begin.after)
            stack.callback(self._cursor.close)
        reader = stack.enter_context(CommittedReader(broker, self._topic, start=begin.start))
        self._carry(broker, reader, begin, follow=follow, stop=stop)

    # Where to go on

    def _beginning(self, broker: Broker, mark: RelayMark | None) -> _Beginning:
        loaded = load(broker, self._topic)
        source = self._source(loaded)
        if mark is None:
            return _Beginning("beginning", None, source)
        if mark.source.topic != self._topic:
            raise RelayTargetTaken(
                f"the target holds what was relayed from topic {mark.source.topic!r}, not {self._topic!r}: "
                "relay to a topic of its own"
            )
        common = self._common(broker, mark, loaded)
        if common is None:
            self.relayed.resumed = mark.position
            ledger, entry, index = mark.position
            start: Start = Position(ledger, entry, index + 1)
            if mark.seqno is not None and ledger < loaded.first_ledger:
                start = "beginning"  # nothing is missing if the log begins right behind: its numbers tell
            return _Beginning(start, mark.seqno, source)
        if not self._resend:
            relayed = str(mark.position) if mark.seqno is None else f"up to {mark.seqno}"
            raise RelayBranched(self._topic, common, relayed)
        return _Beginning("beginning", common, source, common)

    def _source(self, loaded: LoadedTopic) -> RelaySource:
        version = loaded.failover.current.uuid if loaded.registered else 0
        return RelaySource(self._topic, loaded.incarnation, version)

    def _common(self, broker: Broker, mark: RelayMark, loaded: LoadedTopic) -> int | None:
        """Up to which seqno the target holds the source's history, if that is less than all it holds."""
        if mark.source.incarnation != loaded.incarnation:
            return 0
        if mark.source.version and loaded.registered:
            end = loaded.failover.end_of(mark.source.version, MAX_SEQNO)
            if end is None:
                return 0
            if mark.seqno is not None and mark.seqno > end:
                return end
        last = broker.last_position(self._topic)
        if last is None or (last.ledger, last.entry) < mark.position[:2]:
            return 0  # the log is shorter than what was read of it, and no version tells since when
        return None

    # Carrying

    def _carry(
        self, broker: Broker, reader: CommittedReader, begin: _Beginning, *, follow: bool, stop: Callable[[], bool]
    ) -> None:
        under_way = self._under_way
        after, source, rollback = begin.after, begin.source, begin.rollback
        epochs = reader.epochs
        while not stop():
            batch = reader.read(limit=RECORDS, timeout=POLL if follow and not under_way else 0.0)
            if batch is None:
                if not under_way and not follow:
                    return
                self._idle(stop)
                continue
            if begin.start == "beginning" and begin.after and batch.seqnos is not None:
                batch = _behind(batch, batch.seqnos, begin.after)
            if not len(batch):
                continue
            if batch.seqnos is not None:
                after = _follows(after, batch.seqnos.tolist())
                if not source.version or reader.epochs != epochs:  # a new owner begins a version before its records
                    epochs = reader.epochs
                    source = self._source(load(broker, self._topic))
            messages = marked(batch, source, rollback)
            rollback = None
            seqno = None if batch.seqnos is None else int(batch.seqnos[-1])
            sent = Relayed(len(batch), seqno, batch.positions.last)
            under_way.append((self._target.append(messages, seqno), sent))
            if len(under_way) == UNDER_WAY:
                self._settle(stop)
        while under_way:
            self._settle(stop)

    def _idle(self, stop: Callable[[], bool]) -> None:
        """Nothing more stands in the source just now."""
        if self._under_way:
            self._settle(stop)
            return
        self._progress = time.monotonic()
        if self._cursor is not None:
            self._cursor.follow()

    def _settle(self, stop: Callable[[], bool]) -> None:
        """Wait for the oldest append. Raises why it failed, and ServiceUnavailable if that takes too long."""
        future, sent = self._under_way[0]
        began, max_unavailable, told = time.monotonic(), self._max_unavailable, False
        while not wait([future], POLL).done:
            now = time.monotonic()
            if not told and stop():
                told, max_unavailable = True, min(max_unavailable, now - began + LAST_WAIT)
            if now - began > max_unavailable:
                raise ServiceUnavailable(f"the target acknowledged nothing for {max_unavailable:.0f} s")
        self._target.landed(future.result())
        self._under_way.popleft()
        relayed = self.relayed
        relayed.records += sent.records
        relayed.seqno, relayed.position = sent.seqno, sent.position
        self._progress = time.monotonic()
        if self._cursor is not None:
            self._cursor.landed(sent.seqno)
        if self._tell is not None:
            self._tell(relayed)


def _behind(batch: RecordBatch, seqnos: Int64s, seqno: int) -> RecordBatch:
    """The records with seqnos above one."""
    which = slice(int(np.searchsorted(seqnos, seqno, side="right")), None)
    return RecordBatch(
        batch.topic,
        batch.positions.take(which),
        seqnos[which],
        batch.publish_times[which],
        batch.messages.take(which),
        None,
    )


def _follows(after: int | None, seqnos: list[int]) -> int:
    """The last seqno. Raises MutationsTrimmed or SeqnoGap where the first does not follow what was relayed last."""
    first = seqnos[0]
    if after and first > after + 1:
        raise MutationsTrimmed(after + 1, first)
    if after and first <= after:
        raise SeqnoGap(f"seqno {first} comes behind {after}: relay to another topic")
    return seqnos[-1]
