"""Buffer snapshots while the service runs: captured on the loop, written in the worker thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from broker_io.errors import DiskFailed, Error
from snapshots.errors import OwnershipLost
from txnbuffer.service.topic import Topics

PAUSE = 0.1
"""Seconds between two looks at what is due."""
AT_ONCE = 32
"""Topics in one round of snapshots: capturing them holds up the loop."""
AFTER_FAILURE = 5.0


class SnapshotScheduler:
    """`problem`: why the last round failed; it is tried again. `capturing` is told of topics right before."""

    def __init__(self, topics: Topics) -> None:
        self.problem: Error | None = None
        self.written = 0
        self.capturing: Callable[[list[str]], None] | None = None
        self._topics = topics

    async def run(self) -> None:
        """Keep the snapshots young, for ever."""
        while True:
            await asyncio.sleep(PAUSE if self.problem is None else AFTER_FAILURE)
            await self._number()
            due = self._topics.manager.due()
            for start in range(0, len(due), AT_ONCE):
                await self.snapshot(due[start : start + AT_ONCE])

    async def snapshot(self, names: list[str]) -> None:
        """Write snapshots of topics now. Raises what ends the ownership; anything else is kept as `problem`."""
        topics, manager = self._topics, self._topics.manager
        async with topics.snapshot_lock:
            try:
                await topics.work(manager.settle)
                if self.capturing is not None:
                    self.capturing(names)
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

    async def _number(self) -> None:
        """Give seqnos where they trail, a step a topic."""
        for topic in [*self._topics.by_name.values()]:
            if topic.followed is None:
                continue
            sequencing = topic.followed.sequencing
            if not sequencing.has_backlog:
                sequencing.step()
                continue
            try:
                await self._topics.exclusively([topic.name], sequencing.step)
            except (DiskFailed, OwnershipLost):
                raise
            except Error as error:
                if not topic.shared:
                    raise
                self.problem = error
