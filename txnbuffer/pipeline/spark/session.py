"""A Spark session in which the data source `txnbuffer` is registered and Python tasks run on this interpreter."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

from txnbuffer.pipeline.spark.source import register

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PARTITIONS = 8
"""Tasks behind a shuffle, unless asked otherwise: the usual 200 are many for one machine."""


def open_session(
    master: str | None = "local[*]", name: str = "txnbuffer", settings: Mapping[str, str] | None = None
) -> SparkSession:
    """The session of this process, or a new one; `settings` are Spark's, and `master` None is what they say."""
    from pyspark.sql import SparkSession

    for variable in ("PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON"):
        os.environ.setdefault(variable, sys.executable)  # else tasks run on an interpreter without our packages
    if master is not None and master.startswith("local"):
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")  # one machine needs none of its names
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
