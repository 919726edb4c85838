"""The Spark session shared by all tests of a process, started by the first one that uses it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

QUICK_START = {
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Xshare:auto",
    "spark.driver.memory": "1g",
    "spark.executorEnv.PYTHONPATH": str(Path(__file__).parent),
    "spark.network.timeout": "600s",
    "spark.python.authenticate.socketTimeout": "600s",
    "spark.python.daemon.module": "spark_daemon",
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.shuffle.partitions": "2",
}
"""Options for little data, for which compilation does not pay, and for busy machines."""

SECONDS = 900
"""Default timeout of a test on Spark, in seconds; the first one also waits for the JVM."""


SOCKETS = pytest.mark.filterwarnings("ignore:Exception ignored in. <socket:pytest.PytestUnraisableExceptionWarning")
"""PySpark leaves closing the sockets of results to the garbage collector."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "spark" in getattr(item, "fixturenames", ()):
            item.add_marker(SOCKETS)
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(SECONDS))


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from txnbuffer.pipeline.spark.session import open_session

    settings = {**QUICK_START, "spark.sql.warehouse.dir": str(tmp_path_factory.mktemp("warehouse"))}
    session = open_session("local[2,3]", settings=settings)
    session.sparkContext.setLogLevel("OFF")
    yield session
    session.stop()
