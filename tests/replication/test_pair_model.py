"""The model of a pair: breadth-first, by deviations from the usual course, and random histories."""

from __future__ import annotations

import pytest
from pair_explore import beginnings, explore_breadth_first, explore_deviations, explore_randomly, random_history

STEPS = 12_000
"""As many steps on each machine; `make explore-pair` makes more."""


@pytest.mark.parametrize("beginning", beginnings())
def test_histories_breadth_first(beginning: str) -> None:
    world, limits = beginnings()[beginning]
    explored = explore_breadth_first(world, limits, steps=STEPS)
    print(f"{beginning}: {explored.states} states, all of {explored.depth} steps")
    assert explored.depth >= 3


@pytest.mark.parametrize("beginning", beginnings())
def test_histories_with_deviations(beginning: str) -> None:
    world, limits = beginnings()[beginning]
    explored = explore_deviations(world, limits, steps=STEPS)
    print(f"{beginning}: {explored.states} states, all with {explored.depth} deviations")
    assert explored.depth >= 0


def test_random_histories() -> None:
    explored = explore_randomly(0, count=1000)
    print(f"{explored.histories} histories, {explored.steps} steps")
    rare = ("wipe", "look", "lose", "break", "isolate", "checkpoint", "force", "switch", "cut", "copy")
    assert [kind for kind in rare if not explored.actions[kind]] == []


def test_seed_has_one_history() -> None:
    (first, history), (second, again) = random_history(7), random_history(7)
    assert history == again
    assert first.committed == second.committed
