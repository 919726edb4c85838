"""Clients and services of 0.2.0 and of this release work with each other, and read each other's logs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from pair_processes import PairOfProcesses
from service_process import ServiceProcess, kept_port
from source_tree import ROOT

RELEASE = ROOT / "tests" / "releases" / "txnbuffer-0.2.0.tar.xz"
"""The packages of 0.2.0, by `git archive` of commit 33570cfb: a clone may lack its history."""
LIFE = ROOT / "tests" / "release_life.py"
SECONDS = 280.0
"""Within which a program must do what a test waits for, on a busy machine."""
OLD, NEW = "0.2.0", "this release"
WRITERS = {"old": OLD, "new": NEW}
"""The names of the writers, and their releases."""


@pytest.fixture(scope="module")
def trees(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The packages of both releases, as their wheels have them."""
    directory = tmp_path_factory.mktemp("release")
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


KINDS = ("1", "2", "3", "aborted", "number", "in")


def after(before: Counter[str], life: Life) -> bool:
    """Whether a writer has ended two transactions of each kind since a moment."""
    now = life.kinds()
    return all(now[kind] >= before[kind] + 2 for kind in KINDS)


def progress(writers: dict[str, Life]) -> None:
    """Wait until each writer has ended two more transactions of each kind."""
    before = {name: life.kinds() for name, life in writers.items()}
    for name, life in writers.items():
        life.wait(partial(after, before[name], life))


def stopped(writers: dict[str, Life]) -> dict[str, list[Any]]:
    """Stop the writers; what they have printed."""
    for life in writers.values():
        life.process.terminate()
    return {name: life.finish() for name, life in writers.items()}


def end(service: ServiceProcess, how: str) -> None:
    if how == "terminate":
        service.terminate()
        service.finish()
        return
    if how == "stop":  # what clients send from here on reaches the socket, and no service reads it
        service.process.send_signal(signal.SIGSTOP)
        time.sleep(0.2)
    service.kill()


def check(found: dict[str, list[list[Any]]], name: str, lines: list[Any]) -> None:
    """What readers get is what a writer has committed: each record once, all seqnos in order, and a full copy."""
    assert lines.pop() == "done"
    committed: dict[str, Counter[str]] = defaultdict(Counter)
    for topics, values, outcome in lines:
        for topic in topics if outcome else ():
            committed[topic].update(values)
    committed[f"{name}-out"] = committed[f"{name}-in"]
    for topic, values in committed.items():
        records = found[topic]
        assert Counter(value for _, value in records) == values
        assert max(values.values()) == 1
        assert [seqno for seqno, _ in records] == [*range(1, len(records) + 1)]
    numbers = [int(value.rpartition(".")[2]) for _, value in found[f"{name}-a"] if ".number." in value]
    assert numbers == [*range(1, len(numbers) + 1)]
    assert [value for _, value in found[f"{name}-out"]] == [value for _, value in found[f"{name}-in"]]


def read(tree: Path, address: str, errors: Path) -> dict[str, list[list[Any]]]:
    """The committed records of all topics, by a program of a release."""
    topics = [f"{name}-{topic}" for name in WRITERS for topic in ("a", "b", "in", "out")]
    reader = Life(tree, errors, address, "read", *topics)
    found: dict[str, list[list[Any]]] = defaultdict(list)
    for topic, *record in reader.finish():
        found[topic].append(record)
    return found


@pytest.mark.parametrize(
    ("releases", "ends"),
    [((OLD, NEW, OLD, OLD), ("kill", "stop", "kill")), ((NEW, OLD, NEW, NEW), ("stop", "terminate", "stop"))],
    ids=["there and back", "back and there"],
)
def test_services_of_both_releases_take_turns(
    releases: tuple[str, ...], ends: tuple[str, ...], trees: dict[str, Path], tmp_path: Path
) -> None:
    log, port = tmp_path / "log", kept_port()
    address, writers = f"txnbuf://127.0.0.1:{port}", dict[str, Life]()
    try:
        for release, how in zip(releases, (*ends, None), strict=True):
            variables = environment(trees[release])
            with ServiceProcess(log, port=port, python=("-P", "-m", "txnbuffer"), environment=variables) as service:
                for name, of in WRITERS.items():
                    if name not in writers:
                        writers[name] = Life(trees[of], tmp_path / f"{name}.stderr", address, "write", name)
                progress(writers)
                if how is not None:
                    end(service, how)
                    continue
                written = stopped(writers)
                end(service, "terminate")
    finally:
        for life in writers.values():
            life.process.kill()
    for name, life in writers.items():
        assert Path(life.lines[0]).is_relative_to(trees[WRITERS[name]])
    orders = (NEW, OLD, NEW) if releases[-1] is NEW else (OLD, NEW, OLD)
    found, *again = [read(trees[release], f"file:{log}", tmp_path / "reader.stderr") for release in orders]
    assert again == [found, found]
    for name, lines in written.items():
        check(found, name, lines)


def test_the_machines_of_a_pair_run_both_releases(trees: dict[str, Path], tmp_path: Path) -> None:
    """Either is the primary and the backup of the other one, after switches and kills of the primary."""
    pair = PairOfProcesses(tmp_path, f"file:{tmp_path}/lock", trees=[trees[OLD], trees[NEW]])
    writers = dict[str, Life]()

    def found(release: str) -> dict[str, list[list[Any]]]:
        return read(trees[release], pair.address, tmp_path / "reader.stderr")

    try:
        live = [pair.live()]
        for name, of in WRITERS.items():
            writers[name] = Life(trees[of], tmp_path / f"{name}.stderr", pair.address, "write", name)
        progress(writers)
        for how in ("kill", "switch", "switch", "kill"):
            pair.disturb(how)
            live.append(pair.live())
            progress(writers)
        written = stopped(writers)
        first = found(OLD)
        pair.disturb("switch")
        live.append(pair.live())
        assert [found(NEW), found(OLD)] == [first, first]
    finally:
        pair.kill()
        for life in writers.values():
            life.process.kill()
    assert live == [0, 1, 0, 1, 0, 1]
    for name, lines in written.items():
        check(first, name, lines)
