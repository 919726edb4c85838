"""Each of Adya's classes is found in a history that has it, and not in one that nearly has it."""

from __future__ import annotations

import dataclasses

import pytest
from sim.anomalies import columns, judge, random_history

X, Y = 0, 1
Appends = list[tuple[int, int]]
Reads = list[tuple[int, int, int]]

CASES: list[tuple[str, list[bool], Appends, Reads, bool]] = [
    # two transactions append to both keys, in different orders; or in the same one
    ("G0", [False, False], [(X, 0), (X, 1), (Y, 1), (Y, 0)], [], True),
    ("G0", [False, False], [(X, 0), (X, 1), (Y, 0), (Y, 1)], [], False),
    # what an aborted transaction appended is read; or the list is read before it
    ("G1a", [False, True, False], [(X, 0), (X, 1)], [(X, 2, 2)], True),
    ("G1a", [False, True, False], [(X, 0), (X, 1)], [(X, 2, 1)], False),
    # one of two appends of a transaction is read; or both, or the reader wrote them itself
    ("G1b", [False, False], [(X, 0), (X, 0)], [(X, 1, 1)], True),
    ("G1b", [False, False], [(X, 0), (X, 0)], [(X, 1, 2)], False),
    ("G1b", [False], [(X, 0), (X, 0)], [(X, 0, 1)], False),
    # each reads what the other one wrote; or one reads before
    ("G1c", [False, False], [(X, 0), (Y, 1)], [(Y, 0, 1), (X, 1, 1)], True),
    ("G1c", [False, False], [(X, 0), (Y, 1)], [(Y, 0, 0), (X, 1, 1)], False),
    # a lost update: both read the empty list, then append; or the second one reads the first
    ("G-single", [False, False], [(X, 0), (X, 1)], [(X, 0, 0), (X, 1, 0)], True),
    ("G-single", [False, False], [(X, 0), (X, 1)], [(X, 0, 0), (X, 1, 1)], False),
    # write skew: each reads the key that the other one appends to; or one of them reads it afterwards
    ("G2", [False, False], [(X, 0), (Y, 1)], [(Y, 0, 0), (X, 1, 0)], True),
    ("G2", [False, False], [(X, 0), (Y, 1)], [(Y, 0, 0), (X, 1, 1)], False),
]


@pytest.mark.parametrize(("kind", "aborted", "appends", "reads", "has_it"), CASES)
def test_a_class_is_found_where_it_is(
    kind: str, aborted: list[bool], appends: Appends, reads: Reads, has_it: bool
) -> None:
    found = judge(columns(aborted, appends, reads, [True, True]))
    assert [anomaly.kind for anomaly in found] == ([kind] if has_it else []), found


def test_logs_that_transactions_share_have_no_order_of_versions() -> None:
    appends = [(X, 0), (X, 1), (Y, 1), (Y, 0)]
    assert judge(columns([False, False], appends, [], [False, False])) == []
    reads = [(X, 1, 1), (Y, 0, 1)]
    assert [anomaly.kind for anomaly in judge(columns([False, False], appends, reads, [False, False]))] == ["G1c"]


def test_aborted_transactions_are_on_no_cycle() -> None:
    assert judge(columns([False, True], [(X, 0), (Y, 1)], [(Y, 0, 0), (X, 1, 0)], [True, True])) == []


@pytest.mark.parametrize("seed", range(5))
def test_one_changed_read_of_a_long_serial_history_is_found(seed: int) -> None:
    history = random_history(20_000, seed=seed)
    assert judge(history) == []
    at = int((history.read_lengths > 3).nonzero()[0][1_000 * (seed + 1)])
    lengths = history.read_lengths.copy()
    lengths[at] -= 1
    (found,) = judge(dataclasses.replace(history, read_lengths=lengths))
    assert found.kind == "G-single"
    assert history.read_by[at] in found.transactions
