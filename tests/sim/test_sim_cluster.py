"""The contract of the broker port for the simulated cluster, in a world without faults."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
from cluster_contract import ClusterBase
from sim.cluster import ADDRESS, HOST, SimCluster, in_place_of_pulsar
from sim.cluster_faults import CLUSTER
from sim.reduction import Part
from sim.scenario import ClusterScenario, Size
from sim.stage import Semaphore, SimulatedThreading, SimulatedTime, Stage
from sim.world import World

from broker_io import open_broker
from broker_io.environment import current
from broker_io.port import Broker
from broker_io.testing.contract import BrokerContract, DataTopicsContract, base, messages, topics


class OnSimulatedCluster(ClusterBase):
    stage: Stage | None = None
    ledger_entries = 1000
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


class TestCompactedTopics(OnSimulatedCluster, BrokerContract):
    options: ClassVar = {"compacted_prefix": "contract-"}


class TestDataTopics(OnSimulatedCluster, DataTopicsContract):
    pass


class TestSmallLedgers(TestDataTopics):
    ledger_entries = 5


def test_a_restart_of_the_cluster_ends_with_the_faults() -> None:
    with World(1) as world:
        scenario = ClusterScenario(world, CLUSTER, Size(1, 1, 0, 1.0), Part(roles=()))
        process = world.host("beta").spawn("app", lambda: None)
        scenario.cluster.restart(20.0)
        assert not scenario.cluster.reachable(process)
        scenario.faults.calm_down()
        assert scenario.cluster.reachable(process)
