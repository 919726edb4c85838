"""Requests to the REST interface: retries, redirects, credentials and the meaning of answers."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from broker_io import open_broker
from broker_io.errors import CallerError, ClusterRefused, InvalidAddress, NotAuthorized, ServiceUnavailable
from broker_io.port import MAX_MESSAGE_BYTES
from broker_io.pulsar import broker as broker_module
from broker_io.pulsar.admin import MOST_REDIRECTS, AdminClient
from broker_io.pulsar.broker import OVERHEAD_BYTES, PulsarBroker
from broker_io.pulsar.cluster import INCARNATION, Cluster
from broker_io.pulsar.credentials import Credentials
from broker_io.pulsar.ledgers import NEW
from broker_io.pulsar.policies import (
    DEFAULT_QUOTA_BYTES,
    QUOTA_KINDS,
    UNLIMITED,
    check_policies,
    override_policies,
    policies_of,
)
from broker_io.waits import RetryPolicy


class Interface(ThreadingHTTPServer):
    """A server that returns prepared answers and records the requests."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answering)
        self.answers: list[tuple[int, object, dict[str, str]]] = []
        self.questions: list[tuple[str, str, bytes, str | None]] = []
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.hang_up = False

    def will_answer(self, status: int, content: object = None, **headers: str) -> None:
        self.answers.append((status, content, headers))


