"""Addresses of clusters, and how topics are named there.

A topic of the port is the persistent topic of the same name in the namespace, except that Pulsar takes `/` for its
own: it is written `=2F` there. `=` is written `=3D` where `2F`, `3D` or `2E` follow it, and the names `.` and `..`
as `=2E` and `=2E=2E`. A topic of the namespace whose name is written by these rules by no name is not listed.
"""

from __future__ import annotations

import re
from typing import NamedTuple
from urllib.parse import quote

from broker_io.errors import InvalidAddress

DEFAULT_NAMESPACE = "public/default"
ADMIN_PORTS = {"pulsar": ("http", 8080), "pulsar+ssl": ("https", 8443)}

_HOST = r"(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):(\d{1,5})"
_ADDRESS = re.compile(rf"(pulsar(?:\+ssl)?)://({_HOST}(?:,{_HOST})*)(?:/([\w.=:-]+)/([\w.=:-]+))?/?", re.ASCII)
_ESCAPE = {"/": "=2F", "=": "=3D"}


class ClusterAddress(NamedTuple):
    """`service` is what clients connect to, `admin` the default address of the REST interface."""

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
            f"{address!r} is no address of a cluster: write pulsar://HOST:PORT/TENANT/NAMESPACE, or pulsar+ssl://…"
        )
    scheme = found[1]
    protocol, port = ADMIN_PORTS[scheme]
    namespace = f"{found[5]}/{found[6]}" if found[5] else DEFAULT_NAMESPACE
    admin = f"{protocol}://{hosts[0].rpartition(':')[0]}:{port}"
    return ClusterAddress(f"{scheme}://{found[2]}", admin, namespace, scheme == "pulsar+ssl")


def to_local_name(topic: str) -> str:
    """What a topic of the port is called in its namespace."""
    if topic in (".", ".."):
        return topic.replace(".", "=2E")
    return re.sub(r"/|=(?=2F|3D|2E)", lambda found: _ESCAPE[found[0]], topic)


def from_local_name(name: str) -> str | None:
    """The topic of the port that is called so in its namespace; None if there is none."""
    topic = re.sub(r"=(2F|3D|2E)", lambda found: bytes.fromhex(found[1]).decode(), name)
    return topic if to_local_name(topic) == name else None


def path_of(namespace: str, topic: str) -> str:
    """The path of a topic in the REST interface."""
    return f"persistent/{namespace}/{quote(to_local_name(topic), safe='')}"


def url_of(namespace: str, topic: str) -> str:
    """The name of a topic for clients."""
    return f"persistent://{namespace}/{to_local_name(topic)}"
