"""The web service, served by uvicorn: what it has taken is committed, and it shows what others have taken."""

from __future__ import annotations

import json
import socket
from typing import Any

import httpx2
from examples.example_process import EXAMPLES, Shop
from service_process import kept_port


def serve(market: Shop) -> httpx2.Client:
    """Start the web service and wait until its cache is complete."""
    port = kept_port()
    arguments = ["--app-dir", str(EXAMPLES), "--host", "127.0.0.1", "--port", str(port), "fastapi_service:app"]
    process = market.start("-m", "uvicorn", *arguments)
    market.wait(lambda: is_ready(port), process)
    return httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=120.0)


def is_ready(port: int) -> bool:
    with socket.socket() as probe:
        if probe.connect_ex(("127.0.0.1", port)):
            return False
    return httpx2.get(f"http://127.0.0.1:{port}/ready").status_code == 200


def test_orders_are_committed_and_shown_by_all_services(market: Shop) -> None:
    with serve(market) as one, serve(market) as other:  # there is no topic yet
        assert one.get("/orders/1").status_code == 404
        apples: dict[str, Any] = {"item": "apples", "count": 3}
        assert (one.put("/orders/1", json=apples).status_code, one.get("/orders/2").status_code) == (201, 404)
        market.wait(lambda: other.get("/orders/1").status_code == 200)
        assert other.get("/orders/1").json() == apples
        assert other.put("/orders/1", json={"item": "apples", "count": 0}).status_code == 422
    assert [(key, json.loads(value)) for key, value in market.read("orders", 1)] == [("order-1", apples)]
    assert market.read("deliveries", 1) == [("order-1", "3 apples")]
