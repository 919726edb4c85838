"""One Spark session for all tests of a process that need one: started by the first of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

QUICK_START = {
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Xshare:auto",
    "spark.driver.memory": "1g",
    "spark.network.timeout": "600s",
    "spark.python.authenticate.socketTimeout": "600s",
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.shuffle.partitions": "2",
}
"""Little data is done before compilers are; a busy machine may take its time."""

SECONDS = 900
"""A test on Spark has that long, unless it says otherwise: the first one waits for a JVM beside whatever else runs."""


SOCKETS = pytest.mark.filterwarnings("ignore:Exception ignored in. <socket:pytest.PytestUnraisableExceptionWarning")
"""PySpark leaves the sockets over which results come to the garbage collector."""


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
