"""Consumer groups: partition assignment, membership and generations, and positions that commit with transactions

A transaction that consumed a partition states from where to where, and in which generation of its group. It may commit
only if no other member got the partition after that generation, and if it starts where the group's last committed
transaction ended. So a member that was removed cannot process anything twice.

A partition here is a partition of a topic, or a topic without partitions. When a partition gets another holder, or
loses its holder, the group's next generation starts, and the partition is held *since* that generation. A member that
got an older generation can commit nothing there; one that got this or a later generation is the holder. So no member
has to release a partition, and a member that was paused for long does no harm when it continues.

Members and holders are not stored. A new owner knows only the generation, which counts for all partitions: open
transactions of the previous members can commit until the first member joins again and starts the next generation.

The assignment is even and moves few partitions. If members want different topics, a member may hold too many partitions
that no member with fewer wants. Then partitions move along a chain: each member gives one that the next member wants,
so that only the first member has one less, and only the last one has one more. If there is no chain from a member to
one that has at least two less, no assignment is more even.
"""

from __future__ import annotations

import enum
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from broker_io.errors import MessageTooLarge
from broker_io.partitions import whole_name
from broker_io.position import EARLIEST, Position
from txnbuffer.coordinator.core import Core
from txnbuffer.coordinator.decisions import Consumers, PositionCommit, consumers_bytes
from txnbuffer.coordinator.history import ConsumersState
from txnbuffer.coordinator.messages import (
    ConsumerPosition,
    Done,
    GroupHeartbeat,
    Joined,
    MemberAssignments,
    PartitionAssignment,
)
from txnbuffer.coordinator.transaction import Session
from txnbuffer.errors import Error, InvalidRequest, PositionConflict, StaleGeneration

Held = Mapping[str, dict[str, list[str]]]
"""The partitions of each member by topic."""


def assign(
    partitions: Mapping[str, str], members: Mapping[str, Collection[str]], holders: Mapping[str, str]
) -> dict[str, str]:
    """Assign each wanted partition to a member, as evenly as possible.

    `partitions` maps a partition to its topic, `members` a member to the topics that it wants, `holders` a partition
    to its present member. If all members want the same topics, their numbers of partitions differ by at most one, and
    no partition moves unnecessarily.
    """
    held: dict[str, dict[str, list[str]]] = {member: {} for member in members}
    wanting: dict[str, list[str]] = defaultdict(list)
    for member in sorted(members):
        for topic in members[member]:
            wanting[topic].append(member)
    free = []
    for partition in sorted(partitions):
        topic, holder = partitions[partition], holders.get(partition, "")
        if holder in members and topic in members[holder]:
            held[holder].setdefault(topic, []).append(partition)
        else:
            free.append(partition)
    load = {member: sum(map(len, topics.values())) for member, topics in held.items()}
    for partition in free:
        topic = partitions[partition]
        if wanting[topic]:
            member = min(wanting[topic], key=load.__getitem__)
            held[member].setdefault(topic, []).append(partition)
            load[member] += 1
    while _move_one(held, wanting, load):
        pass
    return {partition: member for member, topics in held.items() for names in topics.values() for partition in names}


def _move_one(held: Held, wanting: Mapping[str, list[str]], load: dict[str, int]) -> bool:
    """Move one partition from a member with many to one with at least two less; False if that is not possible."""
    seen: set[str] = set()
    for giver in sorted(load, key=lambda member: (-load[member], member)):
        chain = [] if giver in seen else _chain(giver, held, wanting, load, seen)
        for member, topic, taker in chain:
            held[taker].setdefault(topic, []).append(held[member][topic].pop())
        if chain:
            load[giver] -= 1
            load[chain[0][2]] += 1
            return True
    return False


