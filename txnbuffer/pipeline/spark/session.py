"""A Spark session with the data source `txnbuffer`, whose Python tasks run on the current interpreter"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

from txnbuffer.pipeline.spark.source import register

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PARTITIONS = 8
"""Default number of tasks after a shuffle: Spark's 200 are too many for one machine."""


def open_session(
    master: str | None = "local[*]", name: str = "txnbuffer", settings: Mapping[str, str] | None = None
) -> SparkSession:
    """The session of this process, or a new one with these Spark settings; without `master` they contain it."""
    from pyspark.sql import SparkSession

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
