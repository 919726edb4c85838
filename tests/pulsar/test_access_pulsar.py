"""Access control on a cluster with authorization: one token serves for the cluster and the service."""

from __future__ import annotations

import asyncio
import base64
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from access_table import Cell, table
from access_world import POLICY
from certificates import openssl
from joserfc import jwt
from joserfc.jwk import RSAKey
from pulsar_cluster import Cluster
from service_process import ServiceProcess

from broker_io.errors import CallerError, LimitExceeded, NotAuthorized, Unauthenticated
from broker_io.standalone import ask
from txnbuffer import connect
from txnbuffer.access.policy import Action, ResourceKind, parse_policy
from txnbuffer.cli.admin_client import ServiceAddress, call
from txnbuffer.client.connection import PendingConnection
from txnbuffer.rpc.service_access import ServiceAccess

SUPER = "super"
TENANT = "acme"
NAMESPACE = f"{TENANT}/access"
PROVIDER = "org.apache.pulsar.broker.authentication.AuthenticationProviderToken"
SECONDS = 120.0
LIMITED = """
[[allow]]
principals = ["slow"]
roles = ["read", "write"]
topics = ["a*"]

[[limit]]
principals = ["slow"]
requests_per_second = 2
"""
PRINCIPALS = ("writer", "processor", "root")
NAMES = {ResourceKind.TOPIC: ("a", "b"), ResourceKind.PRODUCER: ("w-1", "x"), ResourceKind.GROUP: ("g-1", "x")}


class GuardedCluster(NamedTuple):
    """A namespace in which each principal may produce and consume, and its service, which has a policy."""

    address: str
    admin: str
    key: RSAKey
    service: ServiceProcess

    def token(self, name: str, **claims: Any) -> str:
        return signed(self.key, name, **claims)

    def connect(self, name: str, **more: Any) -> PendingConnection:
        """A client with one token, that of the cluster."""
        options = {"admin_url": self.admin, "token": self.token(name), "max_unavailable": SECONDS}
        return connect(self.address, broker_options=options, max_unavailable=SECONDS, **more)


def signed(key: RSAKey, name: str, **claims: Any) -> str:
    return jwt.encode({"alg": "RS256"}, {"sub": name, **claims}, key, algorithms=["RS256"])


@pytest.fixture(scope="module")
def guarded(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GuardedCluster]:
    directory, key = tmp_path_factory.mktemp("access"), RSAKey.generate_key(2048)
    public = directory / "public.der"
    (directory / "public.pem").write_bytes(key.as_pem(private=False))
    openssl("pkey", "-pubin", "-in", directory / "public.pem", "-outform", "DER", "-out", public)
    settings = [
        "authenticationEnabled=true",
        "authorizationEnabled=true",
        f"authenticationProviders={PROVIDER}",
        f"tokenPublicKey=data:;base64,{base64.b64encode(public.read_bytes()).decode()}",
        f"superUserRoles={SUPER}",
        f"anonymousUserRole={SUPER}",
        "brokerClientAuthenticationPlugin=org.apache.pulsar.client.impl.auth.AuthenticationToken",
        f"brokerClientAuthenticationParameters=token:{signed(key, SUPER)}",
    ]
    with cluster.private_standalone(settings) as broker:
        clusters = ask(broker.admin, "clusters")
        ask(broker.admin, f"tenants/{TENANT}", "PUT", {"adminRoles": ["service"], "allowedClusters": clusters})
        ask(broker.admin, f"namespaces/{NAMESPACE}", "PUT", {})
        for name in (*PRINCIPALS, "slow", "stranger"):
            ask(broker.admin, f"namespaces/{NAMESPACE}/permissions/{name}", "POST", ["produce", "consume"])
        for topic in NAMES[ResourceKind.TOPIC]:
            ask(broker.admin, f"persistent/{NAMESPACE}/{topic}", "PUT", {})
        (directory / "policy.toml").write_text(POLICY + LIMITED)
        (directory / "policy.toml").chmod(0o644)
        (directory / "token").write_text(signed(key, "service"))
        (directory / "token").chmod(0o600)
        config = directory / "service.toml"
        pulsar = {"admin_url": broker.admin, "token_file": str(directory / "token")}
        access = {"policy": str(directory / "policy.toml"), "jwt_key": str(public)}
        sections = {"pulsar": pulsar, "access": access}
        config.write_text("\n".join(
            line for name, values in sections.items()
            for line in (f"[{name}]", *(f"{key} = {json.dumps(text)}" for key, text in values.items()))
        ))  # fmt: skip
        address = f"{broker.url}/{NAMESPACE}"
        with ServiceProcess(address, "--config", str(config)) as service:
            service.wait_serving()
            yield GuardedCluster(address, broker.admin, key, service)


