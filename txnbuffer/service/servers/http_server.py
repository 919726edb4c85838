"""The HTTP server: liveness, readiness, metrics, and the requests of operators.

- `GET /health`, `GET /ready` and `GET /role` (else 503), are public; with authentication, only known principals see
  details.
- `GET /metrics` for Prometheus, for each principal that a rule of the policy names. Metrics are in base units and read
  from the engine on each request; `docs/reference/metrics.md` lists them.
- `POST /admin/REQUEST`: the requests of the admin service of gRPC, with the same rights. Body and answer are JSON.

A client is known by `Authorization: Bearer TOKEN`, or by its certificate, which TLS asks for but does not require
here, for the probes of `/health`. `txnbuffer.service.door.http_guard` says which requests are refused. The server
answers before there is an engine too: then `/ready` says what the service waits for.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import ssl
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import groupby
from math import ceil
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from broker_io.addresses import split_address
from broker_io.environment import current
from broker_io.errors import EnvironmentFault
from broker_io.rpc.credential_files import ClientCertificate
from broker_io.waits import long_waits
from txnbuffer.coordinator.messages import State
from txnbuffer.errors import Error, InvalidRequest, LimitExceeded, NotAuthorized, Unauthenticated
from txnbuffer.plug_in import PlugIns
from txnbuffer.rpc.admin_encoding import decode_admin_body
from txnbuffer.service.door.access import EVERYTHING_ALLOWED, Access, Permissions
from txnbuffer.service.door.connection_limits import NO_LIMITS, PortLimits
from txnbuffer.service.door.http_guard import JSON, HttpGuard, error_body, peer_of, status_of
from txnbuffer.service.door.quotas import OVERLOAD
from txnbuffer.service.engine.engine import Engine
from txnbuffer.service.servers.admin_calls import AdminCalls
from txnbuffer.service.standby.warm_topics import NO_LAG, StandbyLag
from txnbuffer.service.topics.scrub import Scrub

if TYPE_CHECKING:
    import socket

    from starlette.responses import Response


LOG = logging.getLogger(__name__)
LIVE_ROLES = ("live", "switching")
"""Roles of the live machine of a pair."""


class Metric(NamedTuple):
    """One metric and its value; a counter's name has no `_total` here."""

    name: str
    help: str
    value: float
    kind: str = "gauge"
    labels: tuple[tuple[str, str], ...] = ()


NO_PAIR: Mapping[str, Any] = MappingProxyType({})


def metrics(
    engine: Engine | None,
    lag: StandbyLag = NO_LAG,
    pair: Mapping[str, Any] = NO_PAIR,
    access: Access | None = None,
    scrub: Scrub | None = None,
) -> list[Metric]:
    """All current metrics; a process without an engine has only the first ones. `pair`: facts of its pair, if any."""
    waits = [wait.seconds for wait in long_waits()]
    found = [
        Metric("serving", "1 while this process owns the logs.", engine is not None),
        Metric("waits", "Waits for the cluster or another service that have lasted at least 3 s.", len(waits)),
        Metric("longest_wait_seconds", "Seconds since the longest of these waits began.", max(waits, default=0.0)),
        *_of_access(access),
        *_of_standby(lag),
        *_of_pair(pair),
        *_of_files(engine, scrub if engine is None else engine.verification.scrub),
    ]
    if engine is not None:
        for part in (_of_engine, _of_transactions, _of_work, _of_limits, _of_compaction, _of_groups, _of_streams):
            found += part(engine)
    return found


def _of_plug_ins(found: PlugIns) -> Iterable[Metric]:
    """The plug-in of the brokers of a cluster, once they were asked."""
    if not found.brokers:
        return []
    missing = sum(bool(one.missing) for one in found.brokers)
    return [
        Metric("plug_in_brokers", "Brokers with the plug-in for plain consumers.", len(found.brokers) - missing),
        Metric("plug_in_missing", "Brokers that lack it, or that do not answer.", missing),
    ]


