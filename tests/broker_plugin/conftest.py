"""The JVM with the rules of the broker plug-in, which all tests of them share."""

from collections.abc import Iterator

import pytest
from java_rules import JavaRules


@pytest.fixture(scope="session")
def java() -> Iterator[JavaRules]:
    process = JavaRules()
    yield process
    process.close()
