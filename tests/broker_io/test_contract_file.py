"""The contract for the embedded log in its forms, and for a process that follows the log of another one."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self

import pytest

from broker_io.environment import Environment
from broker_io.errors import DiskWatermark
from broker_io.filelog.log.broker import FileBroker
from broker_io.port import Broker, Ledger, Reader, TogetherAppend, TogetherResult, Writer
from broker_io.position import EARLIEST, Position
from broker_io.testing import SimulatedDisk
from broker_io.testing.contract import AtomicContract, BrokerContract


class FileContract(BrokerContract, AtomicContract):
    """`options` open the log."""

    destructive_compaction = True
    options: ClassVar[dict[str, Any]] = {}

    @pytest.fixture
    def directory(self, tmp_path: Path) -> str:
        return str(tmp_path / "log")

    @pytest.fixture
    def broker(self, directory: str) -> Iterator[Broker]:
        with self.open(directory) as broker:
            yield broker

    @pytest.fixture
    def environment(self) -> Environment:
        return Environment()

    @pytest.fixture(autouse=True)
    def _environment(self, environment: Environment) -> None:
        self.environment_in_use = environment

    def open(self, directory: str) -> Broker:
        return self.opened(directory)

    def opened(self, directory: str) -> FileBroker:
        self.directory_in_use = directory
        return FileBroker.open(
            directory, self.environment_in_use, watermark_bytes=0, compacted_prefix="contract-", **self.options
        )

    def reopen(self, broker: Broker) -> Broker:
        broker.close()
        return self.open(self.directory_in_use)


class InMemory(FileContract):
    """On a simulated disk, for the forms in which a real one makes no difference."""

    @pytest.fixture
    def environment(self) -> Environment:
        return Environment(disk=SimulatedDisk())


class TestFileWithCommitter(FileContract):
    pass


class TestFileInline(InMemory):
    options: ClassVar = {"committer": False}


class TestFileOfSmallSegments(InMemory):
    options: ClassVar = {"segment_bytes": 3_000, "journal_bytes": 20_000}


class TestFileCompressed(InMemory):
    options: ClassVar = {"compression": "zstd", "committer": False, "segment_bytes": 30_000}


class OwnerAndFollower:
    """Writes go to the owner of a log, queries to another broker that opened it read-only."""

    def __init__(self, owner: FileBroker, follower: Broker) -> None:
        self.owner = owner
        self.follower = follower
        self.max_message_bytes = owner.max_message_bytes

    def topics(self) -> list[str]:
        return self.follower.topics()

    def create_topic(self, topic: str) -> None:
        self.owner.create_topic(topic)

    def delete_topic(self, topic: str) -> None:
        self.owner.delete_topic(topic)

    def incarnation(self, topic: str) -> str:
        return self.follower.incarnation(topic)

    def writer(
        self, topic: str, *, exclusive: bool = False, wait: float | None = None, unbatched: bool = False
    ) -> Writer:
        return self.owner.writer(topic, exclusive=exclusive, wait=wait)

    def space_refusal(self) -> DiskWatermark | None:
        return self.owner.space_refusal()

    def append_together(self, appends: Sequence[TogetherAppend], done: Callable[[TogetherResult], None]) -> None:
        self.owner.append_together(appends, done)

    def reader(
        self, topic: str, start: Position = EARLIEST, *, inclusive: bool = True, compacted: bool = False
    ) -> Reader:
        return self.follower.reader(topic, start, inclusive=inclusive, compacted=compacted)

    def ledgers(self, topic: str) -> list[Ledger]:
        return self.follower.ledgers(topic)

    def first_position(self, topic: str) -> Position | None:
        return self.follower.first_position(topic)

    def last_position(self, topic: str) -> Position | None:
        return self.follower.last_position(topic)

    def position_at(self, topic: str, time_ms: int) -> Position | None:
        return self.follower.position_at(topic, time_ms)

    def roll(self, topic: str) -> None:
        self.owner.roll(topic)

    def trim(self, topic: str, first_ledger: int) -> None:
        self.owner.trim(topic, first_ledger)

    def compact(self, topic: str) -> None:
        self.owner.compact(topic)

    def close(self) -> None:
        self.follower.close()
        self.owner.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class TestFileFollowed(FileContract):
    def open(self, directory: str) -> Broker:
        owner = self.opened(directory)
        return OwnerAndFollower(owner, FileBroker.open(directory, self.environment_in_use, read_only=True))


class TestFileOfSmallSegmentsFollowed(TestFileFollowed, InMemory):
    options: ClassVar = {"segment_bytes": 3_000, "journal_bytes": 20_000, "committer": False}
