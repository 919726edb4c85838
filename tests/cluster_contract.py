"""What the contract of the broker port is for clusters, real and simulated."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest

from broker_io.environment import current
from broker_io.port import Broker, Reader
from broker_io.pulsar.broker import OVERHEAD_BYTES
from broker_io.testing.contract.base import Base


class Dead:
    """A reader of the client library whose topic was closed during a reconnect: connected, and silent for ever."""

    def next(self, milliseconds: int) -> None:
        current().clock.sleep(milliseconds / 1000)

    def is_connected(self) -> bool:
        return True

    def has_more(self) -> bool:
        return False

    def close(self) -> None:
        pass


class ClusterBase(Base):
    """The settings of a cluster; `options` are those of its broker."""

    max_message_bytes = 5 * 1024 * 1024 - OVERHEAD_BYTES
    keeps_empty_values = False
    trims_at_once = False
    destructive_compaction = True
    options: ClassVar[dict[str, Any]] = {}

    def open(self) -> Broker:
        """Open a broker of the cluster."""
        raise NotImplementedError

    def lose_source(self, reader: Reader, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(reader, "_source", Dead())

    def reopen(self, broker: Broker) -> Broker:
        broker.close()
        return self.open()
