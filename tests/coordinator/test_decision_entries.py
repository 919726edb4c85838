"""Entries of the decision log: golden bytes, round trips, and what is refused."""

from __future__ import annotations

import contextlib

import pytest
from golden_files import committed
from hypothesis import given
from hypothesis import strategies as st
from pyroaring import BitMap64

from broker_io.batch import Message
from broker_io.position import Position
from txnbuffer.coordinator.decisions import (
    Consumers,
    DecisionRows,
    EndedIds,
    Entry,
    Group,
    Lease,
    LowWaterMark,
    Name,
    NamedCommit,
    Owner,
    OwnerEpoch,
    PositionCommit,
    RegisteredTopic,
    Retired,
    Row,
    decode,
    encode,
    key_of,
    tombstone,
)
from txnbuffer.coordinator.history import History
from txnbuffer.errors import UnreadableDecision
from txnbuffer.model import MAX_LEAST, Outcome

GROUP = Group(
    number=12,
    epoch=3,
    decided_at=1_700_000_000_123,
    rows=DecisionRows.of(
        [
            Row(1001, Outcome.COMMIT, ("orders", "payments"), (2, 1)),
            Row(1000, Outcome.ABORT, (), ()),
            Row(1002, Outcome.COMMIT, ("payments",), (7,)),
        ]
    ),
    retired=(Retired(2000, 30), Retired(2040, 1)),
    names=(NamedCommit("query-1", 42),),
    positions=(PositionCommit("billing", "orders", Position(3, 17)), PositionCommit("billing", "p", Position(3, 9, 4))),
)
ENTRIES: dict[str, Entry] = {
    "owner": Owner(3, "host-7:4711"),
    "group": GROUP,
    "mark": LowWaterMark(5, 1002, 1_700_000_001_000, BitMap64([1, 2, 3, 900]), BitMap64([4])),
    "ended": EndedIds(BitMap64([1005, 1006, 2**40])),
    "lease": Lease(3001, 1000, "client-é", 1_700_000_000_000),
    "topic": RegisteredTopic("orders", True),
    "name": Name("query-1", 2, 42, False),
    "consumers": Consumers("billing", 4, (("orders", Position(3, 17)), ("p", Position(3, 9, 4)))),
}
KEYS = {
    "owner": b"__owner",
    "group": b"group-12",
    "mark": b"mark-5",
    "ended": b"ended",
    "lease": b"lease-3001",
    "topic": b"topic-orders",
    "name": b"name-query-1",
    "consumers": b"consumers-billing",
}


@pytest.mark.parametrize("kind", ENTRIES)
def test_golden(kind: str) -> None:
    message = encode(ENTRIES[kind])
    assert message.key == KEYS[kind]
    assert message.properties == {"tb.v": "1", "tb.kind": kind}
    bytes_found = committed(f"decisions/{kind}.avro", message.value or b"")
    assert decode(message._replace(value=bytes_found)) == ENTRIES[kind]


def test_golden_of_an_owner_with_an_address() -> None:
    """The address is a property, so the format of the value does not change."""
    owner = Owner(3, "host-7:4711", "host-7:7711")
    message = encode(owner)
    assert message.value == encode(ENTRIES["owner"]).value
    shown = [message.key.decode(), *(f"{name}={text}" for name, text in sorted(message.properties.items()))]
    committed("decisions/owner-address.txt", "\n".join([*shown, message.value.hex(), ""]).encode())
    assert decode(message) == owner


def test_golden_of_an_owner_with_those_before_it() -> None:
    """The first owner of a log, and owners on a cluster, have only the id; others also the ids that they skipped."""
    known = (
        OwnerEpoch(1, "5e" * 16),
        OwnerEpoch(2, "0f" * 16, 2001, 2**40),
        OwnerEpoch(4, "a1" * 16, 2**40 + 10, 2**62),
    )
    owner = Owner(4, "host-7:4711", owners=known)
    message = encode(owner)
    shown = [message.key.decode(), *(f"{name}={text}" for name, text in sorted(message.properties.items()))]
    committed("decisions/owner-owners.txt", "\n".join([*shown, message.value.hex(), ""]).encode())
    assert decode(message) == owner


@pytest.mark.parametrize("owners", ["x", "[1]", "[[1]]", '[["a","b"]]', '[[1,"a",2,3,4]]', '[[1,"a",null,3]]'])
def test_invalid_owner_entries_are_refused(owners: str) -> None:
    message = encode(ENTRIES["owner"])
    with pytest.raises(UnreadableDecision):
        decode(message._replace(properties=dict(message.properties) | {"tb.owners": owners}))


@pytest.mark.parametrize("kind", ["topic", "name"])
def test_a_boolean_that_is_neither_0_nor_1_is_refused(kind: str) -> None:
    message = encode(ENTRIES[kind])
    assert message.value is not None
    with pytest.raises(UnreadableDecision, match="2 is not a boolean, which is 0 or 1"):
        decode(message._replace(value=message.value[:-1] + b"\2"))


