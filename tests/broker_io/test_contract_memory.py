"""The contract for the broker in memory."""

import math
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from broker_io.memory import MemoryBroker
from broker_io.port import Broker
from broker_io.testing.contract import AtomicContract, BrokerContract
from broker_io.testing.contract.base import fill, numbered


class TestMemory(BrokerContract, AtomicContract):
    @pytest.fixture
    def broker(self) -> Iterator[Broker]:
        with MemoryBroker(compacted_prefix="contract-") as broker:
            yield broker

    def reopen(self, broker: Broker) -> Broker:
        assert isinstance(broker, MemoryBroker)
        broker.close()
        return broker.connect()

    @pytest.mark.parametrize("timeout", [1e10, math.inf])
    def test_wait_has_no_largest_timeout(self, broker: Broker, topic: str, timeout: float) -> None:
        with broker.reader(topic) as reader, ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(reader.read, timeout=timeout)
            time.sleep(0.05)
            fill(broker, topic, numbered(1))
            assert waiting.result(60) is not None


class TestMemoryOfSmallLedgers(TestMemory):
    @pytest.fixture
    def broker(self) -> Iterator[Broker]:
        with MemoryBroker(ledger_entries=5, compacted_prefix="contract-") as broker:
            yield broker
