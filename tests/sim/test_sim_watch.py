"""A seed that hangs is found, named and ended; no process of a seed outlives its runner."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from sim import simulate, watch
from sim.scenario import Outcome

Work = Callable[[int, Any], None]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[[Work], None]:
    """Let seeds do something else, which gets their number and a scheduler, and look for hangs often."""
    monkeypatch.setattr(watch, "LOOK_SECONDS", 0.1)
    monkeypatch.setattr(watch, "HANG_LOOKS", 5)

    def replace(work: Work) -> None:
        def run_seed(seed: int, *_: object, on_world: Any, **__: object) -> Outcome:
            scheduler = SimpleNamespace(runs=0)
            on_world(SimpleNamespace(scheduler=scheduler, now=7.0))
            work(seed, scheduler)
            return Outcome(seed, 0, 0.0, "", {})

        monkeypatch.setattr(simulate, "run_seed", run_seed)

    return replace


def spin_for_ever() -> None:
    while True:
        pass


def test_a_seed_in_which_nothing_goes_on_hangs(run: Callable[[Work], None]) -> None:
    run(lambda _, __: spin_for_ever())
    (found,) = simulate.outcomes(iter([3]), "embedded", 1)
    assert "hangs at 7.000 s: nothing went on for 0.5 s in" in found.finding
    assert "spin_for_ever" in found.finding


def test_a_seed_that_goes_on_does_not_hang(run: Callable[[Work], None]) -> None:
    def work(_: int, scheduler: Any) -> None:
        until = time.monotonic() + 1.5
        while time.monotonic() < until:
            scheduler.runs += 1
            time.sleep(0.01)

    run(work)
    (found,) = simulate.outcomes(iter([3]), "embedded", 1)
    assert found.finding == ""


def test_a_seed_that_takes_too_long_ends_while_others_go_on(
    run: Callable[[Work], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "HANG_LOOKS", 10_000)
    run(lambda seed, _: time.sleep(0.2) if seed else spin_for_ever())
    found = simulate.outcomes(iter(range(12)), "embedded", 2, seed_seconds=5.0)
    problems = {outcome.seed: outcome.finding for outcome in found}
    assert problems.pop(0) == "ended without a result within 5 s"
    assert problems == dict.fromkeys(range(1, 12), "")


def test_a_seed_ends_with_its_runner(run: Callable[[Work], None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "HANG_LOOKS", 10_000)
    read, write = os.pipe()

    def work(_: int, __: Any) -> None:
        os.write(write, b"begun")
        spin_for_ever()

    run(work)
    runner = os.fork()
    if not runner:
        [*simulate.outcomes(iter([3]), "embedded", 1)]
        os._exit(0)
    os.close(write)
    assert os.read(read, 5) == b"begun"
    os.kill(runner, signal.SIGKILL)
    os.waitpid(runner, 0)
    assert os.read(read, 1) == b"", "the pipe ends when nobody has it open any more"


def test_a_replay_prints_events_when_they_happen(
    run: Callable[[Work], None], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def run_seed(*_: object, echo: Any, **__: object) -> Outcome:
        if echo is not None:
            echo("an event")
        spin_for_ever()
        raise AssertionError

    monkeypatch.setattr(simulate, "run_seed", run_seed)
    monkeypatch.setattr(simulate, "reduce", lambda *_: print(f"reduces after {capfd.readouterr().out!r}"))
    monkeypatch.setattr(watch, "LOOK_SECONDS", 0.1)
    assert simulate.replay(7, "cluster", None) == 1
    text = capfd.readouterr().out
    assert text.startswith("reduces after 'an event\\ndigest")
    assert "spin_for_ever" in text
    assert text.endswith("reduced: make sim SEED=7 KIND=cluster\n")
