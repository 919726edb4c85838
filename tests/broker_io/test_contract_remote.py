"""The contract for the log of a service over a socket: on memory, and on the embedded log."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from log_server import LogServer

from broker_io import open_broker
from broker_io.batch import PlacedBatch
from broker_io.filelog.log import FileBroker
from broker_io.memory import MemoryBroker
from broker_io.port import Broker, Reader, Resource
from broker_io.remote import reader as reader_module
from broker_io.testing.contract import BrokerContract
from broker_io.testing.contract.base import WAIT_SECONDS


class Stuck(Resource):
    """A reader of the service whose disk hangs until `go`, which the pings of the connection do not show."""

    def __init__(self, reader: Reader) -> None:
        self.go = threading.Event()
        self._reader = reader

    def read(self, *, limit: int = 65_536, timeout: float = 0.0) -> PlacedBatch | None:
        assert self.go.wait(WAIT_SECONDS), "the reader of the client has waited for it all the time"
        return self._reader.read(limit=limit, timeout=timeout)

    def close(self) -> None:
        self._reader.close()


class RemoteContract(BrokerContract):
    """`own` opens the log that is served."""

    waits_for_owners = False

    def own(self, directory: Path) -> Broker:
        raise NotImplementedError

    @pytest.fixture
    def broker(self, tmp_path: Path) -> Iterator[Broker]:
        self.directory = tmp_path
        self.stuck: list[Stuck] = []
        with self.serve() as broker:
            yield broker
            for stuck in self.stuck:
                stuck.go.set()
            self.server.stop()
            self.owned.close()

    def lose_source(self, reader: Reader, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(reader_module, "ANSWER_SECONDS", 0.5)
        for serving in self.server.service._readings:
            self.stuck.append(Stuck(serving._reader))
            serving._reader = self.stuck[-1]

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
