"""The contract of the broker port for the simulated cluster, in a world without faults."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
from sim.cluster import ADDRESS, HOST, SimCluster, in_place_of_pulsar
from sim.stage import Semaphore, SimulatedThreading, SimulatedTime, Stage
from sim.world import World

from broker_io import open_broker
from broker_io.environment import current
from broker_io.port import Broker
from broker_io.pulsar.broker import OVERHEAD_BYTES
from broker_io.testing.contract import BrokerContract, base, messages, topics
from broker_io.testing.contract.base import Base
from broker_io.testing.contract.ledgers import LedgersContract, TrimmingContract
from broker_io.testing.contract.messages import ContentsContract, FollowingContract, ReadingContract
from broker_io.testing.contract.topics import OwningContract, TopicsContract


class OnSimulatedCluster(Base):
    """The settings are those of the same contract on a real cluster."""

    stage: Stage | None = None
    ledger_entries = 1000
    max_message_bytes = 5 * 1024 * 1024 - OVERHEAD_BYTES
    keeps_empty_values = False
    trims_at_once = False
    destructive_compaction = True
    time_slack_ms = 1000
    options: ClassVar[dict[str, Any]] = {}

    @pytest.fixture
    def broker(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[Broker]:
        def pool(workers: int) -> Any:
            return current().threads.executor(workers, "contract")

        monkeypatch.setattr(base, "time", SimulatedTime)
        for module in (messages, topics):
            monkeypatch.setattr(module, "ThreadPoolExecutor", pool)
        monkeypatch.setattr(messages, "Semaphore", Semaphore)
        monkeypatch.setattr(topics, "threading", SimulatedThreading)
        with World(1, preemption=0.1) as world:
            stage = Stage(world)
            self.cluster = SimCluster(world, ledger_entries=self.ledger_entries)
            world.enter(in_place_of_pulsar(self.cluster))
            broker = stage.call(self.open)
            self.stage = stage
            yield broker
            self.stage = None

    @pytest.fixture
    def topic(self, broker: Broker) -> str:
        assert self.stage is not None
        return self.stage.call(lambda: base.new_topic(broker))

    def now_ms(self, broker: Broker) -> int:
        return self.cluster.world.host(HOST).clock.now_ms()

    def open(self) -> Broker:
        return open_broker(ADDRESS, **self.options)

    def reopen(self, broker: Broker) -> Broker:
        broker.close()
        return self.open()


class TestCompactedTopics(OnSimulatedCluster, BrokerContract):
    options: ClassVar = {"compacted_prefix": "contract-"}


class TestDataTopics(
    OnSimulatedCluster,
    TopicsContract,
    ContentsContract,
    ReadingContract,
    FollowingContract,
    LedgersContract,
    TrimmingContract,
    OwningContract,
):
    """Data topics are batched and can't be compacted."""


class TestSmallLedgers(TestDataTopics):
    ledger_entries = 5
