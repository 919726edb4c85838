"""The web service, served by uvicorn: what it has taken is committed, and it shows what others have taken."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import httpx2
from examples.example_process import EXAMPLES, Shop, shop
from service_process import kept_port

from txnbuffer.testing import ServiceProcess


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


APPLES = {"item": "apples", "count": 3}


def test_orders_are_committed_and_shown(market: Shop) -> None:
    with serve(market) as client:  # there is no topic yet
        assert client.get("/orders/1").status_code == 404
        assert (client.put("/orders/1", json=APPLES).status_code, client.get("/orders/2").status_code) == (201, 404)
        market.wait(lambda: client.get("/orders/1").status_code == 200)
        assert client.get("/orders/1").json() == APPLES
        assert client.put("/orders/1", json={"item": "apples", "count": 0}).status_code == 422
        if market.is_shared:
            with serve(market) as other:
                assert other.get("/orders/1").json() == APPLES
                assert other.put("/orders/2", json=APPLES).status_code == 201
                market.wait(lambda: client.get("/orders/2").status_code == 200)
    numbers = (1, 2) if market.is_shared else (1,)
    orders = [(key, json.loads(value)) for key, value in market.read("orders", len(numbers))]
    assert orders == [(f"order-{number}", APPLES) for number in numbers]
    assert market.read("deliveries", len(numbers)) == [(f"order-{number}", "3 apples") for number in numbers]


def test_the_cache_that_fails_is_reported_and_starts_again(txnbuf_service: ServiceProcess, tmp_path: Path) -> None:
    with shop(txnbuf_service.address, tmp_path) as market, serve(market) as client:
        assert client.put("/orders/1", json=APPLES).status_code == 201
        txnbuf_service.kill()
        market.wait(lambda: client.get("/ready").status_code == 503)
        assert client.get("/orders/1").status_code == 503
        market.wait(lambda: market.output.count("a background task failed, and starts again in") > 0)
        txnbuf_service.start()
        market.wait(lambda: client.get("/ready").status_code == 200)
        assert client.get("/orders/1").json() == APPLES
        market.wait(lambda: client.put("/orders/2", json=APPLES).status_code == 201)
        market.wait(lambda: client.get("/orders/2").status_code == 200)
