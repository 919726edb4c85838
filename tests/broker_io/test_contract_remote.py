"""The contract for the log of a service over a socket: on memory, and on the embedded log."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from log_server import LogServer

from broker_io import open_broker
from broker_io.filelog.log import FileBroker
from broker_io.memory import MemoryBroker
from broker_io.port import Broker
from broker_io.testing.contract import BrokerContract


class RemoteContract(BrokerContract):
    """`own` opens the log that is served."""

    waits_for_owners = False

    def own(self, directory: Path) -> Broker:
        raise NotImplementedError

    @pytest.fixture
    def broker(self, tmp_path: Path) -> Iterator[Broker]:
        self.directory = tmp_path
        with self.serve() as broker:
            yield broker
            self.server.stop()
            self.owned.close()

    def serve(self) -> Broker:
        self.owned = self.own(self.directory)
        self.server = LogServer(self.owned)
        return open_broker(self.server.address)

    def reopen(self, broker: Broker) -> Broker:
        broker.close()
        self.server.stop()
        self.owned.close()
        return self.serve()


class TestRemoteMemory(RemoteContract):
    def own(self, directory: Path) -> Broker:
        del directory
        if not hasattr(self, "owned"):
            self.memory = MemoryBroker(compacted_prefix="contract-")
        return self.memory.connect()


class TestRemoteFile(RemoteContract):
    destructive_compaction = True

    def own(self, directory: Path) -> Broker:
        return FileBroker.open(str(directory / "log"), watermark_bytes=0, compacted_prefix="contract-")
