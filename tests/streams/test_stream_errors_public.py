"""What a reader of change streams can be told is found where the rest of the public names are."""

from __future__ import annotations

import txnbuffer
from txnbuffer import errors

INSIDE = ("StreamExists", "StreamViolation")
"""Of connections, which are made again by themselves."""
OTHERS = (
    "BackfillFailed", "ForeignToken", "SeqnoOutOfRange", "TokensFailed", "TooManyCursors", "UnknownCursor",
    "UnreadableToken",
)  # fmt: skip


def test_errors_of_streams_are_public() -> None:
    public = {*OTHERS, *(name for name in vars(errors) if name.startswith("Stream"))} - {*INSIDE}
    assert len(public) > len(OTHERS) + 5
    assert public <= set(txnbuffer.__all__)
    assert all(getattr(txnbuffer, name) is getattr(errors, name) for name in public)
