"""Credentials of clients: where a token is sent, and files with tokens."""

from __future__ import annotations

from pathlib import Path

import pytest

from broker_io.errors import EnvironmentFault, InvalidAddress
from broker_io.rpc.channel import Endpoint
from broker_io.rpc.credentials import ClientCredentials, token_of_file
from txnbuffer.errors import InvalidRequest
from txnbuffer.rpc.service_access import ServiceAccess

SENT = (("authorization", "Bearer abc"),)


@pytest.mark.parametrize("target", ["127.0.0.1:1", "localhost:1", "[::1]:1"])
def test_token_is_sent_on_this_machine_without_tls(target: str) -> None:
    assert Endpoint(target, ClientCredentials(token="abc")).metadata() == SENT


@pytest.mark.parametrize("target", ["10.0.0.1:1", "example.org:1", "[2001:db8::1]:1"])
def test_token_is_sent_to_other_machines_with_tls_only(target: str) -> None:
    with pytest.raises(InvalidAddress, match=r"would be sent to .* without encryption: give the CA certificate"):
        Endpoint(target, ClientCredentials(token="abc")).metadata()
    assert Endpoint(target, ClientCredentials(b"pem", token="abc")).metadata() == SENT
    assert Endpoint(target, ClientCredentials(token="abc", optional=True)).metadata() == ()


def test_file_is_read_for_each_call(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("abc\n")
    path.chmod(0o600)
    endpoint = Endpoint("127.0.0.1:1", ClientCredentials(token=token_of_file(path)))
    assert endpoint.metadata() == SENT
    path.write_text("def")
    assert endpoint.metadata() == (("authorization", "Bearer def"),)


@pytest.mark.parametrize("text", [b"", b"\n", b"a b", b"a\nb", "ä".encode(), b"\xff"])
def test_file_without_a_token_is_named_and_not_quoted(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "token"
    path.write_bytes(text)
    path.chmod(0o600)
    with pytest.raises(EnvironmentFault, match=str(path)):
        token_of_file(path)()


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFault, match=rf"{tmp_path}/none"):
        token_of_file(tmp_path / "none")()


@pytest.mark.parametrize(
    ("access", "error"),
    [
        (ServiceAccess(tls_cert="c"), "needs its key"),
        (ServiceAccess(tls_key="k"), "needs its key"),
        (ServiceAccess(tls_cert="c", tls_key="k"), "needs TLS: give tls_ca"),
        (ServiceAccess(token="a", token_file="f"), "exclude each other"),
        (ServiceAccess(token="a\nb"), "printable ASCII"),
        (ServiceAccess(token=""), "printable ASCII"),
        (ServiceAccess(token=5), "must be text or a function"),  # type: ignore[arg-type]  # a wrong use
    ],
)
def test_wrong_combinations_are_refused(access: ServiceAccess, error: str) -> None:
    with pytest.raises(InvalidRequest, match=error):
        access.check()


def test_token_of_the_cluster_is_used_for_the_service_where_it_is_encrypted() -> None:
    credentials = ServiceAccess().load({"token": "abc"})
    assert (credentials.token, credentials.optional) == ("abc", True)
    credentials = ServiceAccess(token="own").load({"token": "abc"})
    assert (credentials.token, credentials.optional) == ("own", False)
    assert ServiceAccess().load().token is None


def test_representations_have_no_token() -> None:
    assert "secret-1" not in repr(ServiceAccess(token="secret-1"))
    assert "secret-1" not in repr(ClientCredentials(token="secret-1", key=b"secret-1"))
