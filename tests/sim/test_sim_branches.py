"""The job of a simulated world whose processes write one transaction together."""

from __future__ import annotations

import asyncio
import random
from types import SimpleNamespace
from typing import Any

import pytest
from sim import branch_apps
from sim.branch_apps import NAME, BranchPlan, BranchWriter
from sim.history import Fate, History

from txnbuffer.coordinator.messages import Branch
from txnbuffer.errors import AlreadyCommitted
from txnbuffer.model import TxnId


class Late:
    """A branch of a number that has committed."""

    def __init__(self, client: object, name: str, number: int, timeout: float | None) -> None:
        del client, timeout
        self._refusal = AlreadyCommitted(name, number, number)

    async def begin(self) -> None:
        raise self._refusal


def test_the_job_goes_on_with_the_next_number_once_a_writer_learns_that_one_has_committed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The outcome of its commit was unknown, so the driver waits for other branches, which nobody can write."""
    monkeypatch.setattr(branch_apps, "Participant", Late)
    history, plan = History(lambda: 1.0, lambda _: None), BranchPlan(numbers=2)
    setting: Any = SimpleNamespace(history=history, topics=("t",), log=lambda *_: None)
    plan.again(1)
    writer = BranchWriter("w", SimpleNamespace(), setting, random.Random(1), plan)  # type: ignore[arg-type]  # no host is used
    client: Any = None
    asyncio.run(writer._write(client, 1, 0))
    assert plan.number == 2
    assert [attempt.fate for attempt in history.attempts] == [Fate.ABORTED]
    asyncio.run(writer._write(client, 1, 0))  # it comes late
    assert plan.number == 2
    plan.again(1)
    plan.finish(2, 0, history.attempt(NAME), Branch(TxnId(0, 1), (), ()))
    plan.again(1)
    plan.committed(1)
    assert [*plan.finished] == [0]
    plan.committed(2)
    assert plan.over
