"""Relay: copies the committed records of a topic to another topic, exactly once

`txnbuffer.sinks.relay_targets` describes the messages of the target, by which a relay resumes. A durable cursor can
keep in the log of the source what the target does not have yet.
"""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from contextlib import ExitStack
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np

from broker_io.batch import Batch
from broker_io.environment import Clock, current
from broker_io.errors import Error, ServiceUnavailable
from broker_io.port import Broker
from broker_io.position import Int64s, Position
from broker_io.waits import Backoff
from txnbuffer.client.reading.reader import CommittedReader
from txnbuffer.client.reading.records import RecordBatch
from txnbuffer.client.reading.starts import Start
from txnbuffer.errors import (
    LogRestored,
    MutationsTrimmed,
    OutcomeUnknown,
    RelayBranched,
    RelayTargetTaken,
    SeqnoGap,
    SeqnoOutOfRange,
    TransactionAborted,
    UnknownCursor,
)
from txnbuffer.progress import ProgressReporter, report
from txnbuffer.recovery.restore import LoadedTopic, load
from txnbuffer.sinks.relay_targets import RelayMark, RelaySource, relay_messages
from txnbuffer.streams.failover import MAX_SEQNO, FailoverLog

MOVE_INTERVAL = 1.0
"""Seconds between two moves of the cursor: each is a call of the service."""

REPEAT_INTERVAL = 60.0
"""Seconds after which the last move is repeated: a service that crashed may have lost it."""

CallOwner = Callable[[Broker, str, dict[str, Any]], Any]
"""Calls the service that owns the topics of a broker; raises the error that it returns."""


class RelayCursor:
    """A durable cursor of the service that owns the source; it is added if the topic has none of that name."""

    def __init__(self, call_owner: CallOwner, topic: str, name: str) -> None:
        self._call_owner = call_owner
        self._topic = topic
        self._name = name
        self._broker: Broker
        self._acknowledged = self._moved_to = 0
        self._last_move = -math.inf
        self._clock = current().clock

    def begin(self, broker: Broker, seqno: int | None) -> None:
        """Keep the mutations after a seqno, or all if it is None. Raises what the service raises."""
        self._broker = broker
        at = "beginning" if seqno is None else seqno
        try:
            self._move("AddCursor", at)
        except SeqnoOutOfRange:
            self._move("AddCursor", "beginning")  # the service has not read as far as the relay has
        self._acknowledged = seqno or 0  # an existing cursor may be at a lower one

    def acknowledged(self, seqno: int | None) -> None:
        """Called when all records up to `seqno` are durable in the target. Raises UnknownCursor."""
        if seqno is not None:
            self._acknowledged = seqno
        self.move_if_due()

    def move_if_due(self) -> None:
        """Move the cursor if a move is due; called regularly, also without new records. Raises UnknownCursor."""
        if self._clock.monotonic() - self._last_move >= MOVE_INTERVAL:
            self._advance()

    def close(self) -> None:
        """Move the cursor a last time; if the service does not respond, the log keeps more than necessary."""
        with contextlib.suppress(Error):
            self._advance()

    def _advance(self) -> None:
        now = self._clock.monotonic()
        if self._acknowledged > self._moved_to or (self._acknowledged and now - self._last_move >= REPEAT_INTERVAL):
            self._last_move = now
            seqno = self._acknowledged
            try:
                self._move("AdvanceCursor", seqno)
            except UnknownCursor:
                raise
            except Error:
                return  # the next move repeats it
            self._moved_to = seqno

    def _move(self, method: str, at: int | str) -> None:
        self._call_owner(self._broker, method, {"topic": self._topic, "cursor": self._name, "at": at})


