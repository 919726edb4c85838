"""Plant known bugs one at a time and check that the tests catch each: `make mutants`.

Each `*.toml` beside this file holds tables

    [[mutant]]
    name = "the rule, and how it is broken, in a few words"
    function = "TransactionBuffer._decide"   # or a class or a constant; `fragments.py` says how it is found
    old = "code that stands exactly once in it"
    new = "code that takes its place; nothing for `pass`"
    tests = ["tests/buffer/test_aborts.py"]  # paths or ids of tests, at least one of which must fail

Change it if the rule or its code changes; where the function stands, and its layout and comments, make no difference.

The working tree is copied, the copy changed, the tests run there with a fixed seed; the test that caught the mutant
the last time runs first. Only failing tests count as caught: a copy whose tests can't be collected is an error of the
mutant. The test that fails has to pass in an unchanged copy, since otherwise its failing would say nothing.

All of them take about an hour, so a run can stop after some time and the next one continues: `.mutants.jsonl` in the
root of the repository has a line for each mutant that was tried, with the test that failed and the seconds. A result
counts as long as the mutant, and the code of the module that it changes and of the test files that it names, are the
same; comments and docstrings do not matter.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import functools
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from pathlib import Path

MUTANTS = Path(__file__).resolve().parent
sys.path[:0] = [str(MUTANTS.parent)]

from mutants.fragments import NotPlantable, planted  # noqa: E402
from source_tree import ROOT, Module  # noqa: E402

COPIED = (
    "broker_io", "snapshots", "txnbuffer", "tests", "bench", "docker", "docs", "examples", "properdocs.yml",
    "pyproject.toml", "requirements", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "Makefile", "README.md",
    "SECURITY.md",
)  # fmt: skip
TEST_TIMEOUT_S = 120  # of tests that have none of their own
TIMEOUT_S = 600
PASSED, FAILED = 0, 1


@dataclass(frozen=True)
class Mutant:
    name: str
    function: str
    old: str
    new: str
    tests: tuple[str, ...]

    def planted(self, root: Path = ROOT) -> Module:
        """The module that it changes, with the change. Raises NotPlantable."""
        return planted(self.function, self.old, self.new, root)


def load(directory: Path = MUTANTS) -> list[Mutant]:
    """All mutants of a directory. A table with a missing or an unknown key raises TypeError or KeyError."""
    tables = [table for path in sorted(directory.glob("*.toml")) for table in tomllib.loads(path.read_text())["mutant"]]
    return [Mutant(**{**table, "tests": tuple(table["tests"])}) for table in tables]


def problems(mutant: Mutant, root: Path = ROOT) -> list[str]:
    """What keeps a mutant from being planted in a tree; nothing where it can be."""
    found = [f"{test}: no such file" for test in mutant.tests if not (root / test.partition("::")[0]).exists()]
    if not mutant.tests:
        found.append("names no test")
    try:
        mutant.planted(root)
    except NotPlantable as error:
        found.append(str(error))
    return found


def copy_tree(target: Path, root: Path = ROOT) -> None:
    """Copy a tree with its compiled modules, which count as long as their sources have the same time and size."""
    there = [str(root / name) for name in COPIED if (root / name).exists()]
    subprocess.run(["cp", "--archive", *there, str(target)], check=True)


def run_tests(tree: Path, tests: Iterable[str]) -> tuple[int, str]:
    """Exit code and output of pytest on some tests of a tree; a run that takes too long has failed."""
    options = ["-q", "-x", "--no-header", "--tb=line", "-p", "no:cacheprovider", f"--timeout={TEST_TIMEOUT_S}"]
    command = [sys.executable, "-m", "pytest", *options, "--hypothesis-seed=0", *tests]
    environment = os.environ | {
        "HYPOTHESIS_PROFILE": "mutants",
        "PYTHONPATH": str(tree),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    try:
        done = subprocess.run(
            command, cwd=tree, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return FAILED, f"took more than {TIMEOUT_S} s"
    return done.returncode, done.stdout + done.stderr


@dataclass(frozen=True)
class Result:
    """`outcome` is `caught`, `survived` or `broken`; `detail` is the failed test, or why the mutant is broken."""

    name: str
    key: str
    outcome: str
    detail: str
    seconds: float


@functools.cache
def digest_of_code(text: bytes) -> bytes:
    """The digest of a Python source without its comments and docstrings."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                node.body.pop(0)
    return hashlib.sha256(ast.dump(tree).encode()).digest()


def key_of(mutant: Mutant, root: Path = ROOT) -> str:
    """A digest of everything that the result of a mutant depends on directly."""
    digest = hashlib.sha256(json.dumps(asdict(mutant)).encode())
    with contextlib.suppress(NotPlantable):
        digest.update(digest_of_code(mutant.planted(root).text.encode()))
    for name in (test.partition("::")[0] for test in mutant.tests):
        path = root / name
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            text = file.read_bytes() if file.is_file() else b""
            digest.update(digest_of_code(text) if file.suffix == ".py" else text)
    return digest.hexdigest()[:32]


def failed_test(output: str) -> str | None:
    """The id of the first test that failed."""
    found = re.search(r"^(?:FAILED|ERROR) (\S+?::[^\[\n]+?(?:\[.*?\])?)(?: - .*)?$", output, re.MULTILINE)
    return found[1] if found else None


