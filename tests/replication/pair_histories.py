"""Histories of a pair that tests step through: its usual beginnings, and what happens next if nothing fails."""

from __future__ import annotations

from collections.abc import Callable

from pair_explore import usual
from pair_world import SETTINGS, World

from broker_io.filelog.replication.member import PairMember, Role

A, B = 0, 1
LOCAL = ("net", "disk", "apply", "link", "start")


def pair(*, appends: int = 0, min_in_sync: int = 1, clocked: bool = True, window: int = 1000) -> World:
    """A pair in sync with A as primary, and some appends acknowledged."""
    terms = SETTINGS.terms._replace(clocked=clocked)
    world = World(SETTINGS._replace(min_in_sync=min_in_sync, terms=terms, window_bytes=window))
    world.do(("start", A))
    run(world, until=lambda: role(world, A) is Role.LIVE)
    world.do(("start", B))
    world.settle()
    for _ in range(appends):
        world.do(("append", A))
        run(world, *LOCAL)
    return world


def alone(*, appends: int = 0, min_in_sync: int = 1) -> World:
    """As `pair`, after B has crashed and was taken out of `in_sync`."""
    world = pair(appends=appends, min_in_sync=min_in_sync)
    world.do(("crash", B))
    run(world, "time", "swap", "net", "disk", until=lambda: world.lock.record.in_sync == (b"a1",))
    run(world, "answer")
    return world


def run(world: World, *kinds: str, until: Callable[[], bool] | None = None, limit: int = 300) -> None:
    """Do what happens as usual, of these kinds if given: until it is so, or until nothing of them is left."""
    for _ in range(limit):
        if until is not None and until():
            return
        actions = [each for each in world.actions({}) if not kinds or each[0] in kinds]
        if not kinds:
            action, _ = usual(world, {})
            actions = [action]
        if not actions:
            break
        world.do(min(actions, key=lambda each: each[0] == "time"))
    assert until is None or until()


def member(world: World, at: int) -> PairMember:
    found = world.nodes[at].member
    assert found is not None
    return found


def role(world: World, at: int) -> Role | None:
    found = world.nodes[at].member
    return found.role if found else None


def promote(world: World, at: int) -> None:
    """Let time pass until a node claims the next epoch, and let it win."""
    run(world, "time", "disk", until=lambda: at in [each[0] for each in world.lock.requests])
    world.do(("swap", [each[0] for each in world.lock.requests].index(at)))
    run(world, "answer", "disk", "apply")


def acked(world: World) -> int:
    return max(world.acked, default=0)
