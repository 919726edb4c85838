"""Comparing data frames of Spark with its own assertion."""

from __future__ import annotations

import sys
from typing import Any
from unittest.mock import patch

from pyspark.testing import assertDataFrameEqual


def assert_same_rows(actual: Any, expected: Any, **options: Any) -> None:
    """`assertDataFrameEqual` of two data frames, or lists of rows.

    It looks whether they are pandas' where there is pandas, and fails where that is newer than its own support of it.
    """
    with patch.dict(sys.modules, {"pandas": None}):
        assertDataFrameEqual(actual, expected, **options)