def _of_engine(engine: Engine) -> Iterable[Metric]:
    manager, coordinator, topics = engine.topics.manager, engine.coordinator, engine.topics.by_name.values()
    return [
        Metric("takeover_topics_warm", "Topics that were warm at the takeover.", manager.warm),
        Metric(
            "takeover_topics_discarded",
            "Warm topics that the takeover could not trust, and recovered from the log.",
            manager.discarded,
        ),
        Metric("epoch", "Epoch of this owner.", coordinator.epoch),
        Metric("shard", "Number of the shard that this process owns.", coordinator.shard),
        Metric("ready", "1 once the predecessor's transactions are taken over.", coordinator.ready),
        Metric("draining", "1 while the service drains and rejects new sessions.", engine.requests.draining),
        Metric("connections", "Connected clients.", len(engine.connections)),
        Metric("topics", "Topics open for writing.", len(topics)),
        Metric(
            "topics_with_transactions",
            "Topics that have a transaction buffer.",
            sum(topic.followed is not None for topic in topics),
        ),
        Metric(
            "topics_stopped",
            "Topics that stopped until an operator acts.",
            sum(topic.stopped for topic in topics),
        ),
        Metric(
            "topics_retrying",
            "Topics with a temporary error, which are retried.",
            sum(topic.obstacle is not None and not topic.stopped for topic in topics),
        ),
        Metric(
            "topics_endangered",
            "Topics with a policy that may drop messages or block writes.",
            len(engine.policy_checks.dangers),
        ),
        *_of_plug_ins(engine.plug_ins.found),
    ]


def _of_transactions(engine: Engine) -> Iterable[Metric]:
    transactions, topics = [*engine.coordinator.transactions()], engine.topics.by_name.values()
    buffers = [topic.followed.buffer for topic in topics if topic.followed is not None]
    held_back = [engine.now() - topic.blocked_since for topic in topics if topic.blocked_by is not None]
    return [
        Metric(
            "transactions_open",
            "Open transactions.",
            sum(transaction.state is State.OPEN for transaction in transactions),
        ),
        Metric(
            "transactions_unsettled",
            "Transactions that are open, or whose outcome or markers are not durable yet.",
            len(transactions),
        ),
        Metric("low_water_mark", "All transactions up to this id have ended.", engine.coordinator.low_water_mark),
        Metric(
            "ongoing",
            "Transactions with undecided records, counted per topic.",
            sum(len(buffer.ongoing) for buffer in buffers),
        ),
        Metric("held_back_topics", "Topics whose readers an open transaction holds back.", len(held_back)),
        Metric(
            "held_back_seconds",
            "Seconds for which one open transaction has held back the readers of a topic, of all topics the most.",
            max(held_back, default=0.0),
        ),
        Metric(
            "aborts",
            "Aborted transactions in the buffers, counted per topic.",
            sum(len(buffer.aborted) for buffer in buffers),
        ),
        Metric("unsettled_bytes", "Bytes of client records that are not durable yet.", engine.requests.unsettled_bytes),
        Metric("waiting_bytes", "Bytes queued for appending to the log.", engine.appends.waiting_bytes),
    ]


def _of_work(engine: Engine) -> Iterable[Metric]:
    effects, shards = engine.effects, engine.effects.shard_messages
    return [
        Metric("records", "Client records appended.", engine.requests.records, "counter"),
        Metric("ends_committed", "Commits applied, counted per topic.", effects.committed, "counter"),
        Metric("ends_aborted", "Aborts applied, counted per topic.", effects.aborted, "counter"),
        Metric("suppressed_records", "Late and duplicate records.", effects.suppressed, "counter"),
        Metric(
            "damaged_commits",
            "Commits whose number of records differs from the declared one.",
            effects.damaged,
            "counter",
        ),
        Metric("snapshots", "Buffer snapshots written.", engine.snapshots.written, "counter"),
        Metric("trimmed_ledgers", "Ledgers dropped by retention.", engine.retention.trimmed, "counter"),
        Metric("letters_sent", "Inter-shard messages written to other shards.", shards.sent, "counter"),
        Metric("letters_received", "Inter-shard messages read from other shards.", shards.received, "counter"),
    ]


