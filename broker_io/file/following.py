"""A log that another process may own, read-only."""

from __future__ import annotations

import contextlib
from typing import Never

from broker_io.environment import Environment
from broker_io.errors import Error, ReadOnly, TopicNotFound
from broker_io.file.manifest import TopicEntry
from broker_io.file.reading import ReadingBroker
from broker_io.file.recovery import check_sizes
from broker_io.file.source import Follower
from broker_io.file.writer import FileWriter


class FollowingBroker(ReadingBroker):
    """Follows the files of a log; whatever would change it raises ReadOnly."""

    def __init__(self, environment: Environment, directory: str) -> None:
        self._follower = Follower(environment, directory)
        super().__init__(self._follower)
        self.report: list[str] = []

    def damages(self) -> dict[str, Error]:
        """As `StoredBroker` says."""
        found = {}
        for name in self.topics():
            with contextlib.suppress(TopicNotFound):  # deleted meanwhile
                if (error := self._damage(name)) is not None:
                    found[name] = error
        return found

    def _damage(self, name: str) -> Error | None:
        while True:
            seen = self._follower.named(name)
            try:
                self._ask(name, self._check_files)
            except Error as error:
                if self._follower.named(name) is seen:
                    return error  # else its files were trimmed or rewritten meanwhile
            else:
                return None

    def _check_files(self, topic: TopicEntry) -> None:
        check_sizes(self._follower.environment.disk, self._follower.directory, topic)
        self._follower.grown(topic)

    def _refuse(self) -> Never:
        raise ReadOnly(f"the log {self._follower.directory} is open read-only: change it through its owner")

    def create_topic(self, topic: str) -> None:
        self._refuse()

    def delete_topic(self, topic: str) -> None:
        self._refuse()

    def writer(
        self, topic: str, *, exclusive: bool = False, wait: float | None = None, alone: bool = False
    ) -> FileWriter:
        self._refuse()

    def roll(self, topic: str) -> None:
        self._refuse()

    def trim(self, topic: str, first_ledger: int) -> None:
        self._refuse()

    def compact(self, topic: str) -> None:
        self._refuse()

    def close(self) -> None:
        self._follower.close()
