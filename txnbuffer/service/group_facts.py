"""What operators are told of consumer groups: members, who holds what, how far each has come, what is left."""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

from broker_io.errors import Error
from broker_io.port import Broker, messages_up_to
from broker_io.position import Position
from txnbuffer.coordinator.coordinator import Coordinator


class GroupFacts(NamedTuple):
    """A partition of a group, or a member that holds none."""

    group: str
    generation: int
    stage: str
    topic: str | None
    member: str | None
    position: Position | None


def group_facts(coordinator: Coordinator, wanted: str | None) -> list[GroupFacts]:
    """Of one group, or of all; by name."""
    facts = []
    for name, generation, positions in sorted(coordinator.consumers.all_groups()):
        if wanted not in (None, name):
            continue
        members = coordinator.consumers.members(name)
        stage = members.stage.value
        for topic in sorted({*positions, *members.holders}):
            held = members.holders.get(topic)
            facts.append(GroupFacts(name, generation, stage, topic, held, positions.get(topic)))
        spare = sorted({*members.by_name} - {*members.holders.values()})
        facts += [GroupFacts(name, generation, stage, None, member, None) for member in spare]
    return facts


def with_lag(broker: Broker, facts: list[GroupFacts]) -> list[dict[str, Any]]:
    """As rows; `lag`: messages of the log behind the position, markers included. In another thread."""
    return [
        {
            **fact._asdict(),
            "position": None if fact.position is None else str(fact.position),
            "lag": None if fact.topic is None else _lag(broker, fact.topic, fact.position),
        }
        for fact in facts
    ]


def _lag(broker: Broker, topic: str, position: Position | None) -> int | None:
    """None where the broker can't tell."""
    with contextlib.suppress(Error):
        ledgers = broker.ledgers(topic)
        return messages_up_to(ledgers, broker.last_position(topic)) - messages_up_to(ledgers, position)
    return None
