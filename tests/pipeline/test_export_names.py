"""An export reads its own files, whatever its directory is called and whatever else stands beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from delta_tables import ROWS, expected, export

from broker_io.errors import InvalidAddress
from txnbuffer.pipeline.delta import DELTA, PARQUET, find, target
from txnbuffer.pipeline.exports import LATEST, VERSIONS

NAMES = {"x{1,2}*?": "x1ab", "c d#e:f,g=h": "c"}
"""Names of directories, and of ones beside them that they match as patterns."""
PARQUET_NAMES = {**NAMES, "x[12]": "x1", "a\\b": "ab", "c%20d": "c d"}


@pytest.mark.parametrize("form", [PARQUET, DELTA])
@pytest.mark.parametrize("kind", [VERSIONS, LATEST])
def test_a_directory_is_read_by_its_name_whatever_that_is(spark: Any, kind: str, form: str, tmp_path: Path) -> None:
    for name, beside in (PARQUET_NAMES if form == PARQUET else NAMES).items():
        for path, rows in ((name, ROWS), (beside, ROWS + 1)):
            for _ in range(2):
                export(target(str(tmp_path / path), kind, form), rows)
        found = find(str(tmp_path / name))
        with found.reading() as run:
            assert run is not None
            values = [int(row.value) for row in found.frame(spark, run).select("value").collect()]
        assert sorted(values) == expected(kind, 2)


@pytest.mark.parametrize("name", ["x[12]", "x]", "a\\b", "a%20b", "a|b", "a^b", "a\nb", "a\udc80b"])
def test_a_name_that_delta_cannot_have_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidAddress, match="export to a directory without"):
        target(str(tmp_path / name), VERSIONS, DELTA)
