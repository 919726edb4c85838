"""Three programs as a new user writes them: killed at random, together with their service, they equal a model.

`programs/shop.py` takes orders over HTTP into a database and publishes them, `programs/invoicing.py` makes an invoice
of each, and `programs/analyst.py` reports what each item earned.
"""

from __future__ import annotations

import json
import os
import random
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx2
import pytest
from service_process import kept_port
from source_tree import ROOT

from txnbuffer import TopicNotFound, connect
from txnbuffer.testing import ServiceProcess

PROGRAMS = ROOT / "tests" / "users" / "programs"
LINES = 60
"""Most lines of a program, without blank ones."""
FULL = os.environ.get("SOAK") == "full"
SEEDS = range(20 if FULL else 2)
ORDERS, KILLS = (200, 20) if FULL else (40, 6)
SECONDS = 240.0
"""Within which the programs must do what a test waits for, on a busy machine."""
PRICES = {"apples": 120, "pears": 80, "plums": 50}


class Town:
    """The three programs on one service; `directory` has the database, the report and what the programs print."""

    def __init__(self, service: ServiceProcess, directory: Path) -> None:
        self.service, self.directory, self.port = service, directory, kept_port()
        uvicorn = ["-m", "uvicorn", "--app-dir", str(PROGRAMS), "--port", str(self.port), "shop:app"]
        rest = {name: [str(PROGRAMS / f"{name}.py")] for name in ("invoicing", "analyst")}
        self.commands = {"shop": uvicorn, **rest}
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self.http = httpx2.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=SECONDS)

    def tend(self) -> None:
        """Start each program that has ended, as a service manager does."""
        variables = {
            "TXNBUFFER_ADDRESS": self.service.address,
            "DATABASE": str(self.directory / "shop.db"),
            "REPORT": str(self.directory / "report.json"),
            "PYTHONPATH": str(ROOT),
        }
        for name, command in self.commands.items():
            if name not in self.running or self.running[name].poll() is not None:
                with (self.directory / "output").open("ab") as output:
                    self.running[name] = subprocess.Popen(
                        [sys.executable, *command], env={**os.environ, **variables}, stdout=output, stderr=output
                    )

    def kill(self, name: str) -> None:
        if name == "service":
            self.service.kill()
            self.service.start()
        else:
            self.running[name].kill()
            self.running[name].wait()

    def end(self) -> None:
        self.http.close()
        for name in self.running:
            self.kill(name)

    def wait(self, condition: Callable[[], bool]) -> None:
        """Wait for a condition while the programs run."""
        deadline = time.monotonic() + SECONDS
        while not condition():
            assert time.monotonic() < deadline, (self.directory / "output").read_text()
            self.tend()
            time.sleep(0.05)

    def place(self, number: int, item: str, count: int) -> bool:
        try:
            answer = self.http.put(f"/orders/{number}", params={"item": item, "count": count})
        except httpx2.TransportError:
            return False
        return answer.status_code == 200

    def report(self) -> dict[str, dict[str, int]]:
        """The report of each item; empty before the first one."""
        whole = self.directory / "report.json"
        rows = [json.loads(line) for line in whole.read_text().splitlines()] if whole.exists() else []
        assert all(row["orders"] == row["numbers"] for row in rows), rows  # each order once, at any moment
        return {row.pop("item"): row for row in rows}

    def read(self, topic: str) -> list[tuple[str, Any]]:
        """What the topic has now: keys and values."""
        try:
            with connect(self.service.address) as client, client.reader(topic, until="now") as reader:
                return [((one.key or b"").decode(), json.loads(one.value)) for one in reader.records()]
        except TopicNotFound:
            return []


@pytest.fixture
def town(txnbuf_service: ServiceProcess, tmp_path: Path) -> Iterator[Town]:
    opened = Town(txnbuf_service, tmp_path)
    yield opened
    opened.end()


@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", SEEDS)
def test_programs_that_are_killed_equal_their_model(town: Town, seed: int) -> None:
    chance = random.Random(seed)
    orders = {n: (chance.choice([*PRICES]), chance.randrange(1, 10)) for n in range(ORDERS)}
    kills = Counter(chance.choices(range(ORDERS), k=KILLS))
    with connect(town.service.address) as client, client.transaction() as txn:
        for item, cents in PRICES.items():
            txn.send("prices", str(cents), key=item)
    town.tend()
    for number, (item, count) in orders.items():
        town.wait(lambda number=number, item=item, count=count: town.place(number, item, count))
        for _ in range(kills[number]):
            time.sleep(chance.uniform(0.0, 0.1))  # within it the shop publishes the order
            town.kill(chance.choice(["shop", "shop", "invoicing", "analyst", "service"]))
            town.report()
    invoices = {
        str(number): {"item": item, "count": count, "cents": count * PRICES[item]}
        for number, (item, count) in orders.items()
    }
    items = {item: [each for each in invoices.values() if each["item"] == item] for item in PRICES}
    report = {
        item: {
            "orders": len(each),
            "numbers": len(each),
            "count": sum(one["count"] for one in each),
            "cents": sum(one["cents"] for one in each),
        }
        for item, each in items.items()
    }
    town.wait(lambda: town.report() == report)
    assert sorted(town.read("invoices")) == sorted(invoices.items())
    assert sorted(town.read("stock")) == sorted((item, -count) for item, count in orders.values())
    published = sorted((key, (order["item"], order["count"])) for key, order in town.read("orders"))
    assert published == sorted((str(number), order) for number, order in orders.items())
    assert town.read("failed") == []
    with closing(sqlite3.connect(town.directory / "shop.db")) as database:
        assert {row[0]: row[1:] for row in database.execute("SELECT id, item, count FROM orders")} == orders


def test_programs_are_short() -> None:
    lengths = {
        path.name: sum(bool(line.strip()) for line in path.read_text().splitlines())
        for path in PROGRAMS.iterdir()
        if path.suffix == ".py"
    }
    assert len(lengths) == 3
    assert {name: lines for name, lines in lengths.items() if lines > LINES} == {}
