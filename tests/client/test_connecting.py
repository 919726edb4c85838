"""What `connect` refuses before it reaches for anything."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from client_world import run

from broker_io.errors import CallerError, InvalidAddress
from txnbuffer import connect
from txnbuffer.errors import InvalidRequest


@pytest.mark.parametrize("address", ["memory:", "file:somewhere", "txnbuf://localhost:1"])
@pytest.mark.parametrize("options", [{"service": "localhost:1"}, {"broker_options": {"token": "t"}}])
def test_options_of_clusters_are_for_clusters(address: str, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="is no cluster"):
        run(connect(address, **options).open())


@pytest.mark.parametrize("service", ["", "localhost", "localhost:", ":7711", "txnbuf://localhost"])
def test_a_service_is_named_by_host_and_port(service: str) -> None:
    with pytest.raises(InvalidAddress, match="write HOST:PORT"):
        run(connect("pulsar://localhost:1/public/default", service=service).open())


def test_what_opening_a_cluster_refuses_is_told() -> None:
    async def test() -> None:
        with pytest.raises(InvalidAddress):
            await connect("pulsar://localhost/x").open()
        with pytest.raises(CallerError, match="choose one"):
            await connect("pulsar://localhost:1", broker_options={"token": "t", "token_file": "f"}).open()

    asyncio.run(test())
