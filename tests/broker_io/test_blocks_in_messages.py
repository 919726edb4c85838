"""Blocks in messages: written and read in place, as any library of protocol buffers would."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker_io.rpc import encoding, log_pb2
from broker_io.rpc.encoding import join_blocks, parse, split_blocks

sizes = st.lists(st.sampled_from([0, 1, 127, 128, 300, encoding.LARGE_BYTES]), max_size=4)


def contents(data: bytes) -> tuple[log_pb2.ReadReply, list[bytes]]:
    message, blocks = split_blocks(log_pb2.ReadReply, data)
    return message, [found[start:end] for found, start, end in blocks]


@given(sizes, st.integers(-(2**63), 2**63 - 1), st.binary(max_size=200))
def test_blocks_come_back_in_a_message_of_any_size(lengths: list[int], ledger: int, entries: bytes) -> None:
    blocks = [bytes([index]) * length for index, length in enumerate(lengths)]
    reply = log_pb2.ReadReply(ledger=ledger, entries=entries, more=True)
    data = join_blocks(reply, [(block[:5], block[5:]) for block in blocks])
    assert parse(log_pb2.ReadReply, data) == log_pb2.ReadReply(ledger=ledger, entries=entries, more=True, blocks=blocks)
    message, found = contents(data)
    assert found == blocks
    assert (message.ledger, message.entries, message.more) == (ledger, entries, True)


def test_blocks_may_be_anywhere_in_a_message() -> None:
    block = bytes(encoding.LARGE_BYTES)
    data = join_blocks(log_pb2.ReadReply(), [(block,)]) + encoding.serialize(log_pb2.ReadReply(ledger=7))
    message, found = contents(data)
    assert (message.ledger, found) == (7, [block])


@pytest.mark.parametrize(
    "end", [b"\x7a\x05abc", b"\x7a", b"\x0b", b"\x7a\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff", b"\x09abc", b"\0"]
)
def test_large_messages_that_are_cut_or_odd_are_refused(end: bytes) -> None:
    data = join_blocks(log_pb2.ReadReply(), [(bytes(encoding.LARGE_BYTES),)]) + end
    with pytest.raises(ValueError, match=r"these|cut off"):
        split_blocks(log_pb2.ReadReply, data)
