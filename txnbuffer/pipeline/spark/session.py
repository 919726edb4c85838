"""A Spark session with the data source `txnbuffer`, whose Python tasks run on the current interpreter"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

from broker_io.environment import current
from broker_io.errors import ServiceUnavailable
from txnbuffer.errors import InvalidRequest
from txnbuffer.pipeline.spark.source import register

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PARTITIONS = 8
"""Default number of tasks after a shuffle: Spark's 200 are too many for one machine."""

PROBE_SECONDS = 5.0
"""Seconds to wait for a connection to a standalone master."""

_STANDALONE = "spark://"
_MASTER = re.compile(
    r"local(\[(\*|[1-9]\d*)(\s*,\s*[1-9]\d*)?\])?|local-cluster\[\d+\s*,\s*\d+\s*,\s*\d+\]|yarn|[a-z][a-z0-9]*://.+"
)
"""Masters of Spark, and the URLs of other cluster managers."""


def check_master(master: str) -> None:
    """Check a master before a JVM starts: Spark would try for a minute to reach a standalone one.

    Raises InvalidRequest if the text is no master, ServiceUnavailable if none of its hosts answers.
    """
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
            current().network.probe(host.strip("[]"), int(port), PROBE_SECONDS)
        except OSError as error:
            missing.append(f"{place} ({error})")
        else:
            return
    raise ServiceUnavailable(
        f"no Spark master answers at {', '.join(missing)}: check the host and the port, and that it is running"
    )


def open_session(
    master: str | None = "local[*]", name: str = "txnbuffer", settings: Mapping[str, str] | None = None
) -> SparkSession:
    """The session of this process, or a new one with these Spark settings; without `master` they contain it.

    Raises as `check_master`.
    """
    from pyspark.sql import SparkSession

    if wanted := (settings or {}).get("spark.master", master):
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
