"""The contract of the broker port for the simulated cluster, in a world without faults, and what it does beyond it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from sim.cluster import HOST, ClusterBroker, SimCluster
from sim.stage import Semaphore, SimulatedThreading, SimulatedTime, Stage
from sim.world import World

from broker_io.environment import current
from broker_io.port import Broker
from broker_io.testing.contract import BrokerContract, base, messages, topics


class TestSimulatedCluster(BrokerContract):
    stage: Stage | None = None
    ledger_entries = 1000
    max_message_bytes = 5 * 1024 * 1024 - 64 * 1024
    time_slack_ms = 1000

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
            self.cluster = SimCluster(world, ledger_entries=self.ledger_entries, compacted_prefix="contract-")
            broker = stage.call(lambda: ClusterBroker(self.cluster, stage.process))
            self.stage = stage
            yield broker
            self.stage = None

    @pytest.fixture
    def topic(self, broker: Broker) -> str:
        assert self.stage is not None
        return self.stage.call(lambda: base.new_topic(broker))

    def now_ms(self, broker: Broker) -> int:
        return self.cluster.world.host(HOST).clock.now_ms()

    def reopen(self, broker: Broker) -> Broker:
        assert self.stage is not None
        broker.close()
        return ClusterBroker(self.cluster, self.stage.process)


class TestSimulatedClusterOfSmallLedgers(TestSimulatedCluster):
    ledger_entries = 5
