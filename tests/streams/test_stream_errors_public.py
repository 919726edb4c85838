"""What a reader of change streams can be told is found where the rest of the public names are."""

from __future__ import annotations

import txnbuffer
from txnbuffer import errors

INSIDE = ("ConnectionSilent", "ConnectionSuperseded", "StreamExists", "StreamViolation")
"""Of connections, which are made again by themselves."""


def test_errors_of_streams_are_public() -> None:
    defined = {name for name, value in vars(errors).items() if getattr(value, "__module__", "") == errors.__name__}
    assert defined - set(INSIDE) <= set(txnbuffer.__all__)
    assert all(getattr(txnbuffer, name) is getattr(errors, name) for name in defined - set(INSIDE))
