"""Failover log and index of mutation snapshots in the snapshot: kept over owners, new if seqnos start again."""

import pytest
from snapshot_driver import manager_on
from writing import TopicWriter

from broker_io.memory import MemoryBroker
from broker_io.position import Position
from broker_io.testing.disk import SimulatedClock
from txnbuffer.mutations.index import IndexColumns, IndexState, SnapshotIndexEntry
from txnbuffer.streams.failover import Version

T = "t"
INDEX = IndexState(1, (), IndexColumns.of([SnapshotIndexEntry(1, 2, Position(0, 0), Position(0, 1), 1)]))


@pytest.fixture
def broker():
    with MemoryBroker(ledger_entries=9) as made:
        yield made


def test_a_topic_has_one_version_whoever_owns_it(broker):
    owner = manager_on(broker)
    owner.register(T)
    writer = TopicWriter(broker, T)
    writer.plain("p")
    writer.plain("q")
    owner.pump()
    first = owner.followed(T).failover
    assert first.versions == (Version(first.current.uuid, 0),)
    owner.followed(T).index = INDEX
    owner.snapshot(T)
    owner.close()
    for _ in range(2):
        owner = manager_on(broker)
        assert owner.followed(T).failover == first
        assert owner.followed(T).index.unsealed.ends.tolist() == [2]
        owner.close()


def test_an_entry_without_versions_gives_each_recovery_the_same_one(broker):
    owner = manager_on(broker)
    owner.register(T)
    owner.followed(T).failover = _Nothing()
    owner.snapshot(T)
    owner.close()
    found = set()
    for _ in range(2):
        owner = manager_on(broker)
        found.add(owner.followed(T).failover)
        owner.close()
    (log,) = found
    assert log.versions == (Version(log.current.uuid, 0),)


def test_recreated_and_rebuilt_topics_have_other_versions(broker):
    clock = SimulatedClock()
    owner = manager_on(broker, clock=clock)

    def version(change):
        clock.advance(0.001)
        change(T)
        return owner.followed(T).failover.current.uuid

    uuids = [version(owner.register), version(owner.rebuild), version(owner.rebuild)]
    owner.close()
    owner = manager_on(broker, clock=clock)
    assert owner.followed(T).failover.versions == tuple(Version(uuid, 0) for uuid in reversed(uuids))
    owner.delete(T)
    uuids.append(version(owner.register))  # of the log that is still there some may have been trimmed meanwhile
    owner.delete(T)
    broker.delete_topic(T)
    uuids.append(version(owner.register))
    assert len(set(uuids)) == len(uuids)


class _Nothing:
    versions = ()
