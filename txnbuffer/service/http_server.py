"""The HTTP server: metrics for Prometheus (`/metrics`), liveness (`/health`) and readiness (`/ready`, else 503).

Metrics are in base units and read from the engine on each request; `docs/service.md` lists them. The server answers
before there is an engine too: then `/ready` says what the service waits for.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from broker_io.environment import current
from broker_io.errors import EnvironmentFault
from broker_io.rpc.channel import split_address
from broker_io.waits import long_waits
from txnbuffer.coordinator.messages import State
from txnbuffer.service.engine import Engine
from txnbuffer.service.warm_topics import NO_LAG, StandbyLag

if TYPE_CHECKING:
    import socket


LIVE_ROLES = ("live", "switching")
"""Roles of the live machine of a pair."""


class Metric(NamedTuple):
    """One metric and its value; a counter's name has no `_total` here."""

    name: str
    help: str
    value: float
    kind: str = "gauge"


NO_PAIR: Mapping[str, Any] = MappingProxyType({})


def metrics(engine: Engine | None, lag: StandbyLag = NO_LAG, pair: Mapping[str, Any] = NO_PAIR) -> Iterator[Metric]:
    """All current metrics; a process without an engine has only the first ones. `pair`: facts of its pair, if any."""
    yield Metric("serving", "1 while this process owns the logs.", engine is not None)
    waits = long_waits()
    yield Metric("waits", "Waits for the cluster or another service that have lasted at least 3 s.", len(waits))
    longest = max((wait.seconds for wait in waits), default=0.0)
    yield Metric("longest_wait_seconds", "Seconds since the longest of these waits began.", longest)
    yield from _of_standby(lag)
    yield from _of_pair(pair)
    if engine is None:
        return
    manager = engine.topics.manager
    yield Metric("takeover_topics_warm", "Topics that were warm at the takeover.", manager.warm)
    discarded = "Warm topics that the takeover could not trust, and recovered from the log."
    yield Metric("takeover_topics_discarded", discarded, manager.discarded)
    transactions = list(engine.coordinator.transactions())
    open_ones = sum(transaction.state is State.OPEN for transaction in transactions)
    followed_topics = [topic.followed for topic in engine.topics.by_name.values() if topic.followed is not None]
    coordinator, effects, requests = engine.coordinator, engine.effects, engine.requests
    stopped = sum(topic.stopped for topic in engine.topics.by_name.values())
    yield Metric("epoch", "Epoch of this owner.", coordinator.epoch)
    yield Metric("shard", "Number of the shard that this process owns.", coordinator.shard)
    yield Metric("ready", "1 once the predecessor's transactions are taken over.", coordinator.ready)
    yield Metric("draining", "1 while the service drains and rejects new sessions.", requests.draining)
    yield Metric("connections", "Connected clients.", len(engine.connections))
    yield Metric("topics", "Topics open for writing.", len(engine.topics.by_name))
    yield Metric("topics_with_transactions", "Topics that have a transaction buffer.", len(followed_topics))
    yield Metric("topics_stopped", "Topics that stopped until an operator acts.", stopped)
    yield Metric("topics_damaged", "Topics with a damaged log.", len(engine.verification.damages))
    waiting = sum(topic.obstacle is not None and not topic.stopped for topic in engine.topics.by_name.values())
    yield Metric("topics_retrying", "Topics with a temporary error, which are retried.", waiting)
    endangered = len(engine.policy_checks.dangers)
    yield Metric("topics_endangered", "Topics with a policy that may drop messages or block writes.", endangered)
    yield Metric("transactions_open", "Open transactions.", open_ones)
    unsettled = "Transactions that are open, or whose outcome or markers are not durable yet."
    yield Metric("transactions_unsettled", unsettled, len(transactions))
    yield Metric("low_water_mark", "All transactions up to this id have ended.", coordinator.low_water_mark)
    ongoing = sum(len(followed.buffer.ongoing) for followed in followed_topics)
    yield Metric("ongoing", "Transactions with undecided records, counted per topic.", ongoing)
    aborts = sum(len(followed.buffer.aborted) for followed in followed_topics)
    yield Metric("aborts", "Aborted transactions in the buffers, counted per topic.", aborts)
    yield Metric("unsettled_bytes", "Bytes of client records that are not durable yet.", requests.unsettled_bytes)
    yield Metric("waiting_bytes", "Bytes queued for appending to the log.", engine.appends.waiting_bytes)
    yield Metric("records", "Client records appended.", requests.records, "counter")
    yield Metric("ends_committed", "Commits applied, counted per topic.", effects.committed, "counter")
    yield Metric("ends_aborted", "Aborts applied, counted per topic.", effects.aborted, "counter")
    yield Metric("suppressed_records", "Late and duplicate records.", effects.suppressed, "counter")
    yield Metric(
        "damaged_commits", "Commits whose number of records differs from the declared one.", effects.damaged, "counter"
    )
    yield Metric("snapshots", "Buffer snapshots written.", engine.snapshots.written, "counter")
    yield Metric("trimmed_ledgers", "Ledgers dropped by retention.", engine.retention.trimmed, "counter")
    shards = engine.effects.shard_messages
    yield Metric("letters_sent", "Inter-shard messages written to other shards.", shards.sent, "counter")
    yield Metric("letters_received", "Inter-shard messages read from other shards.", shards.received, "counter")
    yield from _of_compaction(engine)
    yield from _of_groups(engine)
    yield from _of_streams(engine)


