"""What the applications of a simulated world did, and what they were answered and shown.

The history is outside of the world: it sees all processes at once, in the order of virtual time. It checks each record
when it is shown: somebody must have asked to commit it before.
"""

from __future__ import annotations

import enum
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from sim.partitions import Partitions

from broker_io.position import LEDGERS_OF_A_HISTORY
from txnbuffer.model import EARLIEST, Position, TxnId

NEVER = float("inf")


class Fate(enum.Enum):
    """What is known of a transaction."""

    OPEN = "open"
    """It was not ended, or its abort was not answered."""
    ASKED = "asked"
    """Its commit was requested and not answered."""
    COMMITTED = "committed"
    ABORTED = "aborted"
    LOST = "lost"
    """Its commit was answered, and a forced promotion has dropped it."""

    @property
    def may_be_visible(self) -> bool:
        return self in (Fate.ASKED, Fate.COMMITTED)


@dataclass(slots=True, eq=False)
class Attempt:
    """A transaction, or a send without one. `writes`: values by log, in the order in which they were sent.

    `producer`: the name and number of a numbered transaction; all attempts of a number have the same values. `doubles`:
    whether its records may be there twice, because a cluster may store what is sent without a transaction again.
    """

    client: str
    writes: dict[str, list[bytes]] = field(default_factory=lambda: defaultdict(list))
    producer: tuple[str, int] | None = None
    doubles: bool = False
    txn: TxnId | None = None
    first_sent: float = NEVER
    asked: float = NEVER
    """When its commit was requested."""
    ended: float = NEVER
    fate: Fate = Fate.OPEN
    losable: bool = False
    """Whether its commit may be lost: also if the answer arrives late, after the loss."""
    answered: bool = False
    """Whether the answer to its commit came, of a losable one."""

    def __str__(self) -> str:
        name = "" if self.producer is None else f" {self.producer[0]} no. {self.producer[1]}"
        return f"{self.client}'s {self.txn or 'send'}{name} ({self.fate.value})"


DELETION = "deletion"
"""Property of a deletion: what stands for its value in the history, where each value is there once."""


class Shown(NamedTuple):
    """A committed record as a reader or a stream shows it; `position` is None in streams."""

    seqno: int | None
    key: bytes | None
    value: bytes
    position: Position | None = None


@dataclass(slots=True, eq=False)
class Reading:
    """What one reader showed of a topic, from its beginning on."""

    reader: str
    topic: str
    records: list[Shown] = field(default_factory=list)
    began: float = NEVER
    """When it showed its first record."""
    decided: Position = EARLIEST
    """The newest position up to which it said that everything is decided."""


@dataclass(slots=True, eq=False)
class Following:
    """What a change stream showed of a topic up to a seqno, by seqno; it may leave out what a later change replaced.

    `complete`: whether the newest changes of all keys are those of the topic at this seqno.
    """

    follower: str
    topic: str
    seqno: int = 0
    complete: bool = True
    changes: dict[int, Shown] = field(default_factory=dict)
    rollbacks: int = 0
    began: float = NEVER
    """When it was shown the first changes from its beginning on."""
    states: list[tuple[int, dict[bytes | None, bytes]]] = field(default_factory=list)
    """The values of all keys at some seqnos at which it was complete; later changes would hide what was wrong."""

    @property
    def data(self) -> dict[bytes | None, bytes]:
        """The values of all keys."""
        return {change.key: change.value for _, change in sorted(self.changes.items())}

    def note_state(self) -> None:
        """Keep the values that it has now, if it is complete, and has not been further before."""
        if self.complete and max(self.changes, default=0) <= self.seqno:
            self.states.append((self.seqno, self.data))

    def rolled_back(self, seqno: int) -> None:
        """Take changes back."""
        self.rollbacks += 1
        self.changes = {number: change for number, change in self.changes.items() if number <= seqno}
        self.states = [state for state in self.states if state[0] <= seqno]
        self.seqno, self.complete = min(self.seqno, seqno), True


def _history(record: Shown) -> int:
    """The history of a log in which a record was written: another one begins after a forced promotion."""
    return 0 if record.position is None else record.position.ledger // LEDGERS_OF_A_HISTORY


