"""A buffer's state, encoded and decoded as for a recovery, never as a copied object."""

from __future__ import annotations

from broker_io.position import Position
from snapshots.format import Stored, chain_start
from txnbuffer.buffer.state import BufferSegment, BufferState
from txnbuffer.buffer.visibility import Sequencer
from txnbuffer.recovery.codec import (
    EncodedSegment,
    TopicState,
    decode_segment,
    decode_state,
    encode_segment,
    encode_state,
)

TOPIC = "written-form"


def through_written_form(state: BufferState, parts: list[BufferSegment]) -> tuple[BufferState, list[BufferSegment]]:
    """The state and the segments that a recovery reads after an owner has written these."""
    topic_state = TopicState(state, Sequencer().snapshot_state(), origin_ledger=1)
    before = chain_start(TOPIC, "")
    read_parts: list[BufferSegment] = []
    for part in parts:
        value = encode_segment(EncodedSegment(TOPIC, 1, before, part))
        entry = decode_segment(TOPIC, part.number, Stored(Position(1, 0), "1", "part", 1, value))
        assert entry.chain_before == before
        before = entry.chain_after
        read_parts.append(entry.segment)
    return decode_state(encode_state(topic_state)).buffer, read_parts
