"""The REST interface of a simulated Pulsar cluster, as far as the broker port uses it; it answers as Pulsar 4.0."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import parse_qsl, unquote, urlsplit

from sim.cluster_topics import DEDUPLICATION, Place, StoredTopic
from urllib3.exceptions import ProtocolError
from urllib3.exceptions import TimeoutError as NoAnswer

if TYPE_CHECKING:
    from sim.cluster import SimCluster
    from sim.world import Process

Answer = tuple[int, Any]
QUOTA = {"limit": 10 * 1024**3, "limitSize": 10 * 1024**3, "limitTime": -1, "policy": "producer_request_hold"}
QUOTAS = {"destination_storage": QUOTA, "message_age": QUOTA}
APPLIED: dict[str, Any] = {
    "messageTTL": 0,
    "backlogQuotaMap": QUOTAS,
    "inactiveTopicPolicies": {
        "inactiveTopicDeleteMode": "delete_when_no_subscriptions",
        "maxInactiveDurationSeconds": 60,
        "deleteWhileInactive": True,
    },
    "compactionThreshold": 0,
    "replication": ["standalone"],
    "retention": {"retentionTimeInMinutes": 0, "retentionSizeInMB": 0},
}
"""The policies of a topic that has none of its own."""
ODD: tuple[tuple[int, str], ...] = (
    (412, "Failed to find ownership for topic:persistent://{}"),
    (412, "Namespace bundle for topic (persistent://{}) not served by this instance. Please redo the lookup."),
    (409, "Concurrent modification"),
    (500, "Topic is temporarily unavailable"),
    (500, "org.apache.pulsar.broker.service.BrokerServiceException$TopicFencedException"),
    (503, "PulsarService is not ready"),
)
"""Answers of a cluster that is busy, or whose topic moves."""


class Response(NamedTuple):
    """What the admin client uses of a response of urllib3."""

    status: int
    data: bytes
    headers: dict[str, str] = {}  # noqa: RUF012  no answer has any


class NotFound(Exception):
    """An answer with status 404."""


class Odd(Exception):
    """An answer with another status."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class SimAdmin:
    """The connections of one process to the interface, in place of a pool of urllib3."""

    def __init__(self, cluster: SimCluster, process: Process) -> None:
        self._cluster = cluster
        self._process = process
        self._kept = False

    def clear(self) -> None:
        self._kept = False

    def request(
        self,
        method: str,
        place: str,
        *,
        body: bytes | None,
        headers: Any,
        timeout: float,
        redirect: bool,
        retries: bool,
    ) -> Response:
        cluster, clock = self._cluster, self._process.clock
        self._send(timeout)
        fate = cluster.fate_of_request()
        content = None if body is None else json.loads(body)
        if fate == "lost request":
            clock.sleep(timeout)
            raise NoAnswer("no answer")
        if fate == "odd answer":
            status, reason = cluster.random.choice(ODD)
            return _response(status, {"reason": reason.format("public/default/topic")})
        answer = cluster.answer(method, place.partition("/admin/v2/")[2], content)
        clock.sleep(cluster.delay())
        if fate == "lost answer" or not cluster.reaches(self._process):
            self._kept = False
            clock.sleep(timeout)
            raise NoAnswer("no answer")
        if fate == "odd answer after the effect":
            return _response(500, {"reason": "io.netty.channel.StacklessClosedChannelException"})
        if fate == "broken connection":
            self._kept = False
            raise ProtocolError("Connection aborted.")
        return _response(*answer)

    def _send(self, timeout: float) -> None:
        """Let a request arrive. A connection that was kept may have broken: then no answer comes."""
        cluster, clock = self._cluster, self._process.clock
        kept, self._kept = self._kept and not cluster.away, False
        clock.sleep(cluster.delay())
        if cluster.away:
            raise NoAnswer("connection refused")
        if not (kept or cluster.reachable(self._process)):
            clock.sleep(timeout)
            raise NoAnswer("no answer")
        if not cluster.hears(self._process):
            clock.sleep(timeout)
            raise NoAnswer("no answer")
        self._kept = True


def _response(status: int, body: Any) -> Response:
    return Response(status, b"" if body is None else json.dumps(body).encode())


