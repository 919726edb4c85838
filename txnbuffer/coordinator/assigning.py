"""Who gets which partition: evenly, and with few moves.

Where members want different topics one may have too many of what nobody with less wants. Then partitions move along a
chain: each member of it gives one that the next one wants, only the first has one less and the last one more. Where no
chain leads from a member to one that has at least two less, no other way of sharing is more even.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping

Held = Mapping[str, dict[str, list[str]]]
"""The partitions of each member by topic."""


def assign(
    partitions: Mapping[str, str], members: Mapping[str, Collection[str]], holders: Mapping[str, str]
) -> dict[str, str]:
    """The member for each partition that anyone wants, as evenly as can be.

    `partitions`: the topic of each; `members`: the topics that each wants; `holders`: who has what now. Where all want
    the same nobody gets two more than another one, and nobody loses what needn't move for that.
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
    """Make one who has much have one less, and one who has at least two less have one more; False if that can't be."""
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

    `seen`: members who can't be reached with success by anyone who has no more; those reached in vain are added.
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
                news = [other for other in wanting[topic] if other not in seen]
                came |= dict.fromkeys(news, (member, topic))
                seen.update(news)
                further += news
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
