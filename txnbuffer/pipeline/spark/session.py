"""A Spark session with the data source `txnbuffer`, whose Python tasks run on the current interpreter"""

from __future__ import annotations

import os
import re
import struct
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING
from urllib.parse import urlsplit
from urllib.request import getproxies

from broker_io.environment import current
from broker_io.errors import ServiceUnavailable
from txnbuffer.errors import InvalidRequest
from txnbuffer.pipeline.spark.source import register

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PARTITIONS = 8
"""Default number of tasks after a shuffle: Spark's 200 are too many for one machine."""

PROBE_SECONDS = 5.0
"""Seconds to wait for a connection to a master, and for the answer of a standalone one."""

_STANDALONE, _KUBERNETES = "spark://", "k8s://"
_FILE = b"/files/none\r\n\r\n"
_STREAM_REQUEST = struct.pack(">QBI", 13 + len(_FILE), 6, len(_FILE)) + _FILE
"""A request of Spark's protocol for a file that a master does not have; web servers answer it too, with a text.

It is length of the frame, type, length of the name, name. An answer begins with the length of its frame, 8 bytes.
"""
_MASTER = re.compile(
    r"local(\[(\*|[1-9]\d*)(\s*,\s*[1-9]\d*)?\])?|local-cluster\[\d+\s*,\s*\d+\s*,\s*\d+\]|yarn|[a-z][a-z0-9]*://.+"
)
"""Masters of Spark, and the URLs of other cluster managers."""


def check_master(master: str) -> None:
    """Check a master before a JVM starts: Spark would try for a minute to reach a standalone one.

    Raises InvalidRequest if the text is no master, ServiceUnavailable if none of its hosts answers.
    """
    if master == "yarn" and not (os.environ.get("HADOOP_CONF_DIR") or os.environ.get("YARN_CONF_DIR")):
        raise InvalidRequest("master 'yarn' requires the configuration of the cluster: set HADOOP_CONF_DIR")
    if master.startswith("mesos:"):
        raise InvalidRequest(f"master {master!r} is invalid: Spark has no Mesos support any more")
    if master.startswith(_KUBERNETES):
        _check_kubernetes(master)
    if not _MASTER.fullmatch(master):
        raise InvalidRequest(
            f"master {master!r} is invalid: write local[*], local[N], spark://HOST:PORT, yarn or k8s://…"
        )
    if not master.startswith(_STANDALONE):
        return
    missing = []
    for place in master.removeprefix(_STANDALONE).split(","):
        host, _, port = place.rpartition(":")
        if not (host and port.isascii() and port.isdigit() and 0 < int(port) < 65536):
            raise InvalidRequest(f"master {master!r} is invalid: write spark://HOST:PORT, usually with port 7077")
        try:
            answer = current().network.ask(host.strip("[]"), int(port), _STREAM_REQUEST, PROBE_SECONDS)
        except OSError as error:
            missing.append(f"{place} ({error})")
        else:
            if not answer or answer[0] == 0:  # the first byte of a length
                return
            missing.append(f"{place} (it answers, but with another protocol)")
    raise ServiceUnavailable(
        f"no Spark master answers at {', '.join(missing)}: check the host and the port, and that it is running"
    )


def _check_kubernetes(master: str) -> None:
    """Raises InvalidRequest, and ServiceUnavailable if the API server does not accept connections."""
    url = master.removeprefix(_KUBERNETES)
    try:
        parts = urlsplit(url if "://" in url else f"https://{url}")
        host, port = parts.hostname, parts.port or (80 if parts.scheme == "http" else 443)
    except ValueError:
        host = None
    if not host:
        raise InvalidRequest(f"master {master!r} is invalid: write k8s://https://HOST:PORT")
    if getproxies().get("https"):
        return  # Spark may reach it through the proxy only
    try:
        current().network.probe(host, port, PROBE_SECONDS)
    except OSError as error:
        raise ServiceUnavailable(
            f"no Kubernetes API server answers at {url} ({error}): check the host and the port, and that it is running"
        ) from None


def open_session(
    master: str | None = "local[*]", name: str = "txnbuffer", settings: Mapping[str, str] | None = None
) -> SparkSession:
    """The session of this process, or a new one with these Spark settings; without `master` they contain it.

    Raises as `check_master`.
    """
    from pyspark.sql import SparkSession

    wanted = (settings or {}).get("spark.master", master)
    if wanted is not None:
        check_master(wanted)
    for variable in ("PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON"):
        os.environ.setdefault(variable, sys.executable)  # another interpreter may lack this package
    if master is not None and master.startswith("local"):
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")  # its host name may not resolve
    builder = SparkSession.builder.appName(name)
    if master is not None:
        builder = builder.master(master)
    usual = {
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.shuffle.partitions": str(PARTITIONS),
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
    }
    for key, value in {**usual, **(settings or {})}.items():
        builder = builder.config(key, value)
    session = builder.getOrCreate()
    register(session)
    return session
