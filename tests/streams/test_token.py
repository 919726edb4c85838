"""Resume tokens: their text, and their changes along a stream."""

from __future__ import annotations

import json

import pytest
from golden_files import committed
from hypothesis import given
from hypothesis import strategies as st

from txnbuffer.errors import UnreadableToken
from txnbuffer.streams.failover import MAX_SEQNO, MAX_UUID, ResumeToken, Version

versions = st.lists(st.builds(Version, st.integers(1, MAX_UUID), st.integers(0, MAX_SEQNO)), max_size=25).map(tuple)
seqnos = st.integers(0, MAX_SEQNO)


@st.composite
def tokens(draw: st.DrawFn) -> ResumeToken:
    start, seqno, end = sorted(draw(st.lists(seqnos, min_size=3, max_size=3)))
    topic, cluster, incarnation = (draw(st.text(max_size=5)) for _ in range(3))
    return ResumeToken(topic, cluster, incarnation, draw(versions), seqno, start, end, draw(seqnos))


TOKEN = ResumeToken("flights", "c-1", "i-7", (Version(0xBEEF, 900), Version(0xCAFE, 0)), 950, 940, 960, 700)


def test_golden_tokens() -> None:
    for name, token in (("token", TOKEN), ("token-new", ResumeToken("flüge"))):
        text = committed(f"streams/{name}.json", str(token).encode()).decode()
        assert ResumeToken.parse(text) == token
        assert str(ResumeToken.parse(text)) == text


@given(tokens())
def test_a_token_is_read_as_written(token: ResumeToken) -> None:
    assert ResumeToken.parse(str(token)) == token


@pytest.mark.parametrize(
    "changes",
    [
        {"v": 2},
        {"v": "1"},
        {"more": 1},
        {"seqno": 939},
        {"seqno": 950.0},
        {"seqno": True},
        {"seqno": None},
        {"snapshot": [940]},
        {"snapshot": [961, 960]},
        {"snapshot": [-1, 960]},
        {"snapshot": [940, 2**63]},
        {"topic": 1},
        {"topic": "\ud800"},
        {"cluster": "\ud800"},
        {"incarnation": "\ud800"},
        {"versions": {}},
        {"versions": [[0, 1]]},
        {"versions": [[1]]},
        {"versions": [[n + 1, 0] for n in range(26)]},
        {"purge": -1},
    ],
)
def test_invalid_tokens_are_rejected(changes: dict[str, object]) -> None:
    with pytest.raises(UnreadableToken, match="start the stream from its beginning"):
        ResumeToken.parse(json.dumps(json.loads(str(TOKEN)) | changes))


@pytest.mark.parametrize("text", ["", "{}", "[]", "1", "{", str(TOKEN)[:-1], "[" * 100_000, '{"v":1}'])
def test_noise_is_rejected(text: str) -> None:
    with pytest.raises(UnreadableToken):
        ResumeToken.parse(text)


def test_a_token_follows_its_stream() -> None:
    token = ResumeToken("flights", seqno=10, snapshot_start=10, snapshot_end=10)
    inside = token.entered(20)
    assert (inside.seqno, inside.snapshot_start, inside.snapshot_end, inside.complete) == (10, 10, 20, True)
    part = inside.reached(15)
    assert (part.seqno, part.snapshot_start, part.snapshot_end, part.complete) == (15, 10, 20, False)
    moved = part.entered(30)
    assert (moved.seqno, moved.snapshot_start, moved.snapshot_end) == (15, 10, 30)
    assert moved.reached(30).complete
    assert moved.reached(30).entered(40).snapshot_start == 30
    done = moved.completed(30)
    assert (done.seqno, done.snapshot_start, done.snapshot_end, done.complete) == (30, 30, 30, True)


def test_row_54_rolling_back_drops_versions_that_began_above() -> None:
    back = TOKEN.rolled_back(900)
    assert (back.seqno, back.snapshot_start, back.snapshot_end) == (900, 900, 900)
    assert back.versions == TOKEN.versions
    assert TOKEN.rolled_back(899).versions == (Version(0xCAFE, 0),)
    assert TOKEN.rolled_back(0).versions == (), "who holds nothing holds no version"
    assert (TOKEN.uuid, TOKEN.rolled_back(0).uuid) == (0xBEEF, 0)
