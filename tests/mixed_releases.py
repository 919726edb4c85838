"""Programs of 0.2.0 and of this release that write to one log, and what they must find there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from source_tree import ROOT

RELEASE = ROOT / "tests" / "releases" / "txnbuffer-0.2.0.tar.xz"
"""The packages of 0.2.0, by `git archive` of commit 33570cfb: a clone may lack its history."""
LIFE = ROOT / "tests" / "release_life.py"
SECONDS = 280.0
"""Within which a program must do what a test waits for, on a busy machine."""
OLD, NEW = "0.2.0", "this release"
WRITERS = {"old": OLD, "new": NEW}
"""The names of the writers, and their releases."""
KINDS = ("1", "2", "3", "aborted", "number", "in")
"""The kinds of transactions of a writer."""


def unpacked(directory: Path) -> dict[str, Path]:
    """The packages of both releases, as their wheels have them."""
    with tarfile.open(RELEASE) as tar:
        tar.extractall(directory, filter="data")
    return {OLD: directory, NEW: ROOT}


def environment(tree: Path) -> dict[str, str]:
    return {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}


class Life:
    """A process of `release_life.py`; `lines` are those that it has printed, `errors` the file of its stderr."""

    def __init__(self, tree: Path, errors: Path, *arguments: str) -> None:
        self.lines: list[Any] = []
        self._errors = errors
        with errors.open("w") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-P", str(LIFE), *arguments],
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
                env=os.environ | environment(tree),
            )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                self.lines.append(json.loads(line))

    def kinds(self) -> Counter[str]:
        """How many transactions of each kind it has ended, by their values."""
        return Counter(values[0].split(".")[1] for _, values, _ in self.lines[1:] if "." in values[0])

    def wait(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + SECONDS
        while not condition():
            assert self.process.poll() is None, self._errors.read_text()
            assert time.monotonic() < deadline, (self.lines[-5:], self._errors.read_text())
            time.sleep(0.02)

    def finish(self) -> list[Any]:
        """What it has printed, without the file of the package."""
        code = self.process.wait(SECONDS)
        self._reader.join(60)
        assert code == 0, self._errors.read_text()
        return self.lines[1:]


class Writers:
    """A writer of each release, in the `with` block."""

    def __init__(self, trees: Mapping[str, Path], directory: Path, address: str, *options: str) -> None:
        self._lives = {
            name: Life(trees[of], directory / f"{name}.stderr", address, "write", name, *options)
            for name, of in WRITERS.items()
        }
        self._trees = trees

    def __enter__(self) -> Writers:
        return self

    def __exit__(self, *_: object) -> None:
        for life in self._lives.values():
            life.process.kill()

    def progress(self) -> None:
        """Wait until each writer has ended two more transactions of each kind."""
        before = {name: life.kinds() for name, life in self._lives.items()}
        for name, life in self._lives.items():
            life.wait(partial(_after, before[name], life))

    def stop(self) -> dict[str, list[Any]]:
        """What the writers have printed until they have ended."""
        for life in self._lives.values():
            life.process.terminate()
        written = {name: life.finish() for name, life in self._lives.items()}
        for name, life in self._lives.items():
            assert Path(life.lines[0]).is_relative_to(self._trees[WRITERS[name]])
        return written


def _after(before: Counter[str], life: Life) -> bool:
    now = life.kinds()
    return all(now[kind] >= before[kind] + 2 for kind in KINDS)


Found = dict[str, list[list[Any]]]
"""By topic, the seqno and the value of each committed record."""


def read(tree: Path, errors: Path, address: str, *options: str) -> Found:
    """The committed records of all topics, by a program of a release."""
    topics = [f"{name}-{topic}" for name in WRITERS for topic in ("a", "b", "in", "out")]
    reader = Life(tree, errors, address, "read", ",".join(topics), *options)
    found: Found = defaultdict(list)
    for topic, *record in reader.finish():
        found[topic].append(record)
    return found


def check(found: Found, written: Mapping[str, list[Any]], *, numbered: bool = True) -> None:
    """What readers get is what the writers have committed: each record once, all seqnos in order, and full copies."""
    for name, lines in written.items():
        *ends, done = lines
        assert done == "done"
        committed: dict[str, Counter[str]] = defaultdict(Counter)
        for topics, values, outcome in ends:
            for topic in topics if outcome else ():
                committed[topic].update(values)
        committed[f"{name}-out"] = committed[f"{name}-in"]
        for topic, values in committed.items():
            records = found[topic]
            assert Counter(value for _, value in records) == values
            assert max(values.values()) == 1
            if numbered:
                assert [seqno for seqno, _ in records] == [*range(1, len(records) + 1)]
        numbers = [int(value.rpartition(".")[2]) for _, value in found[f"{name}-a"] if ".number." in value]
        assert numbers == [*range(1, len(numbers) + 1)]
        assert [value for _, value in found[f"{name}-out"]] == [value for _, value in found[f"{name}-in"]]
