"""Partitions: their names, and the partition of a key, as in the Java client."""

from __future__ import annotations

import json

import pytest
from golden_files import GOLDEN
from hypothesis import given, settings
from hypothesis import strategies as st

from broker_io.memory import MemoryBroker
from broker_io.partitions import HASHINGS, Hashing, Partition, choose, hashes, key_to_text, partition_name, partition_of
from broker_io.port import PartitionedBroker

# Text, JavaStringHash and Murmur3_32Hash of it, as the Java client 4.0.8 computed them.
VECTORS: list[tuple[str, int, int]] = json.loads((GOLDEN / "broker_io" / "key-hashes.json").read_bytes())

keys = st.binary(max_size=40) | st.text(max_size=20).map(str.encode)


@pytest.mark.parametrize("hashing", HASHINGS)
def test_hashes_are_those_of_the_java_client(hashing: Hashing) -> None:
    texts = [text for text, _, _ in VECTORS]
    wanted = [java if hashing == "java" else murmur3 for _, java, murmur3 in VECTORS]
    assert len(texts) > 70
    assert hashes(texts, hashing).tolist() == wanted
    assert [hashes([text], hashing).tolist() for text in texts] == [[value] for value in wanted]


@settings(max_examples=100)  # one example has many texts
@given(st.lists(st.text(max_size=12), min_size=5, max_size=20), st.sampled_from(HASHINGS))
def test_hashes_of_many_texts_are_those_of_each(texts: list[str], hashing: Hashing) -> None:
    assert hashes(texts, hashing).tolist() == [int(hashes([text], hashing)[0]) for text in texts]


@settings(max_examples=100)
@given(st.lists(keys, min_size=1, max_size=20), st.integers(1, 9), st.sampled_from(HASHINGS))
def test_partition_of_a_key_is_that_of_its_text(some: list[bytes], count: int, hashing: Hashing) -> None:
    chosen = choose(some, count, hashing).tolist()
    assert chosen == [int(hashes([key_to_text(key)], hashing)[0]) % count for key in some]
    assert all(0 <= one < count for one in chosen)


@given(st.text(min_size=1, max_size=20), st.integers(0, 999_999_999))
def test_partition_is_parsed_from_its_name(topic: str, number: int) -> None:
    assert partition_of(partition_name(topic, number)) == Partition(topic, number)


@pytest.mark.parametrize(
    "name", ["T", "T-partition-", "T-partition-01", "-partition-1", "T-partition-1x", "T-partition-1\n"]
)
def test_other_names_are_no_partitions(name: str) -> None:
    assert partition_of(name) is None


def test_partitions_of_a_topic_in_memory() -> None:
    with MemoryBroker() as broker:
        assert isinstance(broker, PartitionedBroker)
        broker.partition("wide", 2)
        with broker.connect() as other:
            assert (other.partitions("wide"), other.partitions("narrow"), other.partitions("wide-partition-0")) == (
                2,
                0,
                0,
            )
            assert other.topics() == ["wide-partition-0", "wide-partition-1"]
        broker.partition("wide", 3)
        assert broker.partitions("wide") == 3