class Answering(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Interface

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.questions.append((self.command, self.path, body, self.headers.get("Authorization")))
        status, content, headers = self.server.answers.pop(0)
        data = b"" if content is None else content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
        if self.server.hang_up:  # without an answer, as a proxy closes an idle connection
            self.close_connection = True

    do_PUT = do_POST = do_DELETE = do_GET  # noqa: N815 - names required by the library

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def interface() -> Iterator[Interface]:
    server = Interface()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def nothing() -> None: ...


@pytest.fixture
def admin(interface: Interface) -> Iterator[Callable[..., AdminClient]]:
    """Opens admin clients that are closed after the test."""
    opened: list[AdminClient] = []

    def open_admin(
        credentials: Credentials | None = None, *, max_unavailable: float = 30.0, url: str | None = None
    ) -> AdminClient:
        opened.append(
            AdminClient(url or interface.url, credentials or Credentials(), RetryPolicy(max_unavailable, nothing))
        )
        return opened[-1]

    yield open_admin
    for each in opened:
        each.close()


def test_answers_are_decoded(interface: Interface, admin: Callable[..., AdminClient]) -> None:
    interface.will_answer(200, {"a": 1})
    interface.will_answer(204)
    interface.will_answer(200, b"plain")
    asked = admin()
    assert [asked.ask("GET", "x"), asked.ask("PUT", "x/y", {"b": 2}), asked.ask("GET", "x?c=d")] == [
        {"a": 1},
        None,
        "plain",
    ]
    assert interface.questions[1] == ("PUT", "/admin/v2/x/y", b'{"b": 2}', None)
    assert interface.questions[2][1] == "/admin/v2/x?c=d"


def test_request_to_an_unavailable_cluster_is_retried(interface: Interface, admin: Callable[..., AdminClient]) -> None:
    """A broker answers 503, or 500, while it starts or a topic moves."""
    interface.will_answer(503, {"reason": "starting"})
    interface.will_answer(500, b"<html>Error</html>")
    interface.will_answer(200, 5)
    assert admin().ask("GET", "x") == 5


@pytest.mark.parametrize(
    "reason",
    [
        "Can't find owner for topic persistent://public/default/orders",
        "Failed to find ownership for topic:persistent://public/default/orders",
        f"Namespace bundle for topic ({'long' * 100}) not served by this instance. Please redo the lookup.",
    ],
)
def test_request_for_a_topic_without_an_owner_is_retried(
    interface: Interface, admin: Callable[..., AdminClient], reason: str
) -> None:
    """As after the unload of its bundle; each retry starts at the given address, with a lookup."""
    for _ in range(3):
        interface.will_answer(412, {"reason": reason})
    interface.will_answer(307, Location=f"{interface.url}/admin/v2/owner")
    interface.will_answer(412, {"reason": reason})
    interface.will_answer(200, {"a": 1})
    assert admin().ask("GET", "x") == {"a": 1}
    assert [question[1].rpartition("/")[2] for question in interface.questions] == [*"xxxx", "owner", "x"]
    for _ in range(2):
        interface.will_answer(412, {"reason": reason})
        with pytest.raises(ServiceUnavailable, match="the topic is moving, or its broker is starting"):
            admin(max_unavailable=0.0).ask("GET", "x")


def test_endless_redirects_are_retried(interface: Interface, admin: Callable[..., AdminClient]) -> None:
    for _ in range(MOST_REDIRECTS):
        interface.will_answer(307, Location=f"{interface.url}/admin/v2/there")
    interface.will_answer(200, 5)
    assert admin().ask("GET", "x") == 5


def test_final_answer_is_not_retried(interface: Interface, admin: Callable[..., AdminClient]) -> None:
    interface.will_answer(412, {"reason": "Topic has active producers/subscriptions"})
    with pytest.raises(ClusterRefused, match="Topic has active"):
        admin().ask("DELETE", "x")
    assert len(interface.questions) == 1


def test_retries_end_after_max_unavailable(interface: Interface, admin: Callable[..., AdminClient]) -> None:
    interface.will_answer(503, {"reason": "starting"})
    with pytest.raises(ServiceUnavailable, match="starting"):
        admin(max_unavailable=0.0).ask("GET", "x")
    interface.will_answer(503, {"reason": "starting"})
    with pytest.raises(ServiceUnavailable, match="starting"):
        admin().ask("GET", "x", retry=False)


def test_missing_admin_interface_is_named(interface: Interface, admin: Callable[..., AdminClient]) -> None:
    nobody = admin(max_unavailable=0.0, url="http://127.0.0.1:9")
    with pytest.raises(ServiceUnavailable, match=r"127\.0\.0\.1:9"):
        nobody.ask("GET", "x")


def test_closed_client_port_is_named_if_the_admin_interface_answers(interface: Interface) -> None:
    interface.will_answer(200, {"boundaries": []})
    with pytest.raises(ServiceUnavailable, match=r"no broker answers at 127\.0\.0\.1:1 .*, localhost:2 .*usually 6650"):
        open_broker("pulsar://127.0.0.1:1,localhost:2/tenant/namespace", admin_url=interface.url, max_unavailable=0.0)


def test_wrong_port_of_the_admin_interface_is_no_unavailable_cluster(
    interface: Interface, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broker_module, "ADMIN_SECONDS", 0.01)
    address = f"pulsar://127.0.0.1:{interface.server_port}/t/n"  # accepts connections
    with pytest.raises(InvalidAddress, match=r"nothing has listened at http://127\.0\.0\.1:1 .* as admin_url"):
        open_broker(address, admin_url="http://127.0.0.1:1", max_unavailable=3600.0)


def test_stopped_cluster_is_unavailable_for_all_of_max_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broker_module, "ADMIN_SECONDS", 0.01)
    with pytest.raises(ServiceUnavailable, match=r"127\.0\.0\.1:1"):
        open_broker("pulsar://127.0.0.1:2/t/n", admin_url="http://127.0.0.1:1", max_unavailable=0.5)


def test_topic_with_the_name_of_a_partitioned_one_is_hidden(interface: Interface) -> None:
    interface.will_answer(200, {"boundaries": []})
    with open_broker(f"pulsar://127.0.0.1:{interface.server_port}/t/n", admin_url=interface.url) as broker:
        interface.will_answer(200, [f"persistent://t/n/{name}" for name in ("wide", "wide-partition-0", "plain")])
        interface.will_answer(200, ["persistent://t/n/wide"])
        assert broker.topics() == ["plain", "wide-partition-0"]


