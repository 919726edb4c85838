"""Two nodes with all their threads in the simulated world, under faults; `pair_node_world.py` says what holds."""

from __future__ import annotations

import pytest
from pair.pair_node_world import explore


@pytest.mark.parametrize("seed", range(12))
def test_nodes_under_faults(seed: int) -> None:
    counts = explore(seed, 12.0, force=seed % 4 == 3)
    assert counts["acknowledged"] > 20
    assert counts["read"] > 20