RECORDS = 2000
"""Records in one append."""
MAX_UNACKNOWLEDGED = 4
"""Appends that wait for their acknowledgement at the same time."""
POLL = 0.25
"""Seconds of one wait, after which the relay checks whether it is to stop."""
LAST_WAIT = 10.0
"""Seconds that a stopped relay waits for its unacknowledged appends, at most `max_unavailable`."""
FIRST_PAUSE, LONGEST_PAUSE = 0.05, 2.0
RETRIED = (TransactionAborted, OutcomeUnknown, LogRestored)
"""Errors that are retried besides the retryable ones: the target shows which records it has, and of which history."""


class Target(Protocol):
    """The topic that a relay writes to."""

    def open(self) -> RelayMark | None:
        """Fence all other relays; the mark of the last message, or None if there is none.

        May be called again after an error. Raises RelayTargetTaken.
        """

    def append(self, batch: Batch, seqno: int | None) -> Future[Any]:
        """Append messages, the last of which has the seqno `seqno`; they are durable when the future has a result.

        A failed append leaves a prefix of them. The future fails with Fenced after another relay opened the target.
        """

    def acknowledged(self, outcome: Any) -> None:
        """Called when an append is durable; `outcome` is the result of its future."""

    def caught_up(self) -> None:
        """Called again and again while the source has no more records, and all appends are durable."""

    def close(self) -> None: ...


@dataclass(slots=True)
class RelayProgress:
    """Progress of a relay: `records` and the last of them in this run; `resumed`: end of the run before, or None."""

    records: int = 0
    seqno: int | None = None
    position: Position | None = None
    resumed: Position | None = None


class _Origin(NamedTuple):
    """The topic that is relayed, and the versions of its history; None while it has had no transactions.

    `epochs`: of the coordinators that had written markers then.
    """

    topic: str
    incarnation: str
    failover: FailoverLog | None
    epochs: tuple[int, ...]

    @classmethod
    def of(cls, topic: str, loaded: LoadedTopic) -> _Origin:
        epochs = tuple(state.epoch for state in loaded.buffer.coordinators.values())
        return cls(topic, loaded.incarnation, loaded.failover if loaded.registered else None, epochs)

    def by_version(self, batch: RecordBatch) -> Iterator[tuple[RelaySource, RecordBatch]]:
        """The records of each version of the history.

        A mark names the version in which its record was written, never a newer one: owners forget versions without
        mutations.
        """
        if self.failover is None or batch.seqnos is None:
            yield RelaySource(self.topic, self.incarnation, 0), batch
            return
        begin = 0
        for version, end in self.failover.ranges():
            stop = int(np.searchsorted(batch.seqnos, end, side="right"))
            if stop > begin:
                source = RelaySource(self.topic, self.incarnation, version.uuid)
                yield source, batch.take(slice(begin, stop))
                begin = stop


class _ResumePoint(NamedTuple):
    """Where to read on: relay records with seqnos above `after`; the first message gets `rollback`."""

    start: Start
    after: int | None
    origin: _Origin
    rollback: int | None = None


