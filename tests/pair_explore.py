"""Explores the histories of a pair: breadth-first from some beginnings, and at random from seeds.

    make explore-pair SECONDS=3600 SEED=1
    make explore-pair SECONDS=600 BREADTH=1

Prints what was explored as one JSON object; a violation prints the seed and the actions that lead to it.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from pair_world import DRIFT, SETTINGS, TTL, Action, Violation, World, clone, key

from broker_io.filelog.replication.lease import Terms

FAULTS = {
    "append": 30, "read": 30, "look": 10, "lose": 4, "break": 4, "crash": 4, "pause": 2, "checkpoint": 3, "isolate": 2,
    "wipe": 1, "switch": 2, "force": 0,
}  # fmt: skip
WEIGHTS = {
    "time": 3, "start": 2, "look": 4, "disk": 8, "apply": 6, "net": 10, "append": 4, "read": 3, "swap": 4, "answer": 5,
    "lose": 2, "link": 3, "break": 0.5, "crash": 0.7, "pause": 0.5, "resume": 0.7, "checkpoint": 0.5, "isolate": 0.3,
    "reach": 1, "wipe": 0.5, "switch": 0.2, "force": 0.1,
}  # fmt: skip

STALE = {
    "pause": 2, "resume": 0.4, "read": 8, "append": 8, "swap": 20, "disk": 20, "isolate": 1, "crash": 0, "break": 0,
}  # fmt: skip
"""More weights of histories in which a primary is away while another one begins."""


@dataclass
class Explored:
    """What an exploration did: histories or states, steps, the depth, how often each action happened."""

    histories: int = 0
    states: int = 0
    steps: int = 0
    depth: int = 0
    actions: Counter[str] = field(default_factory=Counter)


class Found(AssertionError):
    """A violation with the history that leads to it."""

    def __init__(self, what: str, source: str, history: Sequence[Action]) -> None:
        super().__init__(f"{what}; {source}, {len(history)} steps: {list(history)}")
        self.history = history


def random_world(chance: random.Random) -> World:
    """A world with its own policy, lock and clocks, in which nothing has happened yet."""
    terms = Terms(TTL, DRIFT, clocked=chance.random() < 0.75)
    strict = chance.random() < 0.2
    window = chance.choice((1, 20, 1000))
    kept = chance.choice((1, 30, 1000))
    world = World(SETTINGS._replace(terms=terms, min_in_sync=1 + strict, window_bytes=window, keep_bytes=kept))
    world.eager = chance.random() < 0.3
    world.slow, world.slow_lock = chance.random() < 0.5, chance.random() < 0.3
    for node in world.nodes:
        node.rate = chance.choice((1000, 900, 1100))
    return world


def random_history(seed: int, *, steps: int = 150) -> tuple[World, list[Action]]:
    """One history of a seed, which ends with R5. Raises Found."""
    chance = random.Random(seed)
    world, history = random_world(chance), []
    limits = FAULTS | {"force": chance.random() < 0.2}
    weights = {kind: weight * chance.choice((0.3, 1, 1, 3)) for kind, weight in WEIGHTS.items()}
    if chance.random() < 0.2:
        weights |= STALE
        limits["pause"] = 6
    try:
        if chance.random() < 0.8:
            world.settle()
            world.used.clear()
        for _ in range(chance.randrange(steps // 3, steps)):
            actions = list(world.actions(limits))
            action = chance.choices(actions, [weights[each[0]] for each in actions])[0]
            history.append(action)
            world.do(action)
        world.settle()
    except Violation as violation:
        raise Found(str(violation), f"seed {seed}", history) from violation
    return world, history


def explore_randomly(first: int, *, seconds: float = 0, count: int = 0) -> Explored:
    """Random histories for some time, or so many of them. Raises Found."""
    explored, until = Explored(), time.monotonic() + seconds
    while explored.histories < count or time.monotonic() < until:
        world, history = random_history(first + explored.histories)
        explored.histories += 1
        explored.steps += len(history)
        explored.depth = max(explored.depth, len(history))
        explored.actions += world.used
    return explored


def beginnings() -> dict[str, tuple[World, dict[str, int]]]:
    """Where the breadth-first search starts, and what may happen from there."""
    few = {"append": 2, "read": 1, "look": 1, "lose": 1, "break": 1, "crash": 2}
    both = World()
    both.settle()
    alone = clone(both)
    alone.do(("crash", 1))
    while len(alone.lock.record.in_sync) > 1:
        alone._work_off()
        alone.do(("time",))
    cut = clone(both)
    cut.do(("append", 0))
    cut.do(("disk", 0))
    cut.do(("crash", 0))
    found = {"in sync": both, "alone": alone, "a record on one side": cut, "nothing": World()}
    for world in found.values():
        world.used.clear()
    return {name: (world, few) for name, world in found.items()}


def explore_breadth_first(
    world: World, limits: dict[str, int], *, seconds: float = math.inf, steps: float = math.inf
) -> Explored:
    """All histories, shortest first, for some time or so many steps; `depth` is the last that is complete.

    Raises Found.
    """
    explored, until = Explored(), time.monotonic() + seconds
    level: list[tuple[World, tuple[Action, ...]]] = [(world, ())]
    seen = {hash(key(world))}
    while level:
        following = []
        for before, history in level:
            if explored.steps >= steps or time.monotonic() > until:
                return explored
            for action in before.actions(limits):
                after = clone(before)
                explored.steps += 1
                try:
                    after.do(action)
                except Violation as violation:
                    raise Found(str(violation), "breadth-first", (*history, action)) from violation
                if (known := hash(key(after))) not in seen:
                    seen.add(known)
                    following.append((after, (*history, action)))
        explored.states, explored.depth, level = len(seen), explored.depth + 1, following
    return explored


ORDER = ("net", "disk", "apply", "answer", "swap", "resume", "reach", "link", "append", "time", "start")


def usual(world: World, limits: dict[str, int]) -> tuple[Action, list[Action]]:
    """What happens next if nothing is slow and nothing fails, and everything that may happen instead."""
    actions = list(world.actions(limits))
    first = min((each for each in actions if each[0] in ORDER), key=lambda each: ORDER.index(each[0]))
    return first, [each for each in actions if each != first]


def explore_deviations(
    world: World, limits: dict[str, int], *, seconds: float = math.inf, steps: float = math.inf, horizon: int = 60
) -> Explored:
    """Histories of a length in which everything happens as usual, then those with one deviation, with two, …

    A deviation is a fault, or something else that happens first. Each history ends with R5. `depth` is the number of
    deviations of which all histories were explored. Raises Found.
    """
    explored, until = Explored(depth=-1), time.monotonic() + seconds
    level: list[tuple[World, tuple[Action, ...]]] = [(world, ())]
    seen = {hash(key(world))}
    while level:
        deviating = []
        for start, begun in level:
            if explored.steps >= steps or time.monotonic() > until:
                return explored
            now, history = clone(start), begun
            try:
                while len(history) < horizon:
                    action, others = usual(now, limits)
                    for other in others:
                        after, history = clone(now), (*history, other)
                        after.do(other)
                        if (known := hash(key(after))) not in seen:
                            seen.add(known)
                            deviating.append((after, history))
                        history = history[:-1]
                    history = (*history, action)
                    now.do(action)
                    explored.steps += 1 + len(others)
                now.settle()
            except Violation as violation:
                raise Found(str(violation), "deviations", history) from violation
            explored.histories += 1
        explored.states, explored.depth, level = len(seen), explored.depth + 1, deviating
    return explored


def main(arguments: Iterable[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--breadth", action="store_true", help="breadth-first, not at random")
    options = parser.parse_args([*arguments])
    try:
        if options.breadth:
            found = {
                f"{search.__name__} from {name}": search(world, limits, seconds=options.seconds / 8)
                for search in (explore_breadth_first, explore_deviations)
                for name, (world, limits) in beginnings().items()
            }
        else:
            found = {"random": explore_randomly(options.seed, seconds=options.seconds)}
    except Found as violation:
        print(violation, file=sys.stderr)
        return 1
    print(json.dumps({name: vars(each) for name, each in found.items()}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
