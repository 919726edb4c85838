"""When an owner stops for good, and states that are impossible."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from coordinator.coordinator_stage import S, Stage, txn
from coordinator_world import SHARD, Owner

from txnbuffer.coordinator.messages import CoordinatorConfig, State
from txnbuffer.coordinator.transaction import TransactionState
from txnbuffer.errors import (
    InvalidConfiguration,
)
from txnbuffer.model import Outcome, TxnId


class TestStopping:
    def stopped(self, stop: Callable[[Owner], None]) -> None:
        stage = Stage()
        stage.write(0, "a")
        request = stage.send(lambda request: stage.ask_commit(request, 0, "a"))
        stop(stage.owner)
        stage.owner.take()
        assert stage.owner.stopped
        assert stage.owner.coordinator.stopped
        stage.owner.count()
        stage.owner.tick(100.0)
        assert stage.lease(1) is None
        assert stage.owner.heard(S, request) is None
        assert not stage.owner.appends
        assert not stage.owner.markers

    def test_when_the_log_fails(self) -> None:
        self.stopped(lambda owner: owner.coordinator.decisions_failed("timeout"))

    def test_when_a_newer_epoch_is_seen(self) -> None:
        self.stopped(lambda owner: owner.coordinator.newer_epoch_seen(2, "a"))

    def test_when_a_topic_ends_an_open_transaction(self) -> None:
        def end(owner: Owner) -> None:
            [one] = owner.coordinator.transactions()
            owner.coordinator.markers_applied("a", [(one.txn, Outcome.COMMIT)], owner.world.now)

        self.stopped(end)

    def test_not_by_its_own_epoch_or_an_older_one(self) -> None:
        stage = Stage()
        stage.owner.coordinator.newer_epoch_seen(1, "a")
        stage.owner.coordinator.newer_epoch_seen(0, "a")
        assert stage.owner.coordinator.stopped is None
        assert (stage.owner.coordinator.shard, stage.owner.coordinator.epoch) == (SHARD, 1)

    def test_when_a_topic_ends_it_otherwise(self) -> None:
        stage = Stage()
        stage.write(0, "a")
        stage.send(lambda request: stage.ask_commit(request, 0, "a"))
        stage.owner.count()
        stage.owner.coordinator.markers_applied("a", [(stage.txn(0), Outcome.ABORT)], stage.world.now)
        assert stage.owner.coordinator.stopped

    def test_ends_of_another_coordinator_are_ignored(self) -> None:
        stage = Stage()
        stage.begin(0)
        stage.owner.coordinator.markers_applied("a", [(TxnId(7, stage.first), Outcome.COMMIT)], stage.world.now)
        stage.owner.coordinator.query_outcomes("a", [TxnId(7, 3)], stage.world.now)
        stage.owner.settle()
        assert stage.owner.coordinator.stopped is None
        assert stage.world.topic("a").messages == []


def test_no_state_equals_an_outcome() -> None:
    assert not any(state == outcome for state in State for outcome in Outcome)


def test_a_step_that_the_table_does_not_have_is_a_bug() -> None:
    transaction = TransactionState(txn(1), None, None)
    with pytest.raises(AssertionError, match="OPEN to COMMITTED"):
        transaction.advance(State.COMMITTED)


@pytest.mark.parametrize(
    "more",
    [
        {"transaction_timeout": 0.0},
        {"max_open": 0},
        {"max_transaction_timeout": 59.0},
        {"one_phase": True, "verify_counts": False},
    ],
)
def test_impossible_configurations_are_refused(more: dict[str, float]) -> None:
    with pytest.raises(InvalidConfiguration):
        CoordinatorConfig(**more)  # type: ignore[arg-type]  # by keyword
