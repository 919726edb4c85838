"""Sessions of jobs, without a JVM: how they end."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Thread
from types import SimpleNamespace

import pytest
from py4j.protocol import Py4JError, Py4JJavaError, Py4JNetworkError
from pyspark.errors import AnalysisException

from broker_io.errors import ServiceUnavailable
from broker_io.standalone import Port
from broker_io.system import SystemNetwork
from txnbuffer.errors import InvalidRequest
from txnbuffer.pipeline.jobs.running import JobFailed, report_progress, session
from txnbuffer.pipeline.spark import session as sessions


class Spark:
    """A session that can be stopped."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.stopped = Event()
        self.sparkContext = SimpleNamespace(setLogLevel=self.said.append, stop=self.stopped.set)

    def stop(self) -> None:
        self.said.append("stop")


@pytest.fixture
def fake_spark(monkeypatch: pytest.MonkeyPatch) -> Spark:
    spark = Spark()
    monkeypatch.setenv("JAVA_HOME", "/java")
    monkeypatch.setattr(sessions, "open_session", lambda *_, **__: spark)
    return spark


@pytest.mark.parametrize("fails", [True, False])
def test_sigterm_ends_a_job_without_an_error(fake_spark: Spark, fails: bool) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended, session():
        os.kill(os.getpid(), signal.SIGTERM)
        for _ in range(600):  # as if waiting for the JVM
            if fake_spark.stopped.wait(0.1):
                break
        if fails:
            raise ArithmeticError
    assert ended.value.code == 128 + signal.SIGTERM
    assert fake_spark.said == ["OFF", "stop"]
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_failure_is_raised(fake_spark: Spark) -> None:
    with pytest.raises(ArithmeticError), session():
        raise ArithmeticError
    assert fake_spark.said == ["stop"]


class Java:
    """An exception in a JVM, which has its message as long as it runs."""

    _target_id = "o1"

    def __init__(self, said: str | None) -> None:
        self._gateway_client = self
        self.converters = None
        self.is_connected = True
        self.said = said

    def send_command(self, _: str) -> str:
        if self.said is None:
            raise ConnectionRefusedError(111, "Connection refused")
        return f"ys{self.said}"


ENDED = "its JVM has ended or does not answer"
FAILURES = [
    (lambda: ConnectionRefusedError(111, "Connection refused"), ENDED),
    (lambda: EOFError(), ENDED),
    (lambda: Py4JNetworkError("Answer from Java side is empty"), ENDED),
    (lambda: Py4JJavaError("", Java(None)), ENDED),
    (
        lambda: Py4JJavaError("An error occurred while calling o1.x.", Java(": java.lang.Error: full")),
        "java.lang.Error: full",
    ),
    (lambda: Py4JError("An error occurred while calling o1.x"), "An error occurred while calling o1.x"),
    (lambda: AnalysisException("[CONFLICTING] x"), r"\[CONFLICTING\] x"),
]


@pytest.mark.parametrize(("failure", "said"), FAILURES)
def test_errors_of_the_connection_to_the_jvm_are_one_line(
    fake_spark: Spark, failure: Callable[[], Exception], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exit code is not 1, which an audit returns for differences."""

    def fail(*_: object, **__: object) -> None:
        raise failure()

    monkeypatch.setattr(fake_spark, "stop", fail)
    with pytest.raises(JobFailed, match=f"^Spark failed: {said}") as failed, session():
        fail()
    assert failed.value.exit_code == 5
    fake_spark.sparkContext.statusTracker = fail  # called by the progress report
    with pytest.raises(JobFailed, match=f"^Spark failed: {said}"), report_progress(fake_spark, "exporting", print):  # type: ignore[arg-type]  # as much as it needs
        fail()
    monkeypatch.setattr(sessions, "open_session", fail)
    with pytest.raises(JobFailed, match=f"^Spark does not start: {said}"), session():
        pass


@pytest.mark.parametrize(
    "master",
    [
        "",
        "mesos://h:5050",
        "k8s://",
        "lokal[*]",
        "local[0]",
        "local[2",
        "local[x]",
        "localhost:7077",
        "spark://h",
        "spark://h:x",
        "spark://:1",
    ],
)
def test_an_invalid_master_is_refused_without_a_jvm(monkeypatch: pytest.MonkeyPatch, master: str) -> None:
    monkeypatch.setenv("JAVA_HOME", "/missing")
    with pytest.raises(InvalidRequest, match=r"^master '.*' is invalid: (write|Spark has no Mesos) "), session(master):
        pass
    with pytest.raises(InvalidRequest, match="is invalid"), session(settings={"spark.master": master}):
        pass


def test_a_master_that_does_not_answer_is_one_error_without_a_jvm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAVA_HOME", "/missing")
    ports = [Port().number for _ in range(2)]
    places = ",".join(f"127.0.0.1:{port}" for port in ports)
    said = f"^no Spark master answers at 127.0.0.1:{ports[0]} .*, 127.0.0.1:{ports[1]} .*: check the host and the port"
    with pytest.raises(ServiceUnavailable, match=said), session(f"spark://{places}"):
        pass


@pytest.mark.parametrize(
    "master", ["local", "local[*]", "local[2, 3]", "local-cluster[1,1,1024]", "yarn", "k8s://https://h:443"]
)
def test_other_masters_are_left_to_spark(monkeypatch: pytest.MonkeyPatch, master: str) -> None:
    monkeypatch.setenv("HADOOP_CONF_DIR", "/hadoop")
    monkeypatch.setattr(SystemNetwork, "probe", lambda *_: None)
    sessions.check_master(master)


def test_yarn_requires_its_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HADOOP_CONF_DIR", "YARN_CONF_DIR"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(InvalidRequest, match="set HADOOP_CONF_DIR"):
        sessions.check_master("yarn")


@pytest.mark.parametrize("url", ["127.0.0.1:{}", "https://127.0.0.1:{}", "http://127.0.0.1:{}/api"])
def test_a_kubernetes_that_does_not_answer_is_one_error(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    for name in ("HTTPS_PROXY", "https_proxy"):
        monkeypatch.delenv(name, raising=False)
    place = url.format(Port().number)
    with pytest.raises(ServiceUnavailable, match=f"^no Kubernetes API server answers at {place} "):
        sessions.check_master(f"k8s://{place}")
    monkeypatch.setenv("https_proxy", "http://proxy")
    sessions.check_master(f"k8s://{place}")


def test_a_web_server_is_not_a_master() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        with pytest.raises(ServiceUnavailable, match="it answers, but with another protocol"):
            sessions.check_master(f"spark://127.0.0.1:{server.server_port}")
        server.shutdown()
        thread.join()


def test_one_standby_of_a_master_has_to_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, int]] = []

    def ask(_: object, host: str, port: int, request: bytes, seconds: float) -> bytes:
        asked.append((host, port))
        if host == "away":
            raise ConnectionRefusedError
        return b""

    monkeypatch.setattr(SystemNetwork, "ask", ask)
    sessions.check_master("spark://away:1,[::1]:2,third:3")
    assert asked == [("away", 1), ("::1", 2)]
