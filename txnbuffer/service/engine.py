"""The engine: one owner of a broker's logs, the coordinator and the buffers; everything runs on one loop.

In a turn of the loop all that arrived is taken: appends that became durable, frames of clients; then what
the coordinator asks for is done, and what waits is appended together. Nothing is awaited for a record or a
transaction. The gRPC service is a shell around it, and so is a client in the same process.

Beside a cluster (`shared`) applications write the topics themselves: the engine reads them, and writes markers
and what is its own.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from math import inf
from typing import Any

from broker_io.environment import Clock, SystemClock
from broker_io.errors import Error, as_error
from broker_io.port import Broker
from broker_io.position import EARLIEST, Position
from snapshots.policy import DEFAULT_POLICY, SnapshotPolicy
from snapshots.shards import ONLY, Shard
from txnbuffer.config import RetentionConfig, StreamsConfig
from txnbuffer.coordinator.coordinator import Coordinator
from txnbuffer.coordinator.decisions import TOPIC as DECISIONS
from txnbuffer.coordinator.messages import CoordinatorConfig, Result, SessionOpened, SessionResults
from txnbuffer.coordinator.shard_messages import TOPIC as SHARD_MESSAGES
from txnbuffer.errors import CoordinatorStopped, InvalidConfiguration
from txnbuffer.rpc.frames import ClientFrame, Welcome
from txnbuffer.service.appends import Appends
from txnbuffer.service.cluster import CLUSTER_CONFIG, as_log_deleted, follow_decisions, watch_log
from txnbuffer.service.cluster_topics import FirstRecords
from txnbuffer.service.connection import SessionConnection
from txnbuffer.service.effects import EffectExecutor
from txnbuffer.service.limits import Limits
from txnbuffer.service.log_followers import LogFollower, LogFollowers
from txnbuffer.service.registration import TopicRegistrar
from txnbuffer.service.requests import OPENING, RequestHandler
from txnbuffer.service.retention import LogRetention, LogVerification, PolicyChecks
from txnbuffer.service.sends import Sends
from txnbuffer.service.snapshot_scheduler import SnapshotScheduler
from txnbuffer.service.streams import Streams
from txnbuffer.service.takeover import Identity, StandbyState, check_shard, take_over
from txnbuffer.service.topic import ServiceTopic, Topics

TICK = 1.0
"""Seconds between two looks at the time."""
STOPPING = 10.0
"""Seconds that a cluster has to acknowledge what is under way when the engine stops."""


class Engine:
    """Make it with `Engine.start`; end it with `stop`. `ended` tells when and why it ended by itself, `log` which
    log it owns, by a name that no other has.

    The broker stays the caller's.
    """

    def __init__(self, broker: Broker, limits: Limits, retention: RetentionConfig, clock: Clock) -> None:
        self.broker = broker
        self.limits = limits
        self.clock = clock
        self.ended: asyncio.Future[Error | None]
        self.log: str
        self.coordinator: Coordinator
        self.topics: Topics
        self.requests: RequestHandler
        self.effects: EffectExecutor
        self.snapshots: SnapshotScheduler
        self.retention: LogRetention
        self.policy_checks: PolicyChecks
        self.verification: LogVerification
        self.sends: Sends
        self.appends: Appends
        self.streams: Streams
        self.notes: list[str] = []
        self.followers: LogFollowers | None = None
        self._decisions: ServiceTopic
        self._frames: deque[tuple[SessionConnection, ClientFrame]] = deque()
        self._connections: set[SessionConnection] = set()
        self._asked: dict[int, asyncio.Future[Result]] = {}
        self._question = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._retention_config = retention
        self._streams_config: StreamsConfig
        self._woken = False
        self._credits = 0
        self._began = clock.now_ms() / 1000 - clock.monotonic()

    @classmethod
    async def start(
        cls,
        broker: Broker,
        *,
        owner: str = "txnbuffer",
        address: str = "",
        shard: Shard = ONLY,
        shared: bool = False,
        standby_state: StandbyState | None = None,
        config: CoordinatorConfig | None = None,
        limits: Limits | None = None,
        policy: SnapshotPolicy = DEFAULT_POLICY,
        retention: RetentionConfig | None = None,
        streams: StreamsConfig | None = None,
        clock: Clock | None = None,
    ) -> Engine:
        """Take over everything in the broker. Raises what stands in the way.

        `address`: HOST:PORT where clients find this engine. `shard`: what it owns.
        `shared`: applications write the topics themselves.
        `standby_state`: what a standby has and knows by now; None: whoever else owns the broker is fenced.
        """
        check_shard(shard, shared=shared)
        limits = limits or Limits()
        if shared:  # where records are written by others, the cluster says how large they may be
            limits = replace(limits, max_message_bytes=min(limits.max_message_bytes, broker.max_message_bytes))
        engine = cls(broker, limits, retention or RetentionConfig(), clock or SystemClock())
        engine._streams_config = streams or StreamsConfig()
        config = config or (CLUSTER_CONFIG if shared else CoordinatorConfig())
        largest = min(config.max_message_bytes, limits.max_message_bytes, broker.max_message_bytes)
        config = replace(config, shards=shard.of, max_message_bytes=largest)
        if shared and config.one_phase:
            raise InvalidConfiguration("one_phase can't be beside a cluster: a marker there does not fence a zombie")
        identity = Identity(owner, address, shard, limits.create_topics)
        await engine._start(identity, config, policy, standby_state, shared=shared)
        return engine

    async def _start(
        self,
        identity: Identity,
        config: CoordinatorConfig,
        policy: SnapshotPolicy,
        standby_state: StandbyState | None,
        *,
        shared: bool,
    ) -> None:
        loop = self._loop = asyncio.get_running_loop()
        self.ended = loop.create_future()
        self._executor = ThreadPoolExecutor(1, "txnbuffer-keeper")
        try:
            opened = await loop.run_in_executor(
                self._executor, take_over, self.broker, identity, config, policy, self.clock, self.now, standby_state
            )
        except BaseException:
            self._executor.shutdown(wait=False)
            raise
        coordinator, manager, shard = opened.coordinator, opened.manager, identity.shard
        self.coordinator = coordinator
        self.log = opened.name
        self.notes = manager.notes
        decisions = self._decisions = ServiceTopic(shard.topic(DECISIONS), waits_for_space=True)
        decisions.writer, decisions.held = opened.decisions, False
        if shared:
            self.followers = LogFollowers(loop, self.wake)
        create, work = self.limits.create_topics, self._executor
        topics = self.topics = Topics(
            self.broker, manager, self._applied, create=create, executor=work, followers=self.followers, shard=shard
        )
        self.appends = Appends(loop, topics.acknowledged, self.wake, self._writer_died)
        self.sends = Sends(coordinator, self.limits.max_message_bytes)
        self.registrar = TopicRegistrar(coordinator, topics, self.appends, self.now, self.run, self.wake)
        self.requests = RequestHandler(coordinator, topics, self.appends, self.sends, self.limits, self.registrar.open)
        self.requests.owners = opened.owners
        register = self.registrar.register
        self.effects = EffectExecutor(
            coordinator, topics, self.appends, self.sends, decisions, self.now, self._answer, register, self._stopped
        )
        topics.stopped = self.effects.topic_stopped
        if self.followers is not None:
            self._read_others(self.followers, opened.at, opened.inbox_end)
        topics.load(self.coordinator.topics())
        self._start_background(topics)

    def _start_background(self, topics: Topics) -> None:
        """Start what runs next to the turns of the loop: streams, snapshots, retention, checks and registrations."""
        snapshots = self.snapshots = SnapshotScheduler(topics)
        self.policy_checks = PolicyChecks(topics, self._retention_config.check_seconds)
        self.verification = LogVerification(topics)
        self.streams = Streams(topics, snapshots, self.registrar.registered, self._streams_config, self.clock.monotonic)
        remote = self.effects.shard_messages
        groups, cursors = self.coordinator.consumer_groups.floor, self.streams.cursors.floor
        floors = groups, cursors, None if remote is None else remote.floor, self.prove
        self.retention = LogRetention(topics, snapshots, self._retention_config, self.clock, *floors)
        checks = self.policy_checks, self.verification
        for part in (self.streams, snapshots, self.retention, *checks, self.registrar):
            self.run(part.run())
        self.run(self._watch_time())
        self.wake()

    def _read_others(self, followers: LogFollowers, at: Position, inbox: Position | None) -> None:
        """Read what others write: the decision log behind `at`, and letters of other shards behind `inbox`."""
        broker, effects, decisions = self.broker, self.effects, self._decisions.name
        self.registrar.first_records = FirstRecords(broker, self.coordinator.epoch_marker)
        effects.join_cluster(
            self.run, self.wake, self.registrar.reregister, self.ask, self.coordinator.consumer_groups.floor
        )
        follow_decisions(followers, broker, decisions, at, self.coordinator, self.fail)
        self.run(watch_log(broker, decisions, self.log, self.fail))
        if effects.shard_messages is not None:
            topic = self.topics.shard.topic(SHARD_MESSAGES)
            followers.follow(LogFollower(broker, topic, inbox or EARLIEST, effects.shard_messages.take, self.fail))

    # What clients do

    def connect(self, peer: str = "in process") -> SessionConnection:
        """A new connection; it begins with a frame that says hello."""
        connection = SessionConnection(self._receive, self._gone, self.limits, peer)
        self._connections.add(connection)
        if self.ended.done():
            connection.close(CoordinatorStopped("the service has stopped: connect again later"))
        return connection

    async def ask(self, put: Callable[[int], None]) -> Result:
        """The answer of the coordinator to an operator's request: `put` hands it over under a request number."""
        self._question += 1
        answer: asyncio.Future[Result] = self._loop.create_future()
        self._asked[self._question] = answer
        put(self._question)
        self.wake()
        return await answer

    @property
    def connections(self) -> list[SessionConnection]:
        """Those that are open."""
        return list(self._connections)

    def now(self) -> float:
        """Seconds since 1970 by the wall clock of the start; they pass evenly, also while somebody sets that."""
        return self._began + self.clock.monotonic()

    # The end

    async def drain(self, seconds: float) -> None:
        """Take no new sessions, tell clients, and give what is open so many seconds to end."""
        self.requests.draining = True
        for connection in self._connections:
            connection.drain()
        deadline = self.clock.monotonic() + seconds
        while self._busy() and not self.ended.done() and self.clock.monotonic() < deadline:
            await asyncio.sleep(0.02)

    async def stop(self) -> None:
        """End: say goodbye, append what waits, snapshot what has changed, give up ownership."""
        self.requests.draining = True
        self.streams.close()
        for connection in self.connections:
            connection.close(CoordinatorStopped("the service stops: connect again later"))
        deadline = self.clock.monotonic() + (STOPPING if self.followers is not None else inf)
        while not self.ended.done() and not self.appends.idle and self.clock.monotonic() < deadline:
            await asyncio.sleep(0.005)
        for task in (tasks := [*self._tasks]):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        failed = self.ended.done()
        if not failed:
            self.ended.set_result(None)
        if self.followers is not None:
            await asyncio.to_thread(self.followers.stop)
        with contextlib.suppress(*([Error] if failed else [])):
            await self._loop.run_in_executor(self._executor, self._close)
        self.topics.registration_pool.shutdown(wait=False, cancel_futures=True)
        self._executor.shutdown()

    def fail(self, error: BaseException) -> None:
        """End everything at once: what is under way is told by whoever owns the log next."""
        if self.ended.done():
            return
        named = as_log_deleted(as_error(error)) if self.followers is not None else as_error(error)
        self.ended.set_result(named)
        self.appends.failure = self.appends.failure or named
        self.streams.close(CoordinatorStopped(f"the service has stopped: {named}"))
        for answer in self._asked.values():
            if not answer.done():
                answer.set_exception(named)
        for connection in self.connections:
            connection.close(CoordinatorStopped(f"the service has stopped: {named}"))

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        """Run something beside the loop's turns; an error that it does not handle ends the engine."""
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    def wake(self) -> None:
        """Make a turn of the loop."""
        if not self._woken:
            self._woken = True
            self._loop.call_soon(self._turn)

    # Within

    def _turn(self) -> None:
        self._woken = False
        if self.ended.done():
            return
        try:
            self.appends.complete()
            if self.followers is not None:
                self.followers.take()
            self._take_frames()
            self.effects.execute()
            self.appends.flush()
        except Exception as error:
            self.fail(error)
            raise
        if self.appends.failure is not None:
            self.fail(self.appends.failure)
        full = self.requests.over()
        for connection in self._connections:
            connection.open_or_shut(full)

    def _take_frames(self) -> None:
        now = self.now()
        while self._frames:
            connection, frame = self._frames.popleft()
            try:
                self.requests.take(connection, frame, now)
            except Error as error:
                connection.close(error)

    def _receive(self, connection: SessionConnection, frame: ClientFrame) -> None:
        self._frames.append((connection, frame))
        self.wake()

    def _gone(self, connection: SessionConnection) -> None:
        self._connections.discard(connection)
        if not self.ended.done():
            self.requests.gone(connection, self.now())
            self._share_credits()
            self.wake()

    def _writer_died(self, topic: ServiceTopic, error: Error) -> None:
        if self.effects.marker_writers is not None:
            self.effects.marker_writers.died(topic, error)

    def _applied(self, topic: ServiceTopic, effects: list[Any]) -> None:
        self.effects.applied(topic, effects)

    def _answer(self, effect: SessionResults) -> None:
        session, answers = effect
        if not session:
            for request, result in answers:
                waiting = self._asked.pop(request, None)
                if waiting is not None and not waiting.done():
                    waiting.set_result(result)
            return
        connection = self.requests.connections.get(session)
        if connection is None:
            return
        if answers[0][0] <= OPENING:
            for request, result in answers:
                if request == OPENING and isinstance(result, SessionOpened):
                    self._welcome(connection, result)
            answers = tuple(pair for pair in answers if pair[0] > OPENING)
        if answers:
            connection.answer(answers)

    def _welcome(self, connection: SessionConnection, opened: SessionOpened) -> None:
        self._share_credits()
        limits, shard = self.limits, self.coordinator.shard
        name = self.requests.told(connection.session)
        welcome = Welcome(name, shard, opened.epoch, limits.max_message_bytes, opened.states)
        connection.welcome(welcome, self._credits)
        self.requests.welcomed(connection, self.now())

    def _share_credits(self) -> None:
        """Divide what all clients together may have under way; tell them when that changes much."""
        allowed = self.limits.credits(len(self._connections))
        if not 0.5 * self._credits <= allowed <= self._credits:
            self._credits = allowed
            for connection in self._connections:
                if connection.welcomed:
                    connection.allow(allowed)

    async def prove(self) -> None:
        """Return once it is certain that nobody else had become the owner when this was called."""
        await self.ask(lambda request: self.coordinator.prove_ownership(request, self.now()))

    def _busy(self) -> bool:
        return any(True for _ in self.coordinator.transactions()) or not self.appends.idle

    async def _watch_time(self) -> None:
        while True:
            await asyncio.sleep(TICK)
            self.coordinator.tick(self.now())
            self.effects.tick()
            self.sends.sweep()
            self.wake()

    def _stopped(self, reason: str) -> None:
        self.fail(self.effects.deleted or CoordinatorStopped(reason))

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fail(error)

    def _close(self) -> None:
        try:
            self.topics.manager.close()
        finally:
            for topic in [self._decisions, *self.topics.by_name.values(), *self.effects.remote_writers()]:
                if topic.writer is not None:
                    topic.writer.close()
