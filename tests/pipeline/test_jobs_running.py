"""Sessions of jobs, without a JVM: how they end."""

from __future__ import annotations

import os
import signal
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest

from txnbuffer.pipeline.jobs.running import session
from txnbuffer.pipeline.spark import session as sessions


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What sessions are told from now on."""
    said: list[str] = []
    context = SimpleNamespace(setLogLevel=said.append)
    spark = SimpleNamespace(sparkContext=context, stop=lambda: said.append("stop"))
    monkeypatch.setenv("JAVA_HOME", "/java")
    monkeypatch.setattr(sessions, "open_session", lambda *_, **__: spark)
    return said


def test_sigterm_ends_a_job_in_silence(said: list[str]) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended, session():
        os.kill(os.getpid(), signal.SIGTERM)
        for _ in range(600):  # until it is delivered
            Event().wait(0.1)
    assert ended.value.code == 128 + signal.SIGTERM
    assert said == ["OFF", "stop"]
    assert signal.getsignal(signal.SIGTERM) is before


def test_what_fails_is_logged_by_spark(said: list[str]) -> None:
    def fail(*_: Any) -> None:
        raise ArithmeticError

    with pytest.raises(ArithmeticError), session():
        fail()
    assert said == ["stop"]
