"""The connection of a process to a cluster, addresses of clusters, and requests about topics.

A topic of the port is the persistent topic of the same name in the namespace, except that Pulsar reserves `/`: it is
written `=2F` there. `=` is written `=3D` where `2F`, `3D` or `2E` follow it, and the names `.` and `..` are `=2E` and
`=2E=2E`. A topic of the namespace whose name these rules never produce is not listed.
"""

from __future__ import annotations

import os
import re
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar
from urllib.parse import quote

import pulsar

from broker_io.addresses import shown_address
from broker_io.environment import current
from broker_io.errors import Closed, ClusterRefused, Error, InvalidAddress, ServiceUnavailable, TopicNotFound
from broker_io.partitions import partitioned
from broker_io.port import Resource, check_topic_name
from broker_io.pulsar import threads
from broker_io.pulsar.admin import AdminClient
from broker_io.pulsar.answers import integer, mapping, open_error, read_answer
from broker_io.pulsar.credentials import Credentials
from broker_io.pulsar.threads import Opened, Resolver, flusher
from broker_io.waits import RetryPolicy

DEFAULT_NAMESPACE = "public/default"
ADMIN_PORTS = {"pulsar": ("http", 8080), "pulsar+ssl": ("https", 8443)}

_HOST = r"(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):(\d{1,5})"
_ADDRESS = re.compile(rf"(pulsar(?:\+ssl)?)://({_HOST}(?:,{_HOST})*)(?:/([\w.=:-]+)/([\w.=:-]+))?/?", re.ASCII)
_ESCAPE = {"/": "=2F", "=": "=3D"}


class ClusterAddress(NamedTuple):
    """`service` is the address for clients, `admin` the default address of the REST interface."""

    service: str
    admin: str
    namespace: str
    tls: bool


def parse_address(address: str) -> ClusterAddress:
    """Raises InvalidAddress."""
    found = _ADDRESS.fullmatch(address)
    hosts = found[2].split(",") if found else []
    if found is None or not all(0 < int(host.rpartition(":")[2]) < 65536 for host in hosts):
        raise InvalidAddress(
            f"{shown_address(address)!r} is not the address of a cluster: write pulsar://HOST:PORT/TENANT/NAMESPACE, "
            "or pulsar+ssl://…"
        )
    scheme = found[1]
    protocol, port = ADMIN_PORTS[scheme]
    namespace = f"{found[5]}/{found[6]}" if found[5] else DEFAULT_NAMESPACE
    admin = f"{protocol}://{hosts[0].rpartition(':')[0]}:{port}"
    return ClusterAddress(f"{scheme}://{found[2]}", admin, namespace, scheme == "pulsar+ssl")


def to_local_name(topic: str) -> str:
    """The name of a topic of the port in its namespace."""
    if topic in (".", ".."):
        return topic.replace(".", "=2E")
    return re.sub(r"/|=(?=2F|3D|2E)", lambda found: _ESCAPE[found[0]], topic)


def from_local_name(name: str) -> str | None:
    """The topic of the port with this name in its namespace; None if there is none."""
    topic = re.sub(r"=(2F|3D|2E)", lambda found: bytes.fromhex(found[1]).decode(), name)
    return topic if to_local_name(topic) == name else None


def path_of(namespace: str, topic: str) -> str:
    """The path of a topic in the REST interface."""
    return f"persistent/{namespace}/{quote(to_local_name(topic), safe='')}"


def url_of(namespace: str, topic: str) -> str:
    """The name of a topic for clients."""
    return f"persistent://{namespace}/{to_local_name(topic)}"


T = TypeVar("T")

INCARNATION = "txnbuffer.incarnation"
"""The property that distinguishes a topic of this package from a re-created one of its name."""
OPERATION_SECONDS = 10.0
"""Timeout of an attempt to open; the answer can get lost if the topic is unloaded meanwhile."""
OPENING_STEPS = 3
"""Operations that open a reader or a writer, each with its timeout: find the broker, connect to it, create it there."""
CLOSE_SECONDS = OPERATION_SECONDS + 5.0
"""Timeout of closing. With a hung broker it lasts as long as an operation; if Python ends sooner, it is aborted."""
NOTE = "txnbuffer.note"
"""The property that stores the annotation of a topic."""
READING = "__txnbuffer"
"""Part of the name of each reader's subscription, by which a broker knows who reads the log with its markers."""

PLAIN = "txnbuffer-plain"
"""In place of READING for a reader that gets what those of other programs get."""


