"""The kinds of scenarios, and what runs one seed of a kind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from sim.cluster_faults import CLUSTER
from sim.coverage import recorded
from sim.faults import EMBEDDED
from sim.pair import PairScenario
from sim.pair_faults import PAIR
from sim.reduction import Part
from sim.scenario import ClusterScenario, Outcome, Scenario, ShardsScenario, Size
from sim.world import Finding, World

SCENARIOS: dict[str, tuple[type[Scenario], dict[str, int]]] = {
    "embedded": (Scenario, EMBEDDED),
    "cluster": (ClusterScenario, CLUSTER),
    "shards": (ShardsScenario, CLUSTER),
    "pair": (PairScenario, PAIR),
}
"""Kinds of scenarios, with the weights of their faults."""


def run_seed(
    seed: int,
    kind: str = "embedded",
    size: Size | None = None,
    *,
    faults: dict[str, int] | None = None,
    part: Part | None = None,
    echo: Any = None,
    clears_away: bool = True,
    on_world: Callable[[World], None] = lambda world: None,
) -> Outcome:
    """Run one seed; the outcome has the finding, if there is one.

    `faults`: weights of kinds of faults; None: those of SCENARIOS. `part`: what the seed is reduced to. `on_world` is
    called with its world when that begins.
    """
    scenario_class, usual = SCENARIOS[kind]
    preemption = (0.0, 0.02, 0.2)[seed % 3]
    with World(seed, preemption=preemption, echo=echo, clears_away=clears_away) as world:
        on_world(world)
        reached: Counter[str] = Counter()
        world.enter(recorded(reached))
        scenario = scenario_class(world, faults or usual, size, part)
        finding = ""
        try:
            scenario.run()
        except Finding as found:
            finding = str(found)
        fates: dict[str, int] = {}
        for attempt in scenario.history.attempts:
            fates[attempt.fate.value] = fates.get(attempt.fate.value, 0) + 1
        return Outcome(
            seed,
            scenario.history.operations,
            world.now,
            world.digest,
            dict(world.counts),
            fates,
            finding,
            [*(scenario.whole.roles or ())],
            dict(reached),
            part=scenario.whole,
            faults=scenario.faults.happened,
            restarts=scenario.restarts,
        )