class AdminInterface:
    """Answers requests at once; `SimAdmin` is the way there."""

    def __init__(self, cluster: SimCluster) -> None:
        self._cluster = cluster

    def answer(self, method: str, path: str, body: Any) -> Answer:
        """The status and the body of an answer."""
        parts = urlsplit(path)
        names = [unquote(name) for name in parts.path.split("/")]
        options = dict(parse_qsl(parts.query))
        try:
            if names[0] == "namespaces":
                return self._namespace(method, "/".join(names[1:3]), "/".join(names[3:]))
            if names[0] == "brokers":
                return 200, {"maxMessageSize": str(self._cluster.max_message_bytes)}
            return self._persistent(method, names[1:], options, body)
        except NotFound as error:
            return 404, {"reason": str(error)}
        except Odd as error:
            return error.status, {"reason": str(error)}

    def _namespace(self, method: str, namespace: str, resource: str) -> Answer:
        cluster = self._cluster
        if method == "PUT":
            cluster.namespaces[namespace] = None
            return 204, None
        if namespace not in cluster.namespaces:
            raise NotFound("Namespace does not exist")
        if method == "DELETE":
            cluster.delete_namespace(namespace)
            return 204, None
        if resource == "unload":
            cluster.unload_namespace(namespace)
            return 204, None
        if resource == "bundles":
            return 200, {"boundaries": ["0x00000000", "0xffffffff"], "numBundles": 1}
        return 200, QUOTAS if resource == "backlogQuotaMap" else None

    def _persistent(self, method: str, names: list[str], options: dict[str, str], body: Any) -> Answer:
        cluster, namespace = self._cluster, "/".join(names[:2])
        if namespace not in cluster.namespaces:
            raise NotFound(f"Namespace not found: {namespace}")
        if len(names) == 2:
            return 200, [f"persistent://{name}" for name in cluster.topics if name.startswith(f"{namespace}/")]
        if names[2:] == ["partitioned"]:
            return 200, [f"persistent://{name}" for name in cluster.partitioned if name.startswith(f"{namespace}/")]
        name, resource = "/".join(names[:3]), "/".join(names[3:])
        if method == "PUT" and not resource:
            return self._create(name, body)
        if resource == "partitions":
            return self._partitions(method, name, body)
        creates = method == "PUT" and resource.startswith("subscription/")
        if not cluster.owned(name):
            raise Odd(412, f"Failed to find ownership for topic:persistent://{name}")
        if name not in cluster.topics and name in cluster.partitioned and resource == "internal-info":
            return 200, {"version": 0, "partitions": []}
        if name not in cluster.topics and not creates:
            if name in cluster.partitioned and resource == "properties":
                return 200, {}
            if name in cluster.partitioned and "/" not in resource:  # a policy, which all partitions share
                return self._topic(method, cluster.topics[f"{name}-partition-0"], resource, options, body)
            raise NotFound(f"Topic persistent://{name} not found")
        topic = cluster.create(name)
        if not resource and method == "DELETE":
            cluster.delete(name)
            return 204, None
        return self._topic(method, topic, resource, options, body)

    def _create(self, name: str, properties: Any) -> Answer:
        if name in self._cluster.topics or name in self._cluster.partitioned:
            raise Odd(409, "This topic already exists")
        self._cluster.create(name).properties = dict(properties or {})
        return 204, None

    def _partitions(self, method: str, name: str, count: Any) -> Answer:
        cluster = self._cluster
        if method == "GET":
            if name in cluster.partitioned:
                return 200, {"partitions": cluster.partitioned[name], "deleted": False}
            if name not in cluster.topics:
                raise NotFound(f"Topic persistent://{name} not found")
            return 200, {"partitions": 0, "deleted": False}
        if method == "PUT":
            if name in cluster.topics or name in cluster.partitioned:
                raise Odd(409, "This topic already exists")
        elif name not in cluster.partitioned:
            raise NotFound(f"Topic persistent://{name} not found")
        for number in range(int(count)):
            partition = cluster.create(f"{name}-partition-{number}")
            partition.policies = cluster.topics[f"{name}-partition-0"].policies
        cluster.partitioned[name] = int(count)
        return 204, None

    def _topic(self, method: str, topic: StoredTopic, resource: str, options: dict[str, str], body: Any) -> Answer:
        routes: dict[tuple[str, str], Callable[[], Answer]] = {
            ("GET", "properties"): lambda: (200, topic.properties),
            ("GET", "internalStats"): lambda: (200, topic.statistics()),
            ("GET", "stats"): lambda: (200, {"publishers": [{} for _ in topic.producers]}),
            ("GET", "internal-info"): lambda: (200, {"version": 1, "creationDate": f"{topic.created:.6f}"}),
            ("GET", "lastMessageId"): lambda: (200, _last_message_id(_read(topic))),
            ("PUT", "unload"): lambda: self._done(lambda: self._cluster.unload(topic.name)),
            ("POST", "trim"): lambda: (200, self._done(topic.trim)[1]),
            ("DELETE", "truncate"): lambda: self._done(topic.truncate),
            ("GET", "compaction"): lambda: (200, {"status": topic.compaction, "lastError": ""}),
            ("PUT", "compaction"): lambda: self._compact(topic),
            ("PUT", "properties"): lambda: self._done(lambda: topic.properties.update(body)),
            ("POST", "deduplicationEnabled"): lambda: self._deduplicate(topic, bool(body)),
            ("POST", "retention"): lambda: self._retain(topic, body),
        }
        route = routes.get((method, resource))
        if route is not None:
            return route()
        if resource.startswith("messageid/"):
            return 200, _message_id(_read(topic), int(resource.partition("/")[2]))
        if resource.startswith("subscription/"):
            return self._subscription(method, topic, resource.split("/")[1:], body)
        return self._policy(method, topic, resource, options, body)

    @staticmethod
    def _done(change: Callable[[], object]) -> Answer:
        change()
        return 204, None

    def _compact(self, topic: StoredTopic) -> Answer:
        if topic.compaction == "RUNNING":
            raise Odd(409, "Compaction already in progress")
        self._cluster.compact(topic)
        return 204, None

    @staticmethod
    def _deduplicate(topic: StoredTopic, on: bool) -> Answer:
        topic.policies["deduplicationEnabled"] = on
        topic.cursors.pop(DEDUPLICATION, None)
        return 204, None

    @staticmethod
    def _retain(topic: StoredTopic, body: Any) -> Answer:
        topic.policies["retention"] = body
        topic.policies["retained"] = body["retentionTimeInMinutes"] < 0 and body["retentionSizeInMB"] < 0
        return 204, None

    @staticmethod
    def _subscription(method: str, topic: StoredTopic, names: list[str], body: Any) -> Answer:
        name = names[0]
        if method == "PUT":
            if name in topic.cursors:
                raise Odd(409, "Subscription already exists for topic")
            topic.subscribe(name)
            if body["ledgerId"] > topic.last.ledger:  # MessageId.latest
                topic.cursors[name] = topic.last
        elif name not in topic.cursors:
            raise NotFound(f"Subscription {name} not found")
        elif method == "DELETE":
            del topic.cursors[name]
        else:
            topic.reset_cursor(name, Place(body["ledgerId"], body["entryId"]))
        return 204, None

    @staticmethod
    def _policy(method: str, topic: StoredTopic, resource: str, options: dict[str, str], body: Any) -> Answer:
        policies = topic.policies
        if resource == "backlogQuota":
            policies.setdefault("backlogQuotaMap", {})[options["backlogQuotaType"]] = body
            return 204, None
        if method == "POST":
            policies[resource] = int(options[resource]) if resource in options else body
            return 204, None
        if resource not in APPLIED:
            raise Odd(405, f"the simulated cluster has no {method} {resource}")
        own = policies.get(resource, {} if resource == "backlogQuotaMap" else None)
        if "applied" not in options:
            return 200, own
        return 200, {**APPLIED[resource], **own} if resource == "backlogQuotaMap" else _first(own, APPLIED[resource])


def _first(own: Any, applied: Any) -> Any:
    return applied if own is None else own


def _read(topic: StoredTopic) -> StoredTopic:
    if not topic.readable:
        raise Odd(500, "org.apache.bookkeeper.mledger.ManagedLedgerException: Error while reading ledger")
    return topic


def _last_message_id(topic: StoredTopic) -> dict[str, int]:
    entry = topic.find(topic.last)
    if entry is None:
        first = topic.ledgers[0].number if topic.last.entry < 0 else -1
        return {"ledgerId": first, "entryId": -1, "partitionIndex": -1, "batchIndex": -1}
    ledger, number, batch = entry.last
    return {"ledgerId": ledger, "entryId": number, "partitionIndex": -1, "batchIndex": batch}


def _message_id(topic: StoredTopic, time_ms: int) -> dict[str, int]:
    for entry in topic.entries_after(Place(-1, -1)):
        if entry.published >= time_ms:
            return {"ledgerId": entry.place.ledger, "entryId": entry.place.entry, "partitionIndex": -1}
    return {"ledgerId": topic.last.ledger, "entryId": topic.last.entry + 1, "partitionIndex": -1}
