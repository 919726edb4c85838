"""Helpers of the tests of the embedded log: a log on a simulated disk, and its rows."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future
from typing import Any

from broker_io.batch import Batch, Message, PlacedMessage
from broker_io.environment import Environment
from broker_io.filelog.log.broker import FileBroker, FollowingBroker
from broker_io.filelog.log.commit import FileTopic, PendingBatch, lone_unit
from broker_io.filelog.log.log import FileLog
from broker_io.port import MAX_MESSAGE_BYTES
from broker_io.position import EARLIEST, Position, Positions
from broker_io.testing import SeededRandomness, SimulatedClock, SimulatedDisk

DIRECTORY = "/log"


class World:
    """A disk and a clock, and brokers on them, without a committer by default."""

    def __init__(self, disk: SimulatedDisk | None = None) -> None:
        self.disk = disk or SimulatedDisk()
        self.clock = SimulatedClock()
        self.environment = Environment(self.clock, self.disk, SeededRandomness(1), process="4711")

    def own(self, **options: Any) -> FileBroker:
        return FileBroker.open(DIRECTORY, self.environment, **{"committer": False, "compacted_prefix": "", **options})

    def follow(self) -> FollowingBroker:
        return FileBroker.open(DIRECTORY, self.environment, read_only=True)


def append(broker: FileBroker, topic: str, messages: Iterable[Message]) -> Positions:
    with broker.writer(topic) as writer:
        return writer.append(Batch.of(messages)).result(120)


def numbered(count: int, start: int = 0) -> list[Message]:
    return [Message(b"k%d" % number, b"v%d" % number) for number in range(start, start + count)]


def rows(
    broker: FileBroker | FollowingBroker, topic: str, start: Position = EARLIEST, *, limit: int = 1000
) -> list[PlacedMessage]:
    """All messages from a position on."""
    found: list[PlacedMessage] = []
    with broker.reader(topic, start) as reader:
        while (batch := reader.read(limit=limit)) is not None:
            found += batch
    return found


def messages(broker: FileBroker | FollowingBroker, topic: str) -> list[Message]:
    return [row.message for row in rows(broker, topic)]


def segment_paths(world: World) -> list[str]:
    return [path for path in world.disk.files() if path.endswith(".log")]


def submit(log: FileLog, topic: FileTopic, batch: Batch) -> Future[Positions]:
    """Queue a batch for the next flush of an engine."""
    unit, future = lone_unit(PendingBatch.checked(topic, batch, MAX_MESSAGE_BYTES))
    log.submit_unit(unit)
    return future