def _of_standby(lag: StandbyLag) -> Iterator[Metric]:
    yield Metric("standby_topics", "Topics of the shard of a standby.", lag.topics)
    yield Metric("standby_topics_warm", "Topics that a standby keeps warm.", lag.warm)
    yield Metric("standby_topics_failing", "Warm topics that a standby can't read just now.", lag.failing)
    yield Metric("standby_topics_no_room", "Topics that a standby has no memory for.", lag.no_room)
    yield Metric("standby_bytes", "Approximate memory of the topics that a standby keeps warm.", lag.bytes)
    restarted = "Topics that a standby could not follow any further, and restored again."
    yield Metric("standby_restarts", restarted, lag.restarted, "counter")


PAIR_GAUGES = {
    "epoch": ("pair_epoch", "Greatest epoch of the pair that this machine knows."),
    "partial": ("pair_partial", "1 while the log of this machine lacks parts, so that it can't become live."),
    "linked": ("pair_linked", "1 while the machines of the pair are connected."),
    "waits_for_backup": ("pair_waits_for_backup", "1 while appends wait because too few machines are in sync."),
    "lag_records": ("pair_lag_records", "Records that the live has and its backup has not applied."),
    "lag_operations": ("pair_lag_operations", "Operations of these records: appends to one topic each, and changes."),
    "lag_bytes": ("pair_lag_bytes", "Bytes of these records."),
    "lag_seconds": ("pair_lag_seconds", "Seconds since the oldest of these records was written."),
    "window": ("pair_window_bytes", "Bytes that may be sent and not applied before appends wait."),
    "window_used": ("pair_window_used_bytes", "Bytes that are sent and not applied."),
    "lanes": ("pair_lanes", "Topics to which a backup applies in parallel, at most."),
    "lanes_busy": ("pair_lanes_busy", "Lanes that apply something now."),
    "lease_left": ("pair_lease_left_seconds", "Seconds until the lease of a live ends if it is not renewed."),
}
"""Facts about the pair, and the metrics that show them."""
PAIR_COUNTERS = {
    "swaps": ("pair_swaps", "Changes of the lock's record by this machine."),
    "copies": ("pair_copies", "Copies of the log that this machine has sent or received."),
}


def _of_pair(pair: Mapping[str, Any]) -> Iterator[Metric]:
    if not pair:
        return
    yield Metric("pair_live", "1 while this machine is the live one of its pair.", pair["role"] in LIVE_ROLES)
    yield Metric("pair_in_sync", "Machines that have every acknowledged record, 1 or 2.", len(pair["in_sync"]))
    for fact, (name, text) in PAIR_GAUGES.items():
        yield Metric(name, text, pair[fact])
    for fact, (name, text) in PAIR_COUNTERS.items():
        yield Metric(name, text, pair[fact], "counter")


