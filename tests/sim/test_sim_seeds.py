"""Seeds of the simulator have no finding, and the same seed makes the same events."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

RUN = Path(__file__).resolve().parent / "simulate.py"
FIRST = 1_000
SEEDS = 6
pytestmark = pytest.mark.timeout(900)


def run(*arguments: object, hash_seed: int = 0) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONHASHSEED": str(hash_seed)}
    command = [sys.executable, str(RUN), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=880)


@pytest.mark.parametrize("kind", ["embedded", "cluster", "pair"])
def test_seeds_find_nothing(kind: str) -> None:
    done = run("--kind", kind, "--first", FIRST, "--seeds", SEEDS, "--workers", 2)
    assert done.returncode == 0, done.stderr
    figures: dict[str, Any] = json.loads(done.stdout)
    assert figures["seeds"] == SEEDS
    assert figures["operations_per_seed"] > 200
    assert figures["transactions"]["committed"] > 20 * SEEDS
    assert len(figures["faults"]) > 10, "the faults do not happen"


@pytest.mark.parametrize("kind", ["embedded", "shards", "pair"])  # a cluster is what each shard is on
def test_a_seed_makes_the_same_events_byte_for_byte(kind: str) -> None:
    command = ("--kind", kind, "--seed", FIRST)
    first, second = run(*command), run(*command, hash_seed=7)
    assert first.returncode == 0, first.stdout[-2000:]
    assert first.stdout == second.stdout
    assert len(first.stdout.splitlines()) > 300
