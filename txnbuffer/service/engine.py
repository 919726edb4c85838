"""The engine: the owner of a broker's logs, of the coordinator and of the buffers, on one event loop.

One turn of the loop processes everything that has arrived: acknowledged appends, messages from followed topics and
client frames. It then executes the coordinator's effects and appends everything queued, in groups. No record or
transaction is awaited on its own. The gRPC server and an in-process client are shells around the engine.

In cluster mode applications write to the topics themselves: the engine follows these topics and writes only markers and
its internal topics.
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
from txnbuffer.service.appends import Appends, Sends
from txnbuffer.service.cluster_topics import FirstRecords
from txnbuffer.service.connection import Limits, SessionConnection
from txnbuffer.service.decision_log import CLUSTER_CONFIG, as_log_deleted, follow_decisions, watch_log
from txnbuffer.service.effects import EffectExecutor
from txnbuffer.service.log_readers import LogReader, LogReaders
from txnbuffer.service.registration import TopicRegistrar
from txnbuffer.service.requests import OPEN_REQUEST, RequestHandler
from txnbuffer.service.retention import LogRetention, LogVerification, PolicyChecks
from txnbuffer.service.snapshot_scheduler import SnapshotScheduler
from txnbuffer.service.streams import Streams
from txnbuffer.service.takeover import Identity, StandbyState, check_shard, take_over
from txnbuffer.service.topic import ServiceTopic, Topics

TICK = 1.0
"""Seconds between two ticks of the timers."""
STOPPING = 10.0
"""Seconds to wait for a cluster to acknowledge appends in flight when the engine stops."""


class Engine:
    """Create it with `Engine.start` and end it with `stop`; the caller closes the broker.

    `ended` resolves when the engine has ended, with the error if it failed. `log` identifies the log that it owns.
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
        self.followers: LogReaders | None = None
        self._decisions: ServiceTopic
        self._frames: deque[tuple[SessionConnection, ClientFrame]] = deque()
        self._connections: set[SessionConnection] = set()
        self._operator_requests: dict[int, asyncio.Future[Result]] = {}
        self._last_request = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._retention_config = retention
        self._streams_config: StreamsConfig
        self._woken = False
        self._credits = 0
        self._clock_offset = clock.now_ms() / 1000 - clock.monotonic()

    @classmethod
    async def start(
        cls,
        broker: Broker,
        *,
        owner: str = "txnbuffer",
        address: str = "",
        shard: Shard = ONLY,
        cluster_mode: bool = False,
        standby_state: StandbyState | None = None,
        config: CoordinatorConfig | None = None,
        limits: Limits | None = None,
        policy: SnapshotPolicy = DEFAULT_POLICY,
        retention: RetentionConfig | None = None,
        streams: StreamsConfig | None = None,
        clock: Clock | None = None,
    ) -> Engine:
        """Become the owner of the broker's log and start. Raises the error that prevents it.

        `address`: HOST:PORT where clients reach this engine. `shard`: the shard it owns. `cluster_mode`: applications
        write to the topics themselves. `standby_state`: the writer and the decision log that a standby has acquired;
        None fences any other owner.
        """
        check_shard(shard, cluster_mode=cluster_mode)
        limits = limits or Limits()
        if cluster_mode:  # the cluster limits the size of records that applications write to it
            limits = replace(limits, max_message_bytes=min(limits.max_message_bytes, broker.max_message_bytes))
        engine = cls(broker, limits, retention or RetentionConfig(), clock or SystemClock())
        engine._streams_config = streams or StreamsConfig()
        config = config or (CLUSTER_CONFIG if cluster_mode else CoordinatorConfig())
        largest = min(config.max_message_bytes, limits.max_message_bytes, broker.max_message_bytes)
        config = replace(config, shards=shard.of, max_message_bytes=largest)
        if cluster_mode and config.one_phase:
            raise InvalidConfiguration(
                "one_phase must be False in cluster mode: a marker there does not fence an old owner"
            )
        identity = Identity(owner, address, shard, limits.create_topics)
        await engine._start(identity, config, policy, standby_state, cluster_mode=cluster_mode)
        return engine

    async def _start(
        self,
        identity: Identity,
        config: CoordinatorConfig,
        policy: SnapshotPolicy,
        standby_state: StandbyState | None,
        *,
        cluster_mode: bool,
    ) -> None:
        loop = self._loop = asyncio.get_running_loop()
        self.ended = loop.create_future()
        self._executor = ThreadPoolExecutor(1, "txnbuffer-snapshots")
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
        if cluster_mode:
            self.followers = LogReaders(loop, self.wake)
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
        """Start the background tasks: streams, snapshots, retention, checks and registrations."""
        snapshots = self.snapshots = SnapshotScheduler(topics)
        self.policy_checks = PolicyChecks(topics, self._retention_config.check_seconds)
        self.verification = LogVerification(topics)
        self.streams = Streams(
            topics, snapshots, self.registrar.register_now, self._streams_config, self.clock.monotonic
        )
        remote = self.effects.shard_messages
        groups, cursors = self.coordinator.consumer_groups.floor, self.streams.cursors.floor
        floors = groups, cursors, None if remote is None else remote.floor, self.prove_ownership
        self.retention = LogRetention(topics, snapshots, self._retention_config, self.clock, *floors)
        checks = self.policy_checks, self.verification
        for part in (self.streams, snapshots, self.retention, *checks, self.registrar):
            self.run(part.run())
        self.run(self._watch_time())
        self.wake()

    def _read_others(self, followers: LogReaders, at: Position, inbox: Position | None) -> None:
        """Follow the decision log after `at` and the messages of other shards after `inbox`."""
        broker, effects, decisions = self.broker, self.effects, self._decisions.name
        self.registrar.first_records = FirstRecords(broker, self.coordinator.epoch_marker)
        effects.join_cluster(
            self.run, self.wake, self.registrar.reregister, self.ask, self.coordinator.consumer_groups.floor
        )
        follow_decisions(followers, broker, decisions, at, self.coordinator, self.fail)
        self.run(watch_log(broker, decisions, self.log, self.fail))
        if effects.shard_messages is not None:
            topic = self.topics.shard.topic(SHARD_MESSAGES)
            followers.follow(LogReader(broker, topic, inbox or EARLIEST, effects.shard_messages.take, self.fail))

    # Clients and operators

    def connect(self, peer: str = "in process") -> SessionConnection:
        """Open a connection; its first frame must contain the hello."""
        connection = SessionConnection(self._receive, self._disconnected, self.limits, peer)
        self._connections.add(connection)
        if self.ended.done():
            connection.close(CoordinatorStopped("the service has stopped: connect again later"))
        return connection

    async def ask(self, put: Callable[[int], None]) -> Result:
        """Return the coordinator's answer to an operator's request; `put` submits it under a request number."""
        self._last_request += 1
        answer: asyncio.Future[Result] = self._loop.create_future()
        self._operator_requests[self._last_request] = answer
        put(self._last_request)
        self.wake()
        return await answer

    @property
    def connections(self) -> list[SessionConnection]:
        """The open connections."""
        return list(self._connections)

    def now(self) -> float:
        """Seconds since 1970 by the wall clock at the start; monotonic, even when the wall clock is set."""
        return self._clock_offset + self.clock.monotonic()

    # Shutdown

    async def drain(self, seconds: float) -> None:
        """Reject new sessions, notify clients, and wait up to `seconds` for open transactions to end."""
        self.requests.draining = True
        for connection in self._connections:
            connection.drain()
        deadline = self.clock.monotonic() + seconds
        while self._busy() and not self.ended.done() and self.clock.monotonic() < deadline:
            await asyncio.sleep(0.02)

    async def stop(self) -> None:
        """Close connections, append what is queued, snapshot what has changed, and give up ownership."""
        self.requests.draining = True
        self.streams.close()
        for connection in self.connections:
            connection.close(CoordinatorStopped("the service is stopping: connect again later"))
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
        """End the engine at once; the next owner of the log decides the outcome of operations in flight."""
        if self.ended.done():
            return
        named = as_log_deleted(as_error(error)) if self.followers is not None else as_error(error)
        self.ended.set_result(named)
        self.appends.failure = self.appends.failure or named
        self.streams.close(CoordinatorStopped(f"the service has stopped: {named}"))
        for answer in self._operator_requests.values():
            if not answer.done():
                answer.set_exception(named)
        for connection in self.connections:
            connection.close(CoordinatorStopped(f"the service has stopped: {named}"))

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a background task; an error that it does not handle ends the engine."""
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    def wake(self) -> None:
        """Schedule a turn of the loop."""
        if not self._woken:
            self._woken = True
            self._loop.call_soon(self._turn)

    # Internals

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
        full = self.requests.over_limit()
        for connection in self._connections:
            connection.limit_reading(full)

    def _take_frames(self) -> None:
        now = self.now()
        while self._frames:
            connection, frame = self._frames.popleft()
            try:
                self.requests.handle(connection, frame, now)
            except Error as error:
                connection.close(error)

    def _receive(self, connection: SessionConnection, frame: ClientFrame) -> None:
        self._frames.append((connection, frame))
        self.wake()

    def _disconnected(self, connection: SessionConnection) -> None:
        self._connections.discard(connection)
        if not self.ended.done():
            self.requests.disconnected(connection, self.now())
            self._share_credits()
            self.wake()

    def _writer_died(self, topic: ServiceTopic, error: Error) -> None:
        if self.effects.marker_writers is not None:
            self.effects.marker_writers.failed(topic, error)

    def _applied(self, topic: ServiceTopic, effects: list[Any]) -> None:
        self.effects.applied(topic, effects)

    def _answer(self, effect: SessionResults) -> None:
        session, answers = effect
        if not session:
            for request, result in answers:
                waiting = self._operator_requests.pop(request, None)
                if waiting is not None and not waiting.done():
                    waiting.set_result(result)
            return
        connection = self.requests.connections.get(session)
        if connection is None:
            return
        if answers[0][0] <= OPEN_REQUEST:
            for request, result in answers:
                if request == OPEN_REQUEST and isinstance(result, SessionOpened):
                    self._welcome(connection, result)
            answers = tuple(pair for pair in answers if pair[0] > OPEN_REQUEST)
        if answers:
            connection.answer(answers)

    def _welcome(self, connection: SessionConnection, opened: SessionOpened) -> None:
        self._share_credits()
        limits, shard = self.limits, self.coordinator.shard
        name = self.requests.qualified_name(connection.session)
        welcome = Welcome(name, shard, opened.epoch, limits.max_message_bytes, opened.states)
        connection.welcome(welcome, self._credits)
        self.requests.welcomed(connection, self.now())

    def _share_credits(self) -> None:
        """Divide the limit on unacknowledged records among the clients; notify them of a large change."""
        allowed = self.limits.credits(len(self._connections))
        if not 0.5 * self._credits <= allowed <= self._credits:
            self._credits = allowed
            for connection in self._connections:
                if connection.welcomed:
                    connection.allow(allowed)

    async def prove_ownership(self) -> None:
        """Return once it is certain that no other process owned the log when this was called."""
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
