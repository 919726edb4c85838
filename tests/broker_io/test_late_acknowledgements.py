"""Futures of appends to a cluster are resolved even if their broker was closed meanwhile."""

from __future__ import annotations

import threading

import pytest

from broker_io.pulsar.threads import Resolver

SECONDS = 120.0


@pytest.mark.parametrize("started", [False, True])
def test_work_queued_after_the_end_is_done(started: bool) -> None:
    resolver = Resolver()
    if started:
        resolver.start()
    resolver.stop()
    done = [threading.Event() for _ in range(3)]
    for each in done:
        resolver.put(each.set)
    assert all(each.wait(SECONDS) for each in done)
    resolver.wait(SECONDS)
    resolver.stop()