def _of_compaction(engine: Engine) -> Iterator[Metric]:
    compaction, totals = engine.compaction, engine.compaction.totals
    yield Metric("compactions", "Compactions of data topics that succeeded.", totals.runs, "counter")
    yield Metric("compaction_records_in", "Records before compactions.", totals.records_in, "counter")
    yield Metric("compaction_records_out", "Records that compactions have kept.", totals.records_out, "counter")
    yield Metric("compaction_bytes_in", "Bytes of ledgers before compactions.", totals.bytes_in, "counter")
    yield Metric("compaction_bytes_out", "Bytes of ledgers after compactions.", totals.bytes_out, "counter")
    yield Metric("compaction_seconds", "Seconds that compactions have taken.", totals.seconds, "counter")
    last = "Time of the last compaction that succeeded, in seconds since 1970; 0 if there was none."
    yield Metric("compaction_last_success_timestamp_seconds", last, totals.last_success)
    dirty = "Highest dirty ratio of the topics with a policy."
    yield Metric("compaction_dirty_ratio", dirty, compaction.dirty_ratio)
    failing = "Topics whose last compaction failed."
    yield Metric("compaction_failing", failing, len(compaction.failures()))
    quarantined = "Topics that are compacted on request only, because a segment is damaged."
    yield Metric("compaction_quarantined", quarantined, len(compaction.quarantined))


def _of_groups(engine: Engine) -> Iterator[Metric]:
    known = engine.coordinator.consumer_groups
    groups = [known.members(name) for name, _, _ in known.all_groups()]
    yield Metric("groups", "Consumer groups.", len(groups))
    yield Metric("group_members", "Members of all groups.", sum(len(group.by_name) for group in groups))
    spare = sum(len({*group.by_name} - {*group.holders.values()}) for group in groups)
    yield Metric("group_members_spare", "Members without a partition.", spare)


def _of_streams(engine: Engine) -> Iterator[Metric]:
    """Sums over all streams of the values that `txnbuf streams` shows."""
    streams, now = engine.streams, engine.streams.now()
    connections = [connection.server.statistics(now) for connection in streams.connections]
    open_ones = [stream for connection in connections for stream in connection.streams]
    managers = [feed.manager.statistics() for feed in streams.feeds.values()]
    remaining = sum(stream.items_remaining for stream in open_ones)
    backfilling = sum(stream.state == "backfilling" for stream in open_ones)
    dropped = sum(manager.cursors_dropped for manager in managers)
    yield Metric("stream_connections", "Connections of change streams.", len(connections))
    yield Metric("streams", "Open change streams.", len(open_ones))
    yield Metric("streams_backfilling", "Change streams that read older mutations from the log.", backfilling)
    yield Metric("streams_items_remaining", "Mutations that open streams have not sent yet.", remaining)
    yield Metric("streams_topics", "Topics with a mutation manager.", len(managers))
    yield Metric("streams_memory_bytes", "Memory of all mutation managers.", streams.budget.account.bytes)
    yield Metric("streams_cursors_dropped", "Cursors dropped from memory to free it.", dropped)
    durable, given_up = len(engine.cursors.rows()), engine.cursors.dropped
    yield Metric("streams_durable_cursors", "Durable cursors of all topics.", durable)
    why = "Durable cursors dropped because they kept too much data."
    yield Metric("streams_durable_cursors_dropped", why, given_up, "counter")
    unacked = sum(connection.unacked_bytes for connection in connections)
    replaced = sum(manager.deduplicated for manager in managers)
    reading = streams.backfills.active
    waiting = streams.backfills.pending + len(streams.budget.backfill_memory.waiting)
    yield Metric("streams_unacked_bytes", "Bytes of sent mutations that readers have not acknowledged.", unacked)
    yield Metric("streams_deduplicated", "Mutations left out because a newer one has the same key.", replaced)
    yield Metric("streams_reads_active", "Reads of the log in progress.", reading)
    yield Metric("streams_reads_pending", "Reads of the log that wait for a free reader or a turn.", waiting)
    yield Metric("streams_backfilled", "Mutations read from the log.", streams.backfills.items, "counter")


