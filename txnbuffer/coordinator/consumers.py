"""Consumer groups: consume, transform and produce exactly once.

A transaction that consumed a topic says from where to where. It may commit only if the group's generation
is still its own and it starts where the group's last committed one ended, so a consumer that was given up
can't do work twice.
"""

from __future__ import annotations

from collections.abc import Iterator

from broker_io.position import Position
from txnbuffer.coordinator.core import Core
from txnbuffer.coordinator.entries import Consumers, PositionCommit
from txnbuffer.coordinator.history import ConsumersState
from txnbuffer.coordinator.messages import ConsumerPosition, Joined
from txnbuffer.errors import Error, PositionConflict, StaleGeneration


class ConsumerGroups:
    """Positions count what stands in the log or is on its way there: all after it lands behind it."""

    def __init__(self, core: Core, states: dict[str, ConsumersState]) -> None:
        self._core = core
        self._states = states

    def all_groups(self) -> Iterator[tuple[str, int, dict[str, Position]]]:
        return ((name, state.generation, state.positions) for name, state in self._states.items())

    def join(self, session: str, request: int, group: str) -> None:
        """Begin a new generation; the older ones can commit no more."""
        state = self._states.setdefault(group, ConsumersState())
        state.generation += 1
        state.group = 0
        joined = Joined(state.generation, tuple(state.positions.items()))
        self._core.journal.put(self._entry(group, state), lambda: self._core.answer(session, request, joined))

    def refusal(self, positions: tuple[ConsumerPosition, ...]) -> Error | None:
        """Why a transaction that consumed these can't commit."""
        for group, topic, generation, start, _ in positions:
            state = self._states.get(group)
            if state is None or state.generation != generation:
                return StaleGeneration(
                    f"group {group!r} is no longer in generation {generation}; join it anew, go on from its positions"
                )
            last = state.positions.get(topic)
            if last is not None and start != last:
                return PositionConflict(
                    f"the transaction starts at {start} of {topic!r}, group {group!r} has come to {last}: go on there"
                )
        return None

    def commit(self, positions: tuple[ConsumerPosition, ...]) -> None:
        """The decision just taken moves the groups."""
        commits = [PositionCommit(group, topic, end) for group, topic, _, _, end in positions]
        number = self._core.journal.commit_positions(commits)
        for group, topic, end in commits:
            state = self._states[group]
            state.positions[topic] = end
            state.group = number

    def repeat(self, group: int, consumers: tuple[str, ...]) -> None:
        """A group of decisions is about to be forgotten: write down what only it says."""
        for name in consumers:
            state = self._states.get(name)
            if state is not None and state.group == group:
                state.group = 0
                self._core.journal.put(self._entry(name, state))

    def _entry(self, name: str, state: ConsumersState) -> Consumers:
        return Consumers(name, state.generation, tuple(state.positions.items()))