class History:
    """All attempts, readings and followings. `report` gets a text for each violation.

    All of them are of logs: of the partitions of topics that are partitioned.
    """

    def __init__(
        self, now: Callable[[], float], report: Callable[[str], None], partitions: Partitions | None = None
    ) -> None:
        self.partitions = partitions or Partitions()
        self.attempts: list[Attempt] = []
        self.readings: list[Reading] = []
        self.followings: list[Following] = []
        self.operations = 0
        self.numbered = False
        """Whether each record has a seqno, also without transactions: the log knows that nothing was trimmed before."""
        self.decided_at: dict[str, list[tuple[float, Position, str]]] = defaultdict(list)
        """By topic: when somebody learned that everything up to a position is decided, the newest position each."""
        self.owners: dict[tuple[int, int], str] = {}
        """The process that took over, by shard and epoch."""
        self.newest_take_over = 0.0
        """When a process took over last."""
        self.dropped: Callable[[str, Shown, float], bool] = lambda topic, record, time: False
        """Whether retention had dropped a record of a topic at a time."""
        self.may_miss: Callable[[str, Shown], bool] = lambda topic, record: False
        """Whether compaction may have removed a record of a topic."""
        self.may_purge: Callable[[str, Shown], bool] = lambda topic, record: False
        """Whether compaction may have removed a deletion of a topic although nothing newer has its key."""
        self._writers: dict[bytes, list[Attempt]] = {}
        self._derived: dict[bytes, bytes] = {}
        self._now = now
        self.report = report

    def attempt(self, client: str, producer: tuple[str, int] | None = None, *, doubles: bool = False) -> Attempt:
        """A transaction or a send begins."""
        self.operations += 1
        found = Attempt(client, producer=producer, doubles=doubles)
        self.attempts.append(found)
        return found

    def sent(
        self, attempt: Attempt, topic: str, value: bytes, key: bytes | None = None, partition: int | None = None
    ) -> None:
        """A record is about to be sent, with its key, to a partition if one is named."""
        self.operations += 1
        attempt.first_sent = min(attempt.first_sent, self._now())
        attempt.writes[self.partitions.log(topic, key, partition)].append(value)
        writers = self._writers.setdefault(value, [])
        if attempt not in writers:
            writers.append(attempt)

    def asked(self, *attempts: Attempt) -> None:
        """The commit of these is about to be requested."""
        for attempt in attempts:
            attempt.fate, attempt.asked = Fate.ASKED, min(attempt.asked, self._now())

    def took_over(self, shard: int, epoch: int, process: str) -> None:
        """A service will answer as the owner of a shard: with an epoch that no other life of a service has had.

        A process that was paused may say so after its successor, so epochs need not grow.
        """
        self.newest_take_over = self._now()
        owner = self.owners.setdefault((shard, epoch), process)
        if owner != process:
            self.report(f"{process} owns shard {shard} in epoch {epoch}, as {owner} did")

    def ended(self, attempt: Attempt, fate: Fate) -> None:
        """The end of a transaction was answered."""
        self.operations += 1
        if attempt.losable and fate is Fate.COMMITTED:
            attempt.fate, attempt.answered = Fate.ASKED, True
            return
        attempt.fate = fate
        attempt.ended = self._now()

    def may_lose(self) -> None:
        """From now on everything that was committed so far may be gone: a transaction as a whole, or not at all.

        What readers have shown says nothing any more of what is left, unless they continue; followers of streams roll
        back.
        """
        for attempt in self.attempts:
            attempt.losable = True
            if attempt.fate is Fate.COMMITTED:
                attempt.fate, attempt.ended, attempt.answered = Fate.ASKED, NEVER, True
        self.readings.clear()

    def learned(self, attempt: Attempt, *, committed: bool) -> None:
        """The log says whether a transaction has committed whose outcome is not known."""
        attempt.fate = Fate.COMMITTED if committed else Fate.LOST if attempt.answered else Fate.ABORTED

    def derive(self, source: bytes, value: bytes) -> None:
        """A consumer group makes a record of another one; it may do so again, but commits it once."""
        self.operations += 1
        self._derived[value] = source

    def source(self, value: bytes) -> bytes | None:
        """The record from which a consumer group made one."""
        return self._derived.get(value)

    def may_double(self, value: bytes) -> bool:
        """Whether a record may be there twice: one that may, or what a consumer group made of it."""
        source = self._derived.get(value, value)
        return any(writer.doubles for writer in self.writers(source))

    def writers(self, value: bytes) -> list[Attempt]:
        """The attempts that sent a value."""
        return self._writers.get(value, [])

    def reading(self, reader: str, topic: str) -> Reading:
        """A reader starts at the beginning of a topic."""
        found = Reading(reader, topic)
        self.readings.append(found)
        return found

    def read(self, reading: Reading, records: list[Shown]) -> None:
        """A reader shows more records."""
        self.shown(reading.reader, reading.topic, records)
        if records and not reading.records:
            reading.began = self._now()
        if records and reading.records and _history(records[-1]) != _history(reading.records[-1]):
            # After a forced promotion a reader continues only if the log has all that it showed before.
            self.readings += [reading] if reading not in self.readings else []
        reading.records += records

    def decided(self, reading: Reading, position: Position) -> None:
        """Check a position up to which a reader says that everything is decided."""
        self.operations += 1
        shown = reading.records[-1].position if reading.records else None
        if position < reading.decided or (shown is not None and position < shown):
            self.report(
                f"{reading.reader} said that {reading.topic} is decided up to {position}, after {reading.decided} and "
                f"after it had shown {shown}"
            )
        reading.decided = max(reading.decided, position)
        self._learned(reading.reader, reading.topic, position)

    def _learned(self, who: str, topic: str, position: Position) -> None:
        known = self.decided_at[topic]
        if not known or position > known[-1][1]:
            known.append((self._now(), position, who))

    def shown(self, who: str, topic: str, records: Iterable[Shown]) -> None:
        """Check records when they are shown."""
        self.operations += 1
        for record in records:
            if record.position is not None:
                self._learned(who, topic, record.position)
            if record.value in self._derived:
                continue
            writers = self.writers(record.value)
            if not any(writer.fate.may_be_visible for writer in writers):
                known = ", ".join(map(str, writers)) or "nobody"
                self.report(f"{who} was shown {record} of {topic}, which is from {known}")
