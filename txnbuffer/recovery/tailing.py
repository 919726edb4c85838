"""One data topic as its owner follows it: buffer, seqnos, the account of its snapshots."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import NamedTuple

from broker_io.batch import PlacedBatch
from broker_io.environment import Clock
from broker_io.errors import StorageError
from broker_io.port import Broker, Ledger, Reader
from broker_io.position import NO_INDEX, Position
from snapshots.policy import SnapshotDue, SnapshotPolicy
from snapshots.writer import Plan, SnapshotWriter
from txnbuffer.buffer.buffer import TransactionBuffer
from txnbuffer.buffer.effects import Effect, Ended, Suppressed
from txnbuffer.mutations.index import IndexColumns
from txnbuffer.recovery.numbering import Numbering
from txnbuffer.recovery.parts import PartPayload
from txnbuffer.recovery.recovery import Restored, version_of
from txnbuffer.recovery.states import UNKNOWN_LEDGER, TopicState, encode_state
from txnbuffer.streams.failover import FailoverLog

REPLAY_TIMEOUT = 30.0
"""Seconds in which a message that the log says it holds must be read."""


class Captured(NamedTuple):
    """The snapshot of one topic about to be written, and how many messages and changes it covers."""

    tail: Tail
    plan: Plan
    state: TopicState
    messages: int
    changes: int


class Tail:
    """Follows one topic from where it was restored.

    `failover`: the versions of its history. `index`: where mutations stand in its log, as the next snapshot has it; it
    must not go beyond what is numbered. `cursors`: the durable ones, name → seqno up to which its owner has all; to be
    replaced, not changed, as another thread may write it.
    """

    def __init__(
        self, broker: Broker, restored: Restored, writer: SnapshotWriter, policy: SnapshotPolicy, clock: Clock
    ) -> None:
        self.topic = restored.topic
        self.writer = writer
        self.buffer: TransactionBuffer = restored.buffer
        self.due = SnapshotDue(policy, clock.monotonic())
        self.origin_ledger = restored.origin_ledger
        self.generations: list[int] = []
        if restored.snapshot is not None:
            self.generations.append(restored.snapshot.state.resume_ledger)
        self._broker = broker
        self._clock = clock
        self._following = (self.buffer.applied, restored.following_ledger)
        self._reader: Reader | None = broker.reader(self.topic, restored.resume, inclusive=False)
        self._resume = restored.resume
        self.numbering = Numbering(
            broker,
            self.topic,
            self.buffer,
            restored.sequencer,
            renumber=restored.renumber,
            resume=restored.resume,
        )
        self.failover: FailoverLog = restored.failover
        self.index: IndexColumns = restored.index
        self.cursors: Mapping[str, int] = restored.cursors

    def replay(self) -> list[Effect]:
        """Apply everything up to the present end of the log; nothing is visible before. Raises as `read` does."""
        end = self._broker.last_position(self.topic)
        effects: list[Effect] = []
        if end is not None and end > self.at:
            self.buffer.replay_until(end)
            started, messages = self._clock.monotonic(), self.due.messages
            while self.buffer.replaying:
                found = self.read(REPLAY_TIMEOUT)
                if found is None:
                    raise StorageError(
                        f"topic {self.topic}: the log ends at {end}, but nothing came behind {self.at} within "
                        f"{REPLAY_TIMEOUT:.0f} s; look whether the broker is well, and no transactions of its own end "
                        "the log, and start again"
                    )
                effects += found
            self.due.measured(self.due.messages - messages, self._clock.monotonic() - started)
        self.numbering.advance()
        return effects

    def taken_over(self, owner: str) -> None:
        """Begin a version of the topic's history: `owner`, another text for each, goes on from what is numbered."""
        uuid = version_of(self.topic, self.writer.incarnation, owner)
        self.failover = self.failover.taken_over(uuid, self.numbering.sequencer.next_seqno - 1)

    def read(self, timeout: float = 0.0) -> list[Effect] | None:
        """Apply the next messages; None if none came in `timeout` seconds.

        Raises ProtocolStopped, PositionTrimmed, Damaged: the topic can't be followed any further then.
        """
        if self._reader is None:
            raise AssertionError(f"the reader of topic {self.topic} was given away")
        placed = self._reader.read(timeout=timeout)
        return None if placed is None else self.apply(placed)

    def apply(self, placed: PlacedBatch) -> list[Effect]:
        """Apply messages that follow the applied ones, for an owner that knows what it appends. Raises as `read`."""
        effects = self.buffer.apply_batch(placed)
        self.numbering.applied(placed)
        self.due.applied(len(placed), sum(isinstance(effect, Ended | Suppressed) for effect in effects))
        return effects

    @property
    def at(self) -> Position:
        """Where to read on: everything up to here is applied."""
        applied = self.buffer.applied
        return self._resume if applied is None else max(applied, self._resume)

    def state(self) -> TopicState:
        """The state at this moment. Sealed parts have to be taken first."""
        following = self._following_ledger()
        if following != UNKNOWN_LEDGER:
            self.numbering.goes_on(following)
        return TopicState(
            self.buffer.snapshot_state(),
            self.numbering.sequencer.snapshot_state(),
            self.origin_ledger,
            following,
            self.failover.versions,
            self.index,
            tuple(sorted(self.cursors.items())),
        )

    def _following_ledger(self) -> int:
        """The ledger in which the log goes on, if that can be told; what was told once of a position stays true."""
        applied = self.buffer.applied
        if applied is not None and (self._following[0] != applied or self._following[1] == UNKNOWN_LEDGER):
            self._following = (applied, _following(applied, self._broker.ledgers(self.topic)))
        return self._following[1]

    def plan(self, epoch: int) -> tuple[Plan, TopicState]:
        """The next snapshot of this topic, as it stands at this moment."""
        self.writer.add(map(PartPayload, self.buffer.take_sealed()))
        state = self.state()
        return self.writer.plan(epoch, encode_state(state)), state

    def capture(self, epoch: int) -> Captured:
        """The next snapshot with what it covers."""
        return Captured(self, *self.plan(epoch), self.due.messages, self.due.changes)

    def written(self, state: TopicState, messages: int, changes: int) -> None:
        """A snapshot is durable that covers so many of the messages and changes applied since the one before."""
        self.generations = [*self.generations[-1:], state.resume_ledger]
        self.due.written(self._clock.monotonic(), messages, changes)

    def floor(self) -> int:
        """The lowest ledger that readers of what is still undecided and both kept snapshots need."""
        return min([self.state().resume_ledger, *self.generations])

    def give_reader(self) -> Reader:
        """The reader, which goes on behind `at`, for its new owner: from here on what comes is given to `apply`."""
        reader, self._reader = self._reader, None
        if reader is None:
            raise AssertionError(f"the reader of topic {self.topic} was given away")
        return reader

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()
        self.numbering.close()


def _following(applied: Position | None, ledgers: list[Ledger]) -> int:
    for ledger, following in itertools.pairwise(ledgers):
        if applied is not None and ledger.ledger == applied.ledger:
            # A member of a set does not tell whether it is the last one.
            whole = ledger.closed and ledger.entries == applied.entry + 1 and applied.batch == NO_INDEX
            return following.ledger if whole and following.lasting else UNKNOWN_LEDGER
    return UNKNOWN_LEDGER
