"""Arguments that `connect` rejects before it opens anything."""

from __future__ import annotations

from typing import Any

import pytest
from client_world import run

from broker_io.errors import CallerError, InvalidAddress, UnknownOption
from txnbuffer import connect
from txnbuffer.errors import InvalidRequest


@pytest.mark.parametrize("address", ["memory:", "file:somewhere", "txnbuf://localhost:1"])
@pytest.mark.parametrize("options", [{"service": "localhost:1"}, {"broker_options": {"token": "t"}}])
def test_cluster_options_require_a_cluster_address(address: str, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="is not a cluster"):
        run(connect(address, **options).open())


@pytest.mark.parametrize(
    "service",
    ["", "localhost", "localhost:", ":7711", "txnbuf://localhost", "localhost:65536", "localhost:0", "localhost:٧"],
)
def test_service_must_be_host_and_port(service: str) -> None:
    with pytest.raises(InvalidAddress, match="service must be HOST:PORT, got"):
        run(connect("pulsar://localhost:1/public/default", service=service).open())


@pytest.mark.parametrize("port", ["73247", "65536", "0", "-1", "٧"])
def test_port_of_an_address_is_not_another_port(port: str) -> None:
    with pytest.raises(InvalidAddress, match="is not the address of a service"):
        run(connect(f"txnbuf://127.0.0.1:{port}").open())


async def test_errors_of_opening_a_cluster_are_raised() -> None:
    with pytest.raises(InvalidAddress):
        await connect("pulsar://localhost/x").open()
    with pytest.raises(CallerError, match="choose one"):
        await connect("pulsar://localhost:1", broker_options={"token": "t", "token_file": "f"}).open()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"schemas": ["orders"]}, "schemas must be a mapping from topic to schema, got list"),
        ({"schemas": {"orders": "avro"}}, "the schema of topic 'orders' must be one of the Pulsar client library"),
        ({"serializer": "json"}, "a serializer needs a method dumps, got 'json'"),
        ({"broker_options": ["token"]}, "broker_options must be a mapping, got list"),
    ],
)
def test_arguments_are_checked_before_anything_is_opened(options: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        connect("pulsar://127.0.0.1:9", **options)
    assert text in str(caught.value)


def test_unknown_cluster_option_is_named() -> None:
    with (
        pytest.raises(UnknownOption, match=r"has no option 'hash': use admin_url, .*hashing"),
        connect("pulsar://127.0.0.1:9", broker_options={"hash": "java"}),
    ):
        pass
