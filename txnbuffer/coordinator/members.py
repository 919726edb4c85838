"""The members of one consumer group, and who of them holds which partition since when.

A partition here is one of a topic with partitions, or a topic without. Whenever one gets another holder, or loses the
one it had, the group's next generation begins, and the partition is held *since* that generation: who was told of
an older one commits nothing there, and whoever was told of this or a later one is its holder. So nobody has to be
asked to let go, and a member that was stopped for long can do no harm when it goes on.

What is here is not stored. A new owner knows the generation alone, which stands for all partitions: what its last
members have under way can commit until the first of them comes again, which begins the next one.
"""

from __future__ import annotations

import enum
from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from txnbuffer.coordinator.assigning import assign
from txnbuffer.coordinator.messages import TakePart

AWAY_TIMEOUT = 2.0
"""Seconds after which a member is given up whose connection broke and that did not come again."""
SILENCE = 3.0
"""Seconds after which a member that nothing was heard of may be gone."""
BETWEEN = "\n"
"""No name of a topic holds it."""


class Stage(enum.Enum):
    """Where a group is."""

    EMPTY = "empty"
    WRITING = "rebalancing"
    STABLE = "stable"


class Step(NamedTuple):
    before: Stage
    event: str
    after: Stage


STEPS = (
    Step(Stage.EMPTY, "a member comes", Stage.WRITING),
    Step(Stage.WRITING, "the newest generation is durable", Stage.STABLE),
    Step(Stage.STABLE, "a partition gets another holder, or loses it", Stage.WRITING),
    Step(Stage.WRITING, "the last member goes", Stage.EMPTY),
    Step(Stage.STABLE, "the last member goes", Stage.EMPTY),
)


def table() -> str:
    """The table as Markdown, as the documentation shows it."""
    rows = [f"| {before.name} | {event} | {after.name} |" for before, event, after in STEPS]
    return "\n".join(["| group | event | next |", "|---|---|---|", *rows])


class Member:
    """`heard`: when it was heard of last; `away`: since when its connection is gone."""

    __slots__ = ("away", "heard", "name", "partitions", "session", "topics")

    def __init__(self, name: str) -> None:
        self.name = name
        self.session = ""
        self.partitions: dict[str, str] = {}
        self.topics: frozenset[str] = frozenset()
        self.heard = 0.0
        self.away: float | None = None


class Members:
    """`writing`: generations that are not durable yet. `holders`: the member of each partition that has one."""

    def __init__(self, generation: int) -> None:
        self.by_name: dict[str, Member] = {}
        self.holders: dict[str, str] = {}
        self.writing = 0
        self._floor = generation
        self._since: dict[str, int] = {}
        self._changed = False

    @property
    def stage(self) -> Stage:
        if not self.by_name:
            return Stage.EMPTY
        return Stage.WRITING if self.writing else Stage.STABLE

    def may_commit(self, partition: str, generation: int) -> bool:
        """Whether who was given the partition in this generation, or held it then, still does."""
        return generation >= self._since.get(partition, self._floor)

    def hear(self, part: TakePart, session: str, now: float) -> None:
        """A member says that it is there, and what there is to be read."""
        member = self.by_name.get(part.member)
        if member is None:
            member = self.by_name[part.member] = Member(part.member)
        member.session, member.heard, member.away = session, now, None
        partitions = dict(zip(part.partitions, part.topics, strict=True))
        if not member.partitions or partitions != member.partitions:
            # Members that want the same share one dictionary.
            same = (other.partitions for other in self.by_name.values() if other.partitions == partitions)
            member.partitions, member.topics = next(same, partitions), frozenset(part.topics)
            self._changed = True

    def leave(self, name: str) -> None:
        self._changed |= self.by_name.pop(name, None) is not None

    def leave_session(self, session: str) -> None:
        """All members of a client go."""
        for member in [member for member in self.by_name.values() if member.session == session]:
            self.leave(member.name)

    def away(self, session: str, now: float) -> None:
        """The connection of a client broke."""
        for member in self.by_name.values():
            if member.session == session and member.away is None:
                member.away = now

    def expire(self, now: float, timeout: float) -> None:
        """Give up members that were not heard of in time."""
        for member in [*self.by_name.values()]:
            gone = member.away is not None and member.away + AWAY_TIMEOUT <= now
            if gone or member.heard + timeout <= now:
                self.leave(member.name)

    def unsettled(self, name: str, now: float) -> bool:
        """Whether what somebody else holds may soon be this one's, because that one may be gone."""
        holding = {*self.holders.values()} - {name}
        members = (self.by_name[other] for other in holding if other in self.by_name)
        return any(member.away is not None or member.heard + SILENCE <= now for member in members)

    def fence(self, generation: int) -> None:
        """Whoever was told of an older generation commits nothing any more, whatever it holds."""
        self.by_name.clear()
        self.holders.clear()
        self._since.clear()
        self._floor = generation
        self._changed = False

    def rebalance(self, generation: int) -> bool:
        """See who should hold what; if anything moves it does so in this generation."""
        if not self._changed:
            return False
        self._changed = False
        holders = assign(*self._wanted(), self.holders)
        moved = [name for name in {**self.holders, **holders} if self.holders.get(name) != holders.get(name)]
        self._since |= dict.fromkeys(moved, generation)
        self.holders = holders
        return bool(moved)

    def _wanted(self) -> tuple[dict[str, str], dict[str, frozenset[str]]]:
        """The names by which each partition is wanted, as one text, and which such texts each member wants.

        One may want a topic, and another a single partition of it by its own name.
        """
        names: dict[str, set[str]] = defaultdict(set)
        for listed in {id(member.partitions): member.partitions for member in self.by_name.values()}.values():
            for partition, topic in listed.items():
                names[partition].add(topic)
        partitions = {partition: BETWEEN.join(sorted(topics)) for partition, topics in names.items()}
        texts = {text: {*text.split(BETWEEN)} for text in partitions.values()}
        return partitions, {
            name: frozenset(text for text, topics in texts.items() if not member.topics.isdisjoint(topics))
            for name, member in self.by_name.items()
        }

    def shares(self, member: str) -> Iterator[tuple[str, int]]:
        """What a member holds, and since which generation."""
        return ((name, self._since[name]) for name, holder in self.holders.items() if holder == member)
