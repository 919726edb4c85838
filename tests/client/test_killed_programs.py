"""Programs on an embedded log that are killed again and again: the next program sees at once what is committed."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import textwrap
from contextlib import closing
from pathlib import Path

from source_tree import ROOT

from txnbuffer import connect

KILLS = 5

SHOP = """
import sqlite3, sys, threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from txnbuffer import connect

database = sqlite3.connect("shop.db", check_same_thread=False)
database.execute("CREATE TABLE IF NOT EXISTS outbox (id INTEGER PRIMARY KEY AUTOINCREMENT, value TEXT)")

class Shop(BaseHTTPRequestHandler):
    def do_POST(self):
        with database:
            database.execute("INSERT INTO outbox (value) VALUES (?)", (self.path,))
        self.send_response(204)
        self.end_headers()

server = HTTPServer(("127.0.0.1", 0), Shop)
print(server.server_port, flush=True)
with connect("file:log") as client:
    published = client.committed_number("outbox")
    while True:
        server.handle_request()
        rows = database.execute("SELECT id, value FROM outbox WHERE id > ?", (published,)).fetchall()
        for number, value in rows:
            with client.transaction(name="outbox", number=number) as txn:
                txn.send("orders", value)
                if value == "/killed":
                    client.send("orders", "beside")  # durable, and the record of the transaction before it
                    print("inside", flush=True)
                    sys.stdin.read()
            published = number
            print("published", flush=True)
"""

ENRICHMENT = """
import os, sys
from txnbuffer import connect

with connect("file:log") as client:
    client.send("orders", "order")

    def invoice(txn, record):
        txn.send("invoices", record.value, key=str(os.getpid()))
        with client.reader("invoices", isolation="read_uncommitted", wait=True) as reader:
            next(found for found in reader.records() if found.key == str(os.getpid()).encode())  # it is durable
        client.send("invoices", "beside")
        print("inside", flush=True)
        if sys.argv[1] == "kill":
            sys.stdin.read()

    print(client.process("orders", "invoicing", invoice, idle_timeout=0.2).records, flush=True)
"""

DELETION = """
import sys
from txnbuffer import connect

with connect("file:log") as client:
    with client.transaction() as txn:
        txn.send("temporary", "first")
        txn.send("orders", "first")
    client.delete_topic("temporary")
    with client.transaction() as txn:
        txn.send("orders", "aborted")
        client.send("orders", "beside")
        print("inside", flush=True)
        sys.stdin.read()
"""


def start(directory: Path, program: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program), *arguments],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def kill_when_inside(program: subprocess.Popen[str]) -> None:
    """Kill a program inside a transaction that has a record in the log."""
    assert program.stdout is not None
    assert "inside\n" in iter(program.stdout.readline, "")
    program.send_signal(signal.SIGKILL)
    program.communicate()


def read(directory: Path, topic: str) -> list[bytes]:
    """What a reader gets without waiting, in a process that opens the log for itself."""
    with connect(f"file:{directory / 'log'}"):
        pass
    with connect(f"file:{directory / 'log'}", read_only=True) as client, client.reader(topic) as reader:
        found = [record.value for record in reader.records(timeout=0.01)]
        assert reader.held_back() == []
        return found


def test_a_shop_that_is_killed_while_it_publishes_loses_no_order_and_hides_none(tmp_path: Path) -> None:
    for kill in range(KILLS):
        shop = start(tmp_path, SHOP)
        assert shop.stdout is not None
        port = int(shop.stdout.readline())
        with closing(sqlite3.connect(tmp_path / "shop.db")) as database, database:
            database.execute("INSERT INTO outbox (value) VALUES ('/killed')")
        post(port, f"/order-{kill}")
        kill_when_inside(shop)
        with closing(sqlite3.connect(tmp_path / "shop.db")) as database, database:
            database.execute("UPDATE outbox SET value = '/restarted' WHERE value = '/killed'")
        assert read(tmp_path, "orders").count(b"beside") == kill + 1
    shop = start(tmp_path, SHOP)
    assert shop.stdout is not None
    post(int(shop.stdout.readline()), "/last")
    for _ in range(3):
        assert shop.stdout.readline() == "published\n"
    shop.kill()
    shop.communicate()
    orders = [value for value in read(tmp_path, "orders") if value != b"beside"]
    assert orders == [*(b"/restarted" if one % 2 == 0 else b"/order-%d" % (one // 2) for one in range(10)), b"/last"]


def post(port: int, path: str) -> None:
    from urllib.request import Request, urlopen

    with urlopen(Request(f"http://127.0.0.1:{port}{path}", method="POST"), timeout=60):
        pass


def test_an_enrichment_that_is_killed_in_its_handler_hides_nothing(tmp_path: Path) -> None:
    for kill in range(KILLS):
        kill_when_inside(start(tmp_path, ENRICHMENT, "kill"))
        assert read(tmp_path, "orders") == [b"order"] * (kill + 1)
        assert read(tmp_path, "invoices") == [b"beside"] * (kill + 1)
    done, _ = start(tmp_path, ENRICHMENT, "end").communicate(timeout=120)
    assert done.splitlines()[-1] == str(KILLS + 1)
    assert read(tmp_path, "invoices").count(b"order") == KILLS + 1


def test_a_program_that_is_killed_after_it_deleted_a_topic_hides_nothing(tmp_path: Path) -> None:
    """Its decisions name the topic, which needs no markers any more."""
    kill_when_inside(start(tmp_path, DELETION))
    assert read(tmp_path, "orders") == [b"first", b"beside"]
