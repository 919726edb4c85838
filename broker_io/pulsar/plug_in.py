"""The plug-in of a cluster's brokers, as the REST interface shows it

A broker with the plug-in lists one more name among its dynamic settings, once it has loaded a topic:

    txnbuffer.plugin:version=0.3.0,protocol=1,end=2,part=1

It has the version of the plug-in, and the newest version of each format that it reads: of the log protocol, and of the
entries of snapshots by their kind. Other names may follow.

The state of a topic is among its stats, as properties of the subscription `__txnbuffer`; see docs/plain-consumers.md.
"""

from __future__ import annotations

import contextlib
import re
from typing import Any

from broker_io.errors import ClusterRefused, ServiceUnavailable
from broker_io.port import PLUG_IN_SETTINGS, BrokerPlugIn
from broker_io.pulsar.admin import AdminClient
from broker_io.pulsar.answers import mapping, texts
from broker_io.pulsar.ledgers import SUBSCRIPTION

ANNOUNCED = re.compile(r"txnbuffer\.plugin:version=([^,]+)((?:,[\w.-]+=[\w.-]+)*)")
PREFIX = "txnbuffer."
STATES = ("state", "readable", "transaction", "first", "reason")
"""The names of what the plug-in says of a topic, after PREFIX."""


def plug_ins_of(admin: AdminClient) -> list[BrokerPlugIn]:
    """All active brokers. Raises NotAuthorized for credentials that are not those of a superuser."""
    scheme = admin.url.partition("://")[0]
    return [_asked(admin.at(f"{scheme}://{address}"), address) for address in sorted(admin.query("brokers", texts))]


def _asked(broker: AdminClient, address: str) -> BrokerPlugIn:
    """Ask a broker once: one that starts or ends must not delay the answers of the others."""
    with contextlib.closing(broker):
        try:
            version = str(broker.ask("GET", "brokers/version", retry=False))
            settings = broker.query("brokers/configuration/runtime", mapping, retry=False)
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


def topic_state(stats: Any) -> dict[str, str]:
    """What the plug-in says of a topic in its stats; empty without the plug-in."""
    subscription = mapping(mapping(mapping(stats).get("subscriptions")).get(SUBSCRIPTION))
    properties = mapping(subscription.get("subscriptionProperties"))
    found = {name: properties.get(PREFIX + name) for name in STATES}
    return {name: str(value) for name, value in found.items() if value is not None}
