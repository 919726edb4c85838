"""Two members of a pair in one process, each a broker with a directory of its own, and a lock and a link in memory."""

from __future__ import annotations

import contextlib
from pathlib import Path

from pair_parts import LockServer, LoopTransport, MemoryLock, Net

from broker_io.batch import Batch, Message
from broker_io.environment import current
from broker_io.filelog.log.layout import Options
from broker_io.filelog.pair.broker import PairBroker
from broker_io.filelog.replication.lease import Terms
from broker_io.filelog.replication.member import Settings
from broker_io.port import Broker
from broker_io.testing.contract.base import eventually as until

MS = 1_000_000
TTL = 500 * MS
SETTINGS = Settings(Terms(TTL), member_timeout=200 * MS, answer_timeout=100 * MS, stall=200 * MS, founder=False)
OPTIONS = Options(segment_bytes=20_000, journal_bytes=20_000, watermark_bytes=0)


class BrokerMember:
    def __init__(self, pair: BrokerPair, name: str, directory: Path) -> None:
        self.pair = pair
        self.name = name
        self.directory = str(directory)
        self.lock: MemoryLock
        self.broker: PairBroker
        self.running = False

    def start(self) -> PairBroker:
        self.lock = MemoryLock(self.pair.server)
        settings = self.pair.settings._replace(founder=self.name == "a")
        transport = LoopTransport(self.pair.net, self.name)
        self.broker = PairBroker(current(), self.directory, OPTIONS, settings, self.lock, transport)
        self.running = True
        return self.broker

    def stop(self) -> None:
        if self.running:
            self.running = False
            self.broker.close()

    def live(self) -> PairBroker:
        until(lambda: self.broker.live)
        return self.broker


class BrokerPair:
    def __init__(self, path: Path, settings: Settings = SETTINGS) -> None:
        self.settings = settings
        self.net = Net()
        self.server = LockServer(TTL / 1e9)
        self.a = BrokerMember(self, "a", path / "a")
        self.b = BrokerMember(self, "b", path / "b")

    def begin(self) -> None:
        self.a.start()
        self.a.live()
        self.b.start()
        until(self.in_sync)

    def in_sync(self) -> bool:
        members = [member.broker.status() for member in (self.a, self.b)]
        return {status["store"] for status in members} == {*members[0]["in_sync"]}

    def same(self) -> bool:
        """In sync, and everything is applied on both."""
        one, other = [member.broker.status() for member in (self.a, self.b)]
        return self.in_sync() and one["applied"] == other["applied"] == max(one["end"], other["end"])


def put(broker: Broker, topic: str, *values: str) -> None:
    with broker.writer(topic) as writer:
        writer.append(Batch.of([Message(b"k", value.encode()) for value in values])).result(60)


def contents(broker: Broker, topic: str) -> list[str]:
    found: list[str] = []
    with broker.reader(topic) as reader:
        while (batch := reader.read()) is not None:
            found += [(message.value or b"").decode() for message in batch.messages]
    return found


def segments(directory: str) -> dict[str, bytes]:
    found = {}
    for path in sorted(Path(directory).glob("topics/*/*.log")):
        with contextlib.suppress(FileNotFoundError):  # removed meanwhile
            found[str(path.relative_to(directory))] = path.read_bytes()
    return found
