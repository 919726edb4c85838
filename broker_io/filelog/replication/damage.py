"""Members tell each other which of their topics have a damaged file

A member with damage stays in `in_sync`: it has all records, and if the other one is lost it serves every other topic.
But it is not preferred. A primary switches to no backup that would lose a topic by that, and a store that could become
live leaves the role to the other one for a while. A topic that is damaged on both makes no difference.

Each says what is damaged once the logs were compared on a link, if anything is, and whenever that changes. A member of
a release that does not say it counts as undamaged.
"""

from __future__ import annotations

from broker_io.filelog.log.records import Store
from broker_io.filelog.replication.member import PairMember, PeerStage
from broker_io.filelog.replication.messages import DamagedTopics, DamageNoted

MOST_TOPICS = 1000
"""Of a message: the first ones in the order of their names."""


def on_noted(member: PairMember, event: DamageNoted) -> None:
    if event.topics != member.damaged:
        member.damaged = event.topics
        _report(member)


def on_compared(member: PairMember) -> None:
    """What the other one said on a former link may be over."""
    member.damaged_there = ()
    if member.damaged:
        _report(member)


def _report(member: PairMember) -> None:
    other = _other(member)
    if other is not None:
        member.send(DamagedTopics(other[0], member.store, member.damaged[:MOST_TOPICS]))


def on_reported(member: PairMember, message: DamagedTopics) -> None:
    """Believe the member whose log was compared with ours, in its epoch."""
    other = _other(member)
    if other is not None and other == (message.epoch, message.store):
        member.damaged_there = message.topics
    else:
        member.break_link()


def _other(member: PairMember) -> tuple[int, Store] | None:
    """The epoch and the store of the other member, if the logs were compared on the present link."""
    if member.followed is not None:
        return member.followed.epoch, member.followed.store
    if member.serves and member.peer is not None and member.peer.stage is PeerStage.FOLLOWING:
        return member.leading.epoch, member.peer.store
    return None


def only_here(member: PairMember) -> list[str]:
    """The topics that are damaged here, and not on the other one as far as it has said."""
    return [topic for topic in member.damaged if topic not in member.damaged_there]


def only_there(member: PairMember) -> list[str]:
    """The topics that the other one has said are damaged there, and that are not here."""
    return [topic for topic in member.damaged_there if topic not in member.damaged]
