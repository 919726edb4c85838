"""The simulator finds bugs that are planted in the product: it can fail."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from sim.cluster import SimCluster
from sim.scenario import Size, run_seed

from broker_io.batch import Batch
from broker_io.file.journal import Journal
from txnbuffer.buffer.buffer import TransactionBuffer
from txnbuffer.coordinator.groups import ConsumerGroups
from txnbuffer.service.appends import AppendPart
from txnbuffer.service.effects import EffectExecutor

Plant = Callable[[pytest.MonkeyPatch], None]


def acknowledge_before_the_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    """Acknowledge appends that a power loss takes."""
    append = Journal.append

    def unsynced(self: Any, blocks: Any) -> None:
        file = self._file
        self._file = Unsynced(file)
        try:
            append(self, blocks)
        finally:
            self._file = file

    monkeypatch.setattr(Journal, "append", unsynced)


class Unsynced:
    """A file whose sync does nothing."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def sync(self) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def answer_before_the_decision_is_durable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answer a commit while its decision is being written."""

    def append(self: Any, effect: Any) -> None:
        part = AppendPart(Batch.of(effect.messages), lambda: None, self._decisions_failed)
        self._appends.add(self._decisions, part)
        asyncio.get_running_loop().call_soon(partial(self._decisions_durable, effect.token))

    monkeypatch.setattr(EffectExecutor, "_append_decisions", append)


def test_an_answer_before_the_decision_is_durable_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    answer_before_the_decision_is_durable(monkeypatch)
    size = Size(3, 60, 40, 40.0)
    assert any(run_seed(seed, size=size, faults={"crash at write": 1}).finding for seed in range(10))


def show_what_is_undecided(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let readers see records of open transactions."""
    monkeypatch.setattr(TransactionBuffer, "max_read_position", property(lambda self: self.applied))
    monkeypatch.setattr(TransactionBuffer, "decided_position", property(lambda self: self.applied))


def let_two_members_move_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commit what a group has handled before."""
    monkeypatch.setattr(ConsumerGroups, "refusal", lambda self, positions: None)


def drop_what_is_acknowledged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the cluster acknowledge messages of data topics that it does not store."""
    store, count = SimCluster.store, itertools.count(1)

    def forgetful(self: Any, topic: Any, messages: Any, **how: Any) -> Any:
        found = store(self, topic, messages, **how)
        if "/__" not in topic.name and next(count) % 50 == 0:
            topic.ledgers[-1].entries[-1].messages = [message.emptied() for message in found.messages]
        return found

    monkeypatch.setattr(SimCluster, "store", forgetful)


def store_twice_without_suppressing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let readers see records that a cluster has stored twice."""
    monkeypatch.setattr(TransactionBuffer, "_suppress", lambda self, *arguments, **options: None)


PLANTED: list[tuple[Plant, str, int]] = [
    (acknowledge_before_the_sync, "embedded", 10),
    (show_what_is_undecided, "embedded", 3),
    (let_two_members_move_a_group, "embedded", 10),
    (drop_what_is_acknowledged, "cluster", 5),
    (store_twice_without_suppressing, "cluster", 30),
]


@pytest.mark.parametrize(("plant", "kind", "seeds"), PLANTED, ids=lambda value: getattr(value, "__name__", ""))
def test_a_planted_bug_is_found(plant: Plant, kind: str, seeds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    assert any(run_seed(seed, kind).finding for seed in range(seeds))
