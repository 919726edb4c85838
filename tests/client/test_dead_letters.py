"""Dead letters: whatever the record was, it is put aside whole, with what is said of it."""

from __future__ import annotations

import json
from collections.abc import Mapping

from client.direct_world import DirectWorld, in_direct_world
from client_world import World, in_world, read_all, until
from hypothesis import given
from hypothesis import strategies as st

from txnbuffer import dead_letter
from txnbuffer.client.groups.handling import KEPT_PROPERTIES, MAX_PROPERTIES, PACKED, dead_letter_columns
from txnbuffer.client.reading.records import Record
from txnbuffer.client.serializers import Serializers
from txnbuffer.client.transaction import Transaction
from txnbuffer.model import Position

ADDED = {f"dead_letter_{word}" for word in ("topic", "position", "group", "attempts", "error")}


async def fails(txn: Transaction, record: Record) -> None:
    raise ValueError("not this one")


def unpacked(properties: Mapping[str, str]) -> dict[str, str]:
    """The properties of the record of which a letter has these."""
    kept = {name: text for name, text in properties.items() if name not in ADDED}
    return kept | json.loads(kept.pop(PACKED, "{}"))


def letter_with(properties: Mapping[str, str]) -> Mapping[str, str]:
    record = Record("t", Position(1, 2), None, b"k", b"v", properties, 0, 0, None)
    rows = dead_letter_columns(record, "g", 3, ValueError("no"))
    assert rows.properties is not None
    return rows.properties[0] or {}


@given(
    st.integers(0, 3 * MAX_PROPERTIES),
    st.dictionaries(st.sampled_from([PACKED, "größe", "a", "zz"]), st.text(st.characters(exclude_categories=["Cs"]))),
)
def test_dead_letter_has_all_properties_in_a_bounded_number(count: int, others: dict[str, str]) -> None:
    properties = {f"p{number}": str(number) for number in range(count)} | others
    found = letter_with(properties)
    assert len(found) <= MAX_PROPERTIES + len(ADDED)
    assert found.keys() >= ADDED
    if len(properties) <= MAX_PROPERTIES:
        assert {name: found[name] for name in properties} == properties
    else:
        assert unpacked(found) == properties
        again = letter_with(found)  # a letter of the letter adds nothing but what it says
        assert again.keys() == found.keys()
        assert (unpacked(again), len(again)) == (properties, KEPT_PROPERTIES + 1 + len(ADDED))


@in_world
async def test_record_with_the_maximum_of_properties_becomes_a_dead_letter(world: World) -> None:
    client = await world.client()
    properties = {f"p{number}": str(number) for number in range(1000)}
    await client.send("source", b"1", key="k", properties=properties)
    done = await client.process("source", "g", fails, on_error=dead_letter("bad"), idle_timeout=0.05)
    assert done.dead_letters == 1
    (letter,) = read_all(world.broker, "bad")
    assert (letter.key, letter.value) == (b"k", b"1")
    assert letter.properties["dead_letter_error"] == "ValueError: not this one"
    assert unpacked(letter.properties) == properties


class Reversed:
    """A schema of the client library, as far as that matters here."""

    def encode(self, obj: bytes, /) -> bytes:
        return obj[::-1]

    def decode(self, data: bytes, /) -> bytes:
        return data[::-1]


@in_direct_world
async def test_dead_letters_are_single_messages_although_the_client_sends_record_sets(world: DirectWorld) -> None:
    client = await world.client()
    client.batching = "records"
    client.serializers = Serializers(None, {"bad": Reversed()})
    await client.send_many("source", [b"12", b"34"])
    done = await client.process("source", "g", fails, on_error=dead_letter("bad"), idle_timeout=0.05)
    assert done.dead_letters == 2
    await until(lambda: [record.value for record in read_all(world.broker, "bad")] == [b"12", b"34"])
