"""The two directories of a pair with a lock in a file, each a broker with a link over gRPC."""

from __future__ import annotations

from pathlib import Path

from broker_io.batch import Batch, Message
from broker_io.filelog.log.broker import FileBroker
from broker_io.filelog.pair.broker import PairBroker, PairOptions
from broker_io.port import Broker
from broker_io.standalone import Port
from broker_io.testing.contract.base import eventually as until
from broker_io.testing.contract.base import read_all

LEASE = 1.0


def put(broker: Broker, topic: str, value: str) -> None:
    with broker.writer(topic) as writer:
        writer.append(Batch.of([Message(b"k", value.encode())])).result(60)


def contents(broker: Broker, topic: str) -> list[str]:
    return [(placed.message.value or b"").decode() for placed in read_all(broker, topic)]


class Machines:
    """The two directories of a pair with a lock in a file."""

    def __init__(self, path: Path) -> None:
        self.directories = [str(path / "a"), str(path / "b")]
        self.lock = f"file:{path / 'lock'}"
        self._ports = [Port().number, Port().number]
        self.open: dict[int, PairBroker] = {}

    def options(self, number: int = 0) -> PairOptions:
        listen, peer = (f"127.0.0.1:{self._ports[each]}" for each in (number, 1 - number))
        return PairOptions(self.lock, listen, peer, number == 0, lease_seconds=LEASE)

    def start(self, number: int) -> PairBroker:
        self.open[number] = PairBroker.open_member(
            self.directories[number], pair=self.options(number), watermark_bytes=0
        )
        return self.open[number]

    def begin(self) -> None:
        """Both are in sync and have a topic; the first one is live."""
        self.start(0)
        assert self.open[0].wait_live(120.0)
        self.start(1)
        until(lambda: len(self.open[0].status()["in_sync"]) == 2)
        self.open[0].create_topic("orders")
        put(self.open[0], "orders", "both")
        until(lambda: self.open[1].status()["applied"] == self.open[0].status()["end"])

    def stop(self, *numbers: int) -> None:
        for number in numbers:
            self.open.pop(number).close()

    def alone(self, number: int) -> list[str]:
        """Write to a log without a pair; what it has then."""
        with FileBroker.open(self.directories[number], watermark_bytes=0) as broker:
            put(broker, "orders", "alone")
            broker.create_topic("new")
            broker.roll("orders")
        with FileBroker.open(self.directories[number], watermark_bytes=0) as broker:
            assert broker.topics() == ["new", "orders"]
            return contents(broker, "orders")
