"""Comparing data frames in tests.

Spark's own `assertDataFrameEqual` imports what the pandas of the lock no longer has.
"""

from __future__ import annotations

from typing import Any


def assert_frames_equal(actual: Any, expected: Any) -> None:
    """The same schema and the same rows, in whatever order."""
    from pyspark.testing import assertSchemaEqual

    assertSchemaEqual(actual.schema, expected.schema, ignoreNullable=True)
    assert sorted(map(repr, actual.collect())) == sorted(map(repr, expected.collect()))
