"""Members of consumer groups join, leave, stop and return, while partitions are added and owners change."""

from __future__ import annotations

from coordinator.group_rig import CONFIG, GROUP, MEMBERS, Rig
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from broker_io.position import EARLIEST, Position
from txnbuffer.coordinator.groups import AWAY_TIMEOUT
from txnbuffer.coordinator.messages import ConsumerPosition, MemberAssignments, PartitionAssignment
from txnbuffer.model import Outcome


class Belief:
    """The last assignment of a member, and how far it has read."""

    def __init__(self) -> None:
        self.generation = 0
        self.shares: dict[str, PartitionAssignment] = {}
        self.ends: dict[str, int] = {}

    def hear(self, told: MemberAssignments) -> None:
        if told.generation < self.generation:
            return
        for share in told.assignments:
            known = self.shares.get(share.partition)
            if known is None or known.since != share.since:
                self.ends[share.partition] = share.end.entry
        self.shares = {share.partition: share for share in told.assignments}
        self.generation = told.generation


class Groups(RuleBasedStateMachine):
    """Each partition is a list of numbers, which the group's transactions consume one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.rig = Rig()
        self.partitions = 2
        self.beliefs = {member: Belief() for member in MEMBERS}
        self.told: set[tuple[str, str, int]] = set()
        self.asked: dict[int, str] = {}
        self.commits: dict[int, tuple[str, ConsumerPosition]] = {}
        self.consumed: dict[str, list[int]] = {}

    def hear(self) -> None:
        """Deliver the answers to the members."""
        for asked in [asked for asked in self.asked if asked in self.rig.answers]:
            member, told = self.asked.pop(asked), self.rig.answers[asked]
            if not isinstance(told, MemberAssignments):
                continue  # the member has no connection
            self.beliefs[member].hear(told)
            self.told |= {(member, share.partition, told.generation) for share in told.assignments}
        for asked in [asked for asked in self.commits if asked in self.rig.answers]:
            member, move = self.commits.pop(asked)
            if self.rig.answers[asked] is Outcome.COMMIT:
                self.consumed.setdefault(move.topic, []).append(move.end.entry)

    @rule(member=st.sampled_from(MEMBERS), behind=st.integers(0, 1))
    def say(self, member: str, behind: int) -> None:
        self.asked[self.rig.say(member, max(self.partitions - behind, 1))] = member
        self.hear()

    @rule(member=st.sampled_from(MEMBERS))
    def leave(self, member: str) -> None:
        self.rig.say(member, 0, leaves=True)
        self.hear()

    @rule(member=st.sampled_from(MEMBERS), back=st.booleans())
    def connection_breaks(self, member: str, back: bool) -> None:
        self.rig.coordinator.session_disconnected(member, self.rig.now)
        if back:
            self.rig.coordinator.open_session(member, 0, (), self.rig.now)
        self.rig.take()

    @rule(member=st.sampled_from(MEMBERS))
    def connection_is_back(self, member: str) -> None:
        self.rig.coordinator.open_session(member, 0, (), self.rig.now)
        self.rig.take()

    @rule(seconds=st.sampled_from([0.5, 1.0, AWAY_TIMEOUT, CONFIG.member_timeout]))
    def time_passes(self, seconds: float) -> None:
        self.rig.now += seconds
        self.rig.coordinator.tick(self.rig.now)
        self.rig.take()

    @precondition(lambda self: self.partitions < 6)
    @rule()
    def grow(self) -> None:
        self.partitions += 1

    @rule(count=st.integers(1, 3))
    def land(self, count: int) -> None:
        self.rig.land(count)
        self.hear()

    @rule(landed=st.integers(0, 3))
    def take_over(self, landed: int) -> None:
        """Repeat unanswered requests, as clients do; a member whose transaction aborted returns to its start."""
        self.rig.take_over(landed)
        for member, move in self.commits.values():
            ends = self.beliefs[member].ends
            if ends.get(move.topic) == move.end.entry and self.position(move.topic) < move.end.entry:
                ends[move.topic] = move.start.entry
        for partition in {move.topic for _, move in self.commits.values()}:
            come_to = self.position(partition) + 1
            assert come_to >= len(self.consumed.get(partition, ()))
            self.consumed[partition] = list(range(come_to))
        self.commits.clear()
        self.asked.clear()

    def position(self, partition: str) -> int:
        for _, _, positions in self.rig.coordinator.consumer_groups.all_groups():
            return positions.get(partition, EARLIEST).entry
        return EARLIEST.entry

    @rule(member=st.sampled_from(MEMBERS), data=st.data())
    def commit(self, member: str, data: st.DataObject) -> None:
        belief = self.beliefs[member]
        waiting = {move.topic for who, move in self.commits.values() if who == member}
        free = sorted(set(belief.shares) - waiting)
        if not free or not self.rig.ids[member]:
            return
        partition = data.draw(st.sampled_from(free))
        start = belief.ends[partition]
        first = EARLIEST if start == EARLIEST.entry else Position(1, start)
        move = ConsumerPosition(GROUP, partition, belief.generation, first, Position(1, start + 1))
        belief.ends[partition] = start + 1
        self.commits[self.rig.commit(member, move)] = member, move
        self.hear()

    @invariant()
    def never_can_two_commit(self) -> None:
        members = self.rig.coordinator.consumer_groups.members(GROUP)
        able: dict[str, set[str]] = {}
        for member, partition, generation in self.told:
            if members.may_commit(partition, generation):
                able.setdefault(partition, set()).add(member)
        assert all(len(who) == 1 for who in able.values()), able

    @invariant()
    def nothing_is_consumed_twice_or_left_out(self) -> None:
        for numbers in self.consumed.values():
            assert numbers == list(range(len(numbers)))

    def teardown(self) -> None:
        """In the end the two remaining members hold all partitions."""
        rig = self.rig
        rig.settle()
        rig.now += CONFIG.member_timeout
        rig.coordinator.tick(rig.now)
        for member in MEMBERS:
            rig.coordinator.open_session(member, 0, (), rig.now)
        stay = MEMBERS[:2]
        for _ in range(2):
            asked = [rig.say(member, self.partitions) for member in stay]
            rig.settle()
        held = [rig.held(one) for one in asked]
        assert sorted(held[0] + held[1]) == [f"t-{number}" for number in range(self.partitions)]
        assert abs(len(held[0]) - len(held[1])) <= 1
        self.never_can_two_commit()


Groups.TestCase.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
TestGroups = Groups.TestCase
