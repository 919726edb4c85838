"""Histories from seeds: 600 in the default profile, more of them with HYPOTHESIS_PROFILE=ci and =soak."""

from __future__ import annotations

import os

import pytest
from coordinator_history import Exploration, explore

PIECES = 20
HISTORIES = {"ci": 1_000, "soak": 20_000}.get(os.environ.get("HYPOTHESIS_PROFILE", "dev"), 600)


@pytest.mark.parametrize("piece", range(PIECES))
def test_no_history_breaks_a_promise(piece: int) -> None:
    count = HISTORIES // PIECES
    covered = explore(piece * count, count)
    assert covered["histories"] == count
    assert covered["histories with a commit"] > 0.5 * count


def test_histories_cover_what_matters() -> None:
    covered = explore(1_000_000, 300)
    for what in (
        "AlreadyCommitted",
        "PositionConflict",
        "ProducerFenced",
        "StaleGeneration",
        "client died",
        "committed branches",
        "committed on several topics",
        "committed under a name",
        "committed with positions",
        "forgotten",
        "given back",
        "late record",
        "miscounted",
        "raised the low-water mark",
        "resent run",
        "take-over",
        "told ABORT",
        "told COMMIT",
    ):
        assert covered[what] > 0, what


def test_a_seed_replays_the_same_history() -> None:
    first, second = Exploration(7), Exploration(7)
    assert first.run() == second.run()
    assert first.world.decisions == second.world.decisions
    assert {name: log.messages for name, log in first.world.topics.items()} == {
        name: log.messages for name, log in second.world.topics.items()
    }
