r"""Exactly-once enrichment: orders in, invoices out, each order once.

Reads the topic `orders` as the consumer group `invoicing`, looks up the price of the item in the topic `prices`, and
sends an invoice. The invoice and the position of the group commit in one transaction, so an order has one invoice
however often the program is killed. An order that cannot be invoiced goes to the topic `orders-failed`, with the error
in its properties.

    printf '%s\n' apples=120 pears=80 | txnbuf produce file:data prices --key-separator =
    echo '{"key": "order-1", "value": {"item": "apples", "count": 3}}' | txnbuf produce file:data orders --json
    python examples/enrichment.py                   # until Ctrl-C
    txnbuf tail file:data invoices

Only one process can open `file:data`. With the address of a service or a cluster in TXNBUFFER_ADDRESS, other programs
send orders meanwhile, and if you start this one several times, its processes share the partitions of `orders`.
"""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from typing import Any

from cache import Cache

from txnbuffer import JsonDeserializer, JsonSerializer, Record, Transaction, connect, dead_letter

ADDRESS = os.environ.get("TXNBUFFER_ADDRESS", "file:data")


def invoice(order: dict[str, Any], prices: Cache) -> dict[str, Any]:
    """Return the invoice of an order. Raises LookupError if the item has no price, or the order no item or count."""
    price = prices.get(order["item"])
    if price is None:
        raise LookupError(f"{order['item']} has no price")
    return {**order, "cents": int(price) * int(order["count"])}


async def main() -> None:
    async with (
        connect(
            ADDRESS,
            serializer=JsonSerializer(),
            deserializers={"orders": JsonDeserializer()},
        ) as client,
        asyncio.TaskGroup() as tasks,
    ):
        prices = Cache("prices")
        following = tasks.create_task(prices.follow(client))
        await prices.ready.wait()
        print("ready", flush=True)

        async def enrich(txn: Transaction, order: Record) -> None:
            await txn.send("invoices", invoice(order.value, prices), key=order.key)

        failed = dead_letter("orders-failed")
        await client.process("orders", "invoicing", enrich, on_error=failed, wait=True)  # waits for the topic, too
        following.cancel()


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        asyncio.run(main())
