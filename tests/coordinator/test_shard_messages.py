"""Which shard a name belongs to, and shard messages: pinned, because stored state depends on both."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from golden_files import committed
from hypothesis import given
from hypothesis import strategies as st

from broker_io.batch import Message
from snapshots.shards import ONLY, Shard, shard_of
from txnbuffer.coordinator.shard_messages import ShardMessage, decode_shard_message, encode_shard_message

NAMES = ["orders", "orders-partition-0", "orders-partition-1", "a", "", "größe", "注文", "x" * 400]
MESSAGE = ShardMessage(
    1,
    ("a",),
    ("b", "c"),
    (("d", "a policy is in the way"),),
    ("e",),
    ("f", "größe"),
    (("g", (7, 8, 12)), ("h", (1,))),
    (("i", (3,)),),
    (("j", (2**40,)),),
    (("k", 5),),
    (("l", 6, 77), ("m", 7, -1)),
)


def test_golden_shards_of_names() -> None:
    vectors = {name: [shard_of(name, shards) for shards in (1, 2, 3, 7, 256)] for name in NAMES}
    made = json.dumps(vectors, ensure_ascii=False, indent=1).encode() + b"\n"
    assert committed("shards/shard-of.json", made) == made


def test_names_spread_over_shards() -> None:
    counts = Counter(shard_of(f"topic-{number}", 4) for number in range(4000))
    assert all(900 < counts[shard] < 1100 for shard in range(4))


@given(st.text(max_size=50), st.integers(1, 256))
def test_a_name_belongs_to_one_shard(name: str, shards: int) -> None:
    assert [Shard(number, shards).owns(name) for number in range(shards)].count(True) == 1


def test_one_shard_has_the_topics_of_old() -> None:
    assert ONLY.topic("__txnbuffer_decisions") == "__txnbuffer_decisions"
    assert Shard(1, 2).topic("__txnbuffer_decisions") == "__txnbuffer_decisions-partition-1"
    assert [other.number for other in Shard(1, 3).others()] == [0, 2]


def test_golden_shard_message() -> None:
    message = encode_shard_message(MESSAGE)
    assert (message.key, dict(message.properties)) == (None, {"tb.v": "1", "tb.kind": "letter"})
    assert message.value is not None
    stored = committed("shards/letter.avro", message.value)
    assert stored == message.value
    assert decode_shard_message(message._replace(value=stored)) == MESSAGE
    final = encode_shard_message(MESSAGE._replace(final=("d", "größe")))
    assert final == message._replace(properties={"tb.v": "1", "tb.kind": "letter", "tb.final": "d\ngröße"})


ids = st.lists(st.tuples(st.text(max_size=5), st.lists(st.integers(0, 2**62)).map(tuple))).map(tuple)
numbers = st.lists(st.tuples(st.text(max_size=5), st.integers(0, 2**62))).map(tuple)
floors = st.lists(st.tuples(st.text(max_size=5), st.integers(0, 2**62), st.integers(-1, 2**62))).map(tuple)
pairs = st.lists(st.tuples(st.text(max_size=5), st.text(max_size=5))).map(tuple)
texts = st.lists(st.text(max_size=5)).map(tuple)
names = st.lists(st.text(st.characters(categories=["L", "N"]), min_size=1)).map(tuple)

LISTS = (texts, texts, pairs, texts, texts, ids, ids, ids, numbers, floors, names)


@given(st.builds(ShardMessage, st.integers(0, 255), *LISTS))
def test_shard_messages_decode_as_they_were_encoded(message: ShardMessage) -> None:
    assert decode_shard_message(encode_shard_message(message)) == message


@pytest.mark.parametrize(
    "message",
    [
        Message(value=b""),
        encode_shard_message(MESSAGE)._replace(value=None),
        encode_shard_message(MESSAGE)._replace(value=b"\xff" * 20),
        encode_shard_message(MESSAGE)._replace(properties={"tb.v": "2", "tb.kind": "letter"}),
        encode_shard_message(MESSAGE)._replace(properties={"tb.v": "1", "tb.kind": "group"}),
    ],
)
def test_an_unreadable_shard_message_is_ignored(message: Message) -> None:
    assert decode_shard_message(message) is None
