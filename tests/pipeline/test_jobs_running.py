"""Sessions of jobs, without a JVM: how they end."""

from __future__ import annotations

import os
import signal
from threading import Event
from types import SimpleNamespace

import pytest

from txnbuffer.pipeline.jobs.running import session
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
