"""Credentials reach other machines only over TLS, and errors do not repeat passwords in addresses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest

from broker_io import open_broker, restore_backup
from broker_io.addresses import shown_address
from broker_io.errors import CallerError, InvalidAddress, NotAuthorized
from broker_io.filelog.pair.etcd_lock import EtcdAddress
from broker_io.pulsar.admin import AdminClient
from broker_io.pulsar.credentials import Bearer, Credentials
from broker_io.waits import RetryPolicy

TOKEN = Credentials("a-token")
PLAIN = Credentials("a-token", token_without_tls=True)
RETRY = RetryPolicy(0.0, lambda: None)
PASSWORD = "pa55w/rd"


def redirected(base: str, to: str, credentials: Credentials) -> list[str]:
    """The addresses that are asked by a request that `base` redirects."""
    asked: list[str] = []
    client = AdminClient(base, credentials, RETRY)

    def call(_: str, place: str, data: bytes | None, *, once: bool) -> tuple[int, bytes, str | None]:
        asked.append(place)
        return (307, b"", f"{to}/admin/v2/x") if len(asked) == 1 else (200, b"1", None)

    client._call = call  # type: ignore[method-assign]  # no network
    assert client.ask("GET", "x", retry=False) == 1
    return asked


@pytest.mark.parametrize(
    ("base", "to", "credentials"),
    [
        ("https://a:8443", "http://a:8443", TOKEN),
        ("https://a:8443", "http://a:8080", Credentials()),
        ("https://a:8443", "http://a:8080", PLAIN),
        ("https://127.0.0.1:8443", "http://127.0.0.1:8080", TOKEN),
        ("http://127.0.0.1:8080", "http://b:8080", TOKEN),
        ("http://127.0.0.1:8080", "http://127.0.0.1:80@b:8080", TOKEN),
        ("http://127.0.0.1:8080", "HTTP://b\\@127.0.0.1", TOKEN),
    ],
)
def test_no_redirect_leads_away_from_tls(base: str, to: str, credentials: Credentials) -> None:
    with pytest.raises(InvalidAddress, match=r"TLS|encryption"):
        redirected(base, to, credentials)


def test_redirects_to_the_owner_of_a_topic_are_followed() -> None:
    for base, to, credentials in [
        ("https://a:8443", "https://b:8443", TOKEN),
        ("http://127.0.0.1:8080", "https://b:8443", TOKEN),
        ("http://127.0.0.1:8080", "http://localhost:8081", TOKEN),
        ("http://a:8080", "http://b:8080", PLAIN),
        ("http://a:8080", "http://b:8080", Credentials()),
    ]:
        assert len(redirected(base, to, credentials)) == 2


@pytest.mark.parametrize(
    ("address", "admin"),
    [
        ("pulsar://a:6650", None),
        ("pulsar://127.0.0.1:6650,a:6650", "http://127.0.0.1:8080"),
        ("pulsar+ssl://a:6651", "http://a:8080"),
        ("pulsar+ssl://a:6651", "HTTP://a:8080"),
    ],
)
def test_a_token_is_not_sent_to_a_cluster_without_tls(address: str, admin: str | None) -> None:
    with pytest.raises(InvalidAddress, match=r"without encryption: .* token_without_tls"):
        open_broker(address, admin_url=admin, token="a-token", max_unavailable=0.0)


def test_no_client_secret_is_sent_without_tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (secret := tmp_path / "key.json").touch(0o600)
    secret.write_text(json.dumps({"client_id": "me", "client_secret": "hush"}))
    with pytest.raises(InvalidAddress, match="without encryption"):
        Credentials(oauth2={"issuer_url": "http://issuer", "private_key": str(secret)})

    asked: list[str] = []

    def answer(endpoint: str) -> Callable[[httpx2.Request], httpx2.Response]:
        def handle(request: httpx2.Request) -> httpx2.Response:
            asked.append(str(request.url))
            if request.method == "GET":
                return httpx2.Response(200, json={"token_endpoint": endpoint})
            return httpx2.Response(307, headers={"Location": "https://other/token"})

        return handle

    real = httpx2.Client
    for endpoint in ("http://issuer/token", "https://issuer/token"):

        def made(endpoint: str = endpoint, **options: Any) -> httpx2.Client:
            return real(transport=httpx2.MockTransport(answer(endpoint)), **{**options, "verify": True})

        monkeypatch.setattr(httpx2, "Client", made)
        credentials = Credentials(oauth2={"issuer_url": "https://issuer", "private_key": str(secret)})
        with pytest.raises((InvalidAddress, NotAuthorized)):
            Bearer(credentials).headers()
    assert asked == [*["https://issuer/.well-known/openid-configuration"] * 2, "https://issuer/token"]


def test_a_password_of_etcd_is_not_sent_without_tls() -> None:
    EtcdAddress.parse("etcd://127.0.0.1:1,[::1]:2/p?user=u&password-file=/p")
    EtcdAddress.parse("etcd://a:1/p?user=u&password-file=/p&ca=/c")
    with pytest.raises(InvalidAddress, match="password would be sent to a:2 without TLS"):
        EtcdAddress.parse("etcd://127.0.0.1:1,a:2/p?user=u&password-file=/p")
    with pytest.raises(InvalidAddress, match="certificate would not be used without TLS"):
        EtcdAddress.parse("etcd://127.0.0.1:1/p?cert=/c&key=/k")


@pytest.mark.parametrize(
    "use",
    [
        lambda: AdminClient(f"https://u:{PASSWORD}@a:8443", Credentials(), RETRY),
        lambda: AdminClient(f"https://u:{PASSWORD}@a:8443/path", Credentials(), RETRY),
        lambda: AdminClient(f"ftp://u:{PASSWORD}@a:8443", Credentials(), RETRY),
        lambda: Credentials(oauth2={"issuer_url": f"https://u:{PASSWORD}@a", "private_key": "x"}),
        lambda: open_broker(f"pulsar+ssl://u:{PASSWORD}@a:6651"),
        lambda: open_broker(f"txnbuf://u:{PASSWORD}@a:7711"),
        lambda: open_broker(f"https://u:{PASSWORD}@a"),
        lambda: open_broker(f"u:{PASSWORD}@a:6650"),
        lambda: open_broker(f"txnbuf://a:1?token={PASSWORD}"),
        lambda: restore_backup("backup", f"txnbuf://u:{PASSWORD}@a:1", lambda done, total: None),
        lambda: EtcdAddress.parse(f"etcd://u:{PASSWORD}@a:1/lock"),
    ],
)
def test_errors_do_not_repeat_a_password_in_an_address(use: Callable[[], object]) -> None:
    with pytest.raises(CallerError) as caught:
        use()
    assert "55w" not in str(caught.value)
    assert "rd@" not in str(caught.value)


def test_addresses_without_a_password_are_shown_as_they_are() -> None:
    for address in ("pulsar://a:1/tenant", "file:/data/a@b?c", "txnbuf://a:1,b:2", "a:1"):
        assert shown_address(address) == address
    assert shown_address("https://u:p@a:1/x?y=1") == "https://…@a:1/x?…"


@pytest.mark.parametrize(
    "url", ["http://u:S3CRET@[h:8080", "http://h:8080/?token=S3CRET", "http://h:99999", "http://h:0"]
)
def test_addresses_that_no_admin_interface_has_are_refused_without_their_secrets(url: str) -> None:
    with pytest.raises(InvalidAddress, match="is not the address of an admin interface") as refused:
        AdminClient(url, Credentials(), RETRY)
    assert "S3CRET" not in str(refused.value)