class LiftedMeanwhile(AdminClient):
    """Another process removes the quotas of a topic after the first request for them."""

    def __init__(self) -> None:
        super().__init__("http://127.0.0.1:1", Credentials(), RetryPolicy(0.0, nothing))
        self.own: dict[str, object] = {}

    def ask(self, method: str, path: str, body: object = None, *, retry: bool = True) -> Any:
        if method != "GET" or "/backlogQuotaMap" not in path or path.startswith("namespaces/"):
            return None
        stock = {"limitSize": DEFAULT_QUOTA_BYTES, "limitTime": -1, "policy": "producer_request_hold"}
        answer = {"destination_storage": stock, **self.own} if "applied" in path else self.own
        self.own = dict.fromkeys(QUOTA_KINDS, UNLIMITED)
        return answer


def test_quotas_removed_by_another_process_are_no_error() -> None:
    admin, path = LiftedMeanwhile(), "persistent/t/n/wide"
    policies = override_policies(admin, "t/n", path, policies_of(admin, "t/n", path), ours=False)
    state = NEW
    check_policies("wide-partition-0", "t/n", policies, state, compacted=False)


def test_error_names_an_address_that_the_client_library_rejects() -> None:
    with pytest.raises(InvalidAddress, match=r"'pulsar://\[::1\]:6650' is not a valid address"):
        open_broker("pulsar://[::1]:6650/tenant/namespace")


def test_closed_connection_is_reopened(interface: Interface, admin: Callable[..., AdminClient]) -> None:
    asked = admin(max_unavailable=0.0)
    interface.hang_up = True
    for number in range(3):
        interface.will_answer(200, number)
        assert asked.ask("GET", "x") == number


def test_request_is_redirected_to_the_owner(interface: Interface, admin: Callable[..., AdminClient]) -> None:
    """Brokers redirect requests to the owner of the topic, with the same method and body."""
    interface.will_answer(307, Location=f"{interface.url}/admin/v2/there?x=1")
    interface.will_answer(204)
    assert admin().ask("PUT", "here", {"a": 1}) is None
    assert [question[:3] for question in interface.questions] == [
        ("PUT", "/admin/v2/here", b'{"a": 1}'),
        ("PUT", "/admin/v2/there?x=1", b'{"a": 1}'),
    ]


def test_refusal_has_the_reason_of_the_cluster(interface: Interface, admin: Callable[..., AdminClient]) -> None:
    interface.will_answer(409, {"reason": "Subscription already exists"})
    with pytest.raises(ClusterRefused, match="Subscription already exists") as caught:
        admin().ask("PUT", "x")
    assert caught.value.status == 409


@pytest.mark.parametrize("status", [401, 403])
def test_wrong_credentials_are_a_caller_error(
    interface: Interface, admin: Callable[..., AdminClient], status: int
) -> None:
    interface.will_answer(status, {"reason": "no"})
    with pytest.raises(NotAuthorized, match="credentials"):
        admin().ask("GET", "x")


def test_token_is_read_from_its_file_each_time(
    interface: Interface, admin: Callable[..., AdminClient], tmp_path: Path
) -> None:
    (file := tmp_path / "token").touch(0o600)
    asked = admin(Credentials(token_file=str(file)))
    for token in ("one", "two"):
        file.write_text(token + "\n")
        interface.will_answer(204)
        asked.ask("GET", "x")
    assert [question[3] for question in interface.questions] == ["Bearer one", "Bearer two"]
    file.unlink()
    with pytest.raises(CallerError, match="token"):
        asked.ask("GET", "x")


def test_oauth2_token_is_fetched_and_reused(
    interface: Interface, admin: Callable[..., AdminClient], tmp_path: Path
) -> None:
    (secret := tmp_path / "key.json").touch(0o600)
    secret.write_text(json.dumps({"client_id": "me", "client_secret": "hush"}))
    oauth2 = {"issuer_url": interface.url, "private_key": f"file://{secret}", "audience": "pulsar"}
    interface.will_answer(200, {"token_endpoint": f"{interface.url}/token"})
    interface.will_answer(200, {"access_token": "abc", "expires_in": 3600})
    interface.will_answer(204)
    interface.will_answer(204)
    asked = admin(Credentials(oauth2=oauth2))
    asked.ask("GET", "x")
    asked.ask("GET", "y")
    paths = [(question[0], question[1], question[3]) for question in interface.questions]
    assert paths == [
        ("GET", "/.well-known/openid-configuration", None),
        ("POST", "/token", None),
        ("GET", "/admin/v2/x", "Bearer abc"),
        ("GET", "/admin/v2/y", "Bearer abc"),
    ]
    assert b"grant_type=client_credentials&client_id=me&client_secret=hush&audience=pulsar" in interface.questions[1][2]


