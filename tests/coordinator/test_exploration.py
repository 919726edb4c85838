"""Histories from seeds: 400 of them, 20,000 with HYPOTHESIS_PROFILE=soak."""

from __future__ import annotations

import pytest
from coordinator.coordinator_history import Exploration, explore
from hypothesis import settings

PIECES = 20
HISTORIES = {"soak": 20_000, "mutants": 600}.get(settings.get_current_profile_name(), 400)


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
