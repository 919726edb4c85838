"""Members of consumer groups: who holds what, and who may commit."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator

import pytest
from coordinator.group_rig import CONFIG, GROUP, MEMBERS, Rig
from hypothesis import given
from hypothesis import strategies as st

from broker_io.position import EARLIEST, Position
from txnbuffer.coordinator.groups import AWAY_TIMEOUT, TRANSITIONS, Members, Stage, assign
from txnbuffer.coordinator.messages import ConsumerPosition, Done, GroupHeartbeat
from txnbuffer.errors import InvalidRequest, PositionConflict, StaleGeneration
from txnbuffer.model import Outcome

members_of_topics = st.dictionaries(
    st.sampled_from(MEMBERS), st.frozensets(st.sampled_from(["a", "b"]), min_size=1), max_size=4
)


@given(st.integers(0, 6), st.integers(0, 6), members_of_topics, st.data())
def test_partitions_are_spread_evenly_and_stay_where_they_can(
    a: int, b: int, members: dict[str, frozenset[str]], data: st.DataObject
) -> None:
    partitions = {f"a-{number}": "a" for number in range(a)} | {f"b-{number}": "b" for number in range(b)}
    holders = data.draw(st.dictionaries(st.sampled_from(sorted(partitions) or ["x"]), st.sampled_from(MEMBERS)))
    given_to = assign(partitions, members, holders)
    wanted = {name for name, topic in partitions.items() if any(topic in topics for topics in members.values())}
    assert set(given_to) == wanted
    assert all(partitions[name] in members[member] for name, member in given_to.items())
    load = {member: list(given_to.values()).count(member) for member in members}
    for one, other in ((one, other) for one in members for other in members if members[one] == members[other]):
        assert abs(load[one] - load[other]) <= 1
    assert assign(partitions, members, given_to) == given_to


def evenness(loads: Iterable[int]) -> int:
    """A measure of the assignment: lower is more even."""
    return sum(load * load for load in loads)


@given(
    st.dictionaries(st.sampled_from(MEMBERS), st.sets(st.sampled_from(["a", "b", "c"])), min_size=1),
    st.lists(st.sampled_from(["a", "b", "c"]), max_size=5),
    st.data(),
)
def test_nothing_is_more_even(members: dict[str, set[str]], topics: list[str], data: st.DataObject) -> None:
    """Any members that want any topics and hold any partitions, compared with all possible assignments."""
    partitions = {f"p-{number}": topic for number, topic in enumerate(topics)}
    holders = data.draw(st.dictionaries(st.sampled_from(sorted(partitions) or ["x"]), st.sampled_from(MEMBERS)))
    given_to = assign(partitions, members, holders)
    wanting = [[member for member in members if topic in members[member]] for topic in topics]
    ways = itertools.product(*(some for some in wanting if some))
    assert evenness(Counter(given_to.values()).values()) == min(evenness(Counter(way).values()) for way in ways)


def test_partitions_move_along_a_chain() -> None:
    partitions = {"x-0": "x", "y-0": "y", "z-0": "z"}
    members = {"1": {"x", "y"}, "2": {"y", "z"}}
    before = {"x-0": "1", "y-0": "1", "z-0": "2"}
    assert assign(partitions, {**members, "3": {"z"}}, before) == {"x-0": "1", "y-0": "2", "z-0": "3"}


@given(st.integers(1, 40), st.integers(1, 6))
def test_no_more_moves_than_needed(count: int, crowd: int) -> None:
    partitions = {f"p-{number}": "t" for number in range(count)}
    members = {f"m{number}": {"t"} for number in range(crowd)}
    before = assign(partitions, members, {})
    joined = assign(partitions, members | {"new": {"t"}}, before)
    assert {name for name in partitions if before[name] != joined[name]} == {
        name for name, member in joined.items() if member == "new"
    }
    gone = {name: topics for name, topics in members.items() if name != "m0"}
    after = assign(partitions, gone, before)
    assert all(after[name] == before[name] for name in after if before[name] != "m0")


# Single cases


def shared(rig: Rig) -> Iterator[list[str]]:
    """The partitions of each of two members once both have the newest assignment."""
    for _ in range(2):
        asked = [rig.say(member, 4) for member in MEMBERS[:2]]
        rig.settle()
    return (rig.held(one) for one in asked)


def test_two_share_and_one_that_leaves_gives_back_at_once() -> None:
    rig = Rig()
    assert [len(held) for held in shared(rig)] == [2, 2]
    rig.say("m0", 0, leaves=True)
    asked = rig.say("m1", 4)
    rig.settle()
    assert rig.held(asked) == ["t-0", "t-1", "t-2", "t-3"]


def test_nothing_is_answered_that_is_not_durable() -> None:
    rig = Rig()
    asked = rig.say("m0", 2)
    assert asked not in rig.answers
    assert rig.coordinator.consumer_groups.members(GROUP).stage is Stage.REBALANCING
    again = rig.say("m0", 2)
    rig.land(1)
    assert len(rig.held(asked)) == len(rig.held(again)) == 2
    assert rig.coordinator.consumer_groups.members(GROUP).stage is Stage.STABLE


def test_a_member_removed_while_it_waits_gets_an_unsettled_assignment() -> None:
    rig = Rig()
    waiting = rig.say("m0", 1)
    rig.now += CONFIG.member_timeout
    rig.coordinator.tick(rig.now)
    rig.settle()
    assert (rig.held(waiting), rig.shares(waiting).unsettled) == ([], True)
    again = rig.say("m0", 1)
    rig.settle()
    assert (rig.held(again), rig.shares(again).unsettled) == (["t-0"], False)


def test_a_silent_member_is_removed_and_can_commit_nothing() -> None:
    rig = Rig()
    zombie = rig.say("m0", 1)
    rig.settle()
    told = rig.shares(zombie)
    heir = rig.say("m1", 1)
    assert rig.held(heir) == []
    assert not rig.shares(heir).unsettled
    rig.now += 4.0
    rig.coordinator.tick(rig.now)
    assert rig.shares(rig.say("m1", 1)).unsettled
    rig.now += CONFIG.member_timeout - 4.0
    rig.coordinator.tick(rig.now)
    late = rig.commit("m0", ConsumerPosition(GROUP, "t-0", told.generation, EARLIEST, Position(1, 0)))
    rig.settle()
    assert isinstance(rig.answers[late], StaleGeneration)
    heir = rig.say("m1", 1)
    rig.settle()
    (share,) = rig.shares(heir).assignments
    assert share.end == EARLIEST
    move = ConsumerPosition(GROUP, "t-0", rig.shares(heir).generation, EARLIEST, Position(1, 0))
    ahead = rig.commit("m1", move._replace(start=Position(1, 0), end=Position(1, 1)))
    rig.settle()
    assert isinstance(rig.answers[ahead], PositionConflict)
    done = rig.commit("m1", move)
    rig.settle()
    assert rig.answers[done] is Outcome.COMMIT


def test_members_of_a_broken_connection_are_removed_sooner_of_a_closed_session_at_once() -> None:
    rig = Rig()
    list(shared(rig))
    rig.coordinator.session_disconnected("m0", rig.now)
    rig.now += AWAY_TIMEOUT
    rig.coordinator.tick(rig.now)
    asked = rig.say("m1", 4)
    rig.settle()
    assert len(rig.held(asked)) == 4
    rig.say("m2", 4)
    rig.coordinator.close_session("m1", rig.request(), rig.now)
    asked = rig.say("m2", 4)
    rig.settle()
    assert len(rig.held(asked)) == 4


def test_who_keeps_a_partition_commits_through_rebalances_and_a_change_of_owner() -> None:
    rig = Rig()
    asked = rig.say("m0", 2)
    rig.settle()
    told = rig.shares(asked)
    rig.say("m1", 2)
    rig.settle()
    done = rig.commit("m0", ConsumerPosition(GROUP, "t-0", told.generation, EARLIEST, Position(1, 0)))
    rig.settle()
    assert rig.answers[done] is Outcome.COMMIT
    newest = rig.shares(rig.say("m0", 2)).generation
    rig.take_over(0)
    old = rig.commit("m0", ConsumerPosition(GROUP, "t-0", told.generation, Position(1, 0), Position(1, 1)))
    new = rig.commit("m0", ConsumerPosition(GROUP, "t-0", newest, Position(1, 0), Position(1, 1)))
    rig.settle()
    assert isinstance(rig.answers[old], StaleGeneration)
    assert rig.answers[new] is Outcome.COMMIT


def test_where_a_group_begins_is_settled_by_its_first_member() -> None:
    rig = Rig()
    ends = (Position(1, 9), EARLIEST)
    asked = rig.say("m0", 2, ends)
    rig.settle()
    assert {share.partition: share.end for share in rig.shares(asked).assignments} == {"t-0": ends[0], "t-1": EARLIEST}
    rig.take_over(0)
    asked = rig.say("m1", 3, (Position(1, 99),) * 3)
    rig.settle()
    found = {share.partition: share.end for share in rig.shares(asked).assignments}
    assert found == {"t-0": ends[0], "t-1": EARLIEST, "t-2": EARLIEST}


def test_members_of_before_a_takeover_commit_nothing_to_a_forgotten_group() -> None:
    rig = Rig()
    asked = rig.say("m0", 1)
    rig.settle()
    told = rig.shares(asked)
    rig.commit("m0", ConsumerPosition(GROUP, "t-0", told.generation, EARLIEST, Position(1, 7)))
    rig.settle()
    rig.take_over(0)  # its owner knows the generation, and no members
    rig.coordinator.forget_group(forgotten := rig.request(), GROUP, None, rig.now)
    rig.settle()
    assert rig.answers[forgotten] == Done()
    late = rig.commit("m0", ConsumerPosition(GROUP, "t-0", told.generation, EARLIEST, Position(1, 7)))
    rig.settle()
    assert isinstance(rig.answers[late], StaleGeneration)


def test_a_forgotten_group_starts_again() -> None:
    rig = Rig()
    asked = rig.say("m0", 2)
    rig.settle()
    told = rig.shares(asked)
    for name in ("t-0", "t-1"):
        rig.commit("m0", ConsumerPosition(GROUP, name, told.generation, EARLIEST, Position(1, 7)))
    rig.settle()

    def forget(topic: str | None) -> int:
        rig.coordinator.forget_group(asked := rig.request(), GROUP, topic, rig.now)
        rig.settle()
        return asked

    assert isinstance(rig.answers[forget(None)], InvalidRequest)  # it has a member
    rig.say("m0", 0, leaves=True)
    assert isinstance(rig.answers[forget("t-7")], InvalidRequest)
    rig.coordinator.forget_group(asked := rig.request(), GROUP, "t-0", rig.now)
    rig.take()
    assert asked not in rig.answers  # it is not durable
    rig.settle()
    assert rig.answers[asked] == Done()
    late = rig.commit("m0", ConsumerPosition(GROUP, "t-0", told.generation, Position(1, 7), Position(1, 8)))
    rig.settle()
    assert isinstance(rig.answers[late], StaleGeneration)
    rig.take_over(0)
    asked = rig.say("m1", 2)
    rig.settle()
    assert {share.partition: share.end for share in rig.shares(asked).assignments} == {
        "t-0": EARLIEST,
        "t-1": Position(1, 7),
    }
    rig.say("m1", 0, leaves=True)
    assert rig.answers[forget(None)] == Done()
    assert [positions for _, _, positions in rig.coordinator.consumer_groups.all_groups()] == [{}]


def test_partitions_are_forgotten_with_their_topic() -> None:
    rig = Rig()
    ends = (Position(1, 9), Position(2, 9))
    part = GroupHeartbeat(rig.request(), GROUP, "m0", ("t", "u"), ("t-partition-3", "u"), ends)
    rig.coordinator.heartbeat("m0", part, rig.now)
    rig.say("m0", 0, leaves=True)
    rig.coordinator.forget_group(asked := rig.request(), GROUP, "t", rig.now)
    rig.settle()
    assert rig.answers[asked] == Done()
    assert [positions for _, _, positions in rig.coordinator.consumer_groups.all_groups()] == [{"u": Position(2, 9)}]


def test_a_crowd_is_refused() -> None:
    rig = Rig()
    asked = rig.request()
    names = tuple(f"t-{number}" for number in range(10_001))
    part = GroupHeartbeat(asked, GROUP, "m0", ("t",) * len(names), names)
    rig.coordinator.heartbeat("m0", part, rig.now)
    rig.take()
    assert isinstance(rig.answers[asked], InvalidRequest)


def test_the_table_leaves_no_stage_without_a_way() -> None:
    assert {step.before for step in TRANSITIONS} == {step.after for step in TRANSITIONS} == set(Stage)


@pytest.mark.parametrize("order", [*itertools.permutations(range(3))])
def test_a_partition_is_shared_by_who_names_it_and_who_names_its_topic(order: tuple[int, ...]) -> None:
    """In whatever order they join; the member that wants a single partition can only have that one."""
    parts = [
        GroupHeartbeat(0, GROUP, "whole", ("t", "t", "t"), ("t-0", "t-1", "t-2")),
        GroupHeartbeat(0, GROUP, "one", ("t-1",), ("t-1",)),
        GroupHeartbeat(0, GROUP, "both", ("t", "t", "t-2"), ("t-0", "t-1", "t-2")),
    ]
    members = Members(0)
    for number in order:
        members.heartbeat(parts[number], "session", 0.0)
        members.rebalance(1)
    assert members.holders["t-1"] == "one"
    assert sorted(members.holders) == ["t-0", "t-1", "t-2"]
    assert Counter(members.holders.values()) == {"whole": 1, "one": 1, "both": 1}
    members.leave("one")
    members.rebalance(2)
    assert sorted(Counter(members.holders.values()).values()) == [1, 2]
    members.leave("both")
    members.rebalance(3)
    assert members.holders == {"t-0": "whole", "t-1": "whole", "t-2": "whole"}