def try_mutant(mutant: Mutant, root: Path = ROOT, first: str | None = None) -> Result:
    """Run the tests of a mutant, the test `first` before the others."""
    started = time.monotonic()

    def result(outcome: str, detail: str = "") -> Result:
        return Result(mutant.name, key_of(mutant, root), outcome, detail, round(time.monotonic() - started, 1))

    if found := problems(mutant, root):
        return result("broken", "; ".join(found))
    with tempfile.TemporaryDirectory(prefix="mutant-") as scratch:
        copy_tree(Path(scratch), root)
        module = mutant.planted(root)
        Path(scratch, module.path).write_text(module.text)
        code, output = run_tests(Path(scratch), [first]) if first is not None else (PASSED, "")
        if code != FAILED:
            code, output = run_tests(Path(scratch), mutant.tests)
    if code == FAILED:
        return result("caught", failed_test(output) or output.strip()[-200:])
    return result("survived") if code == PASSED else result("broken", output[-2000:])


def unchanged_passes(tests: Iterable[str], root: Path = ROOT) -> bool:
    """Whether tests pass in a copy without any bug."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as scratch:
        copy_tree(Path(scratch), root)
        code, output = run_tests(Path(scratch), tests)
    if code != PASSED:
        print(output[-4000:], file=sys.stderr)
    return code == PASSED


class Results:
    """The results so far, in a file of one JSON object a line; the last line of a name counts."""

    def __init__(self, path: Path) -> None:
        self._path = path
        lines = path.read_text().splitlines() if path.exists() else []
        self._by_name = {result.name: result for result in (Result(**json.loads(line)) for line in lines)}

    def of(self, mutant: Mutant, root: Path = ROOT) -> Result | None:
        """The result of a mutant, if it still counts."""
        found = self._by_name.get(mutant.name)
        return found if found is not None and found.key == key_of(mutant, root) else None

    def last_test(self, mutant: Mutant) -> str | None:
        """The test that caught a mutant the last time, whether that still counts or not."""
        found = self._by_name.get(mutant.name)
        caught = found.detail if found is not None and found.outcome == "caught" else ""
        return caught if caught.partition("::")[0] in {test.partition("::")[0] for test in mutant.tests} else None

    def add(self, result: Result) -> None:
        self._by_name[result.name] = result
        with self._path.open("a") as file:
            print(json.dumps(asdict(result)), file=file)


def run(
    mutants: list[Mutant],
    results: Results,
    root: Path = ROOT,
    seconds: float = float("inf"),
    parallel: int = 1,
) -> bool:
    """Try those that were not caught yet until the time is over; print a summary. Whether all are caught."""
    deadline = time.monotonic() + seconds
    passes: dict[str, bool] = {}

    def attempt(mutant: Mutant) -> Result | None:
        known = results.of(mutant, root)
        if (known is not None and known.outcome == "caught") or time.monotonic() > deadline:
            return None
        result = try_mutant(mutant, root, results.last_test(mutant))
        if result.outcome != "caught":
            return result
        tests = (result.detail,) if "::" in result.detail else mutant.tests  # no id: they took too long
        for test in tests:
            if test not in passes:
                passes[test] = unchanged_passes([test], root)
        if not all(passes[test] for test in tests):
            return replace(result, outcome="broken", detail=f"fails without the bug, too: {' '.join(tests)}")
        return result

    with ThreadPoolExecutor(parallel) as pool:
        for trial in as_completed([pool.submit(attempt, mutant) for mutant in mutants]):
            if (result := trial.result()) is not None:
                results.add(result)
                print(f"{result.outcome:9}{result.seconds:7.1f} s  {result.name}", file=sys.stderr)
                print(f"{'':19}{result.detail}", file=sys.stderr)
    found = [results.of(mutant, root) for mutant in mutants]
    counts = Counter("not tried" if result is None else result.outcome for result in found)
    print(", ".join(f"{counts[word]} {word}" for word in ("caught", "survived", "broken", "not tried") if counts[word]))
    return counts["caught"] == len(mutants)


def main() -> None:
    parser = argparse.ArgumentParser(description="Plant known bugs and check that the tests catch each.")
    parser.add_argument("only", nargs="?", default="", help="text in the name or the function of the mutants to try")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no mutant after that time")
    parser.add_argument("--parallel", type=int, default=os.cpu_count() or 1, help="how many to try at the same time")
    parser.add_argument("--list", action="store_true", help="print the results so far as a table and try nothing")
    options = parser.parse_args()
    mutants = [one for one in load() if options.only in one.name or options.only in one.function]
    if not mutants:
        sys.exit(f"no mutant has {options.only!r} in its name or its function")
    results = Results(ROOT / ".mutants.jsonl")
    if options.list:
        for mutant in mutants:
            result = results.of(mutant)
            outcome, seconds, detail = (
                (result.outcome, result.seconds, result.detail) if result else ("not tried", 0, "")
            )
            print(f"{outcome}\t{seconds}\t{mutant.function}\t{mutant.name}\t{detail.splitlines()[0] if detail else ''}")
        return
    sys.exit(0 if run(mutants, results, ROOT, options.seconds, options.parallel) else 1)


if __name__ == "__main__":
    main()
