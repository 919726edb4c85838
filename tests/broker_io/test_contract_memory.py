"""The contract for the broker in memory."""

from collections.abc import Iterator

import pytest

from broker_io.memory import MemoryBroker
from broker_io.port import Broker
from broker_io.testing.contract import BrokerContract


class TestMemory(BrokerContract):
    @pytest.fixture
    def broker(self) -> Iterator[Broker]:
        with MemoryBroker(compacted_prefix="contract-") as broker:
            yield broker

    def reopen(self, broker: Broker) -> Broker:
        assert isinstance(broker, MemoryBroker)
        broker.close()
        return broker.connect()


class TestMemoryOfSmallLedgers(TestMemory):
    @pytest.fixture
    def broker(self) -> Iterator[Broker]:
        with MemoryBroker(ledger_entries=5, compacted_prefix="contract-") as broker:
            yield broker
