"""Many topics created in one step: one manifest, and after a crash all of them or none."""

from __future__ import annotations

import pytest
from file_logs import World, append, messages, numbered

from broker_io.errors import InvalidTopicName
from broker_io.port import BulkBroker
from broker_io.testing import Crash, Unsynced

NAMES = ["a", "b", "c", "b"]


def manifests(world: World) -> int:
    """The number of manifests that were written."""
    return sum(operation.kind == "rename" for operation in world.disk.history)


def test_many_topics_are_created_with_one_manifest() -> None:
    world = World()
    with world.own() as broker:
        assert isinstance(broker, BulkBroker)
        broker.create_topic("b")
        append(broker, "b", numbered(3))
        incarnation, before = broker.incarnation("b"), manifests(world)
        broker.create_topics(NAMES)
        assert manifests(world) == before + 1
        broker.create_topics(NAMES)
        assert manifests(world) == before + 1
        assert broker.topics() == ["a", "b", "c"]
        assert broker.incarnation("b") == incarnation
        assert len({broker.incarnation(name) for name in "abc"}) == 3
        for name in "ac":
            append(broker, name, numbered(2))
    with world.own() as broker:
        assert [len(messages(broker, name)) for name in "abc"] == [2, 3, 2]


def test_invalid_name_creates_none() -> None:
    with World().own() as broker:
        with pytest.raises(InvalidTopicName):
            broker.create_topics(["a", ""])
        assert broker.topics() == []


@pytest.mark.parametrize("unsynced", Unsynced)
def test_a_crash_leaves_all_or_none(unsynced: Unsynced) -> None:
    found = set()
    for operation in range(1, 60):
        world = World()
        with world.own() as broker:
            broker.create_topic("old")
            world.disk.stop_at(operation)
            try:
                broker.create_topics(NAMES)
                finished = True
            except Crash:
                finished = False
            world.disk = world.disk.crash(unsynced, operation)
        again = World(world.disk)
        with again.own() as broker:
            topics = tuple(broker.topics())
            assert topics in (("old",), ("a", "b", "c", "old"))
            assert topics != ("old",) or not finished
            found.add(topics)
            broker.create_topics(NAMES)
            for name in "abc":
                append(broker, name, numbered(1))
                assert len(messages(broker, name)) == 1
        if finished:
            break
    assert len(found) == 2
