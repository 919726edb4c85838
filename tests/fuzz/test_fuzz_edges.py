"""Numbers at the edges of their range, one in each message that a client receives.

Those of a service take minutes, since each starts one: `test_fuzz_service.py` has some of them.
"""

from __future__ import annotations

from typing import Any

import pytest
from fuzz.edges import at_edges
from fuzz.inventory import TARGETS
from fuzz.sessions import joined, parted

from txnbuffer.rpc import session_pb2, streams_pb2

FRAMES: dict[str, Any] = {
    "client-states": session_pb2.ServerFrame,
    "stream-client-states": streams_pb2.StreamServerFrame,
}


@pytest.mark.parametrize("name", FRAMES)
def test_numbers_at_the_edges_of_their_range(name: str) -> None:
    frames = parted(TARGETS[name].seeds()[0])
    cases = 0
    for at, frame in enumerate(frames):
        for what, changed in at_edges(FRAMES[name].FromString(frame)):
            cases += 1
            try:
                TARGETS[name].decode(joined([*frames[:at], changed, *frames[at + 1 :]]))
            except Exception as error:
                raise AssertionError(f"{name}, frame {at}, {what}") from error
    assert cases > 100
