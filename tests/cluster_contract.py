"""What the contract of the broker port is for clusters, real and simulated."""

from __future__ import annotations

from typing import Any, ClassVar

from broker_io.port import Broker
from broker_io.pulsar.broker import OVERHEAD_BYTES
from broker_io.testing.contract.base import Base


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

    def reopen(self, broker: Broker) -> Broker:
        broker.close()
        return self.open()
