"""Compaction of data topics by their owner: which topic is due, how far it may be compacted; one at a time.

A topic with a policy is due once enough of it is dirty, which means that no compaction has looked at it, or once a
dirty message is too old. A ledger is compacted only if its messages are all sequenced and old enough, and if no stream
reads a snapshot that ends in it or before it. Deletions are purged only where nothing needs them any more: what
retention may trim, a compaction may purge.

Of the due topics the one with the largest backlog is next. A backlog counts double for each compaction of another topic
that it has waited for, so none waits for long.

The work is done in a thread. It uses a copy of the topic's visibility, since the buffer changes meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, TypeAlias

from broker_io.compaction import (
    CompactingBroker,
    CompactionPolicy,
    CompactionReport,
    CompactionRequest,
    CompactionState,
)
from broker_io.environment import Clock, current
from broker_io.errors import Damaged, Error, NotSupported, TopicNotFound
from broker_io.port import Ledger
from broker_io.position import Position
from txnbuffer.buffer.compaction import TransactionRules
from txnbuffer.buffer.visibility import PinnedVisibility
from txnbuffer.config import CompactionConfig
from txnbuffer.errors import CoordinatorStopped, InvalidRequest, RegistrationFailed
from txnbuffer.service.streams.streams import Streams
from txnbuffer.service.topics.appends import ServiceTopic
from txnbuffer.service.topics.retention import TrimFloors
from txnbuffer.service.topics.topics import Topics
from txnbuffer.service.topics.upkeep import SnapshotScheduler

AFTER_FAILURE = 300.0
"""Seconds until a failed compaction is tried again without a request."""
MAX_SECONDS = 1e9
"""The longest time of a policy."""
STEP = 0.1
"""Seconds after which a compaction that waits for its I/O limit checks whether it has to end."""


class Backlog(NamedTuple):
    """Bytes of ledgers: of those that no compaction has looked at, and of all."""

    dirty: int
    total: int

    @classmethod
    def of(cls, ledgers: Sequence[Ledger], cleaned: int, upto: int | None = None) -> Backlog:
        """The backlog of the closed ledgers, or of those up to one."""
        closed = [one for one in ledgers if (one.closed if upto is None else one.ledger <= upto)]
        return cls(sum(one.bytes for one in closed if one.ledger > cleaned), sum(one.bytes for one in closed))

    @property
    def ratio(self) -> float:
        """The dirty ratio."""
        return self.dirty / self.total if self.total else 0.0


NO_BACKLOG = Backlog(0, 0)

CompactRecords: TypeAlias = Callable[[str, CompactionRequest], CompactionReport]
"""As `CompactingBroker.compact_records`."""


def last_compactable(ledgers: Sequence[Ledger], sequenced: Position | None, young: Position | None) -> int:
    """The last ledger that may be compacted; 0: none.

    Messages up to `sequenced` are sequenced; None: none is. Those from `young` on are too young; None: none is.
    """
    last = 0
    for one in ledgers:
        if not one.closed or (young is not None and one.ledger >= young.ledger):
            break
        if one.entries and (sequenced is None or sequenced[:2] < (one.ledger, one.entries - 1)):
            break
        last = one.ledger
    return last


def choose(backlogs: Mapping[str, int], passed: Mapping[str, int]) -> str:
    """The next of the due topics: the largest backlog, doubled for each compaction that the topic has waited for."""
    return max(backlogs, key=lambda name: (backlogs[name] + 1) << passed.get(name, 0))


def unsupported(topic: str, *, in_memory: bool = False) -> NotSupported:
    """The error for a topic of a broker that does not compact data topics: a cluster, or a log `in_memory`."""
    if in_memory:
        return NotSupported(
            f"topic {topic!r} can't be compacted: its log is in memory, and only a log in a directory (file:DIR) "
            "compacts topics of records"
        )
    return NotSupported(
        f"topic {topic!r} can't be compacted: only an embedded log compacts topics of records, because compaction on a "
        "cluster ignores transactions; `txnbuf relay` copies the committed records to a topic that may be compacted"
    )


def check_policy(
    dirty_ratio: object = None, least_lag: object = None, most_lag: object = None, grace: object = None
) -> CompactionPolicy | None:
    """A policy of these values, times in seconds; None is the default. None if all are None. Raises InvalidRequest."""
    if dirty_ratio is None and least_lag is None and most_lag is None and grace is None:
        return None
    default = CompactionPolicy()
    times = {"least_lag": least_lag, "most_lag": most_lag, "grace": grace}
    checked = {f"{name}_ms": _milliseconds(name, given) for name, given in times.items() if given is not None}
    ratio = default.dirty_ratio if dirty_ratio is None else _number(dirty_ratio)
    if not 0 < ratio <= 1:
        raise InvalidRequest(f"dirty_ratio must be a number above 0 and at most 1, got {dirty_ratio!r:.80}")
    policy = default._replace(dirty_ratio=ratio, **checked)
    if 0 < policy.most_lag_ms < policy.least_lag_ms:
        raise InvalidRequest(f"most_lag must be at least least_lag, got {most_lag} and {least_lag} s")
    return policy


def _milliseconds(name: str, seconds: object) -> int:
    number = _number(seconds)
    if number != 0 and not 0.001 <= number <= MAX_SECONDS:
        raise InvalidRequest(f"{name} must be 0, or a number from 0.001 to {MAX_SECONDS:g}, got {seconds!r:.80}")
    return round(1000 * number)


def _number(value: object) -> float:
    """A value as a number; NaN for anything else."""
    return math.nan if isinstance(value, bool) or not isinstance(value, int | float) else value


class RunState(enum.Enum):
    """How far a compaction is."""

    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"


@dataclass(slots=True, eq=False)
class CompactionRun:
    """One compaction of a topic; numbers ascend. `requested`: by an operator.

    `bytes_done` of about `bytes_expected` were read and written. `upto`: the last ledger that it looks at; 0 if no
    ledger may be compacted. `before` and `after` are the backlogs of the topic.
    """

    topic: str
    number: int
    requested: bool = False
    state: RunState = RunState.WAITING
    upto: int = 0
    bytes_done: int = 0
    bytes_expected: int = 0
    before: Backlog = NO_BACKLOG
    after: Backlog = NO_BACKLOG
    report: CompactionReport = field(default_factory=CompactionReport)
    seconds: float = 0.0
    problem: Error | None = None


@dataclass(slots=True)
class CompactionTotals:
    """Of all compactions since the start. `last_success`: seconds since 1970, 0 if there was none."""

    runs: int = 0
    records_in: int = 0
    records_out: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    seconds: float = 0.0
    last_success: float = 0.0

    def add(self, run: CompactionRun, now: float) -> None:
        report = run.report
        self.runs += 1
        self.records_in += report.records
        self.records_out += report.records - report.emptied - report.purged
        self.bytes_in += report.bytes_before
        self.bytes_out += report.bytes_after
        self.seconds += run.seconds
        self.last_success = now


@dataclass(slots=True, eq=False)
class CompactionProgress:
    """Counts the bytes of a run in its thread, waits for the I/O limit, and raises what `ending` returns.

    `limit`: bytes per second; 0: none.
    """

    run: CompactionRun
    limit: float
    clock: Clock
    ending: Callable[[], Error | None]
    _due: float = 0.0

    def __call__(self, size: int) -> None:
        self.run.bytes_done += size
        self._check()
        if not self.limit:
            return
        self._due = max(self._due, self.clock.monotonic() - STEP) + size / self.limit
        while (left := self._due - self.clock.monotonic()) > 0:
            self.clock.sleep(min(left, STEP))
            self._check()

    def _check(self) -> None:
        if (error := self.ending()) is not None:
            raise error


class DeletionsNeeded(Exception):
    """A group or a durable cursor needs deletions that a compaction was about to purge: it begins again."""


class CompactionScheduler:
    """Compacts the topics of an embedded log that have a policy, and others on request.

    `compact_records` does the work instead of the broker.

    `runs`: the newest run of each topic. `quarantined`: topics with a damaged segment, which are compacted again on
    request only; `problems`: errors of other topics, which are tried again. `dirty_ratio`: the highest one of the
    topics with a policy at the last check.
    """

    def __init__(
        self,
        topics: Topics,
        snapshots: SnapshotScheduler,
        streams: Streams,
        config: CompactionConfig,
        clock: Clock,
        floors: TrimFloors,
        compact_records: CompactRecords | None = None,
    ) -> None:
        self.runs: dict[str, CompactionRun] = {}
        self.quarantined: dict[str, Damaged] = {}
        self.problems: dict[str, Error] = {}
        self.totals = CompactionTotals()
        self.dirty_ratio = 0.0
        self._topics = topics
        self._snapshots = snapshots
        self._streams = streams
        self._config = config
        self._clock = clock
        self._floors = floors
        self._compact_records = compact_records
        self._numbers = 0
        self._one = asyncio.Lock()
        self._wanted = asyncio.Event()
        self._requests: dict[str, CompactionRun] = {}
        self._passed: dict[str, int] = {}
        self._not_before: dict[str, float] = {}
        self._ending: Error | None = None
        self._work: Future[CompactionReport] | None = None
        self._loop = asyncio.get_running_loop()
        self._thread = current().threads.executor(1, "txnbuffer-compaction")

    # For operators

    def broker(self, topic: str) -> CompactingBroker:
        """The broker, which compacts. Raises NotSupported for any other."""
        broker = self._topics.broker
        if not isinstance(broker, CompactingBroker):
            raise unsupported(topic, in_memory=self._topics.takes_records)
        return broker

    async def request(self, topic: str) -> CompactionRun:
        """Compact a topic soon, before the topics that are due, or join a request that waits or runs.

        A run that nobody has requested continues, and the requested one follows. Raises as `set_policy`.
        """
        await self._topic(topic)
        running = self.runs.get(topic)
        if running is not None and running.requested and running.state is RunState.RUNNING:
            return running
        waiting = self._requests.get(topic)
        if waiting is None:
            self.quarantined.pop(topic, None)
            self.problems.pop(topic, None)
            waiting = self._requests[topic] = self._new_run(topic, requested=True)
            if running is None or running.state is not RunState.RUNNING:
                self.runs[topic] = waiting
            self._wanted.set()
        return waiting

    async def set_policy(self, topic: str, policy: CompactionPolicy | None) -> None:
        """Set or remove the policy of a topic, which is registered if needed.

        Raises NotSupported, and the error that prevents the registration.
        """
        broker = self.broker(topic)
        await self._topic(topic)
        await self._topics.work(broker.set_compaction_policy, topic, policy)
        self._wanted.set()

    def stored(self, topic: str) -> tuple[CompactionState, Backlog, list[Ledger]]:
        """What the log says of a topic; may run in any thread. Raises TopicNotFound and NotSupported."""
        state, ledgers = self.broker(topic).compaction(topic), self._topics.broker.ledgers(topic)
        return state, Backlog.of(ledgers, state.cleaned), ledgers

    def failures(self) -> dict[str, Error]:
        """The errors of all topics whose last compaction failed."""
        return {**self.problems, **self.quarantined}

    # For the engine

    async def run(self) -> None:
        """Compact what is due or requested, forever."""
        while isinstance(self._topics.broker, CompactingBroker):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._config.check_seconds):
                    await self._wanted.wait()
            self._wanted.clear()
            await self.check()

    async def check(self) -> None:
        """Compact all topics that are due or requested now."""
        async with self._one:
            while (run := await self._next()) is not None:
                await self._compact(run)

    def end(self, error: Error) -> None:
        """End the running compaction soon; the topic is as before."""
        self._ending = self._ending or error

    async def close(self) -> None:
        """End the running compaction, and return once it has ended."""
        self.end(CoordinatorStopped("the service is stopping: compact again later"))
        if self._work is not None:
            await asyncio.gather(asyncio.wrap_future(self._work), return_exceptions=True)
        self._thread.shutdown(wait=False)

    # Which topic

    async def _next(self) -> CompactionRun | None:
        if self._requests:
            run = self._requests.pop(next(iter(self._requests)))
            self.runs[run.topic] = run
            return run
        now = self._clock.monotonic()
        sequenced = {
            name: topic.followed.numbered.position
            for name, topic in self._topics.by_name.items()
            if topic.followed is not None
        }
        backlogs, self.dirty_ratio = await asyncio.to_thread(self._due, sequenced)
        backlogs = {
            name: dirty
            for name, dirty in backlogs.items()
            if name not in self.quarantined and self._not_before.get(name, 0.0) <= now
        }
        if not backlogs:
            return None
        chosen = choose(backlogs, self._passed)
        self._passed = {name: self._passed.get(name, 0) + 1 for name in backlogs if name != chosen}
        run = self.runs[chosen] = self._new_run(chosen)
        return run

    def _new_run(self, topic: str, *, requested: bool = False) -> CompactionRun:
        self._numbers += 1
        return CompactionRun(topic, self._numbers, requested)

    def _due(self, sequenced: Mapping[str, Position | None]) -> tuple[dict[str, int], float]:
        """The backlogs of the topics that are due, and the highest dirty ratio. Runs in another thread."""
        backlogs: dict[str, int] = {}
        highest = 0.0
        for name, position in sequenced.items():
            try:
                state = self.broker(name).compaction(name)
                if state.policy is not None:
                    highest = max(highest, self.stored(name)[1].ratio)
                    if (dirty := self._due_bytes(name, position, state, state.policy)) is not None:
                        backlogs[name] = dirty
            except TopicNotFound:
                pass  # deleted meanwhile
            except Error as error:
                self.problems[name] = error
        return backlogs, highest

    def _due_bytes(
        self, name: str, sequenced: Position | None, state: CompactionState, policy: CompactionPolicy
    ) -> int | None:
        """The bytes of a topic that are to be compacted for the first time; None if it is not due."""
        broker = self._topics.broker
        ledgers = broker.ledgers(name)
        first = next((one for one in ledgers if one.ledger > state.cleaned and one.entries), None)
        if first is None:
            return None
        too_old = policy.most_lag_ms > 0 and _is_before(
            Position(first.ledger, 0), broker.position_at(name, self._clock.now_ms() - policy.most_lag_ms)
        )
        if too_old and not first.closed and sequenced is not None and sequenced.ledger == first.ledger:
            broker.roll(name)
            ledgers = broker.ledgers(name)
        upto = last_compactable(ledgers, sequenced, self._young(name, policy))
        backlog = Backlog.of(ledgers, state.cleaned, upto)
        due = upto >= first.ledger and (too_old or backlog.ratio >= policy.dirty_ratio)
        return backlog.dirty if due else None

    def _young(self, name: str, policy: CompactionPolicy) -> Position | None:
        """The first message that is too young to be compacted."""
        if not policy.least_lag_ms:
            return None
        return self._topics.broker.position_at(name, self._clock.now_ms() - policy.least_lag_ms)

    # One compaction

    async def _compact(self, run: CompactionRun) -> None:
        """Compact a topic; the result is in the run. It only writes new files, so no error of it stops the log."""
        started = self._clock.monotonic()
        run.state = RunState.RUNNING
        try:
            topic = await self._topic(run.topic)
            async with self._topics.snapshot_lock:
                topic.compacting = True
            try:
                while not await self._execute(run, topic):
                    run.bytes_done = 0
            finally:
                topic.compacting = False
        except Error as error:
            self._failed(run, error)
        else:
            run.state = RunState.DONE
            run.seconds = self._clock.monotonic() - started
            if run.report.ledgers:
                self.totals.add(run, self._clock.now_ms() / 1000)
            self.problems.pop(run.topic, None)

    async def _execute(self, run: CompactionRun, topic: ServiceTopic) -> bool:
        """Compact a topic; False: nothing changed, because what it was about to purge is needed now."""
        try:
            request, cleaned = await self._plan(run, topic)
            if run.upto > (0 if run.requested else cleaned):
                compact = self._compact_records or self.broker(run.topic).compact_records
                self._work = self._thread.submit(compact, run.topic, request)
                run.report = await asyncio.wrap_future(self._work)
            elif not run.requested:  # a stream reads what was due
                self._not_before[run.topic] = self._clock.monotonic() + self._config.check_seconds
        except DeletionsNeeded:
            return False
        finally:
            await self._streams.end_compaction(run.topic)
        run.after = (await asyncio.to_thread(self.stored, run.topic))[1]
        return True

    def _failed(self, run: CompactionRun, error: Error) -> None:
        run.state, run.problem = RunState.FAILED, error
        self._not_before[run.topic] = self._clock.monotonic() + AFTER_FAILURE
        if isinstance(error, Damaged):
            self.quarantined[run.topic] = error
        elif not isinstance(error, TopicNotFound):  # deleted meanwhile
            self.problems[run.topic] = error

    async def _plan(self, run: CompactionRun, topic: ServiceTopic) -> tuple[CompactionRequest, int]:
        """What to compact, decided at one moment of the loop; and the last ledger that was compacted before."""
        name, broker = run.topic, self._topics.broker
        if run.requested:
            await self._topics.work(broker.roll, name)
        await self._snapshots.snapshot([name])  # what older snapshots need can't be purged
        state, run.before, ledgers = await asyncio.to_thread(self.stored, name)
        policy = state.policy or CompactionPolicy()
        young = await asyncio.to_thread(self._young, name, policy)
        request = await self._topics.exclusively([name], self._request, run, topic, policy, ledgers, young)
        return request, state.cleaned

    def _request(
        self,
        run: CompactionRun,
        topic: ServiceTopic,
        policy: CompactionPolicy,
        ledgers: list[Ledger],
        young: Position | None,
    ) -> CompactionRequest:
        name, followed = run.topic, topic.followed
        if followed is None:
            raise topic.refusal()
        last = last_compactable(ledgers, followed.numbered.position, young)
        run.upto = self._streams.begin_compaction(name, last)
        run.bytes_expected = 2 * Backlog.of(ledgers, 0, run.upto).total
        purgeable = self._purgeable(topic, ledgers)
        return CompactionRequest(
            run.upto,
            TransactionRules(PinnedVisibility.copy_of(followed.buffer)),
            purge_upto=min(run.upto, purgeable),
            purge_before_ms=self._clock.now_ms() - policy.grace_ms,
            least_dead=0.0 if run.requested else self._config.least_dead,
            progress=CompactionProgress(run, self._config.bytes_per_second, self._clock, lambda: self._ending),
            before_swap=partial(self._before_swap, topic, ledgers),
        )

    def _purgeable(self, topic: ServiceTopic, ledgers: list[Ledger]) -> int:
        """The last ledger whose deletions no group, durable cursor or snapshot of the buffer needs."""
        if topic.followed is None:
            raise topic.refusal()
        needed = [self._floors.groups(topic.name), self._floors.cursors(topic.name, ledgers, 0), topic.followed.floor()]
        return min(ledger for ledger in needed if ledger is not None) - 1

    def _before_swap(self, topic: ServiceTopic, ledgers: list[Ledger], purged: int) -> None:
        """Check on the loop that what was purged is still not needed; called in the thread of compactions."""
        if not purged:
            return
        purgeable: Future[int] = Future()

        def check() -> None:
            try:
                purgeable.set_result(self._purgeable(topic, ledgers))
            except BaseException as error:
                purgeable.set_exception(error)

        self._loop.call_soon_threadsafe(check)
        if (last := purgeable.result()) < purged:
            raise DeletionsNeeded(f"deletions of topic {topic.name} after ledger {last} are needed")

    async def _topic(self, name: str) -> ServiceTopic:
        """A topic that has a buffer; it is registered if needed. Raises the error that prevents it."""
        self.broker(name)
        topic = self._topics.get(name)
        if topic is None or topic.followed is None:
            self._topics.check(name)
            if name not in await self._topics.work(self._topics.broker.topics):
                raise TopicNotFound(f"there is no topic {name!r} to compact")
            if (error := await self._topics.register(name, create=False)) is not None:
                raise error
            topic = self._topics.get(name)
        if topic is None or topic.followed is None:
            raise RegistrationFailed(f"topic {name!r} could not be registered for its compaction: try again")
        return topic


def _is_before(position: Position, other: Position | None) -> bool:
    """Whether a message is before another one; None: before none, so that all messages are."""
    return other is None or position < other
