"""The decision log read from its start, compacted or not: what a new owner has to know."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from pyroaring import BitMap64

from broker_io.batch import Message
from broker_io.position import Position
from txnbuffer.coordinator.entries import (
    Consumers,
    EndedIds,
    Entry,
    Group,
    Lease,
    Mark,
    Name,
    Owner,
    Topic,
    decode,
)
from txnbuffer.errors import UnreadableDecision


@dataclass(slots=True)
class NameState:
    """`group`: the last group that committed a number of it, 0 if a `name` entry repeats that."""

    opening: int = 0
    committed: int = 0
    group: int = 0
    deleted: bool = False


@dataclass(slots=True)
class ConsumersState:
    """`group`: as with names."""

    generation: int = 0
    positions: dict[str, Position] = field(default_factory=dict)
    group: int = 0


@dataclass(slots=True)
class History:
    """`epoch`: the highest of any owner. Keys that the log forgot are gone from the dictionaries."""

    epoch: int = 0
    next_group: int = 1
    next_mark: int = 1
    low_water_mark: int = 0
    groups: dict[int, Group] = field(default_factory=dict)
    marks: dict[int, Mark] = field(default_factory=dict)
    ended: BitMap64 = field(default_factory=BitMap64)
    leases: dict[int, Lease] = field(default_factory=dict)
    topics: dict[str, bool] = field(default_factory=dict)
    names: dict[str, NameState] = field(default_factory=dict)
    consumers: dict[str, ConsumersState] = field(default_factory=dict)

    @classmethod
    def read(cls, messages: Iterable[Message]) -> History:
        """All messages, in order. Raises UnreadableDecision."""
        history = cls()
        for message in messages:
            history.apply(message)
        return history

    @property
    def highest_lease(self) -> int:
        """Ids above it were never given out."""
        ends = (lease.first + lease.size - 1 for lease in self.leases.values())
        return max(ends, default=0)

    def apply(self, message: Message) -> None:
        entry = decode(message)
        if entry is None:
            self._forget((message.key or b"").decode())
        else:
            self._take(entry)

    def _take(self, entry: Entry) -> None:
        match entry:
            case Owner(epoch=epoch):
                self.epoch = max(self.epoch, epoch)
            case Group():
                self._take_group(entry)
            case Mark():
                self.marks[entry.number] = entry
                self.next_mark = max(self.next_mark, entry.number + 1)
                self.low_water_mark = max(self.low_water_mark, entry.low_water_mark)
            case EndedIds(ids=ids):
                self.ended = ids
            case Lease():
                self.leases[entry.first] = entry
            case Topic(topic=topic, one_phase=one_phase):
                self.topics[topic] = one_phase
            case Name(name=name, opening=opening, committed=committed, deleted=deleted):
                self.names[name] = NameState(opening, committed, 0, deleted)
            case Consumers(group=group, generation=generation, positions=positions):
                self.consumers[group] = ConsumersState(generation, dict(positions), 0)

    def _take_group(self, group: Group) -> None:
        self.groups[group.number] = group
        self.next_group = max(self.next_group, group.number + 1)
        self.epoch = max(self.epoch, group.epoch)
        for name, number in group.names:
            state = self.names.setdefault(name, NameState())
            state.committed, state.group = number, group.number
        for consumers, topic, end in group.positions:
            found = self.consumers.setdefault(consumers, ConsumersState())
            found.positions[topic] = end
            found.group = group.number

    def _forget(self, key: str) -> None:
        kind, _, rest = key.partition("-")
        if kind in ("group", "mark", "lease") and not rest.isdecimal():
            raise UnreadableDecision(f"decision log: {key!r} is no key of a {kind}; restore the log before going on")
        match kind:
            case "group":
                self.groups.pop(int(rest), None)
            case "mark":
                self.marks.pop(int(rest), None)
            case "ended":
                self.ended = BitMap64()
            case "lease":
                self.leases.pop(int(rest), None)
            case "topic":
                self.topics.pop(rest, None)
            case "name":
                self.names.pop(rest, None)
            case "consumers":
                self.consumers.pop(rest, None)
