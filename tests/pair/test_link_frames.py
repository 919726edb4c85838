"""Frames of a link: what was sent is what arrives, or an error."""

from __future__ import annotations

import pytest
from golden_files import committed
from hypothesis import example, given
from hypothesis import strategies as st
from pair.link_samples import END, SAMPLES, STORE

from broker_io.errors import MalformedMessage
from broker_io.filelog.log.records import Fork, Kind, LogRecord, Mark
from broker_io.filelog.pair import link_frames
from broker_io.filelog.pair.link_frames import CHECKSUM_TAG, CopyEnd, Frame, decode_frame, encode_frames, size_of
from broker_io.filelog.pair.port import CopyChunk
from broker_io.filelog.replication import messages as m

NUMBERS = st.integers(0, 2**64 - 1)
STORES = st.binary(max_size=16)
MARKS = st.builds(Mark, NUMBERS, NUMBERS, NUMBERS)
RECORDS = st.builds(LogRecord, MARKS, NUMBERS, st.sampled_from(Kind), st.binary(max_size=40))
RESULTS = st.builds(m.RewriteFinished, NUMBERS, NUMBERS, st.binary(max_size=16))
MESSAGES: st.SearchStrategy[m.Message] = st.one_of(
    st.builds(m.Hello, NUMBERS, STORES, MARKS, MARKS, st.booleans()),
    st.builds(m.Follow, NUMBERS, STORES, MARKS, NUMBERS),
    st.builds(m.Rejoin, NUMBERS, STORES, st.sampled_from(m.CatchUp), MARKS),
    st.builds(m.CopyRequest, NUMBERS, STORES),
    st.builds(m.CopyBegin, NUMBERS, STORES, MARKS, st.lists(st.builds(Fork, NUMBERS, MARKS), max_size=3).map(tuple)),
    st.builds(m.Records, NUMBERS, STORES, st.lists(RECORDS, max_size=5).map(tuple), NUMBERS),
    st.builds(m.Durable, NUMBERS, STORES, MARKS, NUMBERS, st.booleans()),
    st.builds(m.DamagedTopics, NUMBERS, STORES, st.lists(st.text(max_size=10), max_size=3).map(tuple)),
    st.builds(m.RewriteDone, NUMBERS, STORES, st.lists(RESULTS, max_size=3).map(tuple)),
)
FRAMES: st.SearchStrategy[Frame] = st.one_of(
    MESSAGES,
    st.none(),
    st.just(CopyEnd()),
    st.builds(CopyChunk, st.text(max_size=10), NUMBERS, st.binary(max_size=40), st.integers(0, 2**32 - 1)),
)


@pytest.mark.parametrize("name", SAMPLES)
def test_golden_frames(name: str) -> None:
    (data,) = encode_frames(SAMPLES[name])
    assert decode_frame(committed(f"pair/frame-{name}.bin", data)) == SAMPLES[name]


@given(FRAMES)
def test_frame_arrives_as_it_was_sent(frame: Frame) -> None:
    (data,) = encode_frames(frame)
    assert decode_frame(data) == frame


@pytest.mark.parametrize("size", [16 * 1024 - 200, 16 * 1024, 3_000_000])
def test_large_contents_arrive_as_bytes_of_their_own(size: int) -> None:
    content = bytes(range(256)) * (size // 256)
    sent = m.Records(1, STORE, (LogRecord(END, 1, Kind.DATA, content), LogRecord(END, 2, Kind.DATA, b"x")), 3)
    (data,) = encode_frames(sent)
    found = decode_frame(data)
    assert found == sent
    assert isinstance(found, m.Records)
    assert [type(each.content) for each in found.records] == [bytes, bytes]


@given(st.lists(st.integers(0, 30), max_size=12))
@example([])
@example([100])
@example([1] * 9)
def test_records_are_sent_in_bounded_frames(sizes: list[int]) -> None:
    records = tuple([LogRecord(Mark(1, at, at), at, Kind.DATA, b"x" * size) for at, size in enumerate(sizes)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(link_frames, "FRAME_BYTES", 40)
        patch.setattr(link_frames, "FRAME_RECORDS", 4)
        found = [decode_frame(data) for data in encode_frames(m.Records(5, STORE, records, 99))]
    parts = [each for each in found if isinstance(each, m.Records)]
    assert parts == found
    assert [each for part in parts for each in part.records] == [*records]
    assert {(part.epoch, part.store, part.commit) for part in parts} == {(5, STORE, 99)}
    assert len(parts) == 1 or all(part.records for part in parts)
    for part in parts:
        assert len(part.records) <= 4
        assert len(part.records) == 1 or sum(len(each.content) for each in part.records) <= 40


def test_size_of_records_counts_their_contents() -> None:
    record = LogRecord(END, 1, Kind.DATA, b"x" * 1000)
    assert 2000 < size_of(m.Records(1, STORE, (record, record), 1)) < 3000
    assert size_of(m.CopyRequest(1, STORE)) < 1000


@given(FRAMES, st.data())
def test_each_changed_bit_is_an_error(frame: Frame, data: st.DataObject) -> None:
    (sent,) = encode_frames(frame)
    bit = data.draw(st.integers(0, 8 * len(sent) - 1))
    changed = bytearray(sent)
    changed[bit // 8] ^= 1 << bit % 8
    with pytest.raises(MalformedMessage):
        decode_frame(bytes(changed))


@pytest.mark.parametrize("data", [b"", b"\x71\0\0\0", b"\x08" + bytes(8)])
def test_short_frame_is_an_error(data: bytes) -> None:
    with pytest.raises(MalformedMessage, match="frame"):
        decode_frame(data)


def test_checksum_is_a_field_of_the_frame() -> None:
    from broker_io.rpc.replication_pb2 import LinkFrame

    (data,) = encode_frames(SAMPLES["hello"])
    assert data[0] == CHECKSUM_TAG
    assert LinkFrame.FromString(data).checksum == int.from_bytes(data[1:9], "little")
