"""The notebook of the docs runs from end to end, in its own kernel and Spark session."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from source_tree import ROOT

NOTEBOOK = ROOT / "docs" / "flights.ipynb"
SETTINGS = {
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Xshare:auto",
    "spark.network.timeout": "600s",
    "spark.python.authenticate.socketTimeout": "600s",
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.shuffle.partitions": "2",
}
"""With little data, compiling takes longer than it saves."""


@pytest.mark.timeout(900)
def test_the_notebook_runs(tmp_path: Path) -> None:
    (tmp_path / "spark-defaults.conf").write_text("".join(f"{name} {text}\n" for name, text in SETTINGS.items()))
    environment = {
        **os.environ,
        "IPYTHONDIR": str(tmp_path / "ipython"),
        "JUPYTER_RUNTIME_DIR": str(tmp_path / "r"),
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "SPARK_CONF_DIR": str(tmp_path),
    }
    result = tmp_path / "result.ipynb"
    command = [sys.executable, str(ROOT / "tests" / "notebook_run.py"), str(NOTEBOOK), str(result)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=880, check=False)
    assert done.returncode == 0, done.stderr
    shown = [output for cell in cells(result) for output in cell.get("outputs", [])]
    assert sum("<svg" in "".join(output.get("data", {}).get("text/html", "")) for output in shown) == 2
    assert not [output for output in shown if output["output_type"] == "error"]


def cells(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(path.read_text())["cells"]
    return found


def test_the_notebook_contains_nothing_of_the_machine_that_wrote_it() -> None:
    for cell in cells(NOTEBOOK):
        assert cell.get("outputs", []) == []
        assert cell.get("execution_count") is None
        assert not cell["metadata"]
