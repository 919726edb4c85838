"""The HTTP server with access control: who sees and does what, requests of foreign pages, and TLS."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from access_world import AccessedService, accessed
from certificates import Authority
from http_answers import HttpAnswer, ask
from service_setup import engine_on

from broker_io.memory import MemoryBroker
from txnbuffer.service.door import http_guard
from txnbuffer.service.door.http_guard import HEADERS, MAX_BODY, host_of, page_refusal
from txnbuffer.service.door.tls import ServerTls
from txnbuffer.service.servers import http_server


async def request(service: AccessedService, path: str, body: Any = None, **options: Any) -> HttpAnswer:
    if (principal := options.pop("principal", None)) is not None:
        options["token"] = service.tokens.text[principal]
    return await asyncio.to_thread(partial(ask, service.http.port, path, body, **options))


def is_protected(answer: HttpAnswer) -> bool:
    """Whether an answer has all headers that protect it, and none that lets a foreign page read it."""
    open_to = [name for name in answer.headers if name.startswith("access-control-")]
    return all(answer.headers.get(name) == text for name, text in HEADERS.items()) and not open_to


async def test_health_is_public_and_details_are_not(tmp_path: Path) -> None:
    async with engine_on(MemoryBroker()) as engine, accessed(engine, tmp_path) as service:
        for path, public in (("/health", {"status", "insecure"}), ("/ready", {"ready"})):
            for options in ({}, {"token": "txnb_0_0"}):
                answer = await request(service, path, **options)
                assert (answer.status, {*answer.json}) == (200, public)
                assert is_protected(answer)
            assert {*(await request(service, path, principal="reader")).json} > public
        service.policy.write_text("nonsense")
        service.access.refresh()
        (problem,) = (await request(service, "/health", principal="reader")).json["access"]
        assert problem.startswith(f"{service.policy} is not valid TOML")
        assert "txnbuffer_access_problems 1" in (await request(service, "/metrics", principal="root")).body.decode()


async def test_metrics_are_for_principals_that_a_rule_names(tmp_path: Path) -> None:
    async with engine_on(MemoryBroker()) as engine, accessed(engine, tmp_path) as service:
        answer = await request(service, "/metrics")
        assert (answer.status, answer.json["error"]) == (401, "Unauthenticated")
        assert answer.headers["www-authenticate"] == "Bearer"
        answer = await request(service, "/metrics", token=service.tokens.add("stranger"))
        assert answer.status == 401
        service.access.refresh()
        answer = await request(service, "/metrics", token=service.tokens.text["stranger"])
        assert (answer.status, "no rule of the policy names 'stranger'" in answer.json["message"]) == (403, True)
        lines = (await request(service, "/metrics", principal="reader")).body.decode().splitlines()
        assert 'txnbuffer_denied_total{error="Unauthenticated"} 2.0' in lines
        assert 'txnbuffer_denied_total{error="NotAuthorized"} 1.0' in lines
        assert {"txnbuffer_insecure 0.0", "txnbuffer_access_problems 0.0"} <= {*lines}


async def test_operators_ask_over_http_what_they_may(tmp_path: Path) -> None:
    async with engine_on(MemoryBroker()) as engine, accessed(engine, tmp_path) as service:
        async with service.connect("root") as client:
            for topic in ("a", "b"):
                await client.send(topic, b"v")
        topics = lambda answer: [row["topic"] for row in answer.json]  # noqa: E731
        assert topics(await request(service, "/admin/List", {}, principal="operator")) == ["a"]
        assert topics(await request(service, "/admin/List", {}, principal="root")) == ["a", "b"]
        answer = await request(service, "/admin/Describe", {"topic": "b"}, principal="operator")
        assert (answer.status, answer.json["error"], answer.json["retryable"]) == (403, "NotAuthorized", False)
        assert "'operator' may not read topic 'b'" in answer.json["message"]
        assert service.denials()[-1] == ("operator", "read", "topic 'b'")
        answer = await request(service, "/admin/Describe", {"topic": "a"}, principal="operator")
        assert (answer.status, answer.json["topic"], is_protected(answer)) == (200, "a", True)
        answer = await request(service, "/admin/Describe", {"topic": "c"}, principal="root")
        assert (answer.status, answer.json["error"]) == (404, "TopicNotFound")
        assert (await request(service, "/admin/Sessions", {})).status == 401
        await service.server.unserve()
        answer = await request(service, "/admin/List", {}, principal="root")
        assert (answer.status, answer.json["error"], answer.json["retryable"]) == (503, "ServiceUnavailable", True)


async def test_invalid_requests_are_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_guard, "BODY_SECONDS", 0.3)
    async with engine_on(MemoryBroker()) as engine, accessed(engine, tmp_path) as service:
        plain = {"Content-Type": "text/plain"}
        for path, body, status, part, options in (
            ("/admin/None", {}, 404, "nothing at this path", {}),
            ("/none", None, 404, "nothing at this path", {}),
            ("/admin/List", None, 405, "does not take the method", {}),
            ("/health", {}, 405, "does not take the method", {}),
            ("/admin/List", b"[]", 400, "no JSON object", {}),
            ("/admin/List", b"{", 400, "no JSON object", {}),
            ("/admin/List", b"[" * 50_000, 400, "no JSON object", {}),
            ("/admin/Describe", {"topic": 7}, 400, "not arguments of a request", {}),
            ("/admin/Describe", {"subject": "a"}, 400, "not arguments of a request", {}),
            ("/admin/Describe", {}, 400, "needs 'topic', a name", {}),
            ("/admin/List", {"topic": "a"}, 400, "topic", {}),
            ("/admin/List", {}, 415, "content-type: application/json", {"headers": plain}),
            ("/admin/List", b" " * (MAX_BODY + 1), 413, f"over {MAX_BODY} bytes", {}),
        ):
            answer = await request(service, path, body, principal="root", **options)
            assert (answer.status, part in answer.json["message"]) == (status, True), answer
            assert is_protected(answer)
        answer = await asyncio.to_thread(unfinished, service.http.port)
        assert b"408" in answer
        assert b"did not arrive" in answer


async def test_a_limit_says_when_to_retry(tmp_path: Path) -> None:
    async with engine_on(MemoryBroker()) as engine, accessed(engine, tmp_path) as service:
        text = service.policy.read_text()
        service.policy.write_text(f'{text}\n[[limit]]\nprincipals = ["root"]\nrequests_per_second = 0.5\n')
        service.access.refresh()
        assert service.access.problems == []
        answers = [await request(service, "/admin/Status", {}, principal="root") for _ in range(2)]
        assert [answer.status for answer in answers] == [200, 429]
        refusal = answers[1]
        assert refusal.headers["retry-after"] == "2"
        assert (refusal.json["error"], refusal.json["retryable"]) == ("LimitExceeded", True)
        assert is_protected(refusal)


def unfinished(port: int) -> bytes:
    """The answer to a request whose body never ends."""
    head = (
        b"POST /admin/List HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n{"
    )
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        connection.sendall(head)
        parts = []
        while part := connection.recv(65536):
            parts.append(part)
        return b"".join(parts)


EVIL = "https://evil.example"
FORM = {"Content-Type": "text/plain", "Origin": EVIL}
OF_PAGES = {
    "a form": ("POST", FORM | {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}),
    "a form of an old browser": ("POST", FORM),
    "a form in a sandbox": ("POST", {"Content-Type": "application/x-www-form-urlencoded", "Origin": "null"}),
    "fetch without CORS": ("POST", FORM | {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"}),
    "fetch with CORS after a preflight": ("POST", {"Origin": EVIL, "Sec-Fetch-Site": "cross-site"}),
    "a preflight": ("OPTIONS", {"Origin": EVIL, "Access-Control-Request-Method": "POST"}),
    "a script": ("GET", {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Dest": "script"}),
    "a frame": ("GET", {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Dest": "iframe"}),
    "a page on another port": ("GET", {"Sec-Fetch-Site": "same-site"}),
    "an origin on another port": ("POST", {"Origin": "http://localhost:1"}),
    "a name that resolves to this address": ("POST", {"Host": "evil.example:7712", "Sec-Fetch-Site": "same-origin"}),
    "such a name of its own page": ("GET", {"Host": "evil.example", "Origin": "http://evil.example"}),
}
"""What browsers send for pages of others, beside what the page itself can set."""


async def test_requests_of_foreign_pages_are_refused(tmp_path: Path) -> None:
    async with engine_on(MemoryBroker()) as engine, accessed(engine, tmp_path) as service:
        for name, (method, headers) in OF_PAGES.items():
            body = None if method == "GET" else {}
            for path in ("/admin/List", "/metrics", "/health"):
                before = service.access.denied["NotAuthorized"]
                answer = await request(service, path, body, method=method, headers=headers, principal="root")
                assert (answer.status, answer.json["error"]) == (403, "NotAuthorized"), name
                assert is_protected(answer)
                assert service.access.denied["NotAuthorized"] == before + 1
        assert any("evil.example" in line["error"] for line in service.log if line["event"] == "denied")
        own = {"Origin": f"http://localhost:{service.http.port}", "Sec-Fetch-Site": "same-origin"}
        for headers in (own, {"Host": "txn.example.org"}, {"Host": "[::1]:7712"}, {"Sec-Fetch-Site": "none"}):
            answer = await request(service, "/admin/List", {}, headers=headers, principal="root")
            assert answer.status == 200


def test_hosts_are_compared_as_names() -> None:
    assert [host_of(text) for text in ("A.example:1", "a.example.", "[::1]:1", "[::1]", "1.2.3.4")] == [
        "a.example", "a.example", "::1", "::1", "1.2.3.4",
    ]  # fmt: skip
    for host in (
        "localhost.evil.example",
        "1.2.3.4.evil.example",
        "[evil.example]",
        "user@localhost",
        " ",
        "",
        "localhost:80@evil.example",
        "localhost:x",
        "localhost:",
        "localhost:1:2",
        "[::1]evil.example",
        "[::1",
        "::1",
        "[::1%evil.example]",
        "[[::1]",
        "localhost:1234567",
        "localhost\n",
        "127.0.0.1/evil.example",
        "a.example:\xb2",
    ):
        assert page_refusal({"host": host}, "http", frozenset({"a.example"})) is not None
    for host in ("a.example:7712", "A.EXAMPLE", "localhost:1", "10.0.0.1", "[::1]", "a.example."):
        assert page_refusal({"host": host}, "http", frozenset({"a.example"})) is None
    assert page_refusal({}, "http", frozenset()) is None  # of HTTP/1.0, as some probes speak it


async def test_numbers_that_no_argument_can_have_are_refused(tmp_path: Path) -> None:
    async with engine_on(MemoryBroker()) as engine, accessed(engine, tmp_path) as service:
        for number in (b"9" * 4000, b"-" + b"9" * 4000, b"9" * 6000):
            for path, name in (("FindHanging", b"seconds"), ("FindHanging", b"grace"), ("AddCursor", b"at")):
                body = b'{"topic": "a", "cursor": "c", "%s": %s}' % (name, number)
                answer = await request(service, f"/admin/{path}", body, principal="root")
                assert answer.status == 400, (path, number[:2], answer)
                assert answer.json["error"] != "Error"


async def test_an_error_that_nobody_expects_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with engine_on(MemoryBroker()) as engine, accessed(engine, tmp_path) as service:

        def fail(*_: object) -> None:
            raise ZeroDivisionError("a bug")

        monkeypatch.setattr(http_server, "decode_admin_body", fail)
        answer = await request(service, "/admin/List", {}, principal="root")
        assert (answer.status, answer.json["error"]) == (500, "Error")
        assert is_protected(answer)
        assert "POST /admin/List failed" in caplog.text
        assert "ZeroDivisionError: a bug" in caplog.text


def client_tls(trust: Path, *certificate: Path) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(trust))
    if certificate:
        context.load_cert_chain(*map(str, certificate))
    return context


def replace(target: Path, source: Path) -> None:
    """Replace a file by another one as a whole, as those do who renew certificates."""
    new = target.with_suffix(".new")
    new.write_bytes(source.read_bytes())
    new.chmod(0o600)
    os.replace(new, target)


async def test_a_client_certificate_names_its_principal(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "foreign").mkdir()
    ours, foreign = Authority(tmp_path / "own", "ours"), Authority(tmp_path / "foreign", "foreign")
    certificate, key = map(str, ours.sign("service"))
    tls = ServerTls(certificate, key, str(ours.trust))
    async with engine_on(MemoryBroker()) as engine, accessed(engine, tmp_path, tls=tls) as service:
        reader, bare = client_tls(ours.trust, *ours.sign("reader")), client_tls(ours.trust)
        assert (await request(service, "/health", tls=bare)).status == 200
        assert (await request(service, "/metrics", tls=bare)).status == 401
        assert (await request(service, "/metrics", tls=bare, principal="reader")).status == 200
        assert (await request(service, "/metrics", tls=reader)).status == 200
        assert "damaged" in (await request(service, "/health", tls=reader)).json
        answer = await request(service, "/admin/Sessions", {}, tls=reader)
        assert (answer.status, "'reader' may not operate the service" in answer.json["message"]) == (403, True)
        assert (await request(service, "/admin/Sessions", {}, tls=reader, principal="root")).status == 200
        stranger = client_tls(ours.trust, *ours.sign("stranger"))
        assert (await request(service, "/metrics", tls=stranger)).status == 403
        with pytest.raises((ssl.SSLError, ConnectionError)):  # signed by another authority
            await request(service, "/health", tls=client_tls(ours.trust, *foreign.sign("reader")))
        with pytest.raises(OSError, match=r"closed|reset|Remote end|disconnected"):
            await request(service, "/health")  # without TLS


async def test_certificates_are_replaced_without_a_restart(tmp_path: Path) -> None:
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
    old, new = Authority(tmp_path / "old", "old"), Authority(tmp_path / "new", "new")
    certificate, key = old.sign("service")
    trust = tmp_path / "clients.pem"
    for path, source in ((certificate, certificate), (key, key), (trust, old.trust)):
        replace(path, source)
    tls = ServerTls(str(certificate), str(key), str(trust))
    async with engine_on(MemoryBroker()) as engine, accessed(engine, tmp_path, tls=tls) as service:
        assert (await request(service, "/metrics", tls=client_tls(old.trust, *old.sign("reader")))).status == 200
        replace(key, new.sign("service")[1])  # which fits only the next certificate
        service.access.refresh()
        assert [str(error).partition(" is ")[0] for error in service.access.problems] == [str(key)]
        assert (await request(service, "/health", tls=client_tls(old.trust))).status == 200
        replace(certificate, tmp_path / "new" / "service.pem")
        replace(trust, new.trust)
        service.access.refresh()
        assert service.access.problems == []
        with pytest.raises(ssl.SSLCertVerificationError):
            await request(service, "/health", tls=client_tls(old.trust))
        assert (await request(service, "/metrics", tls=client_tls(new.trust, *new.sign("reader")))).status == 200
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await request(service, "/health", tls=client_tls(new.trust, *old.sign("reader")))
        assert "certificate changed" in [line["event"] for line in service.log]
