"""The rules for the end of a log, in memory, in files, and over a socket."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from end_rules import CompactedEnds, LogEnds
from log_server import LogServer

from broker_io import open_broker
from broker_io.filelog.log import FileBroker
from broker_io.memory import MemoryBroker
from broker_io.port import Broker


class OnMemory:
    @pytest.fixture
    def broker(self) -> Iterator[Broker]:
        with MemoryBroker() as broker:
            yield broker


class OnCluster:
    @pytest.fixture
    def broker(self) -> Iterator[Broker]:
        with ClusterBroker() as broker:
            yield broker


class OnFile:
    @pytest.fixture
    def broker(self, tmp_path: Path) -> Iterator[Broker]:
        with FileBroker.open(str(tmp_path / "log"), watermark_bytes=0) as broker:
            yield broker


class OnRemote:
    @pytest.fixture
    def broker(self) -> Iterator[Broker]:
        with MemoryBroker() as served, LogServer(served) as server, open_broker(server.address) as broker:
            yield broker


class ClusterBroker(MemoryBroker):
    """A broker that looks like a cluster: compaction leaves its raw logs as they are."""

    def check_topic(self, topic: str) -> None:
        pass


class TestCompactedOnMemory(OnMemory, CompactedEnds):
    pass


class TestCompactedOnCluster(OnCluster, CompactedEnds):
    pass


class TestCompactedOnFile(OnFile, CompactedEnds):
    pass


class TestCompactedOnRemote(OnRemote, CompactedEnds):
    pass


class TestLogOnMemory(OnMemory, LogEnds):
    pass


class TestLogOnFile(OnFile, LogEnds):
    pass


class TestLogOnRemote(OnRemote, LogEnds):
    pass
