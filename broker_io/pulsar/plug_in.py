"""The plug-in of a cluster's brokers, as the REST interface shows it

A broker with the plug-in lists one more name among its dynamic settings, once it has loaded a topic:

    txnbuffer.plugin:version=0.3.0,protocol=1,end=3,part=1

It has the version of the plug-in, and the newest version of each format that it reads: of the log protocol, and of the
entries of snapshots by their kind. Other names may follow.

The state of a topic is among its stats, as properties of the subscription `__txnbuffer`; see docs/plain-consumers.md.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any

from broker_io.errors import CallerError, ClusterRefused, ServiceUnavailable
from broker_io.port import PLUG_IN_LOCK, PLUG_IN_SETTINGS, BrokerPlugIn
from broker_io.pulsar.admin import AdminClient
from broker_io.pulsar.answers import mapping, texts
from broker_io.pulsar.ledgers import SUBSCRIPTION

ANNOUNCED = re.compile(r"txnbuffer\.plugin:version=([^,]+)((?:,[\w.-]+=[\w.-]+)*)")
RUNTIME = "brokers/configuration/runtime"
"""Where a broker shows its settings."""
PREFIX = "txnbuffer."
STATES = ("state", "readable", "transaction", "first", "reason")
"""The names of what the plug-in says of a topic, after PREFIX."""


def plug_ins_of(admin: AdminClient) -> list[BrokerPlugIn]:
    """All active brokers. Raises NotAuthorized for credentials that are not those of a superuser."""
    return [_asked(broker, address) for address, broker in _brokers(admin)]


def _brokers(admin: AdminClient) -> Iterator[tuple[str, AdminClient]]:
    """The address and a client of each active broker."""
    for address in sorted(admin.query("brokers", texts, retry=False)):
        with contextlib.closing(_at(admin, address)) as broker:
            yield address, broker


def _at(admin: AdminClient, address: str) -> AdminClient:
    """A client of a broker at its address; a cluster with TLS lists the port without TLS if it has both."""
    scheme, _, own = admin.url.partition("://")
    broker, port = admin.at(f"{scheme}://{address}"), own.rpartition(":")[2]
    if scheme == "https" and port.isdecimal():
        try:
            broker.ask("GET", "brokers/version", retry=False)
        except ServiceUnavailable:
            broker.close()
            return admin.at(f"https://{address.rpartition(':')[0]}:{port}")
    return broker


def _asked(broker: AdminClient, address: str) -> BrokerPlugIn:
    """Ask a broker once: one that starts or ends must not delay the answers of the others."""
    try:
        version = str(broker.ask("GET", "brokers/version", retry=False))
        settings = broker.query(RUNTIME, mapping, retry=False)
        missing = [f"{name}={value}" for name, value in PLUG_IN_SETTINGS.items() if settings.get(name) != value]
        plug_in, reads = _announced(broker)
    except (ServiceUnavailable, ClusterRefused) as error:
        return BrokerPlugIn(address, "", "", (f"an answer ({error})",), {})
    return BrokerPlugIn(address, version, plug_in, tuple(missing), reads)


def _announced(broker: AdminClient) -> tuple[str, dict[str, int]]:
    """The version of a broker's plug-in, and what it reads; an empty version if it has loaded no topic yet."""
    for name in broker.query("brokers/configuration", texts, retry=False):
        if (found := ANNOUNCED.fullmatch(name)) is not None:
            reads = dict(pair.split("=") for pair in found[2].split(",")[1:])
            return found[1], {name: int(version) for name, version in reads.items() if version.isdecimal()}
    return "", {}


STORAGE = "txnbuffer"
"""The storage class of a locked namespace, which only brokers with the plug-in have."""
PERSISTENCE = {
    "bookkeeperEnsemble": "managedLedgerDefaultEnsembleSize",
    "bookkeeperWriteQuorum": "managedLedgerDefaultWriteQuorum",
    "bookkeeperAckQuorum": "managedLedgerDefaultAckQuorum",
    "managedLedgerMaxMarkDeleteRate": "managedLedgerDefaultMarkDeleteRateLimit",
}
"""The other values of the policy, and the settings of brokers that hold without it."""


def lock(admin: AdminClient, namespace: str, *, locked: bool) -> None:
    """See `PlugInBroker.lock_plug_in`."""
    settings = [(address, broker.query(RUNTIME, mapping)) for address, broker in _brokers(admin)]
    setting, _, storage = PLUG_IN_LOCK.partition("=")
    if locked and (lacking := [address for address, found in settings if found.get(setting) != storage]):
        raise CallerError(
            f"{', '.join(lacking)} can't serve a locked namespace: set {PLUG_IN_LOCK} in broker.conf, and restart it"
        )
    path = f"namespaces/{namespace}/persistence"
    policy = admin.query(path, mapping) or {name: float(settings[0][1][of]) for name, of in PERSISTENCE.items()}
    values = {name: policy[name] for name in PERSISTENCE}
    if locked or policy.get("managedLedgerStorageClassName") == STORAGE:
        admin.ask("POST", path, {**values, "managedLedgerStorageClassName": STORAGE if locked else None})


def topic_state(stats: Any) -> dict[str, str]:
    """What the plug-in says of a topic in its stats; empty without the plug-in."""
    subscription = mapping(mapping(mapping(stats).get("subscriptions")).get(SUBSCRIPTION))
    properties = mapping(subscription.get("subscriptionProperties"))
    found = {name: properties.get(PREFIX + name) for name in STATES}
    return {name: str(value) for name, value in found.items() if value is not None}