def _of_access(access: Access | None) -> Iterable[Metric]:
    if access is None:
        return []
    problems = "Changed files of policy, tokens, keys and certificates that can't be used."
    denied = "Requests denied, by the name of the error."
    return [
        Metric("insecure", "1 if other machines reach the service without protection.", access.insecure),
        Metric("access_problems", problems, len(access.problems)),
        *[
            Metric("denied", denied, access.denied[error], "counter", (("error", error),))
            for error in sorted({*access.denied, *DENIALS})
        ],
    ]


def _of_standby(lag: StandbyLag) -> Iterable[Metric]:
    return [
        Metric("standby_topics", "Topics of the shard of a standby.", lag.topics),
        Metric("standby_topics_warm", "Topics that a standby keeps warm.", lag.warm),
        Metric("standby_topics_failing", "Warm topics that a standby can't read just now.", lag.failing),
        Metric("standby_topics_no_room", "Topics that a standby has no memory for.", lag.no_room),
        Metric("standby_bytes", "Approximate memory of the topics that a standby keeps warm.", lag.bytes),
        Metric(
            "standby_restarts",
            "Topics that a standby could not follow any further, and restored again.",
            lag.restarted,
            "counter",
        ),
    ]


DAMAGED = "Topics with a damaged log."
DENIALS = (NotAuthorized.__name__, Unauthenticated.__name__)
"""Errors whose count is always shown."""
PAIR_GAUGES = {
    "epoch": ("pair_epoch", "Greatest epoch of the pair that this machine knows."),
    "partial": ("pair_partial", "1 while the log of this machine lacks parts, so that it can't become live."),
    "linked": ("pair_linked", "1 while the machines of the pair are connected."),
    "waits_for_backup": ("pair_waits_for_backup", "1 while appends wait because too few machines are in sync."),
    "lag_records": ("pair_lag_records", "Records that the primary has and its backup has not applied."),
    "lag_operations": ("pair_lag_operations", "Operations of these records: appends to one topic each, and changes."),
    "lag_bytes": ("pair_lag_bytes", "Bytes of these records."),
    "lag_seconds": ("pair_lag_seconds", "Seconds since the oldest of these records was written."),
    "window": ("pair_window_bytes", "Bytes that may be sent and not applied before appends wait."),
    "window_used": ("pair_window_used_bytes", "Bytes that are sent and not applied."),
    "lanes": ("pair_lanes", "Topics to which a backup applies in parallel, at most."),
    "lanes_busy": ("pair_lanes_busy", "Lanes that apply something now."),
    "lease_left": ("pair_lease_left_seconds", "Seconds until the lease of a primary ends if it is not renewed."),
}
"""Facts about the pair, and the metrics that show them."""
PAIR_COUNTERS = {
    "swaps": ("pair_swaps", "Changes of the lock's record by this machine."),
    "copies": ("pair_copies", "Copies of the log that this machine has sent or received."),
}


def _of_pair(pair: Mapping[str, Any]) -> Iterable[Metric]:
    if not pair:
        return []
    return [
        Metric("pair_live", "1 while this machine is the live one of its pair.", pair["role"] in LIVE_ROLES),
        Metric("pair_in_sync", "Machines that have every acknowledged record, 1 or 2.", len(pair["in_sync"])),
        *[Metric(name, text, pair[fact]) for fact, (name, text) in PAIR_GAUGES.items()],
        *[Metric(name, text, pair[fact], "counter") for fact, (name, text) in PAIR_COUNTERS.items()],
    ]


