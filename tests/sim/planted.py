"""Plant bugs in a copy of the project, one at a time, and check that the simulator finds each: `make sim-planted`.

`planted.toml` holds tables

    [[planted]]
    name = "what goes wrong, in a few words"
    kind = "embedded"                        # a kind of scenario
    file = "txnbuffer/coordinator/core.py"   # from the root of the repository
    old = "text that stands exactly once in it"
    new = "text that takes its place"
    more = [{file = "…", old = "…", new = "…"}]  # optional: other places that the same bug changes
    commit = "0123abc"                       # optional: the commit that fixed it, if the project had this bug
    fast = true                              # optional: `make test` plants it too, as a few seeds find it

Seeds run until one has a finding, and has none without the bug. `planted_results.jsonl` has the newest result of each
bug; a run of `make sim-planted` writes it, and `make sim-planted LIST=1` prints it as a table.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import tomllib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent)]

from mutants.run import ROOT, copy_tree  # noqa: E402

RESULTS = HERE / "planted_results.jsonl"
SIMULATE = "tests/sim/simulate.py"


@dataclass(frozen=True)
class Place:
    file: str
    old: str
    new: str

    def problems(self, root: Path) -> list[str]:
        """What keeps it from being changed in a tree."""
        if self.old == self.new:
            return ["changes nothing"]
        if not (root / self.file).is_file():
            return [f"{self.file}: no such file"]
        times = (root / self.file).read_text().count(self.old)
        return [] if times == 1 else [f"{self.file} has the old text {times} times, not once"]

    def changed(self, tree: Path) -> str:
        return (tree / self.file).read_text().replace(self.old, self.new)


@dataclass(frozen=True)
class Planted:
    """A bug and the places where it is planted."""

    name: str
    kind: str
    places: tuple[Place, ...]
    commit: str = ""
    fast: bool = False

    @classmethod
    def of(cls, table: dict[str, Any]) -> Planted:
        """The bug of a table. Raises TypeError or KeyError for a missing or an unknown key."""
        first = {key: table.pop(key) for key in ("file", "old", "new")}
        places = [Place(**place) for place in (first, *table.pop("more", ()))]
        return cls(**table, places=tuple(places))

    def problems(self, root: Path = ROOT) -> list[str]:
        """What keeps it from being planted in a tree."""
        return [problem for place in self.places for problem in place.problems(root)]

    def plant(self, tree: Path) -> None:
        for place in self.places:
            (tree / place.file).write_text(place.changed(tree))


def load(file: Path = HERE / "planted.toml") -> list[Planted]:
    """All bugs to plant."""
    return [Planted.of(table) for table in tomllib.loads(file.read_text())["planted"]]


@dataclass(frozen=True)
class Result:
    """How a bug was found: by `seed`, after so many seeds and seconds; `seed` is -1 if it was not found."""

    name: str
    kind: str
    commit: str
    seed: int
    seeds: int
    seconds: float
    finding: str


SEED_SECONDS = 60
"""Real seconds that one seed may take."""


def simulate(tree: Path, *arguments: object) -> tuple[dict[str, Any], str]:
    """Run seeds in a tree: the figures, and a text with the findings."""
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONHASHSEED": "0"}
    command = [sys.executable, str(tree / SIMULATE), "--seed-seconds", str(SEED_SECONDS), *map(str, arguments)]
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)
    if not done.stdout:
        raise RuntimeError(done.stderr)
    figures: dict[str, Any] = json.loads(done.stdout)
    return figures, done.stderr


def find(bug: Planted, *, seeds: int, seconds: float = float("inf"), workers: int = 1) -> Result:
    """Run seeds with the bug until one finds it."""
    began = time.monotonic()
    used, first = 0, 0
    with tempfile.TemporaryDirectory(prefix="planted-") as scratch:
        tree = Path(scratch)
        copy_tree(tree)
        bug.plant(tree)
        while used < seeds and (left := seconds - (time.monotonic() - began)) > 0:
            limits = ("--first", first, "--seeds", seeds - used, "--seconds", left, "--workers", workers)
            figures, text = simulate(tree, "--kind", bug.kind, "--until-found", *limits)
            used += figures["seeds"]
            found = re.search(r"^seed (\d+): (.*)", text, re.MULTILINE)
            if found is None:
                break
            seed, finding = int(found[1]), found[2][:200]
            if not simulate(ROOT, "--kind", bug.kind, "--first", seed, "--seeds", 1)[0]["findings"]:
                took = round(time.monotonic() - began, 1)
                return Result(bug.name, bug.kind, bug.commit, seed, used, took, finding)
            first = seed + 1
    return Result(bug.name, bug.kind, bug.commit, -1, used, round(time.monotonic() - began, 1), "")


class Results:
    """The newest result of each bug, in a file of one JSON object a line."""

    def __init__(self, path: Path = RESULTS) -> None:
        self._path = path
        lines = path.read_text().splitlines() if path.exists() else []
        self.by_name = {result.name: result for result in (Result(**json.loads(line)) for line in lines)}

    def add(self, result: Result, names: list[str]) -> None:
        """Add a result; keep those of `names`, in their order."""
        self.by_name[result.name] = result
        kept = [self.by_name[name] for name in names if name in self.by_name]
        self._path.write_text("".join(json.dumps(asdict(one), ensure_ascii=False) + "\n" for one in kept))


HEADER = f"{'kind':9} {'found by':>13} {'seeds':>5} {'time':>11}  bug (commit that fixed it)"
"""The header of the table. The seeds are those up to the one that found the bug."""


def row(bug: Planted, result: Result | None) -> str:
    """A line of the table."""
    if result is None:
        how = f"{'not tried':>31}"
    elif result.seed < 0:
        how = f"{'not found in':>13} {result.seeds:5} {result.seconds:9.1f} s"
    else:
        how = f"{'seed':>7}{result.seed:6} {result.seeds:5} {result.seconds:9.1f} s"
    return f"{bug.kind:9} {how}  {bug.name}{f' ({bug.commit})' if bug.commit else ''}"


def main() -> int:
    parser = argparse.ArgumentParser(description="Plant bugs and check that the simulator finds each.")
    parser.add_argument("only", nargs="?", default="", help="plant only bugs with this text in name, file or commit")
    parser.add_argument("--seeds", type=int, default=20_000, help="at most so many seeds for each bug")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="at most so many seconds for each bug")
    parser.add_argument("--workers", type=int, default=1, help="how many seeds run at once")
    parser.add_argument("--list", action="store_true", help="print the newest results and plant nothing")
    parser.add_argument("--missing", action="store_true", help="plant only bugs that were not found yet")
    options = parser.parse_args()
    everything, results = load(), Results()
    names = [bug.name for bug in everything]
    texts = {bug: " ".join([bug.name, bug.commit, *(place.file for place in bug.places)]) for bug in everything}
    chosen = [bug for bug in everything if options.only in texts[bug]]
    if not chosen:
        sys.exit(f"nothing that is planted has {options.only!r} in its name, its file or its commit")
    print(HEADER, flush=True)
    for bug in chosen:
        known = results.by_name.get(bug.name)
        if not options.list and not (options.missing and known is not None and known.seed >= 0):
            known = find(bug, seeds=options.seeds, seconds=options.seconds, workers=options.workers)
            results.add(known, names)
        print(row(bug, known), flush=True)
    found = sum(bug.name in results.by_name and results.by_name[bug.name].seed >= 0 for bug in chosen)
    print(f"{found} of {len(chosen)} found")
    return 0 if found == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
