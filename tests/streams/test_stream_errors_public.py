"""All errors of change streams are public names."""

from __future__ import annotations

import txnbuffer
from txnbuffer import errors

INSIDE = ("StreamExists", "StreamViolation")
"""Errors of connections, which are reopened automatically."""
OTHERS = (
    "BackfillFailed", "ForeignToken", "SeqnoOutOfRange", "TokensFailed", "TooManyCursors", "UnknownCursor",
    "UnreadableToken",
)  # fmt: skip


def test_errors_of_streams_are_public() -> None:
    public = {*OTHERS, *(name for name in vars(errors) if name.startswith("Stream"))} - {*INSIDE}
    assert len(public) > len(OTHERS) + 5
    assert public <= set(txnbuffer.__all__)
    assert all(getattr(txnbuffer, name) is getattr(errors, name) for name in public)