def _of_files(engine: Engine | None, scrub: Scrub | None) -> Iterable[Metric]:
    """What is known of the stored files of an embedded log."""
    if scrub is None or scrub.broker is None:
        return [] if engine is None else [Metric("topics_damaged", DAMAGED, len(engine.verification.damages))]
    damaged = scrub.damaged if engine is None else engine.verification.damages
    return [
        Metric("topics_damaged", DAMAGED, len(damaged)),
        Metric("scrub_age_seconds", "Seconds since all stored data was verified last, or since the start.", scrub.age),
        Metric("scrubs", "How often all stored data was verified.", scrub.passes, "counter"),
        Metric("files_repaired", "Damaged files that were repaired.", len(scrub.broker.repaired), "counter"),
    ]


def _of_limits(engine: Engine) -> Iterable[Metric]:
    """What limits refuse, and what one principal uses at most."""
    quotas, streams = engine.quotas, Counter[str]()
    for connection in engine.streams.connections:
        streams[connection.permissions.principal] += connection.server.open_streams
    used = {
        "sessions": max((usage.sessions for usage in quotas.usages), default=0),
        "open_transactions": max(engine.coordinator.outstanding_of.values(), default=0),
        "bytes_in_flight": max((usage.bytes_in_flight for usage in quotas.usages), default=0),
        "streams": max(streams.values(), default=0),
        "topics_created": max((usage.topics_created for usage in quotas.usages), default=0),
    }
    refused, most = "Requests that a limit has refused.", "What the principal that uses most of a limit uses of it."
    return [
        Metric("overloaded", "1 while work above fair shares is refused.", quotas.overloaded),
        *[
            Metric("refused", refused, count, "counter", (("limit", limit),))
            for limit, count in {OVERLOAD: 0, **quotas.refused}.items()
        ],
        *[
            Metric("principal_used_max", most, value, "gauge", (("limit", f"limits.{limit}"),))
            for limit, value in used.items()
        ],
    ]


def _of_compaction(engine: Engine) -> Iterable[Metric]:
    compaction, totals = engine.compaction, engine.compaction.totals
    return [
        Metric("compactions", "Compactions of data topics that succeeded.", totals.runs, "counter"),
        Metric("compaction_records_in", "Records before compactions.", totals.records_in, "counter"),
        Metric("compaction_records_out", "Records that compactions have kept.", totals.records_out, "counter"),
        Metric("compaction_bytes_in", "Bytes of ledgers before compactions.", totals.bytes_in, "counter"),
        Metric("compaction_bytes_out", "Bytes of ledgers after compactions.", totals.bytes_out, "counter"),
        Metric("compaction_seconds", "Seconds that compactions have taken.", totals.seconds, "counter"),
        Metric(
            "compaction_last_success_timestamp_seconds",
            "Time of the last compaction that succeeded, in seconds since 1970; 0 if there was none.",
            totals.last_success,
        ),
        Metric("compaction_dirty_ratio", "Highest dirty ratio of the topics with a policy.", compaction.dirty_ratio),
        Metric("compaction_failing", "Topics whose last compaction failed.", len(compaction.failures())),
        Metric(
            "compaction_quarantined",
            "Topics that are compacted on request only, because a segment is damaged.",
            len(compaction.quarantined),
        ),
    ]


def _of_groups(engine: Engine) -> Iterable[Metric]:
    known = engine.coordinator.consumer_groups
    groups = [known.members(name) for name, _, _ in known.all_groups()]
    spare = sum(len({*group.by_name} - {*group.holders.values()}) for group in groups)
    return [
        Metric("groups", "Consumer groups.", len(groups)),
        Metric("group_members", "Members of all groups.", sum(len(group.by_name) for group in groups)),
        Metric("group_members_spare", "Members without a partition.", spare),
    ]


