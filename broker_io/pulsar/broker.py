"""The broker of a Pulsar cluster: one namespace of it."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from functools import partial
from typing import Any
from urllib.parse import quote

import _pulsar
import pulsar

from broker_io.errors import (
    ClusterRefused,
    Fenced,
    InvalidAddress,
    NotAuthorized,
    ServiceUnavailable,
    StillHeld,
    TopicNotFound,
    UnsafePolicy,
)
from broker_io.partitions import HASHINGS, Hashing, whole_name
from broker_io.port import (
    MAX_MESSAGE_BYTES,
    OWN_PREFIX,
    BrokerPlugIn,
    Ledger,
    Resource,
    TopicSchema,
    check_compaction,
    check_topic_name,
)
from broker_io.position import EARLIEST, Position
from broker_io.pulsar import plug_in, threads
from broker_io.pulsar.answers import append_error, integer, mapping, texts
from broker_io.pulsar.cluster import (
    INCARNATION,
    NOTE,
    Cluster,
    Handle,
    from_local_name,
    parse_address,
    path_of,
    to_local_name,
)
from broker_io.pulsar.credentials import Credentials
from broker_io.pulsar.head_start import HeadStart, Presence
from broker_io.pulsar.ledgers import (
    NEW,
    SUBSCRIPTION,
    LedgerState,
    LedgerUpkeep,
    create_subscription,
    entry_position,
    last_position,
    topic_state,
)
from broker_io.pulsar.policies import (
    NOT_SHOWN,
    check_policies,
    check_usable,
    override_policies,
    policies_of,
    policies_path,
)
from broker_io.pulsar.reader import PlainPulsarReader, PulsarReader
from broker_io.pulsar.writer import PulsarWriter

OVERHEAD_BYTES = 64 * 1024
"""Bytes that are left of Pulsar's limit for its metadata, and for data that compression makes larger."""
AHEAD, AHEAD_OF_LARGE = 1000, 250
"""Receiver queue sizes; messages of internal topics are large."""
ADMIN_SECONDS = 20.0
"""How long nothing may listen at the admin URL, while brokers accept clients, before the URL counts as wrong."""
LOOK_SECONDS = 0.1

POLICY_LOCKS = 32
"""Locks for changes of topic policies, chosen by hash of the topic."""

Modes = pulsar.ProducerAccessMode


class RegisteredSchema:
    """A registered schema in the form of the client library, for writers."""

    def __init__(self, schema: TopicSchema) -> None:
        self._info = _pulsar.SchemaInfo(_pulsar.SchemaType.__members__[schema.kind.upper()], "", schema.definition)

    def schema_info(self) -> Any:
        return self._info


def read_schema(answer: Any) -> TopicSchema:
    """The schema in an answer of the registry."""
    found = mapping(answer)
    return TopicSchema(str(found["type"]).lower(), str(found["data"]), integer(found["version"]))


