"""Upkeep of stored data: periodic snapshots, checks of policies and of the brokers' plug-in, and log verification.

The state of the buffers is captured on the loop and written in the worker thread. The policy checks report policies of
a cluster that would drop records silently. Log verification stops topics whose files are damaged; the scrub reads them.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from broker_io.errors import DiskFailed, Error, NotAuthorized, TopicNotFound, UnsafePolicy
from broker_io.port import PlugInBroker, PolicyBroker, VerifyingBroker
from snapshots.errors import OwnershipLost, TopicDamaged
from snapshots.format import SNAPSHOT_TOPIC, is_internal
from txnbuffer.coordinator.decisions import TOPIC as DECISIONS
from txnbuffer.coordinator.shard_messages import TOPIC as SHARD_MESSAGES
from txnbuffer.errors import PlugInMissing
from txnbuffer.plug_in import PlugIns, plug_ins_of
from txnbuffer.service.loop import from_thread
from txnbuffer.service.topics.scrub import Scrub
from txnbuffer.service.topics.topics import Topics

SNAPSHOT_PAUSE = 0.1
"""Seconds between two checks for due snapshots."""
AT_ONCE = 32
"""Topics in one round of snapshots: capturing them blocks the loop."""
AFTER_FAILURE = 5.0


@dataclass(eq=False)
class SnapshotScheduler:
    """`problem`: the error of the last round, which is retried.

    `before_capture` is called with the names of topics before their state is captured.
    """

    _topics: Topics
    _before_capture: Callable[[list[str]], None]
    problem: Error | None = None
    written: int = 0
    _unsequenced: Error | None = None

    async def run(self) -> None:
        """Write due snapshots, forever."""
        while True:
            await asyncio.sleep(SNAPSHOT_PAUSE if self.problem is None else AFTER_FAILURE)
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
                self._before_capture(names)
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


CHECK_PAUSE = 0.2
"""Seconds between the policy checks of two topics: each takes ten requests, which would delay transactions."""


@dataclass(eq=False)
class PolicyChecks:
    """Checks policies every `seconds`. `dangers`: the unsafe policy of each topic at the last check."""

    _topics: Topics
    _seconds: float
    dangers: dict[str, Error] = field(default_factory=dict)

    async def run(self) -> None:
        """Check all topics periodically, forever, if the broker has policies."""
        broker = self._topics.broker
        while isinstance(broker, PolicyBroker):
            await asyncio.sleep(self._seconds)
            shard = self._topics.shard
            ours = (DECISIONS, SNAPSHOT_TOPIC, SHARD_MESSAGES) if shard.of > 1 else (DECISIONS, SNAPSHOT_TOPIC)
            names = [*map(shard.topic, ours), *self._topics.by_name]
            self.dangers = {name: danger for name, danger in self.dangers.items() if name in names}
            for name in names:
                await self._check(broker, name)
                await asyncio.sleep(CHECK_PAUSE)

    async def _check(self, broker: PolicyBroker, name: str) -> None:
        try:
            await asyncio.to_thread(broker.check_topic, name)
        except UnsafePolicy as error:
            self.dangers[name] = error
            return
        except TopicNotFound:
            pass
        except Error:
            return  # this check failed: the last result remains
        self.dangers.pop(name, None)


PLUG_IN_CHECK, WITHOUT_PLUG_IN = 10.0, 60.0
"""Seconds between two questions whether all brokers have the plug-in; the second one while none has it."""
SEEN_TOPICS = 8
"""Topics that show whether brokers have the plug-in, if only others may ask brokers."""
NOT_ASKED = PlugInMissing("the service has not yet asked all brokers whether they have the plug-in: wait for it")


class PlugInChecks:
    """Asks the brokers of a cluster for their plug-in. `found`: their last answers; `problem`: what is wrong.

    `refuse` is called with the reason why no client may be served, or None: a broker that can't read what this release
    writes, or, if the plug-in is `required`, one that lacks it, or is not known to have it. Snapshots say that they are
    for readers that ask for the log as it is only, once a broker has the plug-in, so that older releases refuse topics.
    """

    def __init__(self, topics: Topics, refuse: Callable[[Error | None], None], *, required: bool) -> None:
        self.found = PlugIns()
        self.problem: Error | None = None
        self._topics = topics
        self._refuse = refuse
        self._required = required
        self._refused: Error | None = None
        if required and isinstance(topics.broker, PlugInBroker):
            self._refuse_for(NOT_ASKED)

    async def run(self) -> None:
        """Ask again and again, forever, if it is a cluster."""
        broker = self._topics.broker
        if not isinstance(broker, PlugInBroker):
            return
        while True:
            await self._ask(broker)
            self._refuse_for(self.problem if self._required else self.found.outdated)
            await asyncio.sleep(PLUG_IN_CHECK if self._wanted else WITHOUT_PLUG_IN)

    def _refuse_for(self, reason: Error | None) -> None:
        """Refuse all clients for a reason, or none; once for each, because refusing closes connections."""
        if str(reason) != str(self._refused):
            self._refused = reason
            self._refuse(reason)

    async def _ask(self, broker: PlugInBroker) -> None:
        try:
            asked = await asyncio.to_thread(plug_ins_of, broker)
        except NotAuthorized as error:
            seen = await asyncio.to_thread(_sees_plug_in, broker, self._topics.manager.topics[:SEEN_TOPICS])
            if seen is not None:
                self._topics.manager.raw = seen
            self.problem = PlugInMissing(f"{error}, to ask brokers for the plug-in") if self._required else None
        except Error as error:  # the last answers remain
            self.problem = self.problem or (error if self._required and not self.found.brokers else None)
        else:
            self.found = asked.after(self.found)
            if self.found.present is not None:
                self._topics.manager.raw = self.found.present
            self.problem = self.found.lacking if self._wanted else None

    @property
    def _wanted(self) -> bool:
        """Whether all brokers should have the plug-in."""
        return self._required or bool(self.found.present)


def _sees_plug_in(broker: PlugInBroker, names: list[str]) -> bool | None:
    """Whether the broker of a topic with transactions says something of it; None if none answers."""
    seen: bool | None = None
    for name in names:
        with contextlib.suppress(Error):
            if broker.plug_in_state(name):
                return True
            seen = False
    return seen


LOOK = 5.0
"""Seconds after which damage may be gone without a repair: a ledger was trimmed, a topic deleted."""


class LogVerification:
    """Stops the data topics with damaged files, and follows them again once these are repaired.

    `damages`: by topic. It learns of all damage from the broker, whatever part of the program has found it.
    """

    def __init__(self, topics: Topics, scrub: Scrub) -> None:
        self.damages: dict[str, TopicDamaged] = {
            name: problem for name, problem in topics.manager.problems.items() if isinstance(problem, TopicDamaged)
        }
        self.scrub = scrub
        self._topics = topics
        self._seen: set[str] = set()

    @property
    def done(self) -> bool:
        """Whether all data was read since the start, and what was found is in `damages`."""
        return self.scrub.passes > 0 and self.scrub.damaged.keys() <= self.damages.keys()

    async def run(self) -> None:
        """Follow the damage that the broker knows, forever, if it stores the log itself."""
        broker = self._topics.broker
        if not isinstance(broker, VerifyingBroker):
            return
        changed, loop = asyncio.Event(), asyncio.get_running_loop()
        ignore = broker.on_damage(lambda: from_thread(loop, changed.set))
        try:
            while True:
                changed.clear()
                await self._compare(broker.damaged_topics())
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(changed.wait(), LOOK)
        finally:
            ignore()

    async def _compare(self, found: Mapping[str, Error]) -> None:
        for name, error in found.items():
            self._seen.add(name)
            if name not in self.damages:
                await self._damaged(name, error)
        for name in [name for name in self.damages if name in self._seen and name not in found]:
            await self._mended(name)

    async def _damaged(self, name: str, error: Error) -> None:
        damage = self.damages[name] = TopicDamaged(name, error, needed=is_internal(name))
        if not is_internal(name):
            async with self._topics.snapshot_lock:
                self._topics.mark_damaged(name, damage)

    async def _mended(self, name: str) -> None:
        """Follow a topic again; what fails is tried again later, and the topic stays as it is."""
        try:
            if not is_internal(name):
                await self._topics.mended(name)
        except (DiskFailed, OwnershipLost):
            raise
        except Error:
            return
        self._seen.discard(name)
        del self.damages[name]
