"""Compare the figures of this tree with those of another tree: `make compare OTHER=DIR`.

Machines are noisy, so each figure is measured in both trees alternately, first in the other one. Both run on this
interpreter and its packages, each with its own sources. A figure is kept if the median of its paired ratios is at least
0.95, or if its median is within the range of the other tree's runs. A ratio above 1 means that this tree is better,
whatever the unit. Writes one JSON object per figure to stdout.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.calls_table import UNITS
from bench.harness import Figure, figures

RUNS = 5
LEAST_RATIO = 0.95
TIMEOUT_SECONDS = 1800
LESS_IS_BETTER = ("s", "ms", "us", "ns", "bytes", "times", "threads", *UNITS.values())
THIS = Path(__file__).resolve().parent.parent

_MEASURE = """
import sys
from bench.harness import figures, run
run([one for one in figures(sys.argv[1]) if one.name == sys.argv[1]], runs=1)
"""


def measure(tree: Path, name: str) -> float | None:
    """One figure, measured once in a new process; None if it failed, with the reason on stderr."""
    environment = os.environ | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            [sys.executable, "-c", _MEASURE, name],
            cwd=tree,
            env=environment,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        print(f"  {tree}: {name} took more than {TIMEOUT_SECONDS} s", file=sys.stderr, flush=True)
        return None
    lines = done.stdout.splitlines()
    if not lines:
        print(done.stderr[-2000:], file=sys.stderr, flush=True)
        return None
    return float(json.loads(lines[-1])["value"])


def compared(chosen: Figure, pairs: Sequence[tuple[float, float]]) -> dict[str, object]:
    """The JSON object of a figure from pairs of values: of the other tree, of this one."""
    less = chosen.unit in LESS_IS_BETTER
    others, these = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    ratio = statistics.median(other / this if less else this / other for other, this in pairs)
    median = statistics.median(these)
    within = median <= max(others) if less else median >= min(others)
    return {
        "figure": chosen.name,
        "unit": chosen.unit,
        "other": statistics.median(others),
        "other_spread": [min(others), max(others)],
        "this": median,
        "this_spread": [min(these), max(these)],
        "ratio": round(ratio, 3),
        "kept": ratio >= LEAST_RATIO or within,
        "runs": len(pairs),
    }


def main(arguments: list[str]) -> int:
    """Compare figures; the exit code is 0 if every figure is kept, 1 if one is not or could not be measured."""
    parser = argparse.ArgumentParser("python -m bench.compare", description=__doc__)
    parser.add_argument("other", type=Path, metavar="DIR", help="the root of the other tree")
    parser.add_argument("prefix", nargs="*", metavar="PREFIX", help="compare only figures with this name prefix")
    parser.add_argument("--runs", type=int, default=RUNS)
    options = parser.parse_intermixed_args(arguments)
    good = True
    for chosen in {one.name: one for prefix in options.prefix or [""] for one in figures(prefix)}.values():
        pairs: list[tuple[float, float]] = []
        for turn in range(options.runs):
            trees = [options.other.resolve(), THIS]
            values = {tree: measure(tree, chosen.name) for tree in (trees if turn % 2 == 0 else trees[::-1])}
            other, this = (values[tree] for tree in trees)
            if other is None or this is None:
                break
            pairs.append((other, this))
            print(f"  {chosen.name}: {other} {this}", file=sys.stderr, flush=True)
        if len(pairs) < options.runs:
            print(f"{chosen.name} could not be measured in both trees", file=sys.stderr, flush=True)
            good = False
            continue
        line = compared(chosen, pairs)
        good = good and bool(line["kept"])
        print(json.dumps(line), flush=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
