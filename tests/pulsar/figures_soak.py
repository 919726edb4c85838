"""The figures of a real broker, each run once with little work, to notice broken ones; run by `make soak`."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from pulsar_container import distribution

from bench import figures_pulsar, figures_pulsar_recovery, figures_pulsar_scale, figures_pulsar_topics, pulsar_broker
from broker_io.standalone import SHORT_LIVED, NoPulsar, StandaloneProcess

MEMORY = "-Xms256m -Xmx1g -XX:MaxDirectMemorySize=3999m"


@pytest.fixture
def broker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandaloneProcess]:
    """The broker of the figures, with `MEMORY`, which ends with the test."""
    monkeypatch.setenv("PULSAR_MEM", MEMORY)
    try:
        home = distribution()
    except NoPulsar as failure:
        pytest.fail(f"the figures start a broker from the server distribution: {failure}", pytrace=False)
    monkeypatch.setattr(pulsar_broker, "home", lambda: home)
    monkeypatch.setattr(pulsar_broker, "ENVIRONMENT", SHORT_LIVED)
    with pulsar_broker.make(tmp_path) as made:
        for module in (
            pulsar_broker,
            figures_pulsar,
            figures_pulsar_recovery,
            figures_pulsar_scale,
            figures_pulsar_topics,
        ):
            monkeypatch.setattr(module, "broker", lambda: made)
        yield made


def has_the_memory_that_it_is_given(broker: StandaloneProcess) -> None:
    with urllib.request.urlopen(f"{broker.admin}/metrics/") as answer:
        told = answer.read().decode().splitlines()
    most = [float(line.split()[-1]) for line in told if line.startswith("jvm_memory_direct_bytes_max")]
    assert most == [3999 * 1024 * 1024]


def test_figures_of_a_real_broker(broker: StandaloneProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    has_the_memory_that_it_is_given(broker)
    monkeypatch.setattr(figures_pulsar, "SECONDS", 1.0)
    assert min(figures_pulsar.both(16, topics=2)) > 0
    assert min(figures_pulsar_recovery.load(300)) > 0
    assert figures_pulsar_recovery.take_over() > 0
    monkeypatch.setattr(figures_pulsar_topics, "TOPICS", 4)
    assert min(figures_pulsar_topics.topics_per_second()) > 0
    assert 0 < figures_pulsar_topics.topics_threads() <= 64
    monkeypatch.setattr(figures_pulsar_scale, "SECONDS", 0.5)
    monkeypatch.setattr(figures_pulsar_scale, "perf", lambda topic: 1.0)  # the peer takes half a minute
    assert min(figures_pulsar_scale.written_per_second()) > 0
    assert figures_pulsar_scale.read_per_second() > 0
    assert figures_pulsar_scale.processed_per_second() > 0
