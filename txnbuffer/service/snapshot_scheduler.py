"""Periodic snapshots of the buffers: captured on the loop, written in the worker thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from broker_io.errors import DiskFailed, Error
from snapshots.errors import OwnershipLost
from txnbuffer.service.topic import Topics

PAUSE = 0.1
"""Seconds between two checks for due snapshots."""
AT_ONCE = 32
"""Topics in one round of snapshots: capturing them blocks the loop."""
AFTER_FAILURE = 5.0


class SnapshotScheduler:
    """`problem`: the error of the last round, which is retried.

    Each of `before_capture` is called with the names of the topics before their state is captured.
    """

    def __init__(self, topics: Topics) -> None:
        self.problem: Error | None = None
        self.written = 0
        self.before_capture: list[Callable[[list[str]], None]] = []
        self._topics = topics
        self._unsequenced: Error | None = None

    async def run(self) -> None:
        """Write due snapshots, forever."""
        while True:
            await asyncio.sleep(PAUSE if self.problem is None else AFTER_FAILURE)
            await self._assign_seqnos()
            due = self._topics.manager.due()
            for start in range(0, len(due), AT_ONCE):
                await self.snapshot(due[start : start + AT_ONCE])

    async def snapshot(self, names: list[str]) -> None:
        """Write snapshots of topics now. Raises errors that end the ownership; others are kept as `problem`."""
        topics, manager = self._topics, self._topics.manager
        async with topics.snapshot_lock:
            try:
                await topics.work(manager.settle)
                for prepare in self.before_capture:
                    prepare(names)
                captured = await topics.exclusively(names, manager.begin, names)
                await topics.work(manager.write, captured)
                await topics.exclusively(names, manager.finish, captured)
            except (DiskFailed, OwnershipLost):
                raise
            except Error as error:
                self.problem = error
            else:
                self.problem = None
                self.written += len(captured)

    async def _assign_seqnos(self) -> None:
        """Assign seqnos in topics with unsequenced messages, one step per topic."""
        if self.problem is self._unsequenced:
            self.problem = None
        for topic in [*self._topics.by_name.values()]:
            if topic.followed is None:
                continue
            followed = topic.followed
            try:
                if followed.has_backlog:
                    await self._topics.exclusively([topic.name], followed.sequence_held)
                else:
                    followed.sequence_held()
            except Error as error:
                self._topics.sequencing_failed(topic, followed, error)
                if error.retryable:
                    self.problem = self._unsequenced = error