least = st.integers(1, MAX_LEAST)
longs = st.integers(0, MAX_LEAST)
bitmaps = st.builds(BitMap64, st.lists(st.integers(0, 2**62)))
positions = st.builds(Position, longs, longs, st.integers(-1, 2**31))
names = st.text(min_size=1, max_size=8)
outcomes = st.sampled_from(Outcome)


@st.composite
def rows(draw: st.DrawFn) -> Row:
    topics = draw(st.lists(names, max_size=4))
    return Row(draw(least), draw(outcomes), tuple(topics), tuple(draw(longs) for _ in topics))


def several(one: st.SearchStrategy) -> st.SearchStrategy:
    return st.lists(one, max_size=4).map(tuple)


entries = st.one_of(
    st.builds(
        Owner, longs, names, st.one_of(st.just(""), names), several(st.builds(OwnerEpoch, longs, names, longs, longs))
    ),
    st.builds(
        Group,
        longs,
        longs,
        longs,
        several(rows()).map(DecisionRows.of),
        several(st.builds(Retired, least, longs)),
        several(st.builds(NamedCommit, names, longs)),
        several(st.builds(PositionCommit, names, names, positions)),
    ),
    st.builds(LowWaterMark, longs, longs, longs, bitmaps, bitmaps),
    st.builds(EndedIds, bitmaps),
    st.builds(Lease, longs, longs, names, longs),
    st.builds(RegisteredTopic, names, st.booleans()),
    st.builds(Name, names, longs, longs, st.booleans(), longs),
    st.builds(Consumers, names, longs, several(st.tuples(names, positions)), longs),
)


@given(entries)
def test_round_trip(entry: Entry) -> None:
    message = encode(entry)
    assert message.key == key_of(entry).encode()
    assert decode(message) == entry


@given(entries, st.data())
def test_torn_bytes_are_refused_or_read_as_an_entry(entry: Entry, data: st.DataObject) -> None:
    """No other error than UnreadableDecision."""
    message = encode(entry)
    value = bytearray(message.value or b"")
    at = data.draw(st.integers(0, len(value) - 1))
    value[at] ^= data.draw(st.integers(1, 255))
    for torn in (bytes(value), bytes(value[:at])):
        with contextlib.suppress(UnreadableDecision):
            assert key_of(decode(message._replace(value=torn))).encode() == message.key


def test_a_tombstone_says_nothing() -> None:
    message = tombstone("group-4")
    assert (message.key, message.value) == (b"group-4", None)
    assert decode(message) is None


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"properties": {"tb.v": "2", "tb.kind": "lease"}}, "format version 2"),
        ({"properties": {}}, "format version None"),
        ({"properties": {"tb.v": "1", "tb.kind": "novel"}}, "kind 'novel'"),
        ({"properties": {"tb.v": "1"}}, "kind ''"),
        ({"key": b"lease-9"}, "belongs under 'lease-3001'"),
        ({"value": b""}, "not an Avro record"),
        ({"value": b""}, "'lease-3001'"),
    ],
)
def test_what_is_refused(change: dict[str, object], word: str) -> None:
    message: Message = encode(ENTRIES["lease"])._replace(**change)
    with pytest.raises(UnreadableDecision, match=word):
        decode(message)


def test_history_keeps_what_the_log_says() -> None:
    history = History.read(map(encode, ENTRIES.values()))
    assert history.epoch == 3
    assert history.next_group == 13
    assert history.next_mark == 6
    assert history.low_water_mark == 1002
    assert history.highest_lease == 4000
    assert history.groups == {12: GROUP}
    assert history.topics == {"orders": True}
    assert (history.names["query-1"].epoch, history.names["query-1"].committed) == (2, 42)
    assert history.consumers["billing"].positions["p"] == Position(3, 9, 4)


@pytest.mark.parametrize("kind", [kind for kind in ENTRIES if kind != "owner"])
def test_history_forgets_what_the_log_forgets(kind: str) -> None:
    message = encode(ENTRIES[kind])
    history = History.read([message, tombstone((message.key or b"").decode())])
    kept = {"group": History(epoch=3, next_group=13), "mark": History(next_mark=6, low_water_mark=1002)}
    if kind == "group":
        assert history.groups == {}
        assert history.names["query-1"].committed == 42
    else:
        assert history == kept.get(kind, History())


def test_a_newer_entry_of_a_name_wins_over_an_older_group_and_the_other_way_round() -> None:
    reset = Name("query-1", 3, 0, True)
    assert History.read([encode(GROUP), encode(reset)]).names["query-1"].committed == 0
    assert History.read([encode(reset), encode(GROUP)]).names["query-1"].committed == 42
