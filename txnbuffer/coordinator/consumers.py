"""Consumer groups: consume, transform and produce exactly once.

A transaction that consumed a partition says from where to where, and by which generation of its group. It may commit
only if nobody else was given the partition since, and if it starts where the group's last committed one ended: so
a consumer that was given up can't do work twice. Who holds what is `txnbuffer.coordinator.members`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence

from broker_io.errors import MessageTooLarge
from broker_io.partitions import whole_name
from broker_io.position import EARLIEST, Position
from txnbuffer.coordinator.core import Core
from txnbuffer.coordinator.entries import Consumers, PositionCommit
from txnbuffer.coordinator.history import ConsumersState
from txnbuffer.coordinator.members import Members
from txnbuffer.coordinator.messages import ConsumerPosition, Done, Joined, Share, Shares, TakePart
from txnbuffer.coordinator.sizes import consumers_bytes
from txnbuffer.errors import Error, InvalidRequest, PositionConflict, StaleGeneration

MAX_MEMBERS = 1_000
MAX_PARTITIONS = 10_000
"""Of one group."""


class ConsumerGroups:
    """Positions count what stands in the log or is on its way there: all after it lands behind it."""

    def __init__(self, core: Core, states: dict[str, ConsumersState]) -> None:
        self._core = core
        self._states = states
        self._members: dict[str, Members] = {}
        self._sizes: dict[str, tuple[int, int]] = {}
        """How many positions a group had when its entry was measured, and the bytes."""
        self._waiting: dict[str, list[tuple[str, int, str]]] = {}

    def all_groups(self) -> Iterator[tuple[str, int, dict[str, Position]]]:
        """Name, generation, and by topic how far each has come."""
        return ((name, state.generation, state.positions) for name, state in self._states.items())

    def floor(self, topic: str) -> int | None:
        """Return the lowest ledger of a topic from which a group goes on."""
        found = [state.positions[topic].ledger for state in self._states.values() if topic in state.positions]
        return min(found, default=None)

    def members(self, group: str) -> Members:
        """Who shares the group."""
        known = self._members.get(group)
        if known is None:
            state = self._states.get(group)
            known = self._members[group] = Members(0 if state is None else state.generation)
        return known

    def join(self, session: str, request: int, group: str) -> None:
        """Begin a new generation without members; the older ones can commit no more."""
        if (refusal := self._too_large(group)) is not None:
            self._core.answer(session, request, refusal)
            return
        state = self._states.setdefault(group, ConsumersState())
        state.generation += 1
        state.group = 0
        self.members(group).fence(state.generation)
        joined = Joined(state.generation, tuple(state.positions.items()))
        self._core.journal.put(self._entry(group, state), lambda: self._core.answer(session, request, joined))

    def forget(self, request: int, group: str, topic: str | None) -> None:
        """Let a group begin anew on a topic and its partitions, or on all. Answered with Done, or why not."""
        state = self._states.get(group, ConsumersState())
        gone = [name for name in state.positions if topic in (None, name, whole_name(name))]
        if not gone:
            where = "has come to nothing" if topic is None else f"never was on {topic!r}"
            self._core.answer("", request, InvalidRequest(f"group {group!r} {where}: there is nothing to forget"))
        elif count := len(self.members(group).by_name):
            self._core.answer("", request, InvalidRequest(f"group {group!r} has {count} members: end them first"))
        elif (refusal := self._too_large(group, {*state.positions}.difference(gone))) is not None:
            self._core.answer("", request, refusal)
        else:
            self._sizes.pop(group, None)
            for name in gone:
                del state.positions[name]
            state.generation += 1
            state.group = 0
            self.members(group).fence(state.generation)
            self._core.journal.put(self._entry(group, state), lambda: self._core.answer("", request, Done()))

    def refusal(self, positions: tuple[ConsumerPosition, ...]) -> Error | None:
        """Why a transaction that consumed these can't commit."""
        for group, topic, generation, start, _ in positions:
            state = self._states.get(group)
            if state is None or generation > state.generation or not self.members(group).may_commit(topic, generation):
                return StaleGeneration(
                    f"group {group!r} gave {topic!r} to another one after generation {generation}; "
                    "join it anew, go on from its positions"
                )
            last = state.positions.get(topic)
            if last is None and start != EARLIEST and topic in self.members(group).holders:
                return PositionConflict(
                    f"the transaction starts at {start} of {topic!r}, group {group!r} has not begun: ask anew"
                )
            if last is not None and start != last:
                return PositionConflict(
                    f"the transaction starts at {start} of {topic!r}, group {group!r} has come to {last}: go on there"
                )
        for group in {position.group for position in positions}:
            topics = [position.topic for position in positions if position.group == group]
            if (refusal := self._grows_too_large(group, topics)) is not None:
                return refusal
        return None

    def commit(self, commits: Sequence[PositionCommit], number: int) -> None:
        """The decision just taken, in group `number` of the log, moves the groups of consumers."""
        for group, topic, end in commits:
            state = self._states[group]
            state.positions[topic] = end
            state.group = number

    def may_repeat(self, group: int, consumers: tuple[str, ...]) -> bool:
        """Whether what only a group of decisions says can be written down elsewhere."""
        return all(self._too_large(name) is None for name in self._said_by(group, consumers))

    def repeat(self, group: int, consumers: tuple[str, ...]) -> None:
        """A group of decisions is about to be forgotten: write down what only it says."""
        for name in self._said_by(group, consumers):
            state = self._states[name]
            state.group = 0
            self._core.journal.put(self._entry(name, state))

    def _said_by(self, group: int, consumers: tuple[str, ...]) -> list[str]:
        return [name for name in consumers if name in self._states and self._states[name].group == group]

    # Members

    def take_part(self, session: str, request: int, part: TakePart) -> None:
        """A member comes, says that it is still there, or goes. Answered with Shares."""
        members = self.members(part.group)
        if part.leaves:
            members.leave(part.member)
        elif (refusal := self._crowded(members, part)) is not None:
            self._core.answer(session, request, refusal)
            return
        else:
            members.hear(part, session, self._core.now)
        self._rebalance(part.group, changed=not part.leaves and self._begin(part))
        self._waiting.setdefault(part.group, []).append((session, request, part.member))
        self._tell(part.group)

    def session_away(self, session: str) -> None:
        """The connection of a client broke."""
        for members in self._members.values():
            members.away(session, self._core.now)

    def session_closed(self, session: str) -> None:
        """A client goes for good."""
        for group, members in self._members.items():
            members.leave_session(session)
            self._rebalance(group)

    def tick(self) -> None:
        """Give up who was not heard of in time."""
        for group, members in self._members.items():
            if members.by_name:
                members.expire(self._core.now, self._core.config.member_timeout)
                self._rebalance(group)

    def _crowded(self, members: Members, part: TakePart) -> Error | None:
        if len(part.partitions) > MAX_PARTITIONS:
            return InvalidRequest(f"a group has at most {MAX_PARTITIONS} partitions, not {len(part.partitions)}")
        if part.member not in members.by_name and len(members.by_name) >= MAX_MEMBERS:
            return InvalidRequest(f"group {part.group!r} has {MAX_MEMBERS} members, more can't be: end some")
        return self._grows_too_large(part.group, part.partitions) or self._too_large(part.group)

    def _grows_too_large(self, group: str, topics: Iterable[str]) -> MessageTooLarge | None:
        """Why a group can't begin on topics that it never was on."""
        state = self._states.get(group)
        known = () if state is None else state.positions
        new = {topic for topic in topics if topic not in known}
        return self._too_large(group, new.union(known)) if new else None

    def _too_large(self, group: str, topics: Collection[str] | None = None) -> MessageTooLarge | None:
        """Why a group with positions on topics, those that it has, can't be written down: they stand in one message."""
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
            f"group {group!r} with positions on {len(topics)} topics and partitions takes up to {size} bytes of the "
            f"decision log, {limit} may be: share them among several groups, make it forget topics that it reads no "
            "more, or let the service write larger messages (log.max_message_bytes)"
        )

    def _begin(self, part: TakePart) -> bool:
        """Note where the group begins on topics that it never was on; whether there are such."""
        state = self._states.setdefault(part.group, ConsumersState())
        known = {topic for topic, name in zip(part.topics, part.partitions, strict=True) if name in state.positions}
        ends = part.ends or (EARLIEST,) * len(part.partitions)
        begun = {
            name: end
            for topic, name, end in zip(part.topics, part.partitions, ends, strict=True)
            if topic not in known and part.ends
        }
        state.positions |= begun
        return bool(begun)

    def _rebalance(self, group: str, *, changed: bool = False) -> None:
        """Let partitions move, and write the generation in which they do.

        None do in a group of an older owner that is too large to be written: its members are refused until it is not.
        """
        if self._too_large(group) is not None:
            return
        members = self._members[group]
        state = self._states.setdefault(group, ConsumersState())
        if members.rebalance(state.generation + 1) or changed:
            state.generation += 1
            state.group = 0
            members.writing += 1
            self._core.journal.put(self._entry(group, state), lambda: self._written(group))

    def _written(self, group: str) -> None:
        self._members[group].writing -= 1
        self._tell(group)

    def _tell(self, group: str) -> None:
        """Answer who waits, once all that it is told is durable."""
        members, state = self._members[group], self._states[group]
        if members.writing:
            return
        for session, request, member in self._waiting.pop(group, ()):
            shares = tuple(
                Share(partition, since, state.positions.get(partition, EARLIEST))
                for partition, since in members.shares(member)
            )
            # One that was given up while it waited for this comes again, and is given its share then.
            unsettled = member not in members.by_name or members.unsettled(member, self._core.now)
            self._core.answer(session, request, Shares(state.generation, shares, unsettled))

    def _entry(self, name: str, state: ConsumersState) -> Consumers:
        return Consumers(name, state.generation, tuple(state.positions.items()))
