"""What may be done with which permissions, as `docs/operating.md` says, on a broker that asks who one is."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from pulsar_cluster import Cluster
from service_process import ServiceProcess

from broker_io import open_broker
from broker_io.errors import NotAuthorized
from broker_io.port import Broker
from broker_io.testing.standalone import Standalone, ask
from snapshots.keys import SNAPSHOT_TOPIC
from txnbuffer import CommittedReader, connect
from txnbuffer.coordinator.entries import TOPIC as DECISIONS

SECRET = bytes(range(32))
TENANT = "acme"
NAMESPACE = f"{TENANT}/shop"
SUPER = "super"  # also whoever has no token, so that tests set up without one
SECONDS = 120.0


def token(role: str) -> str:
    """A JSON Web Token that says who one is."""
    parts = [b'{"alg":"HS256"}', json.dumps({"sub": role}).encode()]
    text = b".".join(map(encoded, parts))
    return (text + b"." + encoded(hmac.new(SECRET, text, hashlib.sha256).digest())).decode()


def encoded(data: bytes) -> bytes:
    return base64.urlsafe_b64encode(data).rstrip(b"=")


SETTINGS = [
    "authenticationEnabled=true",
    "authorizationEnabled=true",
    "authenticationProviders=org.apache.pulsar.broker.authentication.AuthenticationProviderToken",
    f"tokenSecretKey=data:;base64,{base64.b64encode(SECRET).decode()}",
    f"superUserRoles={SUPER}",
    f"anonymousUserRole={SUPER}",
    "brokerClientAuthenticationPlugin=org.apache.pulsar.client.impl.auth.AuthenticationToken",
    f"brokerClientAuthenticationParameters=token:{token(SUPER)}",
]


class Place(NamedTuple):
    """The namespace, with a service that runs as an administrator of its tenant and made topic `orders`."""

    address: str
    admin: str
    service: ServiceProcess

    def options(self, role: str) -> dict[str, Any]:
        return {"admin_url": self.admin, "token": token(role), "patience": SECONDS}

    def open(self, role: str) -> Broker:
        return open_broker(self.address, **self.options(role))


@pytest.fixture(scope="module")
def place(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    with cluster.private_standalone(SETTINGS) as broker:
        grant(broker)
        address = f"{broker.url}/{NAMESPACE}"
        file = tmp_path_factory.mktemp("tokens") / "service"
        file.write_text(token("service"))
        with ServiceProcess(address, "--admin-url", broker.admin, "--token-file", str(file)) as service:
            made = Place(address, broker.admin, service)
            commit(made, "app", b"1")
            yield made


def grant(broker: Standalone) -> None:
    """The table of permissions."""
    clusters = ask(broker.admin, "clusters")
    ask(broker.admin, f"tenants/{TENANT}", "PUT", {"adminRoles": ["service"], "allowedClusters": clusters})
    ask(broker.admin, f"namespaces/{NAMESPACE}", "PUT", {})
    for role in ("app", "reader"):
        ask(broker.admin, f"namespaces/{NAMESPACE}/permissions/{role}", "POST", ["consume"])
    ask(broker.admin, f"persistent/{NAMESPACE}/orders", "PUT", {})  # a topic that is not there can't be granted
    ask(broker.admin, f"persistent/{NAMESPACE}/orders/permissions/app", "POST", ["produce"])
    ask(broker.admin, f"namespaces/{NAMESPACE}/permissions/subscription/__txnbuffer", "POST", ["service"])


def commit(place: Place, role: str, value: bytes) -> None:
    with connect(place.address, broker_options=place.options(role)) as client, client.transaction() as txn:
        txn.send("orders", value)
        txn.commit(wait_visible=True)


def test_an_application_needs_to_consume_the_namespace_and_to_produce_to_its_topics(place: Place) -> None:
    with place.open("app") as broker, CommittedReader(broker, "orders") as reader:
        batch = reader.read(timeout=SECONDS)
        assert batch is not None
        assert next(iter(batch)).value == b"1"


def test_a_reader_needs_to_consume_the_namespace(place: Place) -> None:
    with place.open("reader") as broker:
        with CommittedReader(broker, "orders") as reader:
            assert reader.read(timeout=SECONDS) is not None
        with pytest.raises(NotAuthorized, match="may not open a writer of topic 'orders'"):
            broker.writer("orders")


def test_applications_write_to_none_of_our_topics(place: Place) -> None:
    with place.open("app") as broker:
        for topic in (DECISIONS, SNAPSHOT_TOPIC):
            with pytest.raises(NotAuthorized):
                broker.writer(topic)
            with pytest.raises(NotAuthorized):
                broker.writer(topic, exclusive=True)
    assert place.service.process.poll() is None


def test_applications_cannot_take_away_what_holds_the_data(place: Place) -> None:
    url = f"persistent/{NAMESPACE}/orders/subscription/__txnbuffer"
    with place.open("app") as broker:
        assert broker.last_position("orders") is not None
    request = urllib.request.Request(f"{place.admin}/admin/v2/{url}", method="DELETE")
    request.add_header("Authorization", f"Bearer {token('app')}")
    with pytest.raises(urllib.error.HTTPError, match=r"40[13]"):
        urllib.request.urlopen(request, timeout=30.0)


def test_a_service_has_to_be_an_administrator_of_the_tenant(place: Place, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(token("app"))
    process = ServiceProcess(place.address, "--admin-url", place.admin, "--token-file", str(file))
    assert process.finish(SECONDS) == NotAuthorized("").exit_code
    assert "give credentials that may do this" in "".join(process.lines)
    commit(place, "app", b"2")


def test_who_may_nothing_is_told_so_at_once(place: Place) -> None:
    with pytest.raises(NotAuthorized, match="give credentials that may do this"):
        place.open("stranger")
