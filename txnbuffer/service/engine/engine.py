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
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import replace
from operator import itemgetter

from broker_io.environment import Clock, current
from broker_io.errors import Error, NotLive, as_error
from broker_io.port import AtomicBroker, Broker, ReplicatedBroker
from broker_io.waits import Waker
from snapshots.shards import ONLY, Shard
from txnbuffer.config import CompactionConfig, RetentionConfig, StreamsConfig
from txnbuffer.coordinator.decisions import TOPIC as DECISIONS
from txnbuffer.coordinator.messages import CoordinatorConfig, SessionOpened, SessionResults
from txnbuffer.errors import CoordinatorStopped, InvalidConfiguration
from txnbuffer.recovery.followed_topic import DEFAULT_POLICY, SnapshotPolicy
from txnbuffer.rpc.frames import ClientFrame, Welcome
from txnbuffer.service.cluster.cluster import ClusterTopics
from txnbuffer.service.door.access import EVERYTHING_ALLOWED, Permissions
from txnbuffer.service.door.connection import Limits, SessionConnection
from txnbuffer.service.door.quotas import STEP, Quotas
from txnbuffer.service.engine.compaction import CompactionScheduler, CompactRecords
from txnbuffer.service.engine.effects import EffectExecutor
from txnbuffer.service.loop import Loop
from txnbuffer.service.standby.decision_log import as_log_deleted
from txnbuffer.service.standby.takeover import Identity, OwnedLog, StandbyState, check_shard, take_over
from txnbuffer.service.streams.stream_topic import Cursors
from txnbuffer.service.streams.streams import Streams
from txnbuffer.service.topics.appends import Appends, ServiceTopic, TopicAppends, UnitAppends
from txnbuffer.service.topics.backups import Backups
from txnbuffer.service.topics.requests import OPEN_REQUEST, RequestHandler, Sends
from txnbuffer.service.topics.retention import LogRetention, TrimFloors
from txnbuffer.service.topics.scrub import Scrub
from txnbuffer.service.topics.topics import EmbeddedTopics, Topics
from txnbuffer.service.topics.upkeep import LogVerification, PlugInChecks, PolicyChecks, SnapshotScheduler

TURN_ROWS = 2048
"""Rows of frames after which a turn handles no more, so that others get their turn of the event loop."""
TICK = 1.0
"""Seconds between two ticks of the timers."""
SETTLE = 5.0
"""Seconds that a stopping engine waits before it closes the connections, so that it can answer the sends it has."""
LAST_FRAMES = 1.0
"""Seconds that a stopping engine waits until the last frames of its connections are sent."""


def topics_class(*, cluster_mode: bool) -> type[Topics]:
    """The mode of a service; `cluster_mode`: applications write to the topics of a cluster themselves."""
    return ClusterTopics if cluster_mode else EmbeddedTopics


def steady_clock(clock: Clock) -> Callable[[], float]:
    """Return a clock: seconds since 1970 by the wall clock now; monotonic, even when the wall clock is set."""
    offset = clock.now_ms() / 1000 - clock.monotonic()
    return lambda: offset + clock.monotonic()


def _adapted(
    config: CoordinatorConfig, topics: type[Topics], broker: Broker, limits: Limits, shard: Shard
) -> CoordinatorConfig:
    """The configuration with the number of shards, and the smallest limit of a record. Raises InvalidConfiguration."""
    if config.one_phase and not topics.takes_records:
        raise InvalidConfiguration(
            "one_phase must be False in cluster mode: a marker there does not fence an old owner"
        )
    largest = min(config.max_message_bytes, limits.max_message_bytes, broker.max_message_bytes)
    return replace(config, shards=shard.of, max_message_bytes=largest, atomic=topics.takes_records)


def _atomic(broker: Broker) -> AtomicBroker:
    """Raises InvalidConfiguration for a broker on which the engine can't own the log."""
    if not isinstance(broker, AtomicBroker):
        raise InvalidConfiguration("this broker can't append to several topics at once: use cluster mode")
    return broker


