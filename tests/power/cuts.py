"""Power cuts of a program on an embedded log: `make power CUTS=1000 SEED=1`.

A history of a seed is a few starts of life.py. Each one is recorded (recording.py), and cut at many operations. The
product opens the log on each disk that a cut leaves, and finds what the program knew (facts.py). The next start
continues on one of these disks, so recovery and what follows it is cut as well.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from copy import deepcopy
from pathlib import Path

from power.facts import Facts, Found, Visible
from power.recording import (
    Operation,
    Replay,
    compile_recorder,
    notes,
    read_record,
    recorded,
    write_disk,
)
from source_tree import ROOT

from broker_io.testing import SimulatedDisk, Unsynced
from txnbuffer import SyncClient, connect

PROGRAM = Path(__file__).with_name("life.py")
STARTS = 2
CUTS = 100
"""Of one history."""
PROGRAM_TIMEOUT_S = 240
NAMES = ("import",)


def run_history(directory: Path, library: Path, seed: int, cuts: int) -> Counter[str]:
    """Run a history in an empty directory and cut it; return how often each kind of operation was the first lost one.

    Raises AssertionError with what a cut has broken.
    """
    choose, counts = random.Random(seed), Counter[str]()
    begun, facts = SimulatedDisk(), Facts()
    for start in range(STARTS):
        place = directory / str(start)
        place.mkdir()
        operations = run_life(place, library, begun, seed * STARTS + start)
        replay = Replay(operations, begun)
        numbers = chosen_cuts(operations, cuts // STARTS, choose)
        continued = numbers[len(numbers) * 2 // 3]
        for number in numbers:
            known = deepcopy(facts)
            known.learn(notes(operations[:number]))
            unsynced, chance = choose.choice([*Unsynced]), choose.random()
            disk = replay.go_to(number).crash(unsynced, int(chance * 1e9))
            try:
                found = check(disk, known, place / "cut")
            except Exception as error:
                cut = f"start {start}, cut before operation {number} ({describe(operations[number])})"
                raise AssertionError(f"seed {seed}, {cut}, unsynced {unsynced.value}: {error}") from error
            counts[describe(operations[number])] += 1
            if number == continued:
                next_disk, next_facts = disk, known
                next_facts.after_cut(found)
        replay.go_to(len(operations))
        replay.check(place / "disk")
        begun, facts = next_disk, next_facts
    return counts


def run_life(place: Path, library: Path, begun: SimulatedDisk, start: int) -> list[Operation]:
    """Run life.py on a copy of a disk; return what it did."""
    write_disk(begun, place / "disk")
    environment = {
        **os.environ,
        **recorded(library, place / "disk", place / "record"),
        "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}",
    }
    ended = subprocess.run(
        [sys.executable, PROGRAM, place / "disk" / "log", str(start)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=PROGRAM_TIMEOUT_S,
    )
    assert ended.returncode == 0, ended.stderr
    return read_record(place / "record")


def describe(operation: Operation) -> str:
    """The kind of an operation and of its file."""
    words = Path(operation.target or operation.path).name.split("-")
    suffix = Path(operation.path).suffix
    return f"{operation.kind.name.lower()} {suffix if words[0].isdigit() else words[0]}".strip()


def chosen_cuts(operations: list[Operation], count: int, choose: random.Random) -> list[int]:
    """Operations before which to cut the power: one of each kind or the one after it, and then any; in order."""
    kinds: defaultdict[str, list[int]] = defaultdict(list)
    for number, operation in enumerate(operations[:-1]):
        kinds[describe(operation)].append(number)
    of_kinds = [choose.choice(numbers) + choose.randint(0, 1) for numbers in kinds.values()]
    choose.shuffle(of_kinds)
    others = choose.sample(range(len(operations)), len(operations))
    return sorted(list(dict.fromkeys([*of_kinds, *others]))[:count])


def check(disk: SimulatedDisk, known: Facts, place: Path) -> Found:
    """Open the log on a disk; return what it has. Raises AssertionError if it breaks a promise."""
    found = opened(disk, place)
    wrong = [*known.violations(found)]
    assert not wrong, "\n".join(wrong)
    return found


def opened(disk: SimulatedDisk, place: Path) -> Found:
    """What the product finds on a disk: it recovers the log, and then a client reads it that cannot write."""
    write_disk(disk, place)
    address = f"file:{place / 'log'}"
    try:
        with connect(address) as client:
            numbers = {name: client.committed_number(name) for name in NAMES}
        with connect(address, read_only=True) as client:
            names = [name for name in client.topics() if not name.startswith("__")]
            return Found({name: visible(client, name) for name in names}, numbers)
    finally:
        shutil.rmtree(place)


def visible(client: SyncClient, topic: str) -> list[Visible]:
    with client.reader(topic) as reader:
        found: list[Visible] = []
        while batch := reader.read():
            found += [Visible((record.key or b"").decode(), (record.value or b"").decode()) for record in batch]
        assert reader.held_back() == [], f"{topic} has an open transaction after recovery: {reader.held_back()}"
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cuts", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        library, done, seed = compile_recorder(Path(place)), Counter[str](), options.seed
        while done.total() < options.cuts:
            history = Path(place) / str(seed)
            history.mkdir()
            done += run_history(history, library, seed, CUTS)
            shutil.rmtree(history)
            print(f"seed {seed}: {done.total()} cuts", flush=True)
            seed += 1
        print(*(f"{number:6} before {kind}" for kind, number in sorted(done.items())), sep="\n")


if __name__ == "__main__":
    main()
