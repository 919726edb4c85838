"""A test broker that restarts in a bad state after a kill is started again."""

from __future__ import annotations

import itertools
import time
from pathlib import Path

import pytest

from broker_io import standalone
from broker_io.standalone import STARTS, NoPulsar, Standalone, StandaloneProcess

LOOP = """\
INFO  AbstractMetadataStore - Deleted path: /ledgers/available/127.0.0.1:3181 (v. Optional[0])
INFO  ResourceLockImpl - Lock on resource /ledgers/available/127.0.0.1:3181 was invalidated. state Valid
INFO  ResourceLockImpl - Acquired resource lock on /ledgers/available/127.0.0.1:3181
"""


class Scripted(Standalone):
    """A broker with scripted logs for each launch and check; the last one is repeated."""

    def __init__(self, *lives: list[str]) -> None:
        super().__init__()
        self.lives = iter(lives)
        self.telling: list[str] = []
        self.launches = 0
        self.running = False

    @property
    def alive(self) -> bool:
        return self.running

    def log(self) -> str:
        return self.telling.pop(0) if len(self.telling) > 1 else self.telling[0]

    def kill(self) -> None:
        self.running = False

    def launch(self) -> None:
        assert not self.running
        self.running = True
        self.launches += 1
        self.telling = list(next(self.lives, self.telling))


@pytest.fixture(autouse=True)
def up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standalone, "is_up", lambda _: True)
    monkeypatch.setattr(standalone, "LOOK_SECONDS", 0.0)


WELL = ["messaging service is ready\n" + LOOP]


def test_healthy_broker_is_started_once() -> None:
    with Scripted(WELL, WELL) as broker:
        broker.start()
        assert broker.launches == 1
        broker.kill()
        broker.start()
        assert (broker.launches, broker.alive) == (2, True)


def test_broker_that_keeps_registering_its_bookie_is_restarted() -> None:
    late = [*WELL, *WELL, 30 * LOOP]
    with Scripted(WELL, [20 * LOOP], late, WELL) as broker:
        broker.kill()
        broker.start()
        assert (broker.launches, broker.alive) == (4, True)


def test_broker_that_is_stuck_before_it_is_up_is_restarted_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with Scripted(WELL, [30 * LOOP], WELL) as broker:
        monkeypatch.setattr(standalone, "is_up", lambda _: not standalone.is_stuck(broker.telling[0]))
        broker.kill()
        broker.start()
        assert (broker.launches, broker.alive) == (3, True)


def test_a_broker_that_is_not_up_in_time_is_started_again_and_then_given_more_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: list[float] = []

    def wait_until_up(admin: str, alive: object, log: object, seconds: float) -> bool:
        given.append(seconds)
        return len(given) in (1, 4)

    monkeypatch.setattr(standalone, "wait_until_up", wait_until_up)
    with Scripted(WELL) as broker:
        broker.kill()
        broker.start()
        assert (broker.launches, broker.alive) == (4, True)
    assert given == [standalone.STARTING, *(n * standalone.RETURNING for n in (1, 2, 3))]


def test_broker_that_is_not_stuck_gets_the_whole_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(standalone, "is_up", lambda _: False)
    assert not standalone.wait_until_up("", lambda: True, lambda: "Error while recovering ledger", 0.5)


def test_a_broker_that_ends_while_it_starts_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standalone, "is_up", lambda _: False)
    with pytest.raises(NoPulsar, match=r"ended during its start(.|\n)*the port is taken$"):
        standalone.wait_until_up("", lambda: False, lambda: "starting\nthe port is taken", 60.0)


def test_broker_that_stays_stuck_is_an_error() -> None:
    with Scripted(WELL, [30 * LOOP]) as broker:
        broker.kill()
        with pytest.raises(NoPulsar, match=f"is not up after {STARTS} starts(.|\n)*was invalidated"):
            broker.start()
        assert (broker.launches, broker.alive) == (1 + STARTS, False)


def with_program(home: Path, script: str) -> StandaloneProcess:
    """A broker with a script in place of the server, which keeps running after the script."""
    (home / "bin").mkdir()
    (home / "conf").mkdir()
    (home / "conf" / "standalone.conf").touch()
    program = home / "bin" / "pulsar"
    program.write_text(f"#!/bin/sh\n{script}; exec sleep 600\n")
    program.chmod(0o755)
    return StandaloneProcess(home, home / "place")


def launched(broker: StandaloneProcess) -> str:
    """Launch a broker; its first line of output."""
    broker.directory.mkdir(exist_ok=True)
    broker.launch()
    deadline = time.monotonic() + 60.0
    while not broker.log().endswith("\n") and time.monotonic() < deadline:
        time.sleep(0.01)
    return broker.log()


def test_log_of_a_broker_is_that_of_its_last_launch(tmp_path: Path) -> None:
    broker = with_program(tmp_path, f"echo x >>{tmp_path}/lives; echo life $(wc -l <{tmp_path}/lives)")
    try:
        for life in (1, 2):
            assert launched(broker) == f"life {life}\n"
            broker.kill()
    finally:
        broker.remove()
    assert broker.output.read_text() == "life 1\nlife 2\n"


def test_broker_stores_everything_in_its_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pulsar uses ZooKeeper if it is configured, or if there is data of it in the distribution."""
    monkeypatch.setenv("PULSAR_STANDALONE_USE_ZOOKEEPER", "1")
    broker = with_program(
        tmp_path, 'echo "$PULSAR_STANDALONE_USE_ZOOKEEPER $PULSAR_LOG_DIR $ROCKSDB_SHAREDLIB_DIR" "$@"'
    )
    try:
        zookeeper, logs, libraries, *command = launched(broker).split()
    finally:
        broker.remove()
    flags = dict(itertools.pairwise(command))
    places = [flags[f"--{what}-dir"] for what in ("zookeeper", "metadata", "bookkeeper")]
    assert zookeeper == "0"
    assert len(set(places)) == 3
    assert all(Path(place).is_relative_to(broker.directory) for place in [*places, logs, libraries, flags["--config"]])
    assert not Path(broker.handle["data"]).exists()


@pytest.mark.parametrize(("ours", "given"), [("", "-Xmx1g"), ("-Xmx3g -XX:MaxDirectMemorySize=7g", "-Xmx3g")])
def test_memory_of_a_broker_is_that_of_the_environment(
    ours: str, given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PULSAR_MEM", ours)
    broker = with_program(tmp_path, 'echo "$PULSAR_MEM"')
    try:
        assert given in launched(broker).split()
    finally:
        broker.remove()
