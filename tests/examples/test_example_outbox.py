"""The outbox publishes each order once, although its publisher is killed again and again."""

from __future__ import annotations

import random
import runpy
import sqlite3
import subprocess
import sys
import time
from contextlib import closing

import pytest
from examples.example_process import EXAMPLES, Shop

KILLS = 4
ORDERS = 30
"""Orders that are placed while a publisher runs."""


def order(market: Shop, item: str, count: str) -> subprocess.CompletedProcess[str]:
    """Place an order with the program."""
    command = [sys.executable, str(EXAMPLES / "outbox.py"), "order", item, count]
    return subprocess.run(
        command, cwd=market.directory, env=market.environment, capture_output=True, text=True, check=False
    )


def test_each_order_is_published_once_by_publishers_that_are_killed(market: Shop) -> None:
    assert order(market, "apples", "3").stdout == "order 1\n"
    place_order = runpy.run_path(str(EXAMPLES / "outbox.py"))["place_order"]
    published, chance = 0, random.Random(1)
    with closing(sqlite3.connect(market.directory / "shop.db", timeout=60)) as database:
        for _ in range(KILLS):
            publisher = market.example("outbox.py", "publish")
            market.wait(lambda before=published: market.output.count("published") > before, publisher)
            for number in range(ORDERS):
                place_order(database, f"item{number % 3}", number)
                time.sleep(chance.uniform(0.0, 0.02))
            publisher.kill()
            publisher.wait()
            published = market.output.count("published")
            place_order(database, "waits", 1)
    total = 1 + KILLS * (ORDERS + 1)
    market.example("outbox.py", "publish")
    orders = market.read("orders", total)
    assert [key for key, _ in orders] == [f"order-{number}" for number in range(1, total + 1)]
    assert orders[:3] == [("order-1", "3 apples"), ("order-2", "0 item0"), ("order-3", "1 item1")]
    changes = [(value.partition(" ")[2], f"-{value.partition(' ')[0]}") for _, value in orders]
    assert market.read("stock", total) == [(item, "0" if count == "-0" else count) for item, count in changes]


@pytest.mark.parametrize("market", ["file"], indirect=True)
def test_an_order_that_the_database_refuses_is_not_published(market: Shop) -> None:
    assert order(market, "apples", "many").returncode == 1
    assert order(market, "apples", "3").stdout == "order 1\n"
    publisher = market.example("outbox.py", "publish")
    market.wait(lambda: "published" in market.output, publisher)
    assert market.read("orders", 1) == [("order-1", "3 apples")]
    market.interrupt(publisher)


@pytest.mark.parametrize("market", ["file"], indirect=True)
def test_another_database_is_not_taken_for_published(market: Shop) -> None:
    for item in ("apples", "pears"):
        order(market, item, "1")
    first = market.example("outbox.py", "publish")
    market.wait(lambda: "published" in market.output, first)
    assert len(market.read("orders", 2)) == 2
    market.interrupt(first)  # it may still delete rows, and its journal would be taken for that of the next database
    (market.directory / "shop.db").unlink()
    assert order(market, "plums", "1").stdout == "order 1\n"
    second = market.example("outbox.py", "publish")
    assert second.wait(120) == 1
    assert "name another producer" in market.output
