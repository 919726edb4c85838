"""`txnbuf serve` as a process: signals, kills, what it refuses."""

from __future__ import annotations

import asyncio
import json
import signal
import time

import pytest
from certificates import self_signed
from commands import txnbuf
from http_answers import get
from raw_session import OverGrpc, RawSession, transactional
from service_process import ServiceProcess, kept_port


async def session_at(service, *topics):
    session = RawSession(OverGrpc(service.port))
    await session.hello()
    await session.register(*topics)
    return session, await session.lease(10)


async def test_the_first_signal_drains_and_the_second_one_ends(tmp_path):
    with ServiceProcess(tmp_path, "--set", "service.drain_seconds=60") as service:
        session, ids = await session_at(service, "a")
        await session.write(("a", transactional(ids[:1])))
        await session.until(lambda: True)
        service.terminate()
        await session.until(lambda: session.draining)
        late = RawSession(OverGrpc(service.port))
        with pytest.raises(EOFError):
            await late.hello()
        assert service.process.poll() is None
        service.terminate()
        assert await asyncio.to_thread(service.finish) == 128 + signal.SIGTERM
        await late.link.cut()
        await session.link.cut()


async def test_the_first_signal_ends_it_once_nothing_is_open(tmp_path):
    with ServiceProcess(tmp_path) as service:
        session, _ = await session_at(service, "a")
        service.terminate()
        with pytest.raises(EOFError):
            await session.until(lambda: False)
        await session.link.cut()
        assert await asyncio.to_thread(service.finish) == 0
        assert [event["event"] for event in service.events] == [
            "recovering",
            "took over",
            "serving",
            "draining",
            "stopped",
        ]


OF_A_PAIR = ["--listen", "127.0.0.1:0", "--http", "", "--pair-listen", "127.0.0.1:0", "--backup-of", "127.0.0.1:1"]


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        (["--listen", "0.0.0.0:0"], 2, "configure TLS (--tls-cert and --tls-key) and authentication"),
        (["--http", "0.0.0.0:0"], 2, "without protection"),
        (["--tls-cert", "some.pem"], 2, "both a certificate and its key"),
        (["--tls-cert", __file__, "--tls-key", __file__], 5, "(service.tls_key): other users may read it"),
        ([*OF_A_PAIR, "--pair-lock", "etcd://127.0.0.1:1/p?user=u&password-file=/none"], 5, "/none (password-file of"),
        (["--tls-cert", __file__, "--tls-key", "none"], 5, "can't read none (service.tls_key)"),
        (["--set", "service.listne=x"], 2, "did you mean 'listen'"),
        (["--set", "transactions.timeout=0"], 2, "must be more than 0 seconds"),
        (["--set", "service.create_topics=perhaps"], 2, "must be true or false"),
    ],
)
def test_what_can_not_be_served_is_refused_at_once(tmp_path, flags, code, message):
    done = txnbuf("serve", f"file:{tmp_path / 'log'}", *flags)
    assert done.returncode == code
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "log").exists()


def test_an_invalid_address_is_refused_before_anything_is_published():
    done = txnbuf("serve", "nonsense:")
    assert done.returncode == 2
    assert "is not a broker address" in done.stderr
    assert "recovering" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give the log to serve exactly once"),
        (["file:x", "--broker", "file:x"], "give the log to serve exactly once"),
        (["file:x", "--standby"], "--standby requires a cluster"),
        (["file:x", "--fence"], "--fence requires a cluster"),
        (["--broker", "pulsar://127.0.0.1:1/p/n", "--fence", "--standby"], "--standby and --fence exclude each other"),
        (["--broker", "pulsar://127.0.0.1:1/p/n", "--advertise", "here"], "write HOST:PORT"),
        (["pulsar://nowhere"], "is not the address of a cluster"),
    ],
)
def test_invalid_service_settings(arguments, message):
    done = txnbuf("serve", *arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_a_log_that_another_service_owns_is_refused(tmp_path):
    with ServiceProcess(tmp_path) as service:
        done = txnbuf("serve", f"file:{tmp_path}", "--listen", "127.0.0.1:0", "--http", "127.0.0.1:0")
        assert done.returncode == 5
        assert str(service.process.pid) in done.stderr
        assert "Traceback" not in done.stderr


def test_a_service_without_protection_says_so(tmp_path):
    with ServiceProcess(tmp_path, "--listen", "0.0.0.0:0", "--insecure") as service:
        event = service.event("insecure")
        assert event is not None
        assert event["listen"] == "0.0.0.0:0"
        assert json.loads(get(service.http, "/health")[1])["insecure"] is True
        assert "txnbuffer_insecure 1.0" in get(service.http, "/metrics")[1]
    with ServiceProcess(tmp_path) as service:
        assert service.event("insecure") is None
        assert json.loads(get(service.http, "/health")[1])["insecure"] is False


def test_operators_reach_a_service_with_tls(tmp_path):
    cert, key = self_signed(tmp_path)
    with ServiceProcess(tmp_path / "log", "--tls-cert", cert, "--tls-key", key) as service:
        command = ["list", f"txnbuf://127.0.0.1:{service.port}"]
        done = txnbuf(*command, "--tls-ca", cert)
        assert (done.returncode, done.stdout) == (0, "topics: nothing found\n")
        done = txnbuf(*command)
        assert done.returncode == 3
        assert "no service answers" in done.stderr


@pytest.mark.parametrize("flags", [(), ("--standby",)], ids=["alone", "standby"])
def test_a_service_that_waits_for_its_cluster_reports_it(flags: tuple[str, ...]) -> None:
    http, max_unavailable = kept_port(), "2" if flags else "600"  # a standby waits on
    address = "pulsar://127.0.0.1:1/public/default"
    more = ("--http", f"127.0.0.1:{http}", "--set", "pulsar.admin_url=http://127.0.0.1:1")
    service = ServiceProcess(address, *more, "--set", f"pulsar.max_unavailable={max_unavailable}", *flags)
    try:
        problem = service.wait_event("problem")
        for _ in range(300):
            problem = [event for event in service.events if event["event"] == "problem"][-1]
            if "no admin interface answers at http://127.0.0.1:1" in problem["error"]:
                break
            time.sleep(0.1)
        assert problem["what"] in (f"the cluster at {address}", "the log to be opened")
        health = json.loads(get(http, "/health")[1])
        assert health["status"] == "running"
        assert "no admin interface answers" in str(health["waits"])
        assert "waiting for the" in json.loads(get(http, "/ready")[1])["waits"][0]
        assert "txnbuffer_longest_wait_seconds" in get(http, "/metrics")[1]
        assert service.process.poll() is None
        service.terminate()
        assert service.finish() == 0
    finally:
        service.kill()