async def denied(guarded: GuardedCluster, cell: Cell) -> bool:
    """Whether the service denies an attempt of a principal, whom the cluster allows it."""
    kind, name = cell.resource
    try:
        match cell.action, kind:
            case Action.WRITE, ResourceKind.TOPIC:
                async with guarded.connect(cell.principal) as client, client.transaction() as txn:
                    await txn.send(name, b"v")
            case Action.READ, ResourceKind.TOPIC:
                async with guarded.connect(cell.principal) as client, client.stream(name, to="now") as stream:
                    [batch async for batch in stream]
            case Action.USE, ResourceKind.PRODUCER:
                async with guarded.connect(cell.principal) as client:
                    await client.delete_name(name)
            case Action.JOIN, ResourceKind.GROUP:
                async with guarded.connect(cell.principal) as client:
                    await client.join(name)
            case Action.OPERATE, ResourceKind.TOPIC:
                await asking(guarded, cell.principal, "AddCursor", topic=name, cursor="c")
            case Action.OPERATE, ResourceKind.GROUP:
                await asking(guarded, cell.principal, "ForgetGroup", group=name)
            case Action.OPERATE, ResourceKind.SERVICE:
                await asking(guarded, cell.principal, "Sessions")
            case Action.OBSERVE, ResourceKind.SERVICE:
                await asking(guarded, cell.principal, "Status")
    except NotAuthorized:
        return True
    except CallerError:  # it comes after the check
        return False
    return False


async def asking(guarded: GuardedCluster, principal: str, request: str, **arguments: Any) -> Any:
    service = ServiceAddress(f"127.0.0.1:{guarded.service.port}", ServiceAccess(token=guarded.token(principal)))
    return await asyncio.to_thread(call, service, request, **arguments)


def test_each_cell_of_the_policy_holds_on_a_cluster(guarded: GuardedCluster) -> None:
    cells = table(parse_policy(POLICY, "policy"), PRINCIPALS, NAMES)

    async def wrong() -> list[str]:
        async with guarded.connect("root") as client:
            for topic in NAMES[ResourceKind.TOPIC]:
                async with client.transaction() as txn:
                    await txn.send(topic, b"v")
        return [str(cell) for cell in cells if await denied(guarded, cell) is cell.allowed]

    assert {cell.allowed for cell in cells} == {True, False}
    assert asyncio.run(wrong()) == []


def test_a_principal_of_the_cluster_that_no_rule_names_is_refused(guarded: GuardedCluster) -> None:
    with (
        pytest.raises(NotAuthorized, match="no rule of the policy names 'stranger'"),
        guarded.connect("stranger") as client,
        client.transaction() as txn,
    ):
        txn.send("a", b"v")


@pytest.mark.parametrize("forged", ["other key", "expired", "none", "nothing"])
def test_token_that_the_cluster_would_not_accept_either_is_refused(guarded: GuardedCluster, forged: str) -> None:
    unsigned = ".".join(
        base64.urlsafe_b64encode(json.dumps(part).encode()).rstrip(b"=").decode()
        for part in ({"alg": "none"}, {"sub": "root"})
    )
    token = {
        "other key": signed(RSAKey.generate_key(2048), "root"),
        "expired": guarded.token("root", exp=1_700_000_000),
        "none": unsigned + ".",
        "nothing": None,
    }[forged]
    with pytest.raises(Unauthenticated):
        call(ServiceAddress(f"127.0.0.1:{guarded.service.port}", ServiceAccess(token=token)), "Status")
    guarded.service.wait_event("denied")
    assert Path(f"/proc/{guarded.service.process.pid}/cmdline").read_bytes().count(b"eyJ") == 0


def test_a_limit_refuses_transactions_on_a_cluster_and_loses_nothing(guarded: GuardedCluster) -> None:
    async def run() -> tuple[set[bytes], set[bytes], dict[bytes, int]]:
        committed, refused, limits = set(), set(), set()
        async with guarded.connect("slow") as client:
            for number in range(20):
                value = b"limited-%d" % number
                try:
                    async with client.transaction() as txn:
                        await txn.send("a", value)
                except LimitExceeded as error:
                    limits.add(error.limit)
                    refused.add(value)
                else:
                    committed.add(value)
            last = b"limited-last"
            await client.run(lambda txn: txn.send("a", last))
            found = Counter[bytes]()
            async with await client.reader("a") as reader:
                while not found[last]:
                    batch = await reader.read(timeout=30.0)
                    assert batch is not None
                    found.update(value for value in batch.messages.values if value.startswith(b"limited-"))
        assert limits == {"limits.requests_per_second"}
        return committed | {last}, refused, found

    committed, refused, found = asyncio.run(run())
    assert refused
    assert found == dict.fromkeys(committed, 1)