@dataclass(eq=False)
class Relay:
    """Copies one topic; see `run`. `open_source` opens the broker of the topic.

    `resend`: if the history of the source branched, append the new history from the branch on. `keyed`: leave out
    records without a key. `max_unavailable`: seconds without progress after which a transient error is raised.
    `on_progress` is called after every durable append. `cursor` keeps in the log of the source what the target does not
    have yet.
    """

    open_source: Callable[[], Broker]
    topic: str
    target: Target
    _: KW_ONLY
    resend: bool = False
    keyed: bool = False
    max_unavailable: float = 60.0
    on_progress: Callable[[RelayProgress], None] | None = None
    cursor: RelayCursor | None = None
    progress: RelayProgress = field(default_factory=RelayProgress, init=False)
    _last_progress: float = field(default=0.0, init=False)
    _clock: Clock = field(default_factory=lambda: current().clock, init=False)
    _reporter: ProgressReporter = field(default_factory=lambda: report("relay", "records"), init=False)
    _appends: deque[tuple[Future[Any], RelayProgress]] = field(default_factory=deque, init=False)

    def run(self, *, follow: bool = True, stop: Callable[[], bool] = lambda: False) -> RelayProgress:
        """Relay until `stop` returns true; without `follow` up to the present end. Returns the progress.

        When stopped it waits for the unacknowledged appends, but not for long if the target does not respond. Raises
        what reading the source and writing the target raise, RelayTargetTaken and RelayBranched; after any error
        another run resumes.
        """
        failures, backoff = 0, Backoff(FIRST_PAUSE, LONGEST_PAUSE)
        self._last_progress = self._clock.monotonic()
        self._reporter = report(f"relay of {self.topic}", "records")
        while True:
            before = self._last_progress
            try:
                with ExitStack() as stack:
                    stack.callback(self.target.close)
                    self._attempt(stack, follow=follow, stop=stop)
            except Error as error:
                retryable = error.retryable or isinstance(error, RETRIED)
                silent = self._clock.monotonic() - self._last_progress
                if not retryable or (silent > self.max_unavailable and not stop()):
                    raise
            else:
                return self.progress
            if stop():
                return self.progress
            failures = 1 if self._last_progress > before else failures + 1
            self._clock.sleep(backoff.after(failures))

    @property
    def unacknowledged(self) -> int:
        """Records without an acknowledgement; after a stop the target may have them, which the next relay checks."""
        return sum(sent.records for _, sent in [*self._appends])

    def _attempt(self, stack: ExitStack, *, follow: bool, stop: Callable[[], bool]) -> None:
        broker = stack.enter_context(self.open_source())
        mark = self.target.open()
        self._appends.clear()  # the mark shows which of the earlier ones the target has
        resume = self._resume_point(broker, mark)
        if self.cursor is not None:
            self.cursor.begin(broker, resume.after)
            stack.callback(self.cursor.close)
        reader = stack.enter_context(CommittedReader(broker, self.topic, start=resume.start))
        self._copy(broker, reader, resume, follow=follow, stop=stop)

    def _resume_point(self, broker: Broker, mark: RelayMark | None) -> _ResumePoint:
        loaded = load(broker, self.topic)
        origin = _Origin.of(self.topic, loaded)
        if mark is None:
            return _ResumePoint("beginning", None, origin)
        if mark.source.topic != self.topic:
            raise RelayTargetTaken(
                f"the target has records of topic {mark.source.topic!r}, not {self.topic!r}: relay to another topic"
            )
        shared = self._shared_seqno(broker, mark, loaded)
        if shared is None:
            self.progress.resumed = mark.position
            ledger, entry, index = mark.position
            start: Start = Position(ledger, entry, index + 1)
            if mark.seqno is not None and loaded.numbered and ledger < loaded.first_ledger:
                start = "beginning"  # nothing is missing if the log begins with the next seqno, which is checked
            return _ResumePoint(start, mark.seqno, origin)
        if not self.resend:
            relayed = str(mark.position) if mark.seqno is None else f"up to {mark.seqno}"
            raise RelayBranched(self.topic, shared, relayed)
        return _ResumePoint("beginning", shared, origin, shared)

    def _shared_seqno(self, broker: Broker, mark: RelayMark, loaded: LoadedTopic) -> int | None:
        """The last seqno that the target shares with the source, or None if that is all it has."""
        if mark.source.incarnation != loaded.incarnation:
            return 0
        if mark.source.version and loaded.registered:
            end = loaded.failover.end_of(mark.source.version, MAX_SEQNO)
            if end is None:
                return 0
            if mark.seqno is not None and mark.seqno > end:
                return end
        last = broker.last_position(self.topic)
        if last is None or (last.ledger, last.entry) < mark.position[:2]:
            return 0  # the log is shorter than what was relayed, and no version shows where it differs
        return None

    def _copy(
        self, broker: Broker, reader: CommittedReader, resume: _ResumePoint, *, follow: bool, stop: Callable[[], bool]
    ) -> None:
        rollback = resume.rollback
        for source, records in self._pieces(broker, reader, resume, self._batches(reader, follow=follow, stop=stop)):
            self._append(relay_messages(records, source, rollback), records)
            rollback = None
            if len(self._appends) >= MAX_UNACKNOWLEDGED:
                self._await_oldest(stop)
        while self._appends:
            self._await_oldest(stop)

    def _batches(self, reader: CommittedReader, *, follow: bool, stop: Callable[[], bool]) -> Iterator[RecordBatch]:
        """What the source has, and gets; while it has nothing new, wait for what was appended, and move the cursor."""
        while not stop():
            batch = reader.read(limit=RECORDS, timeout=POLL if follow and not self._appends else 0.0)
            if batch is not None:
                yield batch
            elif self._appends:
                self._await_oldest(stop)
            else:
                self.target.caught_up()
                if not follow:
                    return
                self._last_progress = self._clock.monotonic()
                if self.cursor is not None:
                    self.cursor.move_if_due()

    def _pieces(
        self, broker: Broker, reader: CommittedReader, resume: _ResumePoint, batches: Iterable[RecordBatch]
    ) -> Iterator[tuple[RelaySource, RecordBatch]]:
        """The records to relay, each piece of one version. Raises MutationsTrimmed or SeqnoGap if some are missing."""
        after, origin, epochs = resume.after, resume.origin, resume.origin.epochs  # the reader may have opened later
        for batch in batches:
            if resume.start == "beginning" and resume.after and batch.seqnos is not None:
                batch = batch.take(slice(int(np.searchsorted(batch.seqnos, resume.after, side="right")), None))
            if not len(batch):
                continue
            if batch.seqnos is not None:
                after = _next_after(after, batch.seqnos, reader.first_seqnos.get(batch.topic))
                # A new owner starts a version before its first records.
                if reader.epochs != epochs:
                    epochs = reader.epochs
                    origin = _Origin.of(self.topic, load(broker, self.topic))
            yield from origin.by_version(batch.take(~batch.messages.keys.absent_mask()) if self.keyed else batch)

    def _append(self, messages: Batch, records: RecordBatch) -> None:
        seqno = None if records.seqnos is None else int(records.seqnos[-1])
        sent = RelayProgress(len(records), seqno, records.positions.last)
        self._appends.append((self.target.append(messages, seqno), sent))

    def _await_oldest(self, stop: Callable[[], bool]) -> None:
        """Wait for the oldest append. Raises its error, or ServiceUnavailable after too long."""
        future, sent = self._appends[0]
        began, max_unavailable, stopping = self._clock.monotonic(), self.max_unavailable, False
        while not wait([future], POLL).done:
            now = self._clock.monotonic()
            if not stopping and stop():
                stopping, max_unavailable = True, min(max_unavailable, now - began + LAST_WAIT)
            if now - began > max_unavailable:
                raise ServiceUnavailable(f"the target has acknowledged nothing for {max_unavailable:.0f} s")
        self.target.acknowledged(future.result())
        self._appends.popleft()
        progress = self.progress
        progress.records += sent.records
        progress.seqno, progress.position = sent.seqno, sent.position
        self._last_progress = self._clock.monotonic()
        if self.cursor is not None:
            self.cursor.acknowledged(sent.seqno)
        if self.on_progress is not None:
            self.on_progress(progress)
        self._reporter.update(progress.records)


def _next_after(after: int | None, seqnos: Int64s, oldest: int | None) -> int:
    """The last seqno. `oldest`: the first one of the log when it was opened; those between may have been emptied.

    Raises MutationsTrimmed or SeqnoGap if they do not follow `after`.
    """
    first = int(seqnos[0])
    if after and oldest is not None and oldest > after + 1:
        raise MutationsTrimmed(after + 1, oldest)
    if after and first <= after:
        raise SeqnoGap(f"seqno {first} follows seqno {after}, expected a higher one: relay to another topic")
    return int(seqnos[-1])
