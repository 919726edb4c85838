"""The lakehouse has each order once, and reports what was ordered, run after run."""

from __future__ import annotations

import json
import sys

from examples.example_process import Shop


def run(market: Shop) -> None:
    job = market.example("lakehouse.py", LAKE=str(market.directory / "lake"), PYSPARK_PYTHON=sys.executable)
    assert job.wait(600) == 0, market.output


def report(market: Shop, count: int) -> list[tuple[str, int]]:
    return sorted((key, json.loads(value)["count"]) for key, value in market.read("sales", count))


def test_each_run_adds_what_is_new_and_publishes_a_report(market: Shop) -> None:
    market.fill({"orders": {f"order-{n}": {"item": "apples" if n % 2 else "pears", "count": n} for n in range(10)}})
    with market.client() as client, client.transaction() as txn:
        txn.send("orders", '{"item": "stones", "count": 1000}', key="order-x")
        txn.abort()
    run(market)
    assert report(market, 2) == [("apples", 25), ("pears", 20)]
    market.fill({"orders": {"order-10": {"item": "plums", "count": 7}}})
    run(market)
    assert report(market, 5) == [("apples", 25), ("apples", 25), ("pears", 20), ("pears", 20), ("plums", 7)]