class Cluster:
    """The connection of one broker.

    Calls fail after the cluster has been unavailable for `max_unavailable` seconds. Closing a writer waits up to
    `close_timeout` seconds for pending appends (None: `max_unavailable`). `max_message_bytes` is lowered when the
    cluster rejects a smaller message.
    """

    def __init__(
        self,
        address: ClusterAddress,
        admin_url: str | None,
        credentials: Credentials,
        max_unavailable: float,
        close_timeout: float | None,
        max_message_bytes: int,
        log: str | None,
    ) -> None:
        credentials.check_sent_to(address.service)
        self.environment = current()
        self.service = address.service
        self.namespace = address.namespace
        self.closed = False
        self.max_message_bytes = max_message_bytes
        self.close_timeout = max_unavailable if close_timeout is None else close_timeout
        self._attempt = min(max(max_unavailable, 1.0), OPERATION_SECONDS)
        self._opening = OPENING_STEPS * self._attempt + 1.0
        self.retry = RetryPolicy(max_unavailable, self.check, from_start=True)
        self.admin = AdminClient(admin_url or address.admin, credentials, self.retry)
        self.reading, self.plain = (
            f"{credentials.role}-{name}" if credentials.role else name for name in (READING, PLAIN)
        )
        self.acks = Resolver()
        try:
            self.client = pulsar.Client(
                address.service,
                authentication=credentials.for_client(),
                operation_timeout_seconds=max(1, round(self._attempt)),
                logger=pulsar.FileLogger(pulsar.LoggerLevel.Warn, log or os.devnull),
                **_tls_options(credentials, tls=address.tls),
            )
        except ValueError as error:
            raise InvalidAddress(
                f"{address.service!r} is not a valid address ({error}): give the name of the host"
            ) from None
        self._end = weakref.finalize(
            self, _close_client, self.client
        )  # a client with pending sends would abort at exit
        threads.watch(self)

    def reach(self) -> None:
        """Check that the address for clients accepts connections; the client library would wait for it silently.

        Raises ServiceUnavailable.
        """
        missing = []
        for host in self.service.partition("://")[2].split(","):
            name, _, port = host.rpartition(":")
            try:
                self.environment.network.probe(name.strip("[]"), int(port), self._attempt)
            except OSError as error:
                missing.append(f"{host} ({error})")
            else:
                return
        raise ServiceUnavailable(
            f"no broker answers at {', '.join(missing)}, though the admin interface at {self.admin.url} does: check "
            "that this is the port for clients, usually 6650, and that the broker is running"
        )

    def check(self) -> None:
        if self.closed:
            raise Closed(f"the connection to {self.service} was closed in this process: open it again")

    def detach(self, why: Error) -> None:
        self.closed = True
        self._end.detach()
        threads.keep(self.client)

    def close(self) -> None:
        self.closed = True
        self._end()
        self.acks.stop()
        self.admin.close()

    def url(self, topic: str) -> str:
        return url_of(self.namespace, topic)

    def ask(self, method: str, topic: str, resource: str = "", body: Any = None, *, retry: bool = True) -> Any:
        """Send an admin request about a topic. Raises TopicNotFound."""
        self.check()
        path = path_of(self.namespace, check_topic_name(topic))
        try:
            return self.admin.ask(method, f"{path}/{resource}" if resource else path, body, retry=retry)
        except ClusterRefused as error:
            if error.status == 404:
                raise TopicNotFound(f"there is no topic {topic!r}: create it first") from None
            raise

    def query(self, topic: str, resource: str, read: Callable[[Any], T], *, retry: bool = True) -> T:
        """What `read` finds in an answer about a topic. Raises TopicNotFound; ClusterRefused for another form."""
        return read_answer(f"{resource} of topic {topic!r}", self.ask("GET", topic, resource, retry=retry), read)

    def property(self, topic: str, name: str, *, retry: bool = True) -> str | None:
        """A property of the topic."""
        found = self.query(topic, "properties", lambda answer: mapping(answer).get(name), retry=retry)
        return None if found is None else str(found)

    def incarnation(self, topic: str, *, retry: bool = True) -> str:
        """The incarnation in the topic's properties, or the creation date of a topic of other programs."""
        mark = self.property(topic, INCARNATION, retry=retry)
        if mark is not None:
            return mark

        def creation_date(info: Any) -> str:
            if "partitions" in info:
                raise partitioned(topic)
            return str(info["creationDate"])

        return f"{self.query(topic, 'internal-info', creation_date, retry=retry)} {self.url(topic)}"

    def partitions(self, topic: str) -> int:
        """The number of partitions; 0 if the topic is not partitioned or does not exist."""
        try:
            return self.query(topic, "partitions", lambda found: integer(found["partitions"]))
        except TopicNotFound:
            return 0

    def opened(self, topic: str, what: str, opening: Callable[[], Opened], *, retry: bool = True) -> Opened:
        """The reader or writer that `opening` opens with the client library, in a thread: that may never return."""

        def attempt() -> Opened:
            self.check()
            try:
                return flusher.open(opening, self._opening)
            except pulsar.PulsarException as error:
                self.check()
                raise open_error(error, topic, what) from None
            except TimeoutError:
                self.check()
                raise ServiceUnavailable(
                    f"the cluster did not open the {what} of topic {topic!r} within {self._opening:g} s: check that "
                    "its brokers run, then try again"
                ) from None

        return self.retry(f"the {what} of topic {topic!r} to be opened", attempt) if retry else attempt()


def _close_client(client: pulsar.Client) -> None:
    """Close the client in a thread.

    `shutdown` would hold Python's global lock until the library's threads give up, and a callback may be freed after
    the end of Python.
    """
    flusher.run(client.close, CLOSE_SECONDS)
    flusher.wait_idle(CLOSE_SECONDS)


def _tls_options(credentials: Credentials, *, tls: bool) -> dict[str, Any]:
    if not tls:
        return {}
    return {"tls_trust_certs_file_path": credentials.tls_trust, "tls_validate_hostname": True}


class Handle(Resource):
    """A reader or a writer; it ends with its topic or its broker."""

    topic: str

    def detach(self, why: Error) -> None:
        """See `threads.ForkedResource`."""
        raise NotImplementedError

    def end(self, error: Error) -> None:
        """Make every later call fail with this error."""
        raise NotImplementedError
