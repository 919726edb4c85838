"""Decoders keep their promises for changed and for arbitrary bytes: no crash, no hang, bounded memory, known errors."""

from __future__ import annotations

import random

import pytest
from fuzz.inventory import TARGETS
from fuzz.mutations import MOST, changed
from fuzz.sessions import SESSIONS
from fuzz.target import check, found
from hypothesis import given, settings
from hypothesis import strategies as st

SLOW = {target.name for target in SESSIONS} | {"directory"}
FEW = 10
"""Examples of the targets that start a service or open a whole log; `make fuzz` runs far more of all."""
SMALL = 16 * 1024


def examples(name: str) -> int:
    return FEW if name in SLOW else settings().max_examples


@pytest.mark.parametrize("name", TARGETS)
def test_changed_inputs(name: str) -> None:
    target = TARGETS[name]
    seeds = [*target.seeds()]

    @settings(max_examples=examples(name))
    @given(st.integers(0, 2**32))
    def run(seed: int) -> None:
        choose = random.Random(seed)
        check(target, changed(choose, choose.choice(seeds), seeds)[: SMALL if name in SLOW else MOST])

    run()


@pytest.mark.parametrize("name", TARGETS)
def test_arbitrary_bytes(name: str) -> None:
    target = TARGETS[name]

    @settings(max_examples=examples(name))
    @given(st.binary(max_size=300))
    def run(data: bytes) -> None:
        check(target, data)

    run()


@pytest.mark.parametrize("name", TARGETS)
def test_valid_inputs_and_those_that_once_broke_a_decoder(name: str) -> None:
    target = TARGETS[name]
    for data in (*target.seeds(), *found(target)):
        check(target, data)
