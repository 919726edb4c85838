"""A log that another process may own, read-only."""

from __future__ import annotations

from typing import Never

from broker_io.environment import Environment
from broker_io.errors import ReadOnly
from broker_io.file.reading import ReadingBroker
from broker_io.file.source import Follower
from broker_io.file.writer import FileWriter


class FollowingBroker(ReadingBroker):
    """Follows the files of a log; whatever would change it raises ReadOnly."""

    def __init__(self, environment: Environment, directory: str) -> None:
        self._follower = Follower(environment, directory)
        super().__init__(self._follower)
        self.report: list[str] = []

    def _refuse(self) -> Never:
        raise ReadOnly(f"the log {self._follower.directory} is open read-only: change it through its owner")

    def create_topic(self, topic: str) -> None:
        self._refuse()

    def delete_topic(self, topic: str) -> None:
        self._refuse()

    def writer(self, topic: str, *, exclusive: bool = False, wait: float | None = None) -> FileWriter:
        self._refuse()

    def roll(self, topic: str) -> None:
        self._refuse()

    def trim(self, topic: str, first_ledger: int) -> None:
        self._refuse()

    def compact(self, topic: str, *, tombstone_grace: float = 0.0) -> None:
        self._refuse()

    def close(self) -> None:
        self._follower.close()
