"""The registry of figures, and the harness that runs them.

A figure is a function that measures once and returns one number, or a `Pair` with the number of a peer
measured right after it. Each runs several times. The medians are printed to stdout, one JSON object per
line, with the keys

    figure, value, unit, goal, peer, peer_value, ratio, runs

`goal` is a text such as ">= 500000", ">= 2 times the peer" or null; `peer`, `peer_value` and `ratio` (value over peer's
value) are null without a peer; `runs` is the number of runs. Everything else is printed to stderr,
including the single values and the time of a synced write on this disk.
"""

from __future__ import annotations

import argparse
import importlib
import json
import pkgutil
import statistics
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, TextIO

import bench
from bench.disk import synced_write_ms

RUNS = 3
TO_PEER = " times the peer"


class Pair(NamedTuple):
    """One measurement, and that of the peer right after it."""

    value: float
    peer_value: float


Measure = Callable[[], float | Pair]


@dataclass(frozen=True, slots=True)
class Figure:
    name: str
    unit: str
    goal: str | None
    peer: str | None
    measure: Measure


_registry: dict[str, Figure] = {}
_if_it_fails: dict[Callable[[TextIO], None], None] = {}
_accepting: dict[str, Callable[[Mapping[str, float]], None]] = {}


def figure(name: str, *, unit: str, goal: str | None = None, peer: str | None = None) -> Callable[[Measure], Measure]:
    """Register a function as a figure; with a `peer` it returns a Pair.

    `goal` is `<= number` or `>= number`, followed by `times the peer` if it is a goal for the ratio.
    """

    def register(measure: Measure) -> Measure:
        if name in _registry:
            raise ValueError(f"figure {name} is registered twice")
        if goal is not None:
            reaches(0.0, goal)
            if goal.endswith(TO_PEER) and peer is None:
                raise ValueError(f"the goal of figure {name} names a peer, but the figure has none: give peer")
        _registry[name] = Figure(name, unit, goal, peer, measure)
        return measure

    return register


def if_it_fails(explain: Callable[[TextIO], None]) -> None:
    """Call `explain` with stderr if the current figure fails, after its traceback."""
    _if_it_fails[explain] = None


def accepting(prefix: str, write: Callable[[Mapping[str, float]], None]) -> None:
    """Let `--accept` call `write` with the values of measured figures with a name prefix, to which tests hold them."""
    _accepting[prefix] = write


def figures(only: str = "") -> list[Figure]:
    """All figures whose names start with `only`, sorted by name. Raises ValueError if there are none."""
    for module in pkgutil.iter_modules(bench.__path__):
        if module.name.startswith("figures_"):
            importlib.import_module(f"bench.{module.name}")
    chosen = [_registry[name] for name in sorted(_registry) if name.startswith(only)]
    if not chosen:
        raise ValueError(f"no figure starts with {only!r}: choose from {', '.join(sorted(_registry)) or 'none'}")
    return chosen


def reaches(value: float, goal: str) -> bool:
    """Whether a value, or the ratio if the goal names the peer, reaches the goal."""
    match goal.removesuffix(TO_PEER).split():
        case ["<=", limit]:
            return value <= float(limit)
        case [">=", limit]:
            return value >= float(limit)
    raise ValueError(f"goal {goal!r} is neither '<= number' nor '>= number', with '{TO_PEER}' or without")


def measured(chosen: Figure, runs: int, err: TextIO) -> dict[str, object]:
    """Run one figure; its JSON object."""
    results: list[Pair] = []
    for _ in range(runs):
        result = chosen.measure()
        if isinstance(result, Pair) != (chosen.peer is not None):
            raise TypeError(f"figure {chosen.name} must return a Pair if it names a peer, and a number if not")
        results.append(result if isinstance(result, Pair) else Pair(result, 0.0))
        print(f"  {_short(results[-1].value)} {chosen.unit}", file=err, flush=True)
    value = statistics.median(result.value for result in results)
    peer_value = statistics.median(result.peer_value for result in results) if chosen.peer else None
    return {
        "figure": chosen.name,
        "value": _short(value),
        "unit": chosen.unit,
        "goal": chosen.goal,
        "peer": chosen.peer,
        "peer_value": None if peer_value is None else _short(peer_value),
        "ratio": _short(value / peer_value) if peer_value else None,
        "runs": runs,
    }


def run(
    chosen: Iterable[Figure],
    *,
    runs: int = RUNS,
    out: TextIO | None = None,
    err: TextIO | None = None,
    accept: bool = False,
) -> bool:
    """Measure and print figures, and whether each reaches its goal; return whether all could be measured.

    `accept`: the values become those that tests hold the figures to.
    """
    out, err = out or sys.stdout, err or sys.stderr
    complete, values = True, dict[str, float]()
    for one in chosen:
        print(f"{one.name}  (a synced write takes {synced_write_ms():.2f} ms here now)", file=err, flush=True)
        _if_it_fails.clear()
        try:
            line = measured(one, runs, err)
        except Exception:  # the other figures are still measured
            traceback.print_exc(file=err)
            for explain in list(_if_it_fails):
                explain(err)
            complete = False
            continue
        if one.goal is not None:
            to_peer = one.goal.endswith(TO_PEER)
            outcome = "reached" if reaches(float(str(line["ratio" if to_peer else "value"])), one.goal) else "MISSED"
            print(f"  goal {one.goal}{'' if to_peer else ' ' + one.unit}: {outcome}", file=err, flush=True)
        values[one.name] = float(str(line["value"]))
        print(json.dumps(line), file=out, flush=True)
    for prefix, write in _accepting.items() if accept else ():
        write({name: value for name, value in values.items() if name.startswith(prefix)})
    return complete


def _short(value: float) -> float:
    """A value rounded to four significant digits, or to an integer if it is larger."""
    return round(value) if abs(value) >= 1000 else float(f"{value:.4g}")


def main(arguments: list[str]) -> int:
    """`python -m bench [PREFIX…]`: run the figures whose names start with a prefix, or all; the exit code."""
    parser = argparse.ArgumentParser(
        "python -m bench",
        description="Measure this machine: one JSON object per line on stdout, all else on stderr. Without PREFIX "
        "all figures are measured, each three times, which takes long.",
    )
    parser.add_argument("prefix", metavar="PREFIX", nargs="*", help="measure only figures with this name prefix")
    parser.add_argument("--list", action="store_true", help="list names, units and goals, and measure nothing")
    parser.add_argument("--accept", action="store_true", help="let tests hold the figures `calls.` to what is measured")
    options = parser.parse_args(arguments)
    try:
        chosen = {one.name: one for prefix in options.prefix or [""] for one in figures(prefix)}
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if options.list:
        for one in chosen.values():
            print(f"{one.name}  {one.unit}  {one.goal or '-'}")
        return 0
    return 0 if run(chosen.values(), accept=options.accept) else 1
