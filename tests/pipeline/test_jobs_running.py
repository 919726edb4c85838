"""Sessions of jobs, without a JVM: how they end."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from threading import Event
from types import SimpleNamespace

import pytest
from py4j.protocol import Py4JError, Py4JJavaError, Py4JNetworkError
from pyspark.errors import AnalysisException

from txnbuffer.pipeline.jobs.running import JobFailed, report_progress, session
from txnbuffer.pipeline.spark import session as sessions


class Spark:
    """A session that is told to stop."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.stopped = Event()
        self.sparkContext = SimpleNamespace(setLogLevel=self.said.append, stop=self.stopped.set)

    def stop(self) -> None:
        self.said.append("stop")


@pytest.fixture
def spark_told(monkeypatch: pytest.MonkeyPatch) -> Spark:
    spark = Spark()
    monkeypatch.setenv("JAVA_HOME", "/java")
    monkeypatch.setattr(sessions, "open_session", lambda *_, **__: spark)
    return spark


@pytest.mark.parametrize("fails", [True, False])
def test_sigterm_ends_a_job_in_silence(spark_told: Spark, fails: bool) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended, session():
        os.kill(os.getpid(), signal.SIGTERM)
        for _ in range(600):  # waits as for the JVM, which notices that it is to end
            if spark_told.stopped.wait(0.1):
                break
        if fails:
            raise ArithmeticError
    assert ended.value.code == 128 + signal.SIGTERM
    assert spark_told.said == ["OFF", "stop"]
    assert signal.getsignal(signal.SIGTERM) is before


def test_what_fails_is_told(spark_told: Spark) -> None:
    with pytest.raises(ArithmeticError), session():
        raise ArithmeticError
    assert spark_told.said == ["stop"]


class Java:
    """An exception in a JVM, which tells of it as long as it lives."""

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


ENDED = "its JVM has ended, or does not answer"
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
def test_what_the_way_to_the_jvm_raises_is_one_sentence(
    spark_told: Spark, failure: Callable[[], Exception], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no exit code of a job that was done: 1 says that two sides differ."""

    def fail(*_: object, **__: object) -> None:
        raise failure()

    monkeypatch.setattr(spark_told, "stop", fail)
    with pytest.raises(JobFailed, match=f"^Spark failed: {said}") as told_so, session():
        fail()
    assert told_so.value.exit_code == 5
    spark_told.sparkContext.statusTracker = fail  # as whoever tells of progress meets it
    with pytest.raises(JobFailed, match=f"^Spark failed: {said}"), report_progress(spark_told, "exporting", print):  # type: ignore[arg-type]  # as much as it needs
        fail()
    monkeypatch.setattr(sessions, "open_session", fail)
    with pytest.raises(JobFailed, match=f"^Spark does not start: {said}"), session():
        pass
