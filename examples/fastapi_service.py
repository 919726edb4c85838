"""A web service: each PUT is one transaction, each GET is answered from a cache of the topic.

    pip install txnbuffer fastapi
    uvicorn --app-dir examples fastapi_service:app
    curl -X PUT localhost:8000/orders/1 -H 'Content-Type: application/json' -d '{"item": "apples", "count": 3}'
    curl localhost:8000/orders/1
    curl -i localhost:8000/ready

A PUT that returns 201 is committed in both topics, `orders` and `deliveries`. The key of both records is the number of
the order, so a client that got no answer may repeat its PUT. Only one process can open `file:data`, so uvicorn has one
worker. With the address of a service or a cluster in TXNBUFFER_ADDRESS, any number of these web services may run: each
follows the topic, so a GET soon shows an order that another one has taken.

The cache is filled by a background task. `supervise` starts the task again when it fails, and until the cache is
complete again, `/ready` and GETs answer 503: let your load balancer ask `/ready`. A publisher of an
[outbox](outbox.py) that runs in a web service is supervised in the same way.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Annotated, Never

from cache import Cache
from fastapi import Depends, FastAPI, HTTPException, Path, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, PositiveInt

from txnbuffer import Error, LimitExceeded, Transaction, connect

ADDRESS = os.environ.get("TXNBUFFER_ADDRESS", "file:data")
LONGEST_PAUSE = 30.0

logger = logging.getLogger("uvicorn.error")


async def supervise(work: Callable[[], Awaitable[None]]) -> Never:
    """Run a background task; whenever it fails or ends, log that and start it again, after 1 s, 2 s, 4 s, … 30 s."""
    pause = 1.0
    while True:
        began = time.monotonic()
        try:
            await work()
            logger.error("a background task ended, and starts again in %.0f s", pause)
        except Exception:  # any: nobody else would notice that the task has ended
            logger.exception("a background task failed, and starts again in %.0f s", pause)
        ran = time.monotonic() - began
        await asyncio.sleep(pause)
        pause = 1.0 if ran > LONGEST_PAUSE else min(2 * pause, LONGEST_PAUSE)


class Order(BaseModel):
    """An order of some pieces of an item."""

    item: str
    count: PositiveInt


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Keep one client and one cache for as long as the web service runs."""
    async with connect(ADDRESS, max_unavailable=10.0) as client:
        app.state.client = client
        app.state.orders = orders = Cache("orders")
        following = asyncio.create_task(supervise(lambda: orders.follow(client)))
        yield
        following.cancel()


def complete_cache(request: Request) -> Cache:
    """Return the cache; it answers 503 instead while the cache lacks something that was committed."""
    orders: Cache = request.app.state.orders
    if not orders.ready.is_set():
        raise HTTPException(503, "the cache of orders is not complete")
    return orders


app = FastAPI(title="Shop", lifespan=lifespan)
Orders = Annotated[Cache, Depends(complete_cache)]


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
async def show(number: int, orders: Orders) -> Order:
    """Return an order, from the cache."""
    found = orders.get(f"order-{number}")
    if found is None:
        raise HTTPException(404, f"there is no order {number}")
    return Order.model_validate_json(found)


@app.get("/ready", dependencies=[Depends(complete_cache)])
async def ready() -> None:
    """Answer 200 once the cache has everything that was committed, and as long as it follows; else 503."""


@app.exception_handler(Error)
async def failed(_: Request, error: Exception) -> JSONResponse:
    """Answer 429 if a limit was reached, else 503; the client may repeat its request."""
    if isinstance(error, LimitExceeded):
        return JSONResponse({"detail": str(error)}, 429, {"Retry-After": str(int(error.retry_after) + 1)})
    return JSONResponse({"detail": str(error)}, 503)
