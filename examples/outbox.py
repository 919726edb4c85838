"""Outbox: publish what a database transaction wrote, each message once.

A shop writes an order and the messages about it in one transaction of SQLite. The publisher sends the messages
as the named producer `outbox`; the number of a transaction is that of its last order. So the log itself knows
which orders were published: a publisher that is killed at any moment, or started twice, publishes nothing twice, and
the messages of an order appear together.

    python examples/outbox.py order apples 3        # as often as you like
    python examples/outbox.py publish               # until Ctrl-C
    txnbuf tail file:data orders stock

Only the publisher can open `file:data`, beside readers like `txnbuf tail`. If other programs write too or consume the
topics, all of them get the address of a service or a cluster in TXNBUFFER_ADDRESS.

The numbers of orders must become visible in order. SQLite has one writer at a time, so they do. On a database with
concurrent writers, lock the outbox table while an order is written. If the database is restored from a backup, let its
orders continue above `client.committed_number("outbox")`, because lower numbers count as published.
"""

from __future__ import annotations

import os
import sqlite3
import sys
import time
from contextlib import closing, suppress
from functools import partial

from txnbuffer import ProducerFenced, SyncClient, SyncTransaction, connect

ADDRESS = os.environ.get("TXNBUFFER_ADDRESS", "file:data")
DATABASE = os.environ.get("DATABASE", "shop.db")

PRODUCER = "outbox"
ORDERS = 100
"""Orders in one transaction, at most."""

TABLES = """
CREATE TABLE IF NOT EXISTS orders (id INTEGER PRIMARY KEY AUTOINCREMENT, item TEXT NOT NULL, count INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS outbox (
    order_id INTEGER NOT NULL, topic TEXT NOT NULL, key TEXT NOT NULL, value TEXT NOT NULL
);
CREATE INDEX IF NOT EXISTS outbox_orders ON outbox (order_id);
"""
NEXT = """
SELECT order_id, topic, key, value FROM outbox
WHERE order_id IN (SELECT DISTINCT order_id FROM outbox WHERE order_id > ? ORDER BY order_id LIMIT ?)
ORDER BY order_id, rowid
"""


def open_database() -> sqlite3.Connection:
    database = sqlite3.connect(DATABASE, timeout=30)
    database.executescript(TABLES)
    return database


def place_order(database: sqlite3.Connection, item: str, count: int) -> int:
    """Write an order and its messages in one transaction of the database; return the number of the order."""
    with database:
        order = database.execute("INSERT INTO orders (item, count) VALUES (?, ?)", (item, count)).lastrowid
        messages = [(order, "orders", f"order-{order}", f"{count} {item}"), (order, "stock", item, str(-count))]
        database.executemany("INSERT INTO outbox VALUES (?, ?, ?, ?)", messages)
    return order or 0


def publish(database: sqlite3.Connection, client: SyncClient) -> None:
    """Publish all orders that are not published yet, and then those that come, for ever."""
    published = client.committed_number(PRODUCER)  # once: it fences a publisher that still runs, which ends then
    last = database.execute("SELECT seq FROM sqlite_sequence WHERE name = 'orders'").fetchone()
    if published > (last[0] if last else 0):
        sys.exit(f"{PRODUCER} has published order {published}, which {DATABASE} does not have: name another producer")
    while True:
        while rows := database.execute(NEXT, (published, ORDERS)).fetchall():
            published = rows[-1][0]
            client.run(partial(send, rows), name=PRODUCER, number=published)
            print("published", len(rows), "messages", flush=True)
            with database:  # only to save space: what is published is skipped by its number
                database.execute("DELETE FROM outbox WHERE order_id <= ?", (published,))
        time.sleep(0.2)


def send(rows: list[tuple[int, str, str, str]], txn: SyncTransaction) -> None:
    for _, topic, key, value in rows:
        txn.send(topic, value, key=key)


def main() -> None:
    with closing(open_database()) as database:
        match sys.argv[1:]:
            case ["order", item, count]:
                print("order", place_order(database, item, int(count)))
            case ["publish"]:
                with connect(ADDRESS) as client:
                    try:
                        publish(database, client)
                    except ProducerFenced:
                        sys.exit("another publisher has begun: this one ends")
            case _:
                sys.exit(__doc__)


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        main()
