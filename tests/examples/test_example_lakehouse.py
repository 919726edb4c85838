"""The lakehouse has each order once, and reports what was ordered, run after run."""

from __future__ import annotations

import json
import runpy
import sys
from typing import TYPE_CHECKING

import pytest
from examples.example_process import EXAMPLES, Shop

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.mark.parametrize("market", ["cluster"], indirect=True)
def test_the_program_runs(market: Shop) -> None:
    market.fill({"orders": {"order-1": {"item": "apples", "count": 3}}})
    job = market.example("lakehouse.py", LAKE=str(market.directory / "lake"), PYSPARK_PYTHON=sys.executable)
    assert job.wait(600) == 0, market.output
    assert report(market, 1) == [("apples", 3)]


def run(market: Shop, spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the functions of the program in the session that tests share: starting one takes longer than all they do."""
    monkeypatch.setenv("LAKE", str(market.directory / "lake"))
    monkeypatch.setenv("TXNBUFFER_ADDRESS", market.address)
    program = runpy.run_path(str(EXAMPLES / "lakehouse.py"))
    program["ingest"](spark)
    program["publish"](program["sales"](spark))


def report(market: Shop, count: int) -> list[tuple[str, int]]:
    return sorted((key, json.loads(value)["count"]) for key, value in market.read("sales", count))


@pytest.mark.parametrize("market", ["file", "service"], indirect=True)
def test_each_run_adds_what_is_new_and_publishes_a_report(
    market: Shop, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    market.fill({"orders": {f"order-{n}": {"item": "apples" if n % 2 else "pears", "count": n} for n in range(10)}})
    with market.client() as client, client.transaction() as txn:
        txn.send("orders", '{"item": "stones", "count": 1000}', key="order-x")
        txn.abort()
    run(market, spark, monkeypatch)
    assert report(market, 2) == [("apples", 25), ("pears", 20)]
    market.fill({"orders": {"order-10": {"item": "plums", "count": 7}}})
    run(market, spark, monkeypatch)
    assert report(market, 5) == [("apples", 25), ("apples", 25), ("pears", 20), ("pears", 20), ("plums", 7)]