def exposition(engine: Engine | None, lag: StandbyLag = NO_LAG, pair: Mapping[str, Any] = NO_PAIR) -> bytes:
    """The text that Prometheus reads, with the metrics of the process."""
    from prometheus_client import REGISTRY, CollectorRegistry, generate_latest
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    class Collector:
        def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
            for name, text, value, kind in metrics(engine, lag, pair):
                family = GaugeMetricFamily if kind == "gauge" else CounterMetricFamily
                yield family(f"txnbuffer_{name}", text, value=value)

    registry = CollectorRegistry(auto_describe=False)
    registry.register(Collector())
    own: bytes = generate_latest(registry)
    process: bytes = generate_latest(REGISTRY)
    return own + process


class HttpServer:
    """Serves on the engine's loop. `port`: where it listens; `engine`: set once there is one; `lag`: of a standby.

    `replication` returns facts about the pair, if there is one.
    """

    def __init__(self, replication: Callable[[], Mapping[str, Any]] = lambda: NO_PAIR) -> None:
        self._replication = replication
        self.port = 0
        self.engine: Engine | None = None
        self.lag: Callable[[], StandbyLag] = lambda: NO_LAG
        self.waits_for = "the service is starting"
        self._server: Any = None
        self._serving: asyncio.Task[None] | None = None

    async def start(self, address: str) -> None:
        """Listen at HOST:PORT. Raises EnvironmentFault if that fails."""
        import uvicorn

        class Quiet(uvicorn.Server):
            """Leaves signals to the service."""

            @contextlib.contextmanager
            def capture_signals(self) -> Iterator[None]:
                yield

        listening = _listen(address)
        self.port = listening.getsockname()[1]
        config = uvicorn.Config(self._app(), log_config=None, access_log=False, lifespan="off", ws="none")
        server = self._server = Quiet(config)
        self._serving = asyncio.ensure_future(server.serve([listening]))
        while not server.started and not self._serving.done():
            await asyncio.sleep(0.01)

    async def stop(self) -> None:
        if self._server is not None and self._serving is not None:
            self._server.should_exit = self._server.force_exit = True
            await self._serving

    def _app(self) -> Any:
        from starlette.applications import Starlette
        from starlette.responses import JSONResponse, Response
        from starlette.routing import Route

        async def metrics(_: Any) -> Response:
            text = exposition(self.engine, self.lag(), self._replication())
            return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

        async def health(_: Any) -> Response:
            damaged = [] if self.engine is None else sorted(self.engine.verification.damages)
            ended = self.engine is not None and self.engine.ended.done()
            waits = [wait._asdict() for wait in long_waits()]
            found = {"status": "running", "damaged": damaged, "waits": waits}
            standby = {"standby": self.lag()._asdict()} if self.engine is None else {}
            pair = {"replication": facts} if (facts := self._replication()) else {}
            return JSONResponse(found | standby | pair, 503 if ended else 200)

        async def ready(_: Any) -> Response:
            waits = self._why_not_ready()
            state = {"ready": not waits, "waits_for": waits, "waits": [*map(str, long_waits())]}
            return JSONResponse(state, 503 if waits else 200)

        return Starlette(routes=[Route("/metrics", metrics), Route("/health", health), Route("/ready", ready)])

    def _why_not_ready(self) -> list[str]:
        engine = self.engine
        if engine is None:
            return [self.waits_for]
        waits = []
        if engine.ended.done():
            waits.append("the engine has stopped")
        if engine.requests.draining:
            waits.append("the service is draining")
        if engine.requests.refusal is not None:
            waits.append(str(engine.requests.refusal))
        if not engine.coordinator.ready:
            waits.append("the predecessor's transactions are being taken over")
        return waits


def _listen(address: str) -> socket.socket:
    host, port = split_address(address)
    try:
        return current().network.listen(host, int(port))
    except OSError as error:
        raise EnvironmentFault(
            f"can't listen at {address}: {error.strerror}; check whether another process uses the port"
        ) from error