def _chain(
    giver: str, held: Held, wanting: Mapping[str, list[str]], load: Mapping[str, int], seen: set[str]
) -> list[tuple[str, str, str]]:
    """A shortest chain from the giver as (member, topic, next member), the last first; empty if there is none.

    `seen` has the members that no giver with as many or fewer partitions can use; the search adds the ones it reached.
    """
    came: dict[str, tuple[str, str]] = {}
    asked: set[str] = set()
    ring = [giver]
    seen.add(giver)
    while ring:
        further: list[str] = []
        for member in ring:
            for topic in sorted(topic for topic, names in held[member].items() if names and topic not in asked):
                asked.add(topic)
                new = [other for other in wanting[topic] if other not in seen]
                came |= dict.fromkeys(new, (member, topic))
                seen.update(new)
                further += new
        taker = min(further, key=lambda member: (load[member], member), default=giver)
        if load[giver] - load[taker] > 1:
            chain = []
            while taker != giver:
                member, topic = came[taker]
                chain.append((member, topic, taker))
                taker = member
            return chain
        ring = further
    return []


AWAY_TIMEOUT = 2.0
"""Seconds after which a member that lost its connection and did not reconnect is removed."""
SUSPECT_TIMEOUT = 3.0
"""Seconds without a heartbeat after which a member counts as possibly gone."""
SEPARATOR = "\n"
"""No topic name contains it."""


class Stage(enum.Enum):
    """The state of a group."""

    EMPTY = "empty"
    REBALANCING = "rebalancing"
    STABLE = "stable"


class StageTransition(NamedTuple):
    """One row of the group's state table: in state `before`, `event` leads to state `after`."""

    before: Stage
    event: str
    after: Stage


TRANSITIONS = (
    StageTransition(Stage.EMPTY, "a member joins", Stage.REBALANCING),
    StageTransition(Stage.REBALANCING, "the newest generation is durable", Stage.STABLE),
    StageTransition(Stage.STABLE, "a partition gets another holder, or loses it", Stage.REBALANCING),
    StageTransition(Stage.REBALANCING, "the last member leaves", Stage.EMPTY),
    StageTransition(Stage.STABLE, "the last member leaves", Stage.EMPTY),
)


@dataclass(slots=True, eq=False)
class Member:
    """A member of a group. `heard`: the time of its last heartbeat; `away`: the time when its connection broke."""

    name: str
    session: str = ""
    partitions: dict[str, str] = field(default_factory=dict)
    topics: frozenset[str] = frozenset()
    heard: float = 0.0
    away: float | None = None


