"""The state of a decision log, compacted or not, read from its start: what a new owner has to know"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from pyroaring import BitMap64

from broker_io.batch import Message
from broker_io.position import Position
from txnbuffer.coordinator.decisions import (
    ENDED_KEY,
    Consumers,
    EndedIds,
    Group,
    Lease,
    LowWaterMark,
    Name,
    Owner,
    OwnerEpoch,
    RegisteredTopic,
    decode,
)
from txnbuffer.errors import UnreadableDecision

NUMBER_DIGITS = 19
"""The most digits of a number in a key."""


@dataclass(slots=True)
class NameState:
    """A producer name. `group`: the last group that committed one of its numbers; 0 if a `name` entry repeats it.

    `since`: as in the newest `name` entry.
    """

    epoch: int = 0
    committed: int = 0
    group: int = 0
    deleted: bool = False
    since: int = 0


@dataclass(slots=True)
class ConsumersState:
    """A consumer group. `group`, `since`: as in NameState.

    `groups`: for each topic the last group that moved the position, unless a `consumers` entry repeats it.
    """

    generation: int = 0
    positions: dict[str, Position] = field(default_factory=dict)
    group: int = 0
    since: int = 0
    groups: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class History:
    """All entries of a decision log that were not deleted.

    `epoch` is the highest epoch of an owner. `owned`: the log has an `owner` entry. `owners` has the newest owners by
    epoch.
    """

    epoch: int = 0
    owned: bool = False
    owners: dict[int, OwnerEpoch] = field(default_factory=dict)
    next_group: int = 1
    next_mark: int = 1
    low_water_mark: int = 0
    groups: dict[int, Group] = field(default_factory=dict)
    marks: dict[int, LowWaterMark] = field(default_factory=dict)
    ended: BitMap64 = field(default_factory=BitMap64)
    leases: dict[int, Lease] = field(default_factory=dict)
    topics: dict[str, bool] = field(default_factory=dict)
    names: dict[str, NameState] = field(default_factory=dict)
    consumers: dict[str, ConsumersState] = field(default_factory=dict)

    @classmethod
    def read(cls, messages: Iterable[Message]) -> History:
        """The state after these messages, in order. Raises UnreadableDecision."""
        history = cls()
        for message in messages:
            history.apply(message)
        return history

    @property
    def highest_lease(self) -> int:
        """The highest id of any lease in the log."""
        ends = (lease.first + lease.size - 1 for lease in self.leases.values())
        return max(ends, default=0)

    @property
    def highest_id(self) -> int:
        """The highest id that may have been leased."""
        return max(self.highest_lease, self.low_water_mark)

    def next_id(self, epoch: int) -> int:
        """The first id that the owner of an epoch leases."""
        own = self.owners.get(epoch)
        return max(self.highest_id + 1, own.first if own is not None else 0)

    def gaps(self, end: int) -> list[tuple[int, int]]:
        """First and last of the ranges above the low-water mark and below `end` that no owner leased."""
        gaps, last = [], self.low_water_mark
        for first in sorted(self.leases):
            if first > last + 1:
                gaps.append((last + 1, first - 1))
            last = max(last, first + self.leases[first].size - 1)
        return gaps if end <= last + 1 else [*gaps, (last + 1, end - 1)]

    def apply(self, message: Message) -> None:
        match entry := decode(message):
            case None:
                self._forget((message.key or b"").decode(errors="replace"))
            case Owner(epoch=epoch, owners=owners):
                self.epoch, self.owned = max(self.epoch, epoch), True
                self.owners.update({one.epoch: one for one in owners})
            case Group():
                self._apply_group(entry)
            case LowWaterMark():
                self.marks[entry.number] = entry
                self.next_mark = max(self.next_mark, entry.number + 1)
                self.low_water_mark = max(self.low_water_mark, entry.low_water_mark)
            case EndedIds(ids=ids):
                self.ended = ids
            case Lease():
                self.leases[entry.first] = entry
            case RegisteredTopic(topic=topic, one_phase=one_phase):
                self.topics[topic] = one_phase
            case Name():
                self._apply_name(entry)
            case Consumers():
                self._apply_consumers(entry)

    # A second copy of an entry says less than the groups after its first copy, which may be compacted away. So the
    # numbers of groups say what is newer, not the order of messages.

    def _apply_name(self, entry: Name) -> None:
        known = self.names.get(entry.name, NameState())
        if not entry.since:
            self.names[entry.name] = NameState(entry.epoch, entry.committed, 0, entry.deleted)
        elif entry.since > known.group:
            if entry.since >= known.since:
                self.names[entry.name] = NameState(entry.epoch, entry.committed, 0, entry.deleted, entry.since)
        else:
            known.epoch = max(known.epoch, entry.epoch)
            known.since = max(known.since, entry.since)

    def _apply_consumers(self, entry: Consumers) -> None:
        known = self.consumers.get(entry.group, ConsumersState())
        if entry.since and entry.since < known.since:
            return
        newer = {topic: group for topic, group in known.groups.items() if entry.since and group >= entry.since}
        places = dict(entry.positions) | {topic: known.positions[topic] for topic in newer}
        generation = max(entry.generation, known.generation) if newer else entry.generation
        group = max(newer.values(), default=0)
        self.consumers[entry.group] = ConsumersState(generation, places, group, entry.since, newer)

    def _apply_group(self, group: Group) -> None:
        self.groups[group.number] = group
        self.next_group = max(self.next_group, group.number + 1)
        self.epoch = max(self.epoch, group.epoch)
        for name, number in group.names:
            state = self.names.setdefault(name, NameState())
            if group.number >= max(state.since, state.group):
                state.committed, state.group = number, group.number
        for consumers, topic, end in group.positions:
            found = self.consumers.setdefault(consumers, ConsumersState())
            if group.number >= max(found.since, found.groups.get(topic, 0)):
                found.positions[topic] = end
                found.groups[topic] = group.number
                found.group = max(found.group, group.number)

    def _forget(self, key: str) -> None:
        kind, _, rest = key.partition("-")
        numbered: dict[str, dict[int, Any]] = {"group": self.groups, "mark": self.marks, "lease": self.leases}
        named: dict[str, dict[str, Any]] = {"topic": self.topics, "name": self.names, "consumers": self.consumers}
        if kind in numbered and not (rest.isascii() and rest.isdecimal() and len(rest) <= NUMBER_DIGITS):
            raise UnreadableDecision(f"decision log: {key!r} is not a key of a {kind}; restore the log from a backup")
        if kind in numbered:
            numbered[kind].pop(int(rest), None)
        elif kind in named:
            named[kind].pop(rest, None)
        elif kind == ENDED_KEY:
            self.ended = BitMap64()
