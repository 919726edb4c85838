"""Plants known bugs one at a time and sees the tests catch each: `make mutants`.

Each `*.toml` beside this file holds tables

    [[mutant]]
    name = "what goes wrong, in a few words"
    file = "txnbuffer/buffer/aborts.py"      # from the root of the repository
    old = "text that stands exactly once in it"
    new = "text that takes its place"
    tests = ["tests/buffer/test_aborts.py"]  # paths or ids of tests, at least one of which must fail

The working tree is copied, the copy changed, the tests run there with a fixed seed. Only failing tests
count as caught: a copy whose tests can't be collected is an error of the mutant. The same tests have
to pass in an unchanged copy first, since otherwise their failing would say nothing.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MUTANTS = Path(__file__).resolve().parent
COPIED = ("broker_io", "snapshots", "txnbuffer", "tests", "bench", "docker", "pyproject.toml", "README.md", "LICENSE")
PARALLEL = 2
TIMEOUT_S = 300
ALL_TIMEOUT_S = 1800
PASSED, FAILED = 0, 1


@dataclass(frozen=True)
class Mutant:
    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


def load(directory: Path = MUTANTS) -> list[Mutant]:
    """All mutants of a directory. A table with a missing or an unknown key raises TypeError or KeyError."""
    tables = [table for path in sorted(directory.glob("*.toml")) for table in tomllib.loads(path.read_text())["mutant"]]
    return [Mutant(**{**table, "tests": tuple(table["tests"])}) for table in tables]


def problems(mutant: Mutant, root: Path = ROOT) -> list[str]:
    """What keeps a mutant from being planted in a tree; nothing where it can be."""
    found = [f"{test}: no such file" for test in mutant.tests if not (root / test.partition("::")[0]).exists()]
    if not mutant.tests:
        found.append("names no test")
    if mutant.old == mutant.new:
        found.append("changes nothing")
    if not (root / mutant.file).is_file():
        return [*found, f"{mutant.file}: no such file"]
    times = (root / mutant.file).read_text().count(mutant.old)
    return found if times == 1 else [*found, f"{mutant.file} holds the old text {times} times, not once"]


def copy_tree(target: Path, root: Path = ROOT) -> None:
    ignore = shutil.ignore_patterns("__pycache__", ".*")
    for name in COPIED:
        source = root / name
        if source.is_dir():
            shutil.copytree(source, target / name, ignore=ignore)
        elif source.exists():
            shutil.copy(source, target / name)


def run_tests(tree: Path, tests: Iterable[str], timeout: int = TIMEOUT_S) -> tuple[int, str]:
    """Exit code and output of pytest on some tests of a tree; a run that takes too long has failed."""
    options = ["-q", "-x", "--no-header", "--tb=line", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *options, "--hypothesis-seed=0", *tests]
    environment = os.environ | {
        "HYPOTHESIS_PROFILE": "dev",
        "PYTHONPATH": str(tree),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    try:
        done = subprocess.run(
            command, cwd=tree, env=environment, capture_output=True, text=True, timeout=timeout, check=False
        )
    except subprocess.TimeoutExpired:
        return FAILED, f"took more than {timeout} s"
    return done.returncode, done.stdout + done.stderr


def try_mutant(mutant: Mutant, root: Path = ROOT) -> tuple[str, str]:
    """`caught`, `survived` or `broken`, and what there is to say about it."""
    if found := problems(mutant, root):
        return "broken", "; ".join(found)
    with tempfile.TemporaryDirectory(prefix="mutant-") as scratch:
        copy_tree(Path(scratch), root)
        target = Path(scratch, mutant.file)
        target.write_text(target.read_text().replace(mutant.old, mutant.new))
        code, output = run_tests(Path(scratch), mutant.tests)
    if code == FAILED:
        return "caught", ""
    return ("survived", "") if code == PASSED else ("broken", output[-2000:])


def unchanged_passes(mutants: Iterable[Mutant], root: Path = ROOT) -> bool:
    tests = dict.fromkeys(test for mutant in mutants for test in mutant.tests)
    with tempfile.TemporaryDirectory(prefix="mutant-") as scratch:
        copy_tree(Path(scratch), root)
        code, output = run_tests(Path(scratch), tests, ALL_TIMEOUT_S)
    if code != PASSED:
        print(output[-4000:], file=sys.stderr)
    return code == PASSED


def run(mutants: list[Mutant], root: Path = ROOT) -> bool:
    """Try all, tell about each on stderr, print the summary; whether all were caught."""
    counts = dict.fromkeys(("caught", "survived", "broken"), 0)
    with ThreadPoolExecutor(PARALLEL) as pool:
        for mutant, (verdict, detail) in zip(
            mutants, pool.map(lambda one: try_mutant(one, root), mutants), strict=True
        ):
            counts[verdict] += 1
            print(f"{verdict:9}{mutant.name}  ({mutant.file})", detail, file=sys.stderr)
    print(", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count or verdict != "broken"))
    return counts["caught"] == len(mutants)


def main() -> None:
    only = sys.argv[1] if len(sys.argv) > 1 else ""
    mutants = [mutant for mutant in load() if only in mutant.name or only in mutant.file]
    if not mutants:
        sys.exit(f"no mutant has {only!r} in its name or its file")
    plantable = [mutant for mutant in mutants if not problems(mutant)]
    if not unchanged_passes(plantable):
        sys.exit("the tests fail without any bug planted: mend that first")
    sys.exit(0 if run(mutants) else 1)


if __name__ == "__main__":
    main()
