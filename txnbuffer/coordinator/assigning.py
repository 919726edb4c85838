"""Who gets which partition: evenly, and with as few moves as that takes."""

from __future__ import annotations

from collections.abc import Collection, Mapping


def assign(
    partitions: Mapping[str, str], members: Mapping[str, Collection[str]], holders: Mapping[str, str]
) -> dict[str, str]:
    """The member for each partition that anyone wants.

    `partitions`: the topic of each; `members`: the topics that each wants; `holders`: who has what now. Among members
    that want the same topics nobody gets two more than another one, and nobody loses what needn't move for that.
    """
    held: dict[str, dict[str, list[str]]] = {member: {} for member in members}
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
        member = _least_loaded(topic, members, load)
        if member is not None:
            held[member].setdefault(topic, []).append(partition)
            load[member] += 1
    while _move_one(held, members, load):
        pass
    return {partition: member for member, topics in held.items() for names in topics.values() for partition in names}


def _least_loaded(topic: str, members: Mapping[str, Collection[str]], load: Mapping[str, int]) -> str | None:
    wanting = [member for member, topics in members.items() if topic in topics]
    return min(wanting, key=lambda member: (load[member], member), default=None)


def _move_one(
    held: Mapping[str, dict[str, list[str]]], members: Mapping[str, Collection[str]], load: dict[str, int]
) -> bool:
    """Move a partition from one who has at least two more; False if there is no such move."""
    for giver in sorted(load, key=lambda member: (-load[member], member)):
        for topic, names in held[giver].items():
            taker = _least_loaded(topic, members, load)
            if names and taker is not None and load[giver] - load[taker] > 1:
                held[taker].setdefault(topic, []).append(names.pop())
                load[giver] -= 1
                load[taker] += 1
                return True
    return False
