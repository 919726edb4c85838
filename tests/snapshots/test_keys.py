from hypothesis import given
from hypothesis import strategies as st

from broker_io.port import OWN_PREFIX
from snapshots.format import END, MUTATIONS, OVERFLOW, OWNER_KEY, SEGMENT, EntryKey, is_internal

topics = st.one_of(
    st.text(st.characters(codec="utf-8"), min_size=1, max_size=12),
    st.lists(st.sampled_from(["a", "-", "1", "s", "s1", "m1", "end", "-end", "partition", "__owner"]), min_size=1).map(
        "".join
    ),
)
keys = st.one_of(
    st.builds(EntryKey, topics, st.just(END), st.just(0)),
    st.builds(EntryKey, topics, st.sampled_from([SEGMENT, OVERFLOW]), st.integers(1, 10**18 - 1)),
)


@given(keys)
def test_a_key_reads_back_as_what_it_was(key):
    assert EntryKey.parse(key.to_bytes()) == key


@given(keys, keys)
def test_two_entries_never_share_a_key(one, other):
    assert (one.to_bytes() == other.to_bytes()) == (one == other)


@given(st.one_of(st.binary(max_size=12), topics.map(str.encode)))
def test_only_one_spelling_of_a_key_is_read(data):
    key = EntryKey.parse(data)
    assert key is None or key.to_bytes() == data


def test_the_keys_are_spelled_as_documented():
    assert EntryKey("orders", SEGMENT, 12).to_bytes() == b"orders-12"
    assert EntryKey("orders", MUTATIONS, 4).to_bytes() == b"orders-m4"
    assert EntryKey("orders", OVERFLOW, 3).to_bytes() == b"orders-s3"
    assert EntryKey("orders", END).to_bytes() == b"orders-end"
    assert EntryKey.parse(OWNER_KEY) is None


def test_neighbours_do_not_collide():
    names = ["a", "a-1", "a-m1", "a-s1", "a-end", "a-partition-1", "a-"]
    kinds = {SEGMENT: 1, MUTATIONS: 1, OVERFLOW: 1, END: 0}
    seen = {EntryKey(name, kind, number).to_bytes() for name in names for kind, number in kinds.items()}
    assert len(seen) == 4 * len(names)


def test_an_invalid_key_is_none():
    for data in (
        b"",
        b"-1",
        b"-end",
        b"a",
        b"a-",
        b"a-0",
        b"a-01",
        b"a-m",
        b"a-s",
        b"a-s0",
        b"a-x",
        b"a-END",
        b"a-+1",
        b"\xff-1",
    ):
        assert EntryKey.parse(data) is None, data
    assert EntryKey.parse("a-١".encode()) is None


def test_internal_topics_are_known_by_their_prefix():
    assert is_internal("__txnbuffer_snapshots")
    assert not is_internal("orders")
    assert is_internal(f"{OWN_PREFIX}x")  # it may be compacted, so it can't hold records of users