def _of_streams(engine: Engine) -> Iterable[Metric]:
    """Sums over all streams of the values that `txnbuf streams` shows."""
    streams, now = engine.streams, engine.streams.now()
    connections = [connection.server.statistics(now) for connection in streams.connections]
    open_ones = [stream for connection in connections for stream in connection.streams]
    managers = [feed.manager.statistics() for feed in streams.feeds.values()]
    reads, waiting = streams.backfills, len(streams.budget.backfill_memory.waiting)
    return [
        Metric("stream_connections", "Connections of change streams.", len(connections)),
        Metric("streams", "Open change streams.", len(open_ones)),
        Metric(
            "streams_backfilling",
            "Change streams that read older mutations from the log.",
            sum(stream.state == "backfilling" for stream in open_ones),
        ),
        Metric(
            "streams_items_remaining",
            "Mutations that open streams have not sent yet.",
            sum(stream.items_remaining for stream in open_ones),
        ),
        Metric("streams_topics", "Topics with a mutation manager.", len(managers)),
        Metric("streams_memory_bytes", "Memory of all mutation managers.", streams.budget.account.bytes),
        Metric(
            "streams_cursors_dropped",
            "Cursors dropped from memory to free it.",
            sum(manager.cursors_dropped for manager in managers),
        ),
        Metric("streams_durable_cursors", "Durable cursors of all topics.", len(engine.cursors.rows())),
        Metric(
            "streams_durable_cursors_dropped",
            "Durable cursors dropped because they kept too much data.",
            engine.cursors.dropped,
            "counter",
        ),
        Metric(
            "streams_unacked_bytes",
            "Bytes of sent mutations that readers have not acknowledged.",
            sum(connection.unacked_bytes for connection in connections),
        ),
        Metric(
            "streams_deduplicated",
            "Mutations left out because a newer one has the same key.",
            sum(manager.deduplicated for manager in managers),
        ),
        Metric("streams_reads_active", "Reads of the log in progress.", reads.active),
        Metric(
            "streams_reads_pending",
            "Reads of the log that wait for a free reader or a turn.",
            reads.pending + waiting,
        ),
        Metric("streams_backfilled", "Mutations read from the log.", reads.items, "counter"),
    ]


def exposition(found: Iterable[Metric]) -> bytes:
    """The text that Prometheus reads: these metrics and those of the process."""
    from prometheus_client import REGISTRY, CollectorRegistry, generate_latest
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    class Collector:
        def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
            for (name, text, kind), group in groupby(found, lambda metric: (metric.name, metric.help, metric.kind)):
                rows = [*group]
                family = (GaugeMetricFamily if kind == "gauge" else CounterMetricFamily)(
                    f"txnbuffer_{name}", text, labels=[label for label, _ in rows[0].labels]
                )
                for row in rows:
                    family.add_metric([value for _, value in row.labels], row.value)
                yield family

    registry = CollectorRegistry(auto_describe=False)
    registry.register(Collector())
    own: bytes = generate_latest(registry)
    process: bytes = generate_latest(REGISTRY)
    return own + process