@dataclass
class Members:
    """The members of one group, and which partitions they hold.

    `pending_generations` counts generations that are not durable yet. `holders` maps a partition to its member.
    """

    _floor: int
    by_name: dict[str, Member] = field(default_factory=dict)
    holders: dict[str, str] = field(default_factory=dict)
    pending_generations: int = 0
    _since: dict[str, int] = field(default_factory=dict)
    _changed: bool = False

    @property
    def stage(self) -> Stage:
        if not self.by_name:
            return Stage.EMPTY
        return Stage.REBALANCING if self.pending_generations else Stage.STABLE

    def may_commit(self, partition: str, generation: int) -> bool:
        """Whether the member that held the partition in this generation still holds it."""
        return generation >= self._since.get(partition, self._floor)

    def heartbeat(self, heartbeat: GroupHeartbeat, session: str, now: float) -> None:
        """A member joins or stays, and reports which partitions it can read."""
        member = self.by_name.setdefault(heartbeat.member, Member(heartbeat.member))
        member.session, member.heard, member.away = session, now, None
        partitions = dict(zip(heartbeat.partitions, heartbeat.topics, strict=True))
        if not member.partitions or partitions != member.partitions:
            # Members that want the same share one dictionary.
            same = (other.partitions for other in self.by_name.values() if other.partitions == partitions)
            member.partitions, member.topics = next(same, partitions), frozenset(heartbeat.topics)
            self._changed = True

    def leave(self, name: str) -> None:
        self._changed |= self.by_name.pop(name, None) is not None

    def leave_session(self, session: str) -> None:
        """All members of a client leave."""
        for member in [member for member in self.by_name.values() if member.session == session]:
            self.leave(member.name)

    def away(self, session: str, now: float) -> None:
        """The connection of a client broke."""
        for member in self.by_name.values():
            if member.session == session and member.away is None:
                member.away = now

    def expire(self, now: float, timeout: float) -> None:
        """Remove members whose heartbeat is overdue."""
        for member in [*self.by_name.values()]:
            gone = member.away is not None and member.away + AWAY_TIMEOUT <= now
            if gone or member.heard + timeout <= now:
                self.leave(member.name)

    def unsettled(self, name: str, now: float) -> bool:
        """Whether another member may be gone, so that its partitions may soon move to this one."""
        holding = {*self.holders.values()} - {name}
        members = (self.by_name[other] for other in holding if other in self.by_name)
        return any(member.away is not None or member.heard + SUSPECT_TIMEOUT <= now for member in members)

    def fence(self, generation: int) -> None:
        """Remove all members: nothing of an older generation can commit any more."""
        self.by_name.clear()
        self.holders.clear()
        self._since.clear()
        self._floor = generation
        self._changed = False

    def rebalance(self, generation: int) -> bool:
        """Assign the partitions again. True: some have moved, in this generation."""
        if not self._changed:
            return False
        self._changed = False
        holders = assign(*self._wanted(), self.holders)
        moved = [name for name in {**self.holders, **holders} if self.holders.get(name) != holders.get(name)]
        self._since |= dict.fromkeys(moved, generation)
        self.holders = holders
        return bool(moved)

    def _wanted(self) -> tuple[dict[str, str], dict[str, frozenset[str]]]:
        """For each partition the names under which members want it, joined to one key; and the keys each member wants.

        One member may want a topic, and another one a single partition of it by its own name.
        """
        names: dict[str, set[str]] = defaultdict(set)
        for listed in {id(member.partitions): member.partitions for member in self.by_name.values()}.values():
            for partition, topic in listed.items():
                names[partition].add(topic)
        partitions = {partition: SEPARATOR.join(sorted(topics)) for partition, topics in names.items()}
        texts = {text: {*text.split(SEPARATOR)} for text in partitions.values()}
        return partitions, {
            name: frozenset(text for text, topics in texts.items() if not member.topics.isdisjoint(topics))
            for name, member in self.by_name.items()
        }

    def assignments(self, member: str) -> Iterator[tuple[str, int]]:
        """The partitions of a member, each with the generation since which it holds it."""
        return ((name, self._since[name]) for name, holder in self.holders.items() if holder == member)


MAX_MEMBERS = 1_000
MAX_PARTITIONS = 10_000
"""Limits of one group."""


