"""An export reads only its own files, with any name of its directory and any neighbours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from delta_tables import ROWS, expected, export

from broker_io.errors import InvalidAddress
from txnbuffer.pipeline.delta import DELTA, PARQUET, find, target
from txnbuffer.pipeline.exports import LATEST, VERSIONS

NAMES = {"x{1,2}*?": "x1ab", "c d#e:f,g=h": "c"}
"""Names of directories, each with that of another directory that it matches as a pattern."""
PARQUET_NAMES = {**NAMES, "x[12]": "x1", "a\\b": "ab", "c%20d": "c d"}


@pytest.mark.parametrize("form", [PARQUET, DELTA])
@pytest.mark.parametrize("kind", [VERSIONS, LATEST])
def test_a_directory_with_any_name_is_read(spark: Any, kind: str, form: str, tmp_path: Path) -> None:
    for name, neighbour in (PARQUET_NAMES if form == PARQUET else NAMES).items():
        for path, rows in ((name, ROWS), (neighbour, ROWS + 1)):
            for _ in range(2):
                export(target(str(tmp_path / path), kind, form), rows)
        found = find(str(tmp_path / name))
        with found.reading() as run:
            assert run is not None
            values = [int(row.value) for row in found.frame(spark, run).select("value").collect()]
        assert sorted(values) == expected(kind, 2)


@pytest.mark.parametrize("name", ["x[12]", "x]", "a\\b", "a%20b", "a|b", "a^b", "a\nb", "a\udc80b"])
def test_names_that_delta_does_not_allow_are_rejected(name: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidAddress, match="which a Delta table does not allow"):
        target(str(tmp_path / name), VERSIONS, DELTA)