class PulsarBroker(Resource):
    """The persistent topics of the namespace at `pulsar://HOST:PORT/TENANT/NAMESPACE`; safe from any thread.

    `admin_url` is the address of the REST interface (default: port 8080 of the first host, 8443 with TLS). At most one
    of `token`, `token_file`, `oauth2`, and `tls_cert` with `tls_key` authenticates; `tls_trust` is the CA file; without
    TLS no token is sent to another machine, except with `token_without_tls`. `role` begins the names of readers'
    subscriptions, for namespaces whose `subscription_auth_mode` is `Prefix`. Topics whose names begin with
    `compacted_prefix` are written so that they can be compacted; other topics must not be compacted. While the cluster
    is unavailable, each call waits up to `max_unavailable` seconds for it, and so does opening the broker. Closing a
    writer waits up to `close_timeout` seconds for pending appends (None: `max_unavailable`). `hashing` is the hash by
    which keys choose partitions (see `broker_io.partitions`). `schemas` maps topics, or partitioned topics as a whole,
    to schemas of the client library: writers declare them to the cluster, and the caller sees to it that values match.
    `client_log` is the log file of the client library.

    Raises InvalidAddress, NotAuthorized, and ServiceUnavailable if the cluster does not answer in that time.
    """

    def __init__(
        self,
        address: str,
        *,
        admin_url: str | None = None,
        token: str | None = None,
        token_file: str | None = None,
        oauth2: Mapping[str, str] | None = None,
        tls_trust: str | None = None,
        tls_cert: str | None = None,
        tls_key: str | None = None,
        role: str | None = None,
        token_without_tls: bool = False,
        max_unavailable: float = 60.0,
        close_timeout: float | None = None,
        compacted_prefix: str = OWN_PREFIX,
        batching: bool = True,
        max_message_bytes: int = MAX_MESSAGE_BYTES - OVERHEAD_BYTES,
        client_log: str | None = None,
        hashing: Hashing = "java",
        schemas: Mapping[str, pulsar.schema.Schema] | None = None,
    ) -> None:
        if hashing not in HASHINGS:
            raise InvalidAddress(f"hashing {hashing!r} is unknown: use {' or '.join(HASHINGS)}")
        place = parse_address(address)
        credentials = Credentials(token, token_file, oauth2, tls_trust, tls_cert, tls_key, role, token_without_tls)
        self._cluster = Cluster(
            place, admin_url, credentials, max_unavailable, close_timeout, max_message_bytes, client_log
        )
        self._compacted_prefix = compacted_prefix
        self._batching = batching
        self.hashing = hashing
        self._schemas: dict[str, Any] = dict(schemas or {})
        self._open: weakref.WeakKeyDictionary[Handle, None] = weakref.WeakKeyDictionary()
        self._head_starts: dict[str, HeadStart] = {}
        self._limit_asked = self._limit_answered = False
        threads = self._cluster.environment.threads
        self._lock = threads.lock()
        self._policy_locks = [threads.lock() for _ in range(POLICY_LOCKS)]
        self._upkeep = LedgerUpkeep(self._cluster)
        self._reached_since: float | None = None
        try:
            at = f"{place.service}/{place.namespace}"  # also names the namespace of an address without one
            self._cluster.retry(f"the cluster at {at}", partial(self._greet, at))
        except BaseException:
            self._cluster.close()
            raise

    def _greet(self, address: str) -> None:
        path = f"namespaces/{self._cluster.namespace}/bundles"  # permission to write or read suffices for this
        try:
            self._cluster.admin.ask("GET", path, retry=False)
        except ServiceUnavailable:
            if self._cluster.admin.refused:
                self._check_admin_url(address)
            raise
        except ClusterRefused as error:
            if error.status != 404:
                raise
            raise InvalidAddress(
                f"{address!r}: the admin interface at {self._cluster.admin.url} answers: {error.reason}. If that is "
                "not the cluster's, give admin_url, else run `pulsar-admin namespaces create "
                f"{self._cluster.namespace}`"
            ) from None
        self._cluster.reach()

    def _check_admin_url(self, address: str) -> None:
        """Raises InvalidAddress if brokers have accepted clients for long, while nothing listened at the admin URL.

        A broker that starts opens both ports within seconds.
        """
        now = self._cluster.environment.clock.monotonic()
        try:
            self._cluster.reach()
        except ServiceUnavailable:
            self._reached_since = None
            return
        if self._reached_since is None:
            self._reached_since = now
        elif now - self._reached_since >= ADMIN_SECONDS:
            raise InvalidAddress(
                f"nothing has listened at {self._cluster.admin.url} for {ADMIN_SECONDS:.0f} s, though the brokers of "
                f"{address} accept clients: give the address of their admin interface as admin_url (setting "
                "pulsar.admin_url, variable TXNBUFFER_PULSAR_ADMIN_URL)"
            )

    @property
    def max_message_bytes(self) -> int:
        """The given limit, or the cluster's if that is lower and these credentials may see it."""
        if not self._limit_asked:
            self._ask_limit()
        return self._cluster.max_message_bytes

    def _ask_limit(self) -> None:
        """Ask once; after ServiceUnavailable the next writer asks again, because it waits for the cluster anyway."""
        self._limit_asked = True
        try:
            limit = self._cluster.admin.query(
                "brokers/configuration/runtime", lambda found: int(found["maxMessageSize"]), retry=False
            )
            room = min(OVERHEAD_BYTES, limit // 4)
            self._cluster.max_message_bytes = min(self._cluster.max_message_bytes, limit - room)
        except ServiceUnavailable:
            return
        except (NotAuthorized, ClusterRefused):
            pass  # these credentials will not learn it later either
        self._limit_answered = True

    def topics(self) -> list[str]:
        self._cluster.check()
        query, path = self._cluster.admin.query, f"persistent/{self._cluster.namespace}"
        prefix = f"persistent://{self._cluster.namespace}/"
        # An older topic can have the name of a partitioned one.
        found = {*query(path, texts)} - {*query(f"{path}/partitioned", texts)}
        names = (from_local_name(url.removeprefix(prefix)) for url in found)
        return sorted(name for name in names if name is not None)

    def create_topic(self, topic: str) -> None:
        self._cluster.check()
        path = path_of(self._cluster.namespace, check_topic_name(topic))
        check_usable(topic, self._cluster.partitions)
        state = NEW
        try:
            self._cluster.admin.ask("PUT", path, {INCARNATION: self._cluster.environment.randomness.token(16).hex()})
        except ClusterRefused as error:
            if error.status != 409:
                raise
            self._cluster.incarnation(topic)  # it exists; raises if it can't be used
            state = topic_state(self._cluster, topic)
        self._protect(topic, exclusive=False, state=state)

    def check_topic(self, topic: str) -> None:
        """See `PolicyBroker`: policies may have changed since the topic was opened."""
        self._cluster.incarnation(topic)
        self._protect(topic, exclusive=True)

    def deduplicate(self, topic: str) -> None:
        """See `DeduplicatingBroker`: the cluster recognizes resent messages by their sequence ids."""
        self._cluster.ask("POST", topic, "deduplicationEnabled", True)

    def annotate(self, topic: str, text: str) -> None:
        self._cluster.ask("PUT", topic, "properties", {NOTE: text}, retry=False)

    def annotation(self, topic: str) -> str | None:
        return self._cluster.property(topic, NOTE, retry=False)

    def plug_ins(self) -> list[BrokerPlugIn]:
        self._cluster.check()
        return plug_in.plug_ins_of(self._cluster.admin)

    def lock_plug_in(self, *, locked: bool) -> None:
        self._cluster.check()
        plug_in.lock(self._cluster.admin, self._cluster.namespace, locked=locked)

    def plug_in_state(self, topic: str) -> dict[str, str]:
        return self._cluster.query(topic, "stats", plug_in.topic_state)

    def schema(self, topic: str, version: int | None = None) -> TopicSchema | None:
        """See `SchemaBroker`; partitions have the schema of their topic."""
        self._cluster.check()
        name = quote(to_local_name(check_topic_name(whole_name(topic))), safe="")
        path = f"schemas/{self._cluster.namespace}/{name}/schema"
        try:
            return self._cluster.admin.query(path if version is None else f"{path}/{version}", read_schema)
        except ClusterRefused as error:
            if error.status != 404:
                raise
            return None

    def write_with(self, topic: str, schema: TopicSchema) -> None:
        """See `SchemaBroker`. A schema of `schemas` takes precedence."""
        self._schemas.setdefault(whole_name(topic), RegisteredSchema(schema))

    def delete_topic(self, topic: str) -> None:
        self._cluster.incarnation(topic)
        gone = TopicNotFound(f"topic {topic!r} was deleted: open it again if it was re-created")
        for handle in self._handles(topic):  # the client library would re-create the topic
            handle.end(gone)
        self._cluster.ask("DELETE", topic, "?force=true", retry=False)  # not retried: it may be re-created meanwhile

    def partitions(self, topic: str) -> int:
        return self._cluster.partitions(check_topic_name(topic))

    def partition(self, topic: str, count: int) -> None:
        path = path_of(self._cluster.namespace, check_topic_name(topic))
        try:
            self._cluster.admin.ask("PUT", f"{path}/partitions", count)
        except ClusterRefused as error:
            if error.status != 409:
                raise

    def incarnation(self, topic: str) -> str:
        return self._cluster.incarnation(topic)

    def writer(
        self, topic: str, *, exclusive: bool = False, wait: float | None = None, unbatched: bool = False
    ) -> PulsarWriter:
        incarnation = self._cluster.incarnation(topic)
        self._protect(topic, exclusive=exclusive)
        if not exclusive:
            return self._writer(topic, incarnation, Modes.Shared, unbatched=unbatched)
        if wait is not None:
            return self._wait_for_owner(topic, incarnation, wait, unbatched=unbatched)
        older = [handle for handle in self._handles(topic) if isinstance(handle, PulsarWriter)]
        fenced = append_error("ProducerFenced", topic)
        for each in older:  # shared ones would reconnect and resend, so they end first
            if not each.exclusive:
                each.end(fenced)
        writer = self._writer(topic, incarnation, Modes.ExclusiveWithFencing, unbatched=unbatched)
        for each in older:
            each.end(fenced)
        return writer

    def writer_of_left(self, topic: str) -> PulsarWriter | None:
        """See `ReloadingBroker`. The request must not wait for a topic that is loaded: it might be the first."""
        head_start, now = self._head_starts.setdefault(topic, HeadStart()), self._cluster.environment.clock.monotonic
        if not head_start.is_over(self._presence(topic), now()):
            return None
        incarnation = self._cluster.incarnation(topic)
        self._protect(topic, exclusive=True)
        if not head_start.is_over(self._presence(topic), now()):  # those requests may have waited for the cluster
            return None
        try:
            writer = self._writer(topic, incarnation, Modes.Exclusive, unbatched=False, retry=False)
        except Fenced:
            return None
        head_start.opened()
        return writer

    def _presence(self, topic: str) -> Presence | None:
        before = topic_state(self._cluster, topic, retry=False)
        if self._cluster.query(topic, "stats", lambda stats: bool(stats["publishers"]), retry=False):
            return Presence(True, before.newest, used=True)
        state = topic_state(self._cluster, topic, retry=False)
        if state.closing or state.newest != before.newest:
            return None
        used = bool(state.ledgers[-1].entries) or not any(ledger.entries for ledger in state.ledgers)
        return Presence(False, state.newest, used)

    def writer_of_new(self, topic: str) -> PulsarWriter:
        return self._writer(topic, self._cluster.incarnation(topic), Modes.Shared, unbatched=False)

    def reader(
        self, topic: str, start: Position = EARLIEST, *, inclusive: bool = True, compacted: bool = False
    ) -> PulsarReader:
        self._cluster.check()
        ahead = AHEAD_OF_LARGE if self._is_compacted(check_topic_name(topic)) else AHEAD
        reader = PulsarReader(self._cluster, topic, start, inclusive=inclusive, compacted=compacted, ahead=ahead)
        self._add(reader)
        return reader

    def plain_reader(self, topic: str) -> PlainPulsarReader:
        self._cluster.check()
        reader = PlainPulsarReader(self._cluster, check_topic_name(topic), AHEAD)
        self._add(reader)
        return reader

    def ledgers(self, topic: str) -> list[Ledger]:
        return topic_state(self._cluster, topic).ledgers

    def first_position(self, topic: str) -> Position | None:
        if not any(ledger.entries for ledger in self.ledgers(topic)):
            return None
        with self.reader(topic) as reader:
            batch = reader.read(limit=1)
            return None if batch is None else batch.positions.first

    def last_position(self, topic: str) -> Position | None:
        return last_position(self._cluster, topic)

    def position_at(self, topic: str, time_ms: int) -> Position | None:
        start = self._cluster.query(topic, f"messageid/{min(max(time_ms, 0), 2**62)}", entry_position)
        state = topic_state(self._cluster, topic)
        if state.last.entry < 0 or start > state.last or start.entry < 0:
            return None
        with self.reader(topic, start) as reader:
            while (batch := reader.read(limit=100)) is not None:
                late = (batch.publish_times >= time_ms).nonzero()[0]
                if len(late):
                    return batch.positions[int(late[0])]
        return None

    def roll(self, topic: str) -> None:
        self._upkeep.roll(topic)

    def trim(self, topic: str, first_ledger: int) -> None:
        self._upkeep.trim(topic, first_ledger)

    def compact(self, topic: str) -> None:
        self._cluster.incarnation(topic)
        check_compaction(topic, self._compacted_prefix)
        raw = [handle for handle in self._handles(topic) if isinstance(handle, PulsarReader) and not handle.compacted]
        floor = min((reader.position.ledger for reader in raw), default=None)
        self._upkeep.compact(topic, floor)

    def close(self) -> None:
        if self._cluster.closed:
            return
        for handle in self._handles():
            handle.close()
        self._cluster.close()
        for handle in self._handles():  # those opened meanwhile
            handle.close()

    def _is_compacted(self, topic: str) -> bool:
        return topic.startswith(self._compacted_prefix)

    def _handles(self, topic: str | None = None) -> list[Handle]:
        with self._lock:
            return [handle for handle in self._open if topic is None or handle.topic == topic]

    def _add(self, handle: Handle) -> None:
        with self._lock:
            self._open[handle] = None
        threads.watch(handle)
        if self._cluster.closed:  # closed while the handle was opened
            handle.close()
            self._cluster.check()

    def _protect(self, topic: str, *, exclusive: bool, state: LedgerState | None = None) -> None:
        """Subscribe to the topic so that its messages are kept, and check its policies. Raises UnsafePolicy.

        Only administrators of the tenant may see policies: an exclusive writer must be one, others may skip the check.
        """
        check_usable(topic, self._cluster.partitions)
        cluster, path = self._cluster, path_of(self._cluster.namespace, topic)
        state = state or topic_state(cluster, topic)
        made = SUBSCRIPTION not in state.cursors
        if made:
            create_subscription(cluster.admin, path)
        try:
            place = policies_path(cluster.namespace, topic)
            with self._policy_locks[
                hash(place) % POLICY_LOCKS
            ]:  # partitions share policies, so concurrent changes would be lost
                policies = policies_of(cluster.admin, cluster.namespace, place)
                policies = override_policies(
                    cluster.admin, cluster.namespace, place, policies, ours=self._is_compacted(topic)
                )
        except NotAuthorized:
            if exclusive:
                raise
            policies = NOT_SHOWN
        try:
            check_policies(topic, cluster.namespace, policies, state, compacted=self._is_compacted(topic))
        except UnsafePolicy:
            if made:  # a topic that is not written to shall not keep its messages
                cluster.admin.ask("DELETE", f"{path}/subscription/{SUBSCRIPTION}?force=true")
            raise

    def _writer(
        self, topic: str, incarnation: str, mode: pulsar.ProducerAccessMode, *, unbatched: bool, retry: bool = True
    ) -> PulsarWriter:
        batching = self._batching and not unbatched and not self._is_compacted(topic)
        if not self._limit_answered:
            self._ask_limit()
        writer = self._cluster.opened(
            topic,
            "writer",
            lambda: PulsarWriter(
                self._cluster,
                topic,
                incarnation,
                mode=mode,
                batching=batching,
                max_message_bytes=self._cluster.max_message_bytes,
                schema=self._schemas.get(whole_name(topic)),
            ),
            retry=retry,
        )
        try:
            if self._cluster.incarnation(topic) != incarnation:  # the library writes to partitions of a re-created one
                raise TopicNotFound(f"topic {topic!r} was deleted and re-created while it was opened: open it again")
        except BaseException:
            writer.close()
            raise
        self._add(writer)
        return writer

    def _wait_for_owner(self, topic: str, incarnation: str, seconds: float, *, unbatched: bool) -> PulsarWriter:
        """A writer that fences no other. Raises StillHeld."""
        clock = self._cluster.environment.clock
        deadline = clock.monotonic() + seconds
        while True:
            try:
                return self._writer(topic, incarnation, Modes.Exclusive, unbatched=unbatched)
            except Fenced:
                missing = deadline - clock.monotonic()
            if missing <= 0:
                raise StillHeld(f"topic {topic!r} is held by an exclusive writer that is still open: wait longer")
            clock.sleep(min(missing, LOOK_SECONDS))