class Engine(Loop):
    """Create it with `Engine.start` and end it with `stop`; the caller closes the broker.

    `log` identifies the log that it owns.
    """

    def __init__(
        self,
        broker: Broker,
        owned: OwnedLog,
        topics: type[Topics],
        shard: Shard,
        limits: Limits,
        retention: RetentionConfig,
        compaction: CompactionConfig,
        streams: StreamsConfig,
        clock: Clock,
        now: Callable[[], float],
        executor: Executor,
        compact_records: CompactRecords | None,
        term: int,
        scrub: Scrub,
    ) -> None:
        super().__init__(now)
        self.broker = broker
        self._member = broker if isinstance(broker, ReplicatedBroker) else None  # slow: a protocol has many members
        self.term = term
        """The term of the broker, if it is one of a pair, in which this engine owns the log."""
        self.limits = limits
        self.clock = clock
        self.coordinator = owned.coordinator
        self.log = owned.name
        self.notes = owned.manager.notes
        self._decisions = ServiceTopic(shard.topic(DECISIONS))
        self._decisions.writer, self._decisions.held = owned.decisions, False
        calls = self._loop, self.wake, Waker(self._loop, self._turn)
        units = UnitAppends(*calls, _atomic(broker), self._decisions) if topics.takes_records else None
        self._units = units
        self.appends: Appends = units or TopicAppends(*calls)
        self.topics = topics(self, broker, owned, self.appends, executor, shard, create=limits.create_topics)
        self.sends = Sends(self.coordinator, limits.max_message_bytes, self._units)
        self.quotas = Quotas(limits.principal, limits.overload, clock.monotonic)
        self.effects = EffectExecutor(self, self.coordinator, self.topics, self.appends, self.sends, self._decisions)
        parts = self.coordinator, self.topics, self.appends, self.sends, self.quotas, owned.owners
        self.requests = RequestHandler(*parts, self.effects.visible.expect)
        self.streams = Streams(self.topics, streams, clock.monotonic, self.quotas)
        self.snapshots = SnapshotScheduler(self.topics, self.streams.persist)
        self.cursors = Cursors(self.topics, self.snapshots, self.streams.cursor_topic, streams)
        self.trim_floors = TrimFloors(
            self.coordinator.consumer_groups.floor,
            self.cursors.floor,
            self.effects.shard_messages.floor,
            self._prove_ownership,
        )
        self.retention = LogRetention(self.topics, self.snapshots, retention, clock, self.trim_floors)
        self.compaction = CompactionScheduler(
            self.topics, self.snapshots, self.streams, compaction, clock, self.trim_floors, compact_records
        )
        self.backups = Backups(broker)
        self.policy_checks = PolicyChecks(self.topics, retention.check_seconds)
        self.verification = LogVerification(self.topics, scrub)
        self._executor = executor
        self._with_frames: deque[SessionConnection] = deque()
        self._connections: dict[SessionConnection, None] = {}
        self._credits, self._takes_frames = 0, True
        self.plug_ins = PlugInChecks(self.topics, self.refuse, required=limits.require_plug_in)

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
        compaction: CompactionConfig | None = None,
        streams: StreamsConfig | None = None,
        clock: Clock | None = None,
        compact_records: CompactRecords | None = None,
        scrub: Scrub | None = None,
    ) -> Engine:
        """Become the owner of the broker's log and start. Raises the error that prevents it.

        `address`: HOST:PORT where clients reach this engine. `shard`: the shard it owns. `cluster_mode`: applications
        write to the topics themselves. `standby_state`: the writer and the decision log that a standby has acquired;
        None fences any other owner. `compact_records`: compacts topics instead of the broker. `scrub`: of the
        process; this engine runs it.
        """
        topics, limits, clock = topics_class(cluster_mode=cluster_mode), limits or Limits(), clock or current().clock
        check_shard(shard, topics.max_shards)
        config = _adapted(config or topics.config, topics, broker, limits, shard)
        if cluster_mode:  # the cluster limits the size of records that applications write to it
            limits = replace(limits, max_message_bytes=min(limits.max_message_bytes, broker.max_message_bytes))
        elif not address:
            config = replace(config, reconnect_seconds=0.0)
        identity = Identity(owner, address, shard, limits.create_topics)
        now = steady_clock(clock)
        executor = current().threads.executor(1, "txnbuffer-snapshots")
        # Read first: the writer of the decision log works in this term only if it lasts from now on.
        term = broker.term if isinstance(broker, ReplicatedBroker) else 0
        try:
            owned = await asyncio.get_running_loop().run_in_executor(
                executor, take_over, broker, identity, config, policy, clock, now, standby_state
            )
        except BaseException:
            executor.shutdown(wait=False)
            raise
        configs = retention or RetentionConfig(), compaction or CompactionConfig(), streams or StreamsConfig()
        scrub = scrub or Scrub(broker)
        engine = cls(broker, owned, topics, shard, limits, *configs, clock, now, executor, compact_records, term, scrub)
        engine.topics.start(engine.effects, engine.effects.shard_messages.take)
        engine._end_gone_sessions()
        engine._run_parts()
        engine.run(engine._watch_time())
        if limits.overload:
            engine.run(engine._watch_load())
        engine.wake()
        return engine

    def _run_parts(self) -> None:
        for part in (
            self.streams,
            self.snapshots,
            self.retention,
            self.compaction,
            self.policy_checks,
            self.plug_ins,
            self.verification,
            self.verification.scrub,
        ):
            self.run(part.run())

    # Clients and operators

    def connect(
        self, peer: str = "in process", permissions: Permissions = EVERYTHING_ALLOWED, *, local: bool = False
    ) -> SessionConnection:
        """Open a connection; its first frame must contain the hello. `local`: the client ends with this process."""
        quota = self.quotas.connect(permissions)
        receive, gone = self._receive, self._disconnected
        connection = SessionConnection(receive, gone, self.limits, peer, quota, permissions, local=local)
        self._connections[connection] = None
        # Each session may have an older connection that is not known to be lost.
        if (refusal := quota.check("sessions", (quota.usage.connections - 1) // 2)) is not None:
            connection.close(refusal)
        elif self.ended.done() or not self._takes_frames:
            connection.close(CoordinatorStopped("the service has stopped: connect again later"))
        return connection

    @property
    def connections(self) -> list[SessionConnection]:
        """The open connections."""
        return list(self._connections)

    def check_answer(self) -> None:
        """Raises NotLive if another process may own the log, or has since, so that nothing of it may be sent."""
        if self._member is not None:
            self._member.check_answer()
            if self._member.term != self.term:
                raise NotLive("this service owned the log in a former term: connect again")

    def refuse(self, error: Error | None) -> None:
        """Serve no sessions because of an error, or serve them again. Readers and change streams are served on.

        The clients reconnect until they get a session, or for `max_unavailable` seconds, and then raise this error.
        """
        self.requests.refusal = error
        for connection in self.connections if error is not None else ():
            connection.close(error)

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
        await self._close_connections()
        self._end_gone_sessions()
        deadline = self.clock.monotonic() + self.topics.stop_seconds
        while not self.ended.done() and self._writes and self.clock.monotonic() < deadline:
            await asyncio.sleep(0.005)
        for task in (tasks := [*self._tasks]):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.compaction.close()
        await self.backups.close()
        failed = self.ended.done()
        if not failed:
            self.ended.set_result(None)
            await self.streams.finish()
        await self.topics.stop()
        with contextlib.suppress(*([Error] if failed else [])):
            await self._loop.run_in_executor(self._executor, self._close)
        self._executor.shutdown()

    async def _close_connections(self) -> None:
        """Take no more frames, answer the sends that were taken, and close the connections.

        What a client has sent in addition it may send again, to the next owner of the log.
        """
        connections, now = self.connections, self._loop.time
        self._takes_frames, deadline = False, now() + SETTLE
        while not (self.ended.done() or self._all_settled(connections) or now() >= deadline):
            await asyncio.sleep(0.005)
        for connection in connections:
            connection.close(CoordinatorStopped("the service is stopping: connect again later"))
        deadline = now() + LAST_FRAMES
        while not all(connection.finished for connection in connections) and now() < deadline:
            await asyncio.sleep(0.005)

    def _all_settled(self, connections: list[SessionConnection]) -> bool:
        return not self._with_frames and all(connection.settled or connection.closed for connection in connections)

    def fail(self, error: BaseException) -> None:
        """End the engine at once; the next owner of the log decides the outcome of operations in flight."""
        if self.ended.done():
            return
        named = as_error(error)
        if not self.topics.takes_records:
            named = as_log_deleted(named)
        self.ended.set_result(named)
        self.appends.failure = self.appends.failure or named
        self.streams.close(CoordinatorStopped(f"the service has stopped: {named}"))
        self.compaction.end(CoordinatorStopped(f"the service has stopped: {named}"))
        self.backups.end(CoordinatorStopped(f"the service has stopped: {named}"))
        for answer in self._operator_requests.values():
            if not answer.done():
                answer.set_exception(named)
        for connection in self.connections:
            connection.close(CoordinatorStopped(f"the service has stopped: {named}"))

    # Internals

    def _end_gone_sessions(self) -> None:
        """Abort what clients have left open that are gone: at the start, and when no client is served any more."""
        self.coordinator.end_gone_sessions(self.topics.ongoing(), self.now())
        self.wake()

    @property
    def _writes(self) -> bool:
        """Whether a turn is due, or something is being appended, after which more may follow."""
        return self._woken or not self.appends.idle

    def _turn(self) -> None:
        self._woken = self.in_turn = True
        try:
            for exchange in self.exchanges:
                exchange()
            self._woken = False
            if not self.ended.done():
                self._process()
        except Exception as error:
            self._woken = False
            self.fail(error)
            raise
        finally:
            self.in_turn = False
            for exchange in self.exchanges:
                exchange()

    def _process(self) -> None:
        self.appends.complete()
        if self.appends.failure is None:
            self._work()
        if self.appends.failure is not None:
            self.fail(self.appends.failure)
        full = self.requests.unsettled_bytes > self.limits.total_bytes
        for connection in self._connections:
            connection.limit_reading(full)

    def _work(self) -> None:
        if not self.topics.takes_records:
            self.topics.turn()
        if self._with_frames:
            self._handle_frames(self.now())
        self.effects.execute()
        self.appends.flush()

    def _handle_frames(self, now: float) -> None:
        """Handle a frame of each connection, and again, until they have had TURN_ROWS rows: the rest waits."""
        left = TURN_ROWS
        units = self._units
        while self._with_frames and left > 0 and (units is None or not units.full):
            connection = self._with_frames.popleft()
            frame, rows = connection.frames.popleft()
            if connection.frames:
                self._with_frames.append(connection)
            left -= rows
            connection.waiting_rows -= rows
            try:
                self.requests.handle(connection, frame, now)
            except Error as error:
                connection.close(error)
        if self._with_frames and (units is None or units.may_append):
            self.wake()

    def _receive(self, connection: SessionConnection, frame: ClientFrame) -> None:
        if self._takes_frames:
            if not connection.frames:
                self._with_frames.append(connection)
            connection.frames.append((frame, rows := frame.rows))
            connection.waiting_rows += rows
            self.wake()

    def _disconnected(self, connection: SessionConnection) -> None:
        self._connections.pop(connection, None)
        self.quotas.disconnect(connection.quota)
        if not self.ended.done():
            if self.requests.connections.get(connection.session) is connection:
                self.effects.visible.disconnected(connection.session)
            self.requests.disconnected(connection, self.now())
            self._share_credits()
            self.wake()

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
        if connection is None or not answers:
            return
        if min(map(itemgetter(0), answers)) <= OPEN_REQUEST:  # answers to its older connection may come first
            for request, result in answers:
                if request == OPEN_REQUEST and isinstance(result, SessionOpened):
                    self._welcome(connection, result)
            answers = tuple(pair for pair in answers if pair[0] > OPEN_REQUEST)
        if answers:
            connection.answer(answers)
            if not self.topics.takes_records:
                self.quotas.served(len(answers), 0)

    def _welcome(self, connection: SessionConnection, opened: SessionOpened) -> None:
        self._share_credits()
        limits, shard = self.limits, self.coordinator.shard
        name = self.requests.qualified_name(connection.session)
        welcome = Welcome(name, shard, opened.epoch, limits.max_message_bytes, opened.states)
        connection.welcome(welcome, connection.quota.credits(self._credits))
        self.requests.welcomed(connection, self.now())

    def _share_credits(self) -> None:
        """Divide the limit on unacknowledged records among the clients; notify them of a large change."""
        allowed = self.limits.credits(len(self._connections))
        if not 0.5 * self._credits <= allowed <= self._credits:
            self._credits = allowed
            self._send_credits()

    def _send_credits(self) -> None:
        for connection in self._connections:
            if connection.welcomed:
                connection.allow(connection.quota.credits(self._credits))

    async def _prove_ownership(self) -> None:
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
            self.quotas.refresh()
            self.wake()

    async def _watch_load(self) -> None:
        """Adjust the shares of the clients to the queue delay."""
        monotonic = self.clock.monotonic
        while True:
            due = monotonic() + STEP
            await asyncio.sleep(STEP)
            if self.quotas.adjust(max(monotonic() - due, self.appends.age)):
                self._send_credits()

    def _close(self) -> None:
        try:
            self.topics.manager.close()
        finally:
            for topic in [self._decisions, *self.topics.by_name.values(), *self.effects.remote_writers()]:
                if topic.writer is not None:
                    topic.writer.close()
