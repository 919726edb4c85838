"""The figures of a real broker, each run once on little work, so that none rots until somebody measures."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from pulsar_container import distribution

from bench import figures_pulsar, figures_pulsar_recovery, figures_pulsar_scale, pulsar_broker
from broker_io.testing.standalone import NoPulsar, Standalone, StandaloneProcess


@pytest.fixture
def broker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Standalone]:
    """The broker of the figures, which ends with the test."""
    try:
        home = distribution()
    except NoPulsar as failure:
        pytest.fail(f"the figures start a broker from the server distribution: {failure}", pytrace=False)
    with StandaloneProcess(home, tmp_path, pulsar_broker.SETTINGS) as made:
        for module in (pulsar_broker, figures_pulsar, figures_pulsar_recovery, figures_pulsar_scale):
            monkeypatch.setattr(module, "broker", lambda: made)
        monkeypatch.setattr(pulsar_broker, "home", lambda: home)
        yield made


@pytest.mark.usefixtures("broker")
def test_figures_of_a_real_broker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures_pulsar, "SECONDS", 1.0)
    assert min(figures_pulsar.both(16, topics=2)) > 0
    assert min(figures_pulsar_recovery.load(300)) > 0
    assert figures_pulsar_recovery.take_over() > 0
    monkeypatch.setattr(figures_pulsar_scale, "SECONDS", 0.5)
    monkeypatch.setattr(figures_pulsar_scale, "perf", lambda topic: 1.0)  # the peer takes half a minute
    assert min(figures_pulsar_scale.written_per_second()) > 0
    assert figures_pulsar_scale.read_per_second() > 0
    assert figures_pulsar_scale.processed_per_second() > 0
