"""The simulator finds a call whose answer is late, and one that has none."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from sim.calls import ANSWER_SECONDS, Calls
from sim.world import Process, World

from txnbuffer.client.client import Client
from txnbuffer.client.transaction import Transaction


async def answered_after(seconds: float, **_: Any) -> None:
    await asyncio.sleep(seconds)


def calls_of(
    monkeypatch: pytest.MonkeyPatch, use: Callable[[], Any], calm: float, end: Callable[[Process], None] | None = None
) -> list[str]:
    """What is late when a process has used a client for 100 s."""
    for owner, name in ((Client, "outcome"), (Transaction, "commit")):
        monkeypatch.setattr(owner, name, staticmethod(answered_after))
    with World(seed=1) as world:
        calls = Calls(world)
        world.enter(calls.recorded())
        process = world.host("beta").start("app", use)
        world.run(100.0)
        if end is not None:
            end(process)
        return [*calls.late(calm)]


@pytest.mark.parametrize(
    ("seconds", "calm", "found"),
    [
        (ANSWER_SECONDS - 1.0, 0.0, ""),
        (ANSWER_SECONDS + 1.0, 0.0, "its answer 21.0 s after"),
        (ANSWER_SECONDS + 1.0, 2.0, ""),
        (200.0, 85.0, ""),
        (200.0, 70.0, "no answer 30.0 s after"),
    ],
    ids=["in time", "late", "late before the calm", "waits a short time", "waits for ever"],
)
def test_a_call_with_a_late_answer_is_found(
    monkeypatch: pytest.MonkeyPatch, seconds: float, calm: float, found: str
) -> None:
    async def main() -> None:
        await Client.outcome(seconds)
        await asyncio.Event().wait()

    late = calls_of(monkeypatch, main, calm)
    assert len(late) == bool(found)
    assert found in "".join(late)


def test_a_process_that_was_killed_waits_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        await Client.outcome(200.0)

    assert len(calls_of(monkeypatch, main, 0.0)) == 1
    assert calls_of(monkeypatch, main, 0.0, Process.kill) == []


def test_a_commit_may_wait_for_others_until_it_is_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        await asyncio.gather(Transaction.commit(200.0), Transaction.commit(200.0, wait_visible=True))

    assert len(calls_of(monkeypatch, main, 0.0)) == 1