def test_errors_of_an_oauth2_issuer_say_whether_to_retry(
    interface: Interface, admin: Callable[..., AdminClient], tmp_path: Path
) -> None:
    (secret := tmp_path / "key.json").touch(0o600)
    secret.write_text(json.dumps({"client_id": "me", "client_secret": "hush"}))

    def asked(url: str = interface.url) -> None:
        oauth2 = {"issuer_url": url, "private_key": f"file://{secret}"}
        admin(Credentials(oauth2=oauth2), max_unavailable=0.0).ask("GET", "x")

    where = {"token_endpoint": f"{interface.url}/token"}
    refused: list[list[tuple[int, object]]] = [
        [(404, b"no such page")],
        [(200, where), (401, {"error": "invalid_client"})],
        [(200, where), (403, b"<html>")],
    ]
    for answers in refused:
        for status, content in answers:
            interface.will_answer(status, content)
        with pytest.raises(NotAuthorized, match="refuses a token"):
            asked()
    for answers in ([(200, {"other": 1})], [(200, where), (200, {"token_type": "Bearer"})], [(200, b"text")]):
        for status, content in answers:
            interface.will_answer(status, content)
        with pytest.raises(NotAuthorized, match="no token from"):
            asked()
    for bad in ("ftp://127.0.0.1", "127.0.0.1", f"{interface.url}x"):
        with pytest.raises((NotAuthorized, InvalidAddress), match=r"no token from|would be sent"):
            asked(bad)
    interface.will_answer(503)
    with pytest.raises(ServiceUnavailable, match="503"):
        asked()
    with pytest.raises(ServiceUnavailable, match=r"issuer http://127.0.0.1:9 does not answer"):
        asked("http://127.0.0.1:9")


def test_a_redirect_to_a_wrong_address_is_an_error(interface: Interface, admin: Callable[..., AdminClient]) -> None:
    asked = admin(max_unavailable=0.0)
    for place in ("ftp://127.0.0.1/x", "http://127.0.0.1:x/", "http://[127.0.0.1/"):
        interface.will_answer(307, Location=place)
        with pytest.raises(ServiceUnavailable):
            asked.ask("GET", "x")
    assert len(interface.questions) == 3, "an answer was received, so nothing is repeated"
    interface.will_answer(307, Location="/admin/v2/there")
    interface.will_answer(200, 1)
    assert asked.ask("GET", "x") == 1


