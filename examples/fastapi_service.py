"""A web service: each POST is one transaction, each GET is answered from a cache of the topic.

    pip install 'txnbuffer[pulsar]' fastapi
    uvicorn --app-dir examples fastapi_service:app
    curl -X PUT localhost:8000/orders/1 -H 'Content-Type: application/json' -d '{"item": "apples", "count": 3}'
    curl localhost:8000/orders/1

A PUT that returns 201 is committed in both topics, `orders` and `deliveries`. The key of both records is the number of
the order, so a client that got no answer may repeat its PUT. Any number of these services may run: each follows the
topic, so a GET soon shows an order that another one has taken.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated

from cache import Cache
from fastapi import FastAPI, HTTPException, Path, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, PositiveInt

from txnbuffer import Error, LimitExceeded, Transaction, connect

ADDRESS = os.environ.get("TXNBUFFER_ADDRESS", "pulsar://localhost:6650/public/default")
ADMIN_URL = os.environ.get("TXNBUFFER_PULSAR_ADMIN_URL", "http://localhost:8080")


class Order(BaseModel):
    """An order of some pieces of an item."""

    item: str
    count: PositiveInt


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Keep one client and one cache for as long as the service runs."""
    async with connect(ADDRESS, broker_options={"admin_url": ADMIN_URL}, max_unavailable=10.0) as client:
        app.state.client = client
        app.state.orders = orders = Cache("orders")
        app.state.following = following = asyncio.create_task(orders.follow(client))
        yield
        following.cancel()


app = FastAPI(title="Shop", lifespan=lifespan)


@app.put("/orders/{number}", status_code=201)
async def place(number: Annotated[int, Path(ge=1)], order: Order, request: Request) -> Order:
    """Take an order: it and its delivery are committed when this returns."""
    key = f"order-{number}"

    async def work(txn: Transaction) -> None:
        await txn.send("orders", order.model_dump_json(), key=key)
        await txn.send("deliveries", f"{order.count} {order.item}", key=key)

    await request.app.state.client.run(work)
    return order


@app.get("/orders/{number}")
async def show(number: int, request: Request) -> Order:
    """Return an order, from the cache."""
    found = request.app.state.orders.get(f"order-{number}")
    if found is None:
        raise HTTPException(404, f"there is no order {number}")
    return Order.model_validate_json(found)


@app.get("/ready")
async def ready(request: Request) -> Response:
    """Answer 200 once the cache has everything that was committed, and as long as it follows."""
    state = request.app.state
    return Response(status_code=200 if state.orders.ready.is_set() and not state.following.done() else 503)


@app.exception_handler(Error)
async def failed(_: Request, error: Exception) -> JSONResponse:
    """Answer 429 if a limit was reached, else 503; the client may repeat its request."""
    if isinstance(error, LimitExceeded):
        return JSONResponse({"detail": str(error)}, 429, {"Retry-After": str(int(error.retry_after) + 1)})
    return JSONResponse({"detail": str(error)}, 503)
