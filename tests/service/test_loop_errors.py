"""Errors that asyncio reports are logged at a bounded rate."""

from __future__ import annotations

import asyncio
from typing import Any

from broker_io.environment import Environment, use
from broker_io.testing import SeededRandomness, SimulatedClock, SimulatedDisk
from txnbuffer.service.loop import LoopErrors


def test_each_kind_is_logged_once_a_second() -> None:
    lines: list[Any] = []
    clock = SimulatedClock()
    with use(Environment(clock, SimulatedDisk(), SeededRandomness(1))):
        errors = LoopErrors(lambda event, **facts: lines.append((event, facts["what"], facts["error"])))
        loop = asyncio.new_event_loop()
        for _ in range(100):
            errors.handle(loop, {"message": "accept failed", "exception": OSError(24, "too many")})
        errors.handle(loop, {"message": "other"})
        clock.advance(1.0)
        errors.handle(loop, {"message": "accept failed"})
        loop.close()
    assert lines == [
        ("problem", "accept failed", "OSError(24, 'too many')"),
        ("problem", "other", ""),
        ("problem", "accept failed", ""),
    ]