def test_a_proxy_of_the_environment_is_not_used(
    interface: Interface, admin: Callable[..., AdminClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    interface.will_answer(200, 1)
    assert admin(max_unavailable=0.0).ask("GET", "x") == 1


@pytest.mark.parametrize(
    "options",
    [
        {"token": "a", "token_file": "b"},
        {"tls_cert": "a"},
        {"oauth2": {"issuer_url": "x"}},
        {"token": "a", "tls_cert": "b", "tls_key": "c"},
        {"token": ""},
        {"token": "\n"},
        {"oauth2": {"issuer_url": 5, "private_key": "x"}},
    ],
)
def test_inconsistent_credentials_are_rejected(options: dict[str, Any]) -> None:
    with pytest.raises(CallerError):
        Credentials(**options)


def test_credentials_are_not_printed() -> None:
    assert "hush" not in repr(Credentials(token="hush"))


def test_white_space_around_a_token_is_dropped(interface: Interface, admin: Callable[..., AdminClient]) -> None:
    interface.will_answer(204)
    admin(Credentials(token=" abc\n")).ask("GET", "x")
    assert interface.questions[-1][3] == "Bearer abc"


@pytest.mark.parametrize("token", ["hush\nhush", "hush hush", "hush-t\u00f6k\u00e9n\U0001f600", "hush\0"])
def test_a_token_that_no_header_can_have_is_one_error_without_it(tmp_path: Path, token: str) -> None:
    with pytest.raises(CallerError, match=r"^the token has ") as error:
        Credentials(token=token)
    assert "hush" not in str(error.value)
    (file := tmp_path / "file").touch(0o600)
    file.write_text(token)
    with pytest.raises(CallerError, match=r"^the token file .* (has|contains) ") as error:
        Credentials(token_file=str(file)).current_token()
    assert "hush" not in str(error.value)


def test_a_private_key_that_is_no_data_is_one_error(tmp_path: Path) -> None:
    for key in ("data:application/json;base64,!!!", str(tmp_path / "missing")):
        with pytest.raises(CallerError, match=r"^private_key of oauth2 "):
            Credentials(oauth2={"issuer_url": "http://127.0.0.1:1", "private_key": key}).for_client()


def test_redirects_of_an_issuer_without_end_are_not_retried(
    interface: Interface, admin: Callable[..., AdminClient], tmp_path: Path
) -> None:
    (secret := tmp_path / "key.json").touch(0o600)
    secret.write_text(json.dumps({"client_id": "me", "client_secret": "hush"}))
    for _ in range(21):
        interface.will_answer(302, None, Location=f"{interface.url}/again")
    with pytest.raises(NotAuthorized, match="check the parameters of oauth2"):
        admin(Credentials(oauth2={"issuer_url": interface.url, "private_key": str(secret)})).ask("GET", "x")


def test_a_page_instead_of_json_is_not_an_answer(interface: Interface, admin: Callable[..., AdminClient]) -> None:
    interface.will_answer(200, b"<!DOCTYPE html><html></html>")
    with pytest.raises(InvalidAddress, match=f"^{interface.url} answered GET x with a page instead of JSON"):
        admin().ask("GET", "x")


def test_invalid_admin_address_is_rejected() -> None:
    with pytest.raises(InvalidAddress, match="must be a text, got 5"):
        AdminClient(5, Credentials(), RetryPolicy(0.0, nothing))  # type: ignore[arg-type]  # what a caller may do
    with pytest.raises(InvalidAddress, match="http://HOST:PORT"):
        AdminClient("host:8080", Credentials(), RetryPolicy(0.0, nothing))


def test_error_of_a_missing_namespace_names_the_admin_interface(interface: Interface) -> None:
    """The admin interface may be that of another cluster."""
    interface.will_answer(404, {"reason": "Namespace does not exist"})
    with pytest.raises(InvalidAddress) as error:
        open_broker("pulsar://127.0.0.1:1/tenant/namespace", admin_url=interface.url)
    assert str(error.value) == (
        f"'pulsar://127.0.0.1:1/tenant/namespace': the admin interface at {interface.url} answers: Namespace does not "
        "exist. If that is not the cluster's, give admin_url, else run `pulsar-admin namespaces create "
        "tenant/namespace`"
    )


@pytest.mark.parametrize(("status", "again"), [(503, True), (403, False)])
def test_message_limit_is_requested_again_after_an_outage(
    interface: Interface, monkeypatch: pytest.MonkeyPatch, status: int, again: bool
) -> None:
    """The next writers ask until there is an answer; a refusal is an answer."""

    def not_opened(*_: object, **__: object) -> None:
        raise ClusterRefused("no writer here", 412, "")

    monkeypatch.setattr(Cluster, "opened", not_opened)
    limit, free = "/admin/v2/brokers/configuration/runtime", MAX_MESSAGE_BYTES - OVERHEAD_BYTES
    interface.will_answer(200, [])
    with open_broker(f"pulsar://127.0.0.1:{interface.server_port}/tenant/namespace", admin_url=interface.url) as broker:
        assert isinstance(broker, PulsarBroker)
        interface.will_answer(status, {"reason": "not now"})
        assert [broker.max_message_bytes, broker.max_message_bytes] == [free, free]
        for _ in range(2):
            interface.will_answer(200, {INCARNATION: "first"})
            if again and len(interface.questions) == 2:
                interface.will_answer(200, {"maxMessageSize": "65536"})
            with pytest.raises(ClusterRefused):
                broker.writer_of_new("orders")
        assert [question[1] for question in interface.questions].count(limit) == 1 + again
        assert broker.max_message_bytes == (48 * 1024 if again else free)
