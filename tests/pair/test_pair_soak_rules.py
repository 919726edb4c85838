"""The rules of the soak of a pair find what breaks them."""

from __future__ import annotations

from typing import Any

import pytest
from pair_machines import Lives
from pair_soak import Report


def facts(epoch: int, store: str, role: str = "live", lease: float = 1.0) -> dict[str, Any]:
    return {"role": role, "epoch": epoch, "store": store, "lease_left": lease}


def test_two_stores_that_are_live_in_one_epoch_are_found() -> None:
    lives = Lives()
    for epoch, store in ((1, "a"), (2, "b"), (3, "a"), (3, "b")):
        lives.note(store, facts(epoch, store))
    assert lives.two_lives == 1


def test_a_live_with_a_lease_after_a_later_one_is_found() -> None:
    lives = Lives()
    lives.note("a", facts(1, "a"))
    lives.note("b", facts(2, "b", "switching"))
    lives.note("a", facts(1, "a"))
    assert lives.stale == ["a serves in epoch 1 after 2"]


def test_what_is_allowed_is_no_finding() -> None:
    lives = Lives()
    lives.note("a", facts(1, "a"))
    lives.note("b", facts(1, "b", "backup", 0.0))
    lives.note("b", facts(2, "b"))
    lives.note("a", facts(1, "a", lease=0.0))
    assert (lives.two_lives, lives.stale, lives.seen) == (0, [], 3)


@pytest.mark.parametrize(
    "wrong",
    [
        {"lost": 1},
        {"doubled": 1},
        {"half": 1},
        {"uncommitted_seen": 1},
        {"live_differs": 1},
        {"two_lives": 1},
        {"stale_lives": ["a"]},
        {"copies_differ": 1},
        {"stream_differs": 1},
        {"rollbacks": 1},
        {"machines_differ": 1},
        {"surprises": ["a"]},
    ],
)
def test_a_report_with_a_finding_is_not_good(wrong: dict[str, Any]) -> None:
    assert Report().good
    assert not Report(**wrong).good
