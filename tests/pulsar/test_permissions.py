"""The permissions of `docs/reference/cluster-requirements.md`, on a broker with authentication and authorization."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import os
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import pulsar
import pytest
from certificates import Authority
from pulsar_cluster import Cluster
from pyspark.testing import assertDataFrameEqual
from service_process import ServiceProcess

from broker_io import open_broker
from broker_io.errors import ClusterRefused, Error, NotAuthorized, ServiceUnavailable
from broker_io.port import AnnotatedBroker, Broker
from broker_io.standalone import Standalone, ask
from snapshots.format import SNAPSHOT_TOPIC
from txnbuffer import CommittedReader, connect
from txnbuffer.coordinator.decisions import TOPIC as DECISIONS
from txnbuffer.pipeline.exports import VERSIONS, ExportDirectory
from txnbuffer.pipeline.jobs.export import Export
from txnbuffer.pipeline.options import reading_options
from txnbuffer.rpc.discovery import ServiceDiscovery

SECRET = bytes(range(32))
TENANT = "acme"
NAMESPACE = f"{TENANT}/shop"
SUPER = "super"  # also clients without a token, so that tests need none for their setup
SECONDS = 120.0


def token(role: str) -> str:
    """A JSON Web Token for a role."""
    parts = [b'{"alg":"HS256"}', json.dumps({"sub": role}).encode()]
    text = b".".join(map(encoded, parts))
    return (text + b"." + encoded(hmac.new(SECRET, text, hashlib.sha256).digest())).decode()


def encoded(data: bytes) -> bytes:
    return base64.urlsafe_b64encode(data).rstrip(b"=")


PROVIDERS = "org.apache.pulsar.broker.authentication.AuthenticationProvider"
SETTINGS = [
    "brokerServicePortTls={tls_port}",
    "webServicePortTls={web_tls_port}",
    "tlsCertificateFilePath={files}/broker.pem",
    "tlsKeyFilePath={files}/key.pem",
    "tlsTrustCertsFilePath={files}/trust.pem",
    "authenticationEnabled=true",
    "authorizationEnabled=true",
    f"authenticationProviders={PROVIDERS}Token,{PROVIDERS}Tls",
    f"tokenSecretKey=data:;base64,{base64.b64encode(SECRET).decode()}",
    f"superUserRoles={SUPER}",
    f"anonymousUserRole={SUPER}",
    "brokerClientAuthenticationPlugin=org.apache.pulsar.client.impl.auth.AuthenticationToken",
    f"brokerClientAuthenticationParameters=token:{token(SUPER)}",
    "topicFactoryClassName=txnbuffer.broker.TxnTopicFactory",
    "allowOverrideEntryFilters=true",
    f"txnbufferRawRoles=service,app,reader, {SUPER}",
]


class Place(NamedTuple):
    """The namespace, with a service that is an administrator of its tenant and created topic `orders`.

    `address` and `admin` are without TLS, `tls_address` and `tls_admin` with TLS and the CA file `trust`. `client` has
    certificate and key of role `app`, `stranger` is the file of an authority that signed none of the certificates.
    """

    address: str
    admin: str
    service: ServiceProcess
    tls_address: str
    tls_admin: str
    trust: str
    client: tuple[str, str]
    stranger: str

    def options(self, role: str) -> dict[str, Any]:
        return {"admin_url": self.admin, "token": token(role), "max_unavailable": SECONDS}

    def over_tls(self, **who: Any) -> dict[str, Any]:
        return {"admin_url": self.tls_admin, "tls_trust": self.trust, "max_unavailable": SECONDS, **who}

    def open(self, role: str) -> Broker:
        return open_broker(self.address, **self.options(role))


@pytest.fixture(scope="module")
def place(cluster: Cluster, plug_in: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    directory = tmp_path_factory.mktemp("secrets")
    authority, stranger = Authority(directory, "authority"), Authority(directory, "stranger")
    certificate, key = authority.sign("broker")
    files = {
        "broker.pem": certificate.read_text(),
        "key.pem": key.read_text(),
        "trust.pem": authority.trust.read_text(),
    }
    certificate, key = authority.sign("app")
    trust = str(authority.trust)
    with cluster.private_standalone(SETTINGS, files, plug_in) as broker:
        grant(broker)
        address, tls_address = f"{broker.url}/{NAMESPACE}", f"{broker.tls_url}/{NAMESPACE}"
        config = directory / "service.toml"
        (directory / "token").touch(0o600)
        (directory / "token").write_text(token("service"))
        settings = {"admin_url": broker.tls_admin, "token_file": str(directory / "token"), "tls_trust": trust}
        config.write_text("\n".join(["[pulsar]", *(f"{name} = {json.dumps(text)}" for name, text in settings.items())]))
        with ServiceProcess(tls_address, "--config", str(config)) as service:
            made = Place(
                address, broker.admin, service, tls_address, broker.tls_admin, trust, (str(certificate), str(key)),
                str(stranger.trust),
            )  # fmt: skip
            commit(made, "app", b"1")
            yield made


def grant(broker: Standalone) -> None:
    """Grant the permissions of the table."""
    clusters = ask(broker.admin, "clusters")
    ask(broker.admin, f"tenants/{TENANT}", "PUT", {"adminRoles": ["service"], "allowedClusters": clusters})
    ask(broker.admin, f"namespaces/{NAMESPACE}", "PUT", {})
    for role in ("app", "reader", "plain"):
        ask(broker.admin, f"namespaces/{NAMESPACE}/permissions/{role}", "POST", ["consume"])
    ask(broker.admin, f"persistent/{NAMESPACE}/orders", "PUT", {})  # permissions require an existing topic
    ask(broker.admin, f"persistent/{NAMESPACE}/orders/permissions/app", "POST", ["produce"])
    ask(broker.admin, f"namespaces/{NAMESPACE}/permissions/subscription/__txnbuffer", "POST", ["service"])


def commit(place: Place, role: str, value: bytes) -> None:
    commit_at(place.address, place.options(role), value)


def commit_at(address: str, options: dict[str, Any], value: bytes) -> None:
    with connect(address, broker_options=options) as client, client.transaction() as txn:
        txn.send("orders", value)
        txn.commit(wait_visible=True)


def assert_read(address: str, options: dict[str, Any], value: bytes) -> None:
    """Read committed records up to this value."""
    with open_broker(address, **options) as broker, CommittedReader(broker, "orders") as reader:
        values: list[bytes | None] = []
        while value not in values:
            batch = reader.read(timeout=SECONDS)
            assert batch is not None, values
            values += [record.value for record in batch]


def test_application_requires_consume_on_the_namespace_and_produce_on_its_topics(place: Place) -> None:
    with place.open("app") as broker, CommittedReader(broker, "orders") as reader:
        batch = reader.read(timeout=SECONDS)
        assert batch is not None
        assert next(iter(batch)).value == b"1"


def test_reader_requires_consume_on_the_namespace(place: Place) -> None:
    with place.open("reader") as broker:
        with CommittedReader(broker, "orders") as reader:
            assert reader.read(timeout=SECONDS) is not None
        with pytest.raises(NotAuthorized, match="may not open a writer of topic 'orders'"):
            broker.writer("orders")


def test_roles_that_may_read_what_is_not_committed_are_listed_for_the_plug_in(place: Place) -> None:
    with place.open("plain") as broker, pytest.raises(ClusterRefused, match="NotAllowed"):
        CommittedReader(broker, "orders")
    client = pulsar.Client(
        place.address.rpartition("/acme/")[0], authentication=pulsar.AuthenticationToken(token("plain")),
        logger=pulsar.FileLogger(pulsar.LoggerLevel.Error, os.devnull),
    )  # fmt: skip
    consumer = client.subscribe(
        f"persistent://{NAMESPACE}/orders", "plain", initial_position=pulsar.InitialPosition.Earliest
    )
    assert consumer.receive(round(1000 * SECONDS)).data() == b"1"
    client.close()


def test_applications_cannot_write_to_internal_topics(place: Place) -> None:
    with place.open("app") as broker:
        for topic in (DECISIONS, SNAPSHOT_TOPIC):
            with pytest.raises(NotAuthorized):
                broker.writer(topic)
            with pytest.raises(NotAuthorized):
                broker.writer(topic, exclusive=True)
    assert place.service.process.poll() is None


def test_applications_can_read_but_not_publish_the_service_address(place: Place) -> None:
    with place.open("app") as broker:
        assert isinstance(broker, AnnotatedBroker)
        assert ServiceDiscovery(broker, NAMESPACE).property_address() == f"127.0.0.1:{place.service.port}"
        with pytest.raises(NotAuthorized):
            broker.annotate(DECISIONS, "9 elsewhere:1")


def test_applications_cannot_remove_the_subscription(place: Place) -> None:
    url = f"persistent/{NAMESPACE}/orders/subscription/__txnbuffer"
    with place.open("app") as broker:
        assert broker.last_position("orders") is not None
    request = urllib.request.Request(f"{place.admin}/admin/v2/{url}", method="DELETE")
    request.add_header("Authorization", f"Bearer {token('app')}")
    with pytest.raises(urllib.error.HTTPError, match=r"40[13]"):
        urllib.request.urlopen(request, timeout=30.0)


def test_a_service_has_to_be_an_administrator_of_the_tenant(place: Place, tmp_path: Path) -> None:
    (file := tmp_path / "token").touch(0o600)
    file.write_text(token("app"))
    process = ServiceProcess(place.address, "--admin-url", place.admin, "--token-file", str(file))
    assert process.finish(SECONDS) == NotAuthorized("").exit_code
    assert "use credentials with that permission" in "".join(process.lines)
    commit(place, "app", b"2")


def test_role_without_permissions_is_rejected_at_once(place: Place) -> None:
    with pytest.raises(NotAuthorized, match="use credentials with that permission"):
        place.open("stranger")


def test_role_begins_the_subscriptions_of_readers_where_a_namespace_requires_it(place: Place) -> None:
    mode = f"namespaces/{NAMESPACE}/subscriptionAuthMode"
    ask(place.admin, mode, "POST", "Prefix")
    try:
        options = place.options("reader") | {"max_unavailable": 5.0}
        with open_broker(place.address, **options) as broker, pytest.raises(NotAuthorized):
            broker.reader("orders")
        with open_broker(place.address, role="reader", **options) as broker, broker.reader("orders") as reader:
            assert reader.read(timeout=SECONDS) is not None
            found = ask(place.admin, f"persistent/{NAMESPACE}/orders/stats")["subscriptions"]
            assert any(name.startswith("reader-__txnbuffer-reader-") for name in found), found
    finally:
        ask(place.admin, mode, "POST", "None")


# --- TLS and other authentication ---


def test_token_over_tls(place: Place) -> None:
    options = place.over_tls(token=token("app"))
    commit_at(place.tls_address, options, b"by token")
    assert_read(place.tls_address, options, b"by token")


def test_client_certificate(place: Place) -> None:
    certificate, key = place.client
    options = place.over_tls(tls_cert=certificate, tls_key=key)
    commit_at(place.tls_address, options, b"by certificate")
    assert_read(place.tls_address, options, b"by certificate")
    with open_broker(place.tls_address, **options) as broker, pytest.raises(NotAuthorized):
        broker.writer(DECISIONS)


def test_cluster_with_an_untrusted_certificate_is_rejected(place: Place) -> None:
    options = place.over_tls(token=token("app"), tls_trust=place.stranger, max_unavailable=1.0)
    with pytest.raises(ServiceUnavailable, match="CERTIFICATE_VERIFY_FAILED"):
        open_broker(place.tls_address, **options)
    options["admin_url"] = place.admin  # only the binary port can refuse it
    with (
        open_broker(place.tls_address, **options) as broker,
        pytest.raises(Error, match=r"did not open a writer|refused to open a writer"),
    ):
        broker.writer("orders")


def test_tasks_of_queries_and_jobs_authenticate(place: Place, spark: Any, tmp_path: Path) -> None:
    """Writes authenticate by certificate, reads by a token file."""
    certificate, key = place.client
    (tmp_path / "token").touch(0o600)
    (tmp_path / "token").write_text(token("reader"))
    common = {"pulsar.admin_url": place.tls_admin, "pulsar.tls_trust": place.trust}
    writer = {**common, "pulsar.tls_cert": certificate, "pulsar.tls_key": key}
    reader = {**common, "pulsar.token_file": str(tmp_path / "token")}
    first = spark.range(2).selectExpr("CAST(id AS STRING) key", "'by query' value").coalesce(1)
    first.write.format("txnbuffer").mode("append").options(broker=place.tls_address, topic="orders", **writer).save()
    options = reading_options(place.tls_address, ("orders",), None, reader)
    table = ExportDirectory(str(tmp_path / "table"), VERSIONS)
    with table.locked():
        assert Export(spark, options, table, on_progress=lambda _: None).run() is not None
    found = spark.read.parquet(table.table).where("CAST(value AS STRING) = 'by query'")
    assertDataFrameEqual(found.selectExpr("CAST(key AS STRING)", "CAST(value AS STRING)"), first)


class Issuer(BaseHTTPRequestHandler):
    """Issues a token of role `app` for the right secret."""

    def do_GET(self) -> None:
        self.answer({"token_endpoint": f"http://127.0.0.1:{self.server.server_address[1]}/token"})

    def do_POST(self) -> None:
        form = urllib.parse.parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())
        if form["client_secret"] == ["right"] and form["grant_type"] == ["client_credentials"]:
            self.answer({"access_token": token("app"), "expires_in": 3600, "token_type": "Bearer"})
        else:
            self.send_error(401)

    def answer(self, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def issuer() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Issuer) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        serving.join()


def test_oauth2_issuer(place: Place, issuer: str, tmp_path: Path) -> None:
    """The client library and the REST client each fetch a token."""
    secret = {"client_id": "me", "client_secret": "right", "issuer_url": issuer, "type": "client_credentials"}
    (tmp_path / "secret.json").touch(0o600)
    (tmp_path / "secret.json").write_text(json.dumps(secret))
    oauth2 = {"issuer_url": issuer, "private_key": f"file://{tmp_path}/secret.json", "audience": "cluster"}
    options = place.over_tls(oauth2=oauth2)
    commit_at(place.tls_address, options, b"by issuer")
    assert_read(place.tls_address, options, b"by issuer")
    (tmp_path / "secret.json").write_text(json.dumps({**secret, "client_secret": "wrong"}))
    with pytest.raises(NotAuthorized, match="refuses a token"):
        open_broker(place.tls_address, **options)