class HttpServer:
    """Serves on the engine's loop. `port`: where it listens; `engine`: set once there is one; `lag`: of a standby;
    `scrub`: once the log is open.

    `replication` returns facts about the pair, if there is one. `names`: names of the service in requests, besides its
    addresses.
    """

    def __init__(
        self,
        replication: Callable[[], Mapping[str, Any]] = lambda: NO_PAIR,
        admin: AdminCalls | None = None,
        access: Access | None = None,
        names: Iterable[str] = (),
        connections: PortLimits = NO_LIMITS,
    ) -> None:
        self._replication = replication
        self._admin = AdminCalls() if admin is None else admin
        self._access = access
        self._names = frozenset(names)
        self._connections = connections
        self.port = 0
        self.engine: Engine | None = None
        self.lag: Callable[[], StandbyLag] = lambda: NO_LAG
        self.scrub: Scrub | None = None
        self.follows: Callable[[], bool] = lambda: False
        self._server: Any = None
        self._serving: asyncio.Task[None] | None = None

    async def start(self, address: str) -> None:
        """Listen at HOST:PORT, with the TLS of the service if it has one. Raises EnvironmentFault if that fails."""
        import uvicorn

        class Quiet(uvicorn.Server):
            """Leaves signals to the service, and limits the time of the handshake."""

            @contextlib.contextmanager
            def capture_signals(self) -> Iterator[None]:
                yield

            async def startup(self, sockets: list[socket.socket] | None = None) -> None:
                protocol: Any = config.http_protocol_class
                server = await asyncio.get_running_loop().create_server(
                    lambda: protocol(config=config, server_state=self.server_state, app_state={}),
                    sock=listening,
                    ssl=config.ssl,
                    ssl_handshake_timeout=None if config.ssl is None else HEADER_SECONDS,
                )
                self.servers = [server]
                self.started = True

        listening = _listen(address, self._connections)
        self.port = listening.getsockname()[1]
        config = uvicorn.Config(
            HttpGuard(self._app(), self._names, self._refused),
            http=_protocol(),
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,  # the client is the one that is connected
            lifespan="off",
            ws="none",
        )
        config.load()
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # or bytes that are no request fill the log
        if self._access is not None and self._access.tls is not None:
            config.ssl = self._access.tls.server_context()
        server = self._server = Quiet(config)
        self._serving = asyncio.ensure_future(server.serve([listening]))
        while not server.started and not self._serving.done():
            await asyncio.sleep(0.01)

    async def stop(self) -> None:
        if self._server is not None and self._serving is not None:
            self._server.should_exit = self._server.force_exit = True
            await self._serving

    def _refused(self, error: NotAuthorized, peer: str) -> None:
        if self._access is not None:
            self._access.deny(error, peer=peer)

    def _permissions(self, request: Any) -> Permissions:
        """What the caller of a request may do. Raises Unauthenticated, and NotAuthorized for one that no rule names."""
        access = self._access
        if access is None or not access.enabled:
            return EVERYTHING_ALLOWED
        certificate = request.scope["state"].get(CERTIFICATE)
        return Permissions(
            access, access.authenticate(request.headers.get("authorization"), certificate, peer_of(request.scope))
        )

    def _sees_details(self, request: Any) -> bool:
        """Whether the caller of a public request is known; a probe is not, and that is no denial."""
        if self._access is None or not self._access.enabled:
            return True
        if "authorization" not in request.headers and request.scope["state"].get(CERTIFICATE) is None:
            return False
        with contextlib.suppress(NotAuthorized):
            self._permissions(request)
            return True
        return False

    def _app(self) -> Any:
        from starlette.applications import Starlette
        from starlette.exceptions import HTTPException
        from starlette.responses import Response
        from starlette.routing import Route

        async def metrics_of(request: Any) -> Response:
            self._permissions(request)
            found = metrics(self.engine, self.lag(), self._replication(), self._access, self.scrub)
            return Response(exposition(found), media_type="text/plain; version=0.0.4; charset=utf-8")

        async def health(request: Any) -> Response:
            ended = self.engine is not None and self.engine.ended.done()
            found: dict[str, Any] = {"status": "running", "insecure": self._is_insecure}
            return _json(found | (self._health() if self._sees_details(request) else {}), 503 if ended else 200)

        async def ready(request: Any) -> Response:
            waits = self._why_not_ready()
            details: dict[str, Any] = {"waits_for": waits, "waits": [*map(str, long_waits())]}
            if self.engine is not None and self.engine.plug_ins.found.brokers:
                details["plug_in"] = self.engine.plug_ins.found.state.value
            return _json({"ready": not waits} | (details if self._sees_details(request) else {}), 503 if waits else 200)

        async def role(request: Any) -> Response:
            waits = self._why_not_ready() if self.role == NO_ROLE else []
            details = {"waits_for": waits, "waits": [*map(str, long_waits())]}
            return _json(
                {"role": self.role} | (details if self._sees_details(request) else {}),
                503 if self.role == NO_ROLE else 200,
            )

        async def admin(request: Any) -> Response:
            permissions, name = self._permissions(request), request.path_params["name"]
            if name not in self._admin.names:
                raise HTTPException(404)
            arguments = decode_admin_body(await request.body())
            return _json(await self._admin.answer(name, arguments, permissions))

        def failed(_: Any, error: Any) -> Response:
            headers = {}
            if isinstance(error, Unauthenticated):
                headers["www-authenticate"] = "Bearer"
            elif isinstance(error, LimitExceeded):
                headers["retry-after"] = str(ceil(error.retry_after))
            return Response(error_body(error), status_of(error), headers, JSON)

        def unknown(_: Any, error: Any) -> Response:
            text = {404: "there is nothing at this path", 405: "this path does not take the method"}
            problem = InvalidRequest(f"{text.get(error.status_code, error.detail)}: see docs/reference/metrics.md")
            return Response(error_body(problem), error.status_code, error.headers, JSON)

        routes = [
            Route("/health", health),
            Route("/ready", ready),
            Route("/role", role),
            Route("/metrics", metrics_of),
            Route("/admin/{name}", admin, methods=["POST"]),
        ]
        handlers: dict[Any, Any] = {Error: failed, HTTPException: unknown, Exception: _unexpected}
        return Starlette(routes=routes, exception_handlers=handlers)

    @property
    def _is_insecure(self) -> bool:
        return self._access is not None and self._access.insecure

    def _health(self) -> dict[str, Any]:
        """What only callers see that are known."""
        found: dict[str, Any] = {
            "damaged": sorted(self._damaged()),
            "waits": [wait._asdict() for wait in long_waits()],
            "access": [] if self._access is None else [*map(str, self._access.problems)],
        }
        if self.engine is None:
            found["standby"] = self.lag()._asdict()
        if facts := self._replication():
            found["replication"] = facts
        return found

    def _damaged(self) -> Iterable[str]:
        """The topics with a damaged log."""
        if self.engine is not None:
            return self.engine.verification.damages
        return () if self.scrub is None else self.scrub.damaged

    @property
    def role(self) -> str:
        """`active` of the owner of the log, `standby` of one that follows the owner, else `none`."""
        if self.engine is None:
            return "standby" if self.follows() else NO_ROLE
        return NO_ROLE if self.engine.ended.done() else "active"

    def _why_not_ready(self) -> list[str]:
        engine = self.engine
        if engine is None:
            return [self._admin.waits_for]
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


