"""Issued tokens and the file of their hashes."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from txnbuffer.access.tokens import HEAD, IssuedToken, TokenFile, issue, parse_tokens, with_token, without_tokens
from txnbuffer.errors import InvalidTokenFile

RANDOM = bytes(range(38))
TEXT, TOKEN = issue("orders", RANDOM, 1_764_000_000, None)
FILE = TokenFile({TOKEN.id: TOKEN})


def test_token_is_found_by_its_text_only() -> None:
    assert FILE.find(TEXT) == TOKEN
    for other in ("", "txnb", TEXT[:-1], TEXT + "0", TEXT[:-1] + "0", TEXT.upper(), "txnb_" + "0" * 12 + TEXT[17:]):
        assert FILE.find(other) is None


def test_file_has_no_secret() -> None:
    text = FILE.format()
    secret = TEXT.rpartition("_")[2]
    assert secret not in text
    assert hashlib.sha256(secret.encode()).hexdigest() in text


def test_text_of_the_file_is_pinned() -> None:
    assert issue("team a", RANDOM, 1_764_000_000, 1_764_003_600)[1].expires == 1_764_003_600
    assert FILE.format() == (f"{HEAD}\n000102030405\torders\t{TOKEN.hash}\t2025-11-24T16:00:00Z\tnever\n")


NAMES = st.text(st.characters(exclude_categories=["C", "Z"], exclude_characters="*"), min_size=1, max_size=40)
TIMES = st.integers(0, 2**32)
TOKENS = st.builds(lambda name, random, now, ends: issue(name, random, now, ends)[1], NAMES,
                   st.binary(min_size=38, max_size=38), TIMES, st.none() | TIMES)  # fmt: skip


@given(st.lists(TOKENS, unique_by=lambda token: token.id))
def test_file_is_read_as_it_was_written(tokens: list[IssuedToken]) -> None:
    file = TokenFile({})
    for token in tokens:
        file = with_token(file, token)
    assert parse_tokens(file.format(), "tokens") == file
    assert without_tokens(file, [token.id for token in tokens]) == TokenFile({})


@pytest.mark.parametrize(
    ("lines", "error"),
    [
        ([], "tokens is not a token file: create one with `txnbuf token create`"),
        (["# other"], "tokens is not a token file"),
        ([HEAD, "", ""], "line 2 is not a token: remove it"),
        ([HEAD, "a\tb"], "line 2 is not a token"),
        ([HEAD, f"000102030405\to*\t{TOKEN.hash}\t2025-11-24T16:00:00Z\tnever"], "line 2 is not a token"),
        ([HEAD, f"000102030405\to\t{TOKEN.hash}\t2025-11-24\tnever"], "line 2 is not a token"),
        ([HEAD, f"000102030405\to\t{TOKEN.hash[1:]}\t2025-11-24T16:00:00Z\tnever"], "line 2 is not a token"),
        (FILE.format().splitlines() + FILE.format().splitlines()[1:], "line 3 has the id of another one"),
    ],
)
def test_each_mistake_is_named_with_its_line(lines: list[str], error: str) -> None:
    with pytest.raises(InvalidTokenFile) as raised:
        parse_tokens("\n".join(lines), "tokens")
    assert error in str(raised.value)
