"""Partitions of internal topics: created once, even after crashes; topics that were created otherwise are refused."""

from __future__ import annotations

import pytest

from broker_io.errors import ServiceUnavailable, TopicNotFound
from broker_io.memory import MemoryBroker
from snapshots.format import SNAPSHOT_TOPIC
from snapshots.shard_count import recorded_shard_count, shards_of
from snapshots.shards import Shard
from txnbuffer.errors import InvalidConfiguration
from txnbuffer.service.standby.takeover import INTERNAL_TOPICS, MAX_SHARDS, check_shard, prepare

DECISIONS = INTERNAL_TOPICS[0]


class Noting(MemoryBroker):
    """A cluster whose topics can have annotations, partitioned topics too."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: dict[str, str] = {}

    def annotate(self, topic: str, text: str) -> None:
        self.notes[topic] = text

    def annotation(self, topic: str) -> str | None:
        if topic not in self.topics() and not self.partitions(topic):
            raise TopicNotFound(f"there is no topic {topic!r}")
        return self.notes.get(topic)


def refused(cluster: MemoryBroker, shard: Shard, why: str) -> None:
    """Expect a refusal that creates nothing."""
    before = cluster.topics()
    with pytest.raises(InvalidConfiguration, match=why):
        prepare(cluster, shard)
    assert cluster.topics() == before


@pytest.mark.parametrize("broker", [MemoryBroker, Noting])
@pytest.mark.parametrize("made", range(4))
def test_what_a_crash_left_unmade_is_made_by_the_next_service(broker: type[MemoryBroker], made: int) -> None:
    cluster = broker()
    for topic in INTERNAL_TOPICS[:made]:
        cluster.partition(topic, 3)
    if made:
        refused(cluster, Shard(0, 2), "has 3 shards, .* not 2: give --shards 3")
        refused(cluster, Shard(), "has 3 shards, .* not 1: give --shards 3")
    prepare(cluster, Shard(2, 3))
    assert {topic: cluster.partitions(topic) for topic in INTERNAL_TOPICS} == dict.fromkeys(INTERNAL_TOPICS, 3)
    assert (shards_of(cluster), recorded_shard_count(cluster)) == (3, 3 if broker is Noting else None)


@pytest.mark.parametrize("topic", INTERNAL_TOPICS)
@pytest.mark.parametrize("shards", [2, 3])
def test_an_internal_topic_created_by_hand_is_named(topic: str, shards: int) -> None:
    for count in (0, 3):
        cluster = Noting()
        for other in INTERNAL_TOPICS:
            if other != topic:
                cluster.partition(other, 2)
        if count:
            cluster.partition(topic, count)
        else:
            cluster.create_topic(topic)
        refused(cluster, Shard(0, shards), f"{topic} has {count or 'no'}.*one was not created by a service: delete it")


def test_one_shard_has_no_partitions() -> None:
    cluster = Noting()
    cluster.partition(SNAPSHOT_TOPIC, 3)  # where readers would look for snapshots
    refused(cluster, Shard(), "has 3 shards")
    cluster.create_topic(DECISIONS)
    plain = Noting()
    plain.create_topic(DECISIONS)
    plain.create_topic(SNAPSHOT_TOPIC)
    prepare(plain, Shard())
    assert (shards_of(plain), plain.notes) == (1, {})
    refused(plain, Shard(1, 2), "has 1 shards")


@pytest.mark.parametrize("grown", [INTERNAL_TOPICS[:1], INTERNAL_TOPICS[1:2], INTERNAL_TOPICS])
def test_partitions_that_are_added_later_count_for_nothing(grown: tuple[str, ...]) -> None:
    cluster = Noting()
    prepare(cluster, Shard(0, 2))
    for topic in grown:
        cluster.partition(topic, 5)
    prepare(cluster, Shard(1, 2))
    assert shards_of(cluster) == 2
    refused(cluster, Shard(0, 5), "has 2 shards, .* not 5")


def test_without_a_note_partitions_that_were_added_are_refused() -> None:
    cluster = MemoryBroker()
    prepare(cluster, Shard(0, 2))
    cluster.partition(SNAPSHOT_TOPIC, 5)
    for shards in (2, 5):
        refused(cluster, Shard(0, shards), f"{DECISIONS} has 2, {SNAPSHOT_TOPIC} has 5")


def test_a_number_that_could_not_be_noted_is_noted_by_the_next_service(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Noting()
    with monkeypatch.context() as patch:
        patch.setattr(Noting, "annotate", _unavailable)
        prepare(cluster, Shard(0, 2))
    assert (shards_of(cluster), recorded_shard_count(cluster)) == (2, None)
    prepare(cluster, Shard(0, 2))
    assert recorded_shard_count(cluster) == 2


def test_of_two_first_services_one_settles_the_number(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, usual = Noting(), Noting.partition

    def second(broker: Noting, topic: str, count: int) -> None:
        if not broker.partitions(topic):
            usual(broker, topic, 4)  # the other one was first

    monkeypatch.setattr(Noting, "partition", second)
    with pytest.raises(InvalidConfiguration, match="has 4 shards"):
        prepare(cluster, Shard(0, 2))


def _unavailable(*_: object) -> None:
    raise ServiceUnavailable("not now")


@pytest.mark.parametrize("shard", [Shard(2, 2), Shard(-1, 2), Shard(0, 0), Shard(0, 257)])
def test_invalid_shards(shard: Shard) -> None:
    with pytest.raises(InvalidConfiguration, match="shard"):
        check_shard(shard, MAX_SHARDS)
