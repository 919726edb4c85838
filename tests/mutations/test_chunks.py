"""Chunks of a snapshot: replacing, packing, joining, against lists of mutations."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from mutations.naive_mutations import Topic

from txnbuffer.mutations.snapshot import TOGETHER, TOGETHER_BYTES, Chunk, MemoryAccount, join_tiny

values = st.sampled_from([None, b"", b"v", b"x" * 9_000, b"x" * 20_000])


@given(st.lists(st.lists(values, min_size=1, max_size=3), max_size=80))
def test_joining_keeps_order_and_bounds(sizes: list[list[bytes | None]]) -> None:
    topic = Topic()
    chunks = [Chunk(topic.add([(None, value) for value in part])) for part in sizes]
    joined = join_tiny(chunks)
    assert [row for chunk in joined for row in chunk.rows] == topic.rows
    assert all(chunk.rows.payload() <= max(TOGETHER_BYTES, 60_000) for chunk in joined)
    assert all(chunk.first <= chunk.rows.first for chunk in joined)
    assert all(one in chunks or len(one.rows) > 1 for one in joined)
    if all(chunk.tiny for chunk in chunks) and sum(chunk.rows.payload() for chunk in chunks) <= TOGETHER_BYTES:
        assert len(joined) == -(-len(chunks) // TOGETHER)


@given(st.integers(1, 40), st.data())
def test_packing_frees_replaced_mutations(count: int, data: st.DataObject) -> None:
    topic = Topic()
    chunk = Chunk(topic.add([(b"k%d" % number, b"v" * number) for number in range(count)]).owned())
    gone = data.draw(st.sets(st.integers(1, count), max_size=count - 1))
    if gone:
        chunk.replace(sorted(gone))
    left = [row for row in topic.rows if row.seqno not in gone]
    assert list(chunk.living()) == left
    assert chunk.live == len(left)
    before = chunk.bytes
    assert chunk.pack() == before - chunk.bytes
    assert list(chunk.rows) == left
    assert chunk.bytes == chunk.rows.nbytes()
    assert chunk.pack() == 0


def test_rows_in_use_are_counted_until_the_last_reader_is_done() -> None:
    chunk = Chunk(Topic().add([(b"k", b"v")]))
    leaving = MemoryAccount()
    chunk.handed = 2
    chunk.give_back()
    chunk.leave(leaving)
    assert leaving.bytes == chunk.bytes
    chunk.give_back()
    assert leaving.bytes == 0
    chunk.leave(leaving)
    assert leaving.bytes == 0
