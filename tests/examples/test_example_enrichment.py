"""Each order has one invoice, although a process of the group is killed; what has no price becomes a dead letter."""

from __future__ import annotations

import json

from examples.example_process import Shop

ORDERS = 60


def test_each_order_has_one_invoice(market: Shop) -> None:
    orders = {f"order-{number}": {"item": "apples", "count": number} for number in range(ORDERS)}
    wrong = {"order-x": {"item": "stones", "count": 1}, "order-y": "many apples"}
    market.fill({"prices": {"apples": "120"}, "orders": {**orders, **wrong}})
    first = market.example("enrichment.py")
    market.read("invoices", 1)
    first.kill()
    first.wait()
    market.fill({"orders": {f"late-{key}": order for key, order in orders.items()}})
    members = [market.example("enrichment.py") for _ in range(2 if market.is_shared else 1)]
    invoices = market.read("invoices", 2 * ORDERS)
    expected = {key: {**order, "cents": 120 * order["count"]} for key, order in orders.items()}
    expected |= {f"late-{key}": invoice for key, invoice in expected.items()}
    assert {key: json.loads(value) for key, value in invoices} == expected
    assert len(invoices) == len(expected)
    failed = [("order-x", '{"item": "stones", "count": 1}'), ("order-y", "many apples")]
    assert market.read("orders-failed", 2) == failed
    market.interrupt(*members)
