"""The engine: the owner of a broker's logs, of the coordinator and of the buffers, on one event loop.

One turn of the loop processes everything that has arrived: acknowledged appends, messages from followed topics and
client frames. It then executes the coordinator's effects and appends everything queued, in groups. No record or
transaction is awaited on its own. The gRPC server and an in-process client are shells around the engine.

The mode, embedded or cluster, decides who writes to the topics, and with that how their buffers are fed.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

from broker_io.environment import Clock, current
from broker_io.errors import Error, as_error
from broker_io.port import Broker
from snapshots.shards import ONLY, Shard
from txnbuffer.buffer.state import Effect
from txnbuffer.config import RetentionConfig, StreamsConfig
from txnbuffer.coordinator.coordinator import Coordinator
from txnbuffer.coordinator.decisions import TOPIC as DECISIONS
from txnbuffer.coordinator.messages import CoordinatorConfig, Result, SessionOpened, SessionResults
from txnbuffer.errors import CoordinatorStopped
from txnbuffer.recovery.followed_topic import DEFAULT_POLICY, SnapshotPolicy
from txnbuffer.rpc.frames import ClientFrame, Welcome
from txnbuffer.service.appends import Appends, Sends
from txnbuffer.service.cluster import ClusterMode
from txnbuffer.service.connection import Limits, SessionConnection
from txnbuffer.service.effects import EffectExecutor
from txnbuffer.service.embedded import EmbeddedMode
from txnbuffer.service.mode import Mode
from txnbuffer.service.registration import TopicRegistrar
from txnbuffer.service.requests import OPEN_REQUEST, RequestHandler
from txnbuffer.service.streams import Streams
from txnbuffer.service.takeover import Identity, OwnedLog, StandbyState, check_shard, take_over
from txnbuffer.service.topic import ServiceTopic, Topics
from txnbuffer.service.upkeep import LogRetention, LogVerification, PolicyChecks, SnapshotScheduler, TrimFloors

TICK = 1.0
"""Seconds between two ticks of the timers."""


def mode_class(*, cluster_mode: bool) -> type[Mode]:
    """The mode of a service; `cluster_mode`: applications write to the topics of a cluster themselves."""
    return ClusterMode if cluster_mode else EmbeddedMode


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
        self.mode: Mode
        self.coordinator: Coordinator
        self.topics: Topics
        self.requests: RequestHandler
        self.effects: EffectExecutor
        self.snapshots: SnapshotScheduler
        self.retention: LogRetention
        self.trim_floors: TrimFloors
        self.policy_checks: PolicyChecks
        self.verification: LogVerification
        self.sends: Sends
        self.appends: Appends
        self.streams: Streams
        self.notes: list[str] = []
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
        mode = mode_class(cluster_mode=cluster_mode)
        check_shard(shard, mode.max_shards)
        limits = mode.limits(limits or Limits(), broker)
        engine = cls(broker, limits, retention or RetentionConfig(), clock or current().clock)
        engine._streams_config = streams or StreamsConfig()
        config = config or mode.config
        largest = min(config.max_message_bytes, limits.max_message_bytes, broker.max_message_bytes)
        config = replace(config, shards=shard.of, max_message_bytes=largest)
        mode.check_config(config)
        identity = Identity(owner, address, shard, limits.create_topics)
        await engine._start(identity, mode, config, policy, standby_state)
        return engine

    async def _start(
        self,
        identity: Identity,
        mode: type[Mode],
        config: CoordinatorConfig,
        policy: SnapshotPolicy,
        standby_state: StandbyState | None,
    ) -> None:
        loop = self._loop = asyncio.get_running_loop()
        self.ended = loop.create_future()
        self._executor = current().threads.executor(1, "txnbuffer-snapshots")
        try:
            opened = await loop.run_in_executor(
                self._executor, take_over, self.broker, identity, config, policy, self.clock, self.now, standby_state
            )
        except BaseException:
            self._executor.shutdown(wait=False)
            raise
        self.coordinator = opened.coordinator
        self.log = opened.name
        self.notes = opened.manager.notes
        decisions = self._decisions = ServiceTopic(identity.shard.topic(DECISIONS), waits_for_space=True)
        decisions.writer, decisions.held = opened.decisions, False
        self.appends = Appends(loop, self.wake)
        self.mode = mode(self, self.broker, self.coordinator, self.appends, identity.shard)
        self._make_parts(opened, identity.shard)
        self.topics.load(self.coordinator.topics())
        self.mode.start(opened, self.topics, self.effects.shard_messages.take)
        self._start_background()

    def _make_parts(self, owned: OwnedLog, shard: Shard) -> None:
        """Make the parts that requests and effects pass through."""
        coordinator, appends, mode, limits = self.coordinator, self.appends, self.mode, self.limits
        topics = self.topics = Topics(
            self.broker, owned.manager, mode, self, self._executor, shard, create=limits.create_topics
        )
        sends = self.sends = Sends(coordinator, limits.max_message_bytes)
        registrar = self.registrar = TopicRegistrar(self, coordinator, topics, appends, mode)
        self.requests = RequestHandler(
            coordinator, topics, appends, sends, registrar, limits, owned.owners, takes_records=mode.takes_records
        )
        self.effects = EffectExecutor(self, coordinator, topics, appends, sends, self._decisions, registrar, mode)

    def _start_background(self) -> None:
        """Start the background tasks: streams, snapshots, retention and checks."""
        topics = self.topics
        snapshots = self.snapshots = SnapshotScheduler(topics)
        self.policy_checks = PolicyChecks(topics, self._retention_config.check_seconds)
        self.verification = LogVerification(topics)
        self.streams = Streams(
            topics, snapshots, self.registrar.register_now, self._streams_config, self.clock.monotonic
        )
        groups, cursors = self.coordinator.consumer_groups.floor, self.streams.cursors.floor
        floors = self.trim_floors = TrimFloors(groups, cursors, self.effects.shard_messages.floor, self.prove_ownership)
        self.retention = LogRetention(topics, snapshots, self._retention_config, self.clock, floors)
        for part in (self.streams, snapshots, self.retention, self.policy_checks, self.verification):
            self.run(part.run())
        self.run(self._watch_time())
        self.wake()

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
        deadline = self.clock.monotonic() + self.mode.stop_seconds
        while not self.ended.done() and not self.appends.idle and self.clock.monotonic() < deadline:
            await asyncio.sleep(0.005)
        for task in (tasks := [*self._tasks]):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        failed = self.ended.done()
        if not failed:
            self.ended.set_result(None)
        await self.mode.stop()
        with contextlib.suppress(*([Error] if failed else [])):
            await self._loop.run_in_executor(self._executor, self._close)
        self.topics.registration_pool.shutdown(wait=False, cancel_futures=True)
        self._executor.shutdown()

    def fail(self, error: BaseException) -> None:
        """End the engine at once; the next owner of the log decides the outcome of operations in flight."""
        if self.ended.done():
            return
        named = self.mode.end_error(as_error(error))
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
            self.mode.turn()
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

    # What the parts call

    def applied(self, topic: ServiceTopic, effects: list[Effect]) -> None:
        """Report what a topic's buffer has applied."""
        self.effects.applied(topic, effects)

    def stopped(self, topic: ServiceTopic) -> None:
        """Handle a stopped topic."""
        self.effects.topic_stopped(topic)

    def answer(self, results: SessionResults) -> None:
        """Send answers of the coordinator to a client or an operator."""
        session, answers = results
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