@dataclass
class ConsumerGroups:
    """The consumer groups of a coordinator.

    Positions include what is on its way to the decision log: all later entries follow it there.
    """

    _core: Core
    _states: dict[str, ConsumersState]
    _members: dict[str, Members] = field(default_factory=dict)
    _sizes: dict[str, tuple[int, int]] = field(default_factory=dict)
    """How many positions a group had when its entry was measured, and the bytes."""
    _waiting: dict[str, list[tuple[str, int, str]]] = field(default_factory=dict)

    def all_groups(self) -> Iterator[tuple[str, int, dict[str, Position]]]:
        """The name, generation, and positions by topic of each group."""
        return ((name, state.generation, state.positions) for name, state in self._states.items())

    def floor(self, topic: str) -> int | None:
        """Return the lowest ledger of a topic at which a group continues."""
        found = [state.positions[topic].ledger for state in self._states.values() if topic in state.positions]
        return min(found, default=None)

    def members(self, group: str) -> Members:
        """The members of a group."""
        known = self._members.get(group)
        if known is None:
            state = self._states.get(group)
            known = self._members[group] = Members(0 if state is None else state.generation)
        return known

    def join(self, session: Session, request: int, group: str) -> None:
        """Start a new generation without members: nothing of older generations can commit any more."""
        if (refusal := self._too_large(group)) is not None:
            self._core.answer(session.name, request, refusal)
            return
        state = self._states.setdefault(group, ConsumersState())
        joined = Joined(state.generation + 1, tuple(state.positions.items()))
        self._next_generation(group, self._core.answer_when_durable(session, request, joined))
        self.members(group).fence(state.generation)

    def forget(self, request: int, group: str, topic: str | None) -> None:
        """Delete a group's positions on a topic and its partitions, or on all. Answered with Done, or an error."""
        state = self._states.get(group, ConsumersState())
        gone = [name for name in state.positions if topic in (None, name, whole_name(name))]
        if not gone:
            what = "position" if topic is None else f"position on {topic!r}"
            self._core.answer("", request, InvalidRequest(f"group {group!r} has no {what}: check the names"))
        elif count := len(self.members(group).by_name):
            self._core.answer("", request, InvalidRequest(f"group {group!r} has {count} members: stop them first"))
        elif (refusal := self._too_large(group, {*state.positions}.difference(gone))) is not None:
            self._core.answer("", request, refusal)
        else:
            self._sizes.pop(group, None)
            for name in gone:
                del state.positions[name]
            self._next_generation(group, lambda: self._core.answer("", request, Done()))
            self.members(group).fence(state.generation)

    def _next_generation(self, group: str, on_durable: Callable[[], None]) -> None:
        """Start the group's next generation: write it with all positions."""
        self._states[group].generation += 1
        self._write(group, on_durable)

    def _write(self, group: str, on_durable: Callable[[], None] | None = None) -> None:
        state = self._states[group]
        state.group = 0
        self._core.journal.put(Consumers(group, state.generation, tuple(state.positions.items())), on_durable)

    def refusal(self, positions: tuple[ConsumerPosition, ...]) -> Error | None:
        """Why a transaction that consumed these can't commit; None if it can."""
        for group, topic, generation, start, _ in positions:
            state = self._states.get(group)
            if state is None or generation > state.generation or not self.members(group).may_commit(topic, generation):
                return StaleGeneration(
                    f"group {group!r} gave {topic!r} to another member after generation {generation}: "
                    "join again and continue at the group's positions"
                )
            last = state.positions.get(topic)
            if last is None and start != EARLIEST and topic in self.members(group).holders:
                return PositionConflict(
                    f"the transaction starts at {start} of {topic!r}, where group {group!r} has no position yet: "
                    "get the assignment again"
                )
            if last is not None and start != last:
                return PositionConflict(
                    f"the transaction starts at {start} of {topic!r}, group {group!r} is at {last}: continue there"
                )
        for group in {position.group for position in positions}:
            topics = [position.topic for position in positions if position.group == group]
            if (refusal := self._grows_too_large(group, topics)) is not None:
                return refusal
        return None

    def commit(self, commits: Sequence[PositionCommit], number: int) -> None:
        """A decision was taken, in group `number` of the log, that moves consumer groups."""
        for group, topic, end in commits:
            state = self._states[group]
            state.positions[topic] = end
            state.group = number

    def repeat(self, group: int, consumers: tuple[str, ...]) -> bool:
        """Before a group of decisions is deleted from the log, write positions that only it has to other entries.

        Return False, and write nothing, if they don't fit.
        """
        names = [name for name in consumers if name in self._states and self._states[name].group == group]
        if any(self._too_large(name) is not None for name in names):
            return False
        for name in names:
            self._write(name)
        return True

    # Members

    def heartbeat(self, session: str, request: int, heartbeat: GroupHeartbeat) -> None:
        """A member joins, stays, or leaves. Answered with MemberAssignments."""
        members = self.members(heartbeat.group)
        if heartbeat.leaves:
            members.leave(heartbeat.member)
        elif (refusal := self._limit_refusal(members, heartbeat)) is not None:
            self._core.answer(session, request, refusal)
            return
        else:
            members.heartbeat(heartbeat, session, self._core.now)
        self._rebalance(heartbeat.group, changed=not heartbeat.leaves and self._set_initial_positions(heartbeat))
        self._waiting.setdefault(heartbeat.group, []).append((session, request, heartbeat.member))
        self._answer_waiting(heartbeat.group)

    def session_away(self, session: str) -> None:
        """The connection of a client broke."""
        for members in self._members.values():
            members.away(session, self._core.now)

    def session_closed(self, session: str) -> None:
        """A client has closed its session."""
        for group, members in self._members.items():
            members.leave_session(session)
            self._rebalance(group)

    def tick(self) -> None:
        """Remove members whose heartbeat is overdue."""
        for group, members in self._members.items():
            if members.by_name:
                members.expire(self._core.now, self._core.config.member_timeout)
                self._rebalance(group)

    def _limit_refusal(self, members: Members, heartbeat: GroupHeartbeat) -> Error | None:
        if len(heartbeat.partitions) > MAX_PARTITIONS:
            return InvalidRequest(
                f"a group can have {MAX_PARTITIONS} partitions, got {len(heartbeat.partitions)}: use more groups"
            )
        if heartbeat.member not in members.by_name and len(members.by_name) >= MAX_MEMBERS:
            return InvalidRequest(f"group {heartbeat.group!r} has {MAX_MEMBERS} members, the limit: stop some")
        return self._grows_too_large(heartbeat.group, heartbeat.partitions) or self._too_large(heartbeat.group)

    def _grows_too_large(self, group: str, topics: Iterable[str]) -> MessageTooLarge | None:
        """Why a group can't start on these topics; None if it can."""
        state = self._states.get(group)
        known = () if state is None else state.positions
        new = {topic for topic in topics if topic not in known}
        return self._too_large(group, new.union(known)) if new else None

    def _too_large(self, group: str, topics: Collection[str] | None = None) -> MessageTooLarge | None:
        """Why one message can't hold a group's positions on these topics (None: its present ones); None if it can."""
        if topics is None:
            state = self._states.get(group)
            topics = () if state is None else state.positions
            if self._sizes.get(group, (-1, 0))[0] != len(topics):
                self._sizes[group] = len(topics), consumers_bytes(group, topics)
            size = self._sizes[group][1]
        else:
            size = consumers_bytes(group, topics)
        limit = self._core.config.max_message_bytes
        if size <= limit:
            return None
        return MessageTooLarge(
            f"group {group!r} with positions on {len(topics)} topics and partitions needs up to {size} bytes in the "
            f"decision log, the limit is {limit}: use several groups, make it forget topics that it no longer reads, "
            "or raise log.max_message_bytes of the service"
        )

    def _set_initial_positions(self, heartbeat: GroupHeartbeat) -> bool:
        """Set the group's position on topics that it has not consumed before. True: there are such topics."""
        if not heartbeat.ends:
            return False
        state = self._states.setdefault(heartbeat.group, ConsumersState())
        rows = list(zip(heartbeat.topics, heartbeat.partitions, heartbeat.ends, strict=True))
        known = {topic for topic, name, _ in rows if name in state.positions}
        begun = {name: end for topic, name, end in rows if topic not in known}
        state.positions |= begun
        return bool(begun)

    def _rebalance(self, group: str, *, changed: bool = False) -> None:
        """Assign the partitions again, and write the new generation if any have moved.

        If the group, written by an older owner, exceeds the limit, none move: its members are refused.
        """
        if self._too_large(group) is not None:
            return
        members = self._members[group]
        state = self._states.setdefault(group, ConsumersState())
        if members.rebalance(state.generation + 1) or changed:
            members.pending_generations += 1
            self._next_generation(group, lambda: self._generation_durable(group))

    def _generation_durable(self, group: str) -> None:
        self._members[group].pending_generations -= 1
        self._answer_waiting(group)

    def _answer_waiting(self, group: str) -> None:
        """Answer the waiting members once the newest generation is durable."""
        members, state = self._members[group], self._states[group]
        if members.pending_generations:
            return
        for session, request, member in self._waiting.pop(group, ()):
            assignments = tuple(
                PartitionAssignment(partition, since, state.positions.get(partition, EARLIEST))
                for partition, since in members.assignments(member)
            )
            # A member that was removed while it waited joins again, and gets its assignment then.
            unsettled = member not in members.by_name or members.unsettled(member, self._core.now)
            self._core.answer(session, request, MemberAssignments(state.generation, assignments, unsettled))
