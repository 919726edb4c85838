"""Applications of a simulated world that write one transaction together: branches, and a driver that commits them.

Each number of a named producer has two tasks. Any writer may write a branch for a task, also one that already has a
branch, as Spark does when it runs a task again. The driver commits the first branch of each task.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from dataclasses import dataclass, field

from sim.apps import PAUSE, App, Leaves, Setting
from sim.history import Attempt, Fate
from sim.world import Host

from broker_io.batch import Batch, Message
from broker_io.errors import Error, Fenced
from txnbuffer.client.branches import Participant, abort_branches, commit_branches
from txnbuffer.client.client import Client
from txnbuffer.coordinator.messages import Branch
from txnbuffer.errors import AlreadyCommitted, OutcomeUnknown, ServiceUnavailable, TransactionAborted

NAME = "branches"
TASKS = 2
AGAIN = 0.2
"""How often a task that has a branch is written again."""
REFUSED = (AlreadyCommitted, TransactionAborted, Fenced)
"""Errors of a branch after which none of its records becomes visible."""


@dataclass(slots=True, eq=False)
class BranchCommit:
    """A commit of a number: the branches that it named. `fate` is COMMITTED if it said that it committed the number."""

    number: int
    branches: tuple[Attempt, ...]
    fate: Fate = Fate.ASKED


@dataclass(slots=True)
class BranchPlan:
    """What the processes of a job tell each other: the current number, the branches of its tasks, and all commits."""

    numbers: int
    number: int = 1
    finished: dict[int, tuple[Attempt, Branch]] = field(default_factory=dict)
    """The first branch of each task of the current number."""
    commits: list[BranchCommit] = field(default_factory=list)

    @property
    def over(self) -> bool:
        return self.number > self.numbers

    def finish(self, number: int, task: int, attempt: Attempt, branch: Branch) -> None:
        """A branch is finished; one that is late or not the first of its task is not committed."""
        if number == self.number:
            self.finished.setdefault(task, (attempt, branch))

    def again(self, number: int) -> None:
        """Begin a number again with other branches, unless it is known to have committed."""
        if number == self.number:
            self.finished = {}

    def committed(self, number: int) -> None:
        """A number has committed: go on with the next one. A writer may learn it before the driver does."""
        if number == self.number:
            self.number, self.finished = number + 1, {}


class BranchWriter(App):
    """Writes branches for the tasks of the current number."""

    def __init__(self, name: str, host: Host, setting: Setting, choose: random.Random, plan: BranchPlan) -> None:
        super().__init__(name, host, setting, choose)
        self._plan = plan

    async def work(self, client: Client) -> None:
        while not self._plan.over:
            open_tasks = [task for task in range(TASKS) if task not in self._plan.finished]
            if open_tasks or self.choose.random() < AGAIN:
                await self._write(client, self._plan.number, self.choose.choice(open_tasks or range(TASKS)))
            await asyncio.sleep(self.choose.choice((0.01, 0.3, 1.0)))

    async def _write(self, client: Client, number: int, task: int) -> None:
        """Write a branch of a number and end it: most are finished, and some of these outlive their client."""
        attempt = self.history.attempt(self.name)
        branch = Participant(client, NAME, number, self.choose.choice((None, None, None, 1.0, 30.0)))
        end = self.choose.choices(("finish", "abort", "leave"), (12, 1, 1))[0]
        try:
            await branch.begin()
            attempt.txn = branch.id
            for topic in self.choose.sample(self.setting.topics, self.choose.randint(1, len(self.setting.topics))):
                await self._send(branch, attempt, topic)
            if end == "finish":
                self._plan.finish(number, task, attempt, await branch.finish())
            elif end == "abort":
                await branch.abort()
                self._ended(attempt, Fate.ABORTED)
        except REFUSED as error:
            self._ended(attempt, Fate.ABORTED)
            if isinstance(error, AlreadyCommitted):  # a commit with an unknown outcome has taken effect
                self._plan.committed(number)
        except ServiceUnavailable:
            await asyncio.sleep(PAUSE)
        if self.choose.random() < 0.2:
            raise Leaves

    async def _send(self, branch: Participant, attempt: Attempt, topic: str) -> None:
        """Send some batches, whose records keep their order."""
        for _ in range(self.choose.randint(1, 2)):
            values = [self._value() for _ in range(self.choose.randint(1, 3))]
            for value in values:
                self.history.sent(attempt, topic, value, self._key(value))
            await branch.send_batch(topic, Batch.of([Message(self._key(value), value) for value in values]))
            if self.choose.random() < 0.3:
                await asyncio.sleep(self.choose.choice((0.001, 0.05, 0.5)))


class BranchDriver(App):
    """Commits one number after another, each with the first branch of every task."""

    def __init__(self, name: str, host: Host, setting: Setting, choose: random.Random, plan: BranchPlan) -> None:
        super().__init__(name, host, setting, choose)
        self._plan = plan

    async def work(self, client: Client) -> None:
        while not self._plan.over:
            if len(self._plan.finished) == TASKS:
                await self._commit(client)
            await asyncio.sleep(self.choose.choice((0.01, 0.3)))

    async def _commit(self, client: Client) -> None:
        """Commit the number, or begin it again; with an unknown outcome the same branches may be committed again."""
        plan = self._plan
        number, (attempts, branches) = plan.number, zip(*plan.finished.values(), strict=True)
        commit = BranchCommit(number, attempts)
        plan.commits.append(commit)
        self.history.asked(*attempts)
        try:
            committed = await commit_branches(client, NAME, number, branches)
        except AlreadyCommitted as error:
            self.history.report(f"{self.name} committed no. {number} last and asked for it again, and got {error!r}")
        except (TransactionAborted, Fenced) as error:
            self.log(f"begins no. {number} again after {error!r:.200}")
            self._end(commit, Fate.ABORTED)
            plan.again(number)
            if self.choose.random() < 0.5:
                with contextlib.suppress(Error):
                    await abort_branches(client, branches)
        except (OutcomeUnknown, ServiceUnavailable):
            if self.choose.random() < 0.5:
                plan.again(number)
            await asyncio.sleep(PAUSE)
        else:
            if committed:
                self._end(commit, Fate.COMMITTED)
            plan.committed(number)

    def _end(self, commit: BranchCommit, fate: Fate) -> None:
        commit.fate = fate
        for attempt in commit.branches:
            self._ended(attempt, fate)