NO_ROLE = "none"
HEADER_SECONDS = 10.0
"""Seconds in which a client completes the handshake of TLS, and in which the headers of each request arrive."""
CERTIFICATE = "certificate"
"""Where the state of a request has its client's certificate."""


def _protocol() -> Any:
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class Protocol(H11Protocol):
        """Keeps the certificate of the client, and ends connections that begin no further request."""

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._waiting = self.loop.call_later(HEADER_SECONDS, self._end_idle, self.cycle)
            certificate = transport.get_extra_info("peercert") or {}
            names = [value for part in certificate.get("subject", ()) for key, value in part if key == "commonName"]
            if names:
                found = ClientCertificate(names[0], int(ssl.cert_time_to_seconds(certificate["notAfter"])))
                self.app_state = {**self.app_state, CERTIFICATE: found}

        def on_response_complete(self) -> None:
            answered = self.cycle
            self._waiting.cancel()
            self._waiting = self.loop.call_later(HEADER_SECONDS, self._end_idle, answered)
            super().on_response_complete()

        def _end_idle(self, answered: Any) -> None:
            if self.cycle is answered and not self.transport.is_closing():
                self.transport.close()

    return Protocol


def _unexpected(request: Any, error: Exception) -> Response:
    """The answer after a bug, which is logged: uvicorn's lines are turned off, as any bytes cause one."""
    from starlette.responses import Response

    LOG.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return Response(error_body(Error("the service failed to answer: see its log")), 500, media_type=JSON)


def _json(value: Any, status: int = 200) -> Response:
    from starlette.responses import Response

    return Response(json.dumps(value), status, media_type=JSON)


def _listen(address: str, limits: PortLimits) -> socket.socket:
    host, port = split_address(address)
    try:
        return current().network.listen(host, int(port), *limits)
    except OSError as error:
        raise EnvironmentFault(
            f"can't listen at {address}: {error.strerror}; check whether another process uses the port"
        ) from error
