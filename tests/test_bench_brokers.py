"""The broker of the figures: its errors are printed if a figure fails, and it is replaced if it is lost."""

from __future__ import annotations

import io
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from bench import brokers as module
from bench import harness, pulsar_broker
from bench.brokers import ERRORS, LINE_LENGTH, Brokers, last_errors
from bench.harness import Figure
from broker_io.standalone import NoPulsar, Standalone, StandaloneProcess

STARTING = "T1 [web-1] ERROR Namespaces - Tenant not found\n"
LOST = """\
T2 [web-3] INFO  Topics - Failed to get metadata: org.apache.pulsar.broker.web.RestException: Topic a not found
T2 [client-3] WARN  Client - slow
T2 [BookieJournal-3181] ERROR org.apache.bookkeeper.bookie.Journal - the journal ended
io.netty.util.internal.OutOfDirectMemoryError: failed to allocate 4194304 byte(s) of direct memory (used: 1, max: 2)
\tat io.netty.util.internal.PlatformDependent.incrementMemoryCounter(PlatformDependent.java:1)
\t... 12 more
T3 [BookKeeperClientWorker-0] ERROR LedgerHandle - Not enough non-faulty bookies available, ledger 17
T4 [BookKeeperClientWorker-1] ERROR LedgerHandle - Not enough non-faulty bookies available, ledger 18
"""
TOLD = [
    "T2 [BookieJournal-3181] ERROR org.apache.bookkeeper.bookie.Journal - the journal ended",
    LOST.splitlines()[3],
    "T3 [BookKeeperClientWorker-0] ERROR LedgerHandle - Not enough non-faulty bookies available, ledger 17  (2 times)",
]


class Fake(StandaloneProcess):
    """A broker without a process: its log, whether it runs, whether it can store messages."""

    def __init__(self, directory: Path, starts: bool = True) -> None:
        super().__init__(Path("/nowhere"), directory)
        self.said, self.starts, self.runs, self.stores, self.removed = "", starts, False, True, False

    def start(self) -> None:
        Path(self.handle["data"]).mkdir()
        self.say(STARTING)
        if not self.starts:
            raise NoPulsar("it isn't up")
        self.runs = True

    def say(self, what: str) -> None:
        self.said += what
        self.output.write_text(self.said)

    def log(self) -> str:
        return self.said

    @property
    def alive(self) -> bool:
        return self.runs

    def remove(self) -> None:
        super().remove()
        self.runs, self.removed = False, True


class Rig:
    """Figures on fake brokers, their output on stderr, and the content of the temporary directory."""

    def __init__(self, scratch: Path) -> None:
        self.scratch = scratch
        self.made: list[Fake] = []
        self.err = io.StringIO()
        self.starts = True
        self.brokers = Brokers(self.make, self.err)

    def make(self, directory: Path) -> Fake:
        self.made.append(Fake(directory, self.starts))
        return self.made[-1]

    def fail(self, spoil: Callable[[Fake], None] = lambda broker: None) -> float:
        self.brokers.current()
        self.made[-1].say(LOST)
        spoil(self.made[-1])
        raise RuntimeError("the driver failed")

    def measure(self) -> float:
        broker = self.brokers.current()
        assert broker.alive
        assert broker is self.made[-1]
        return 1.0

    def run(self, *measures: Callable[[], float]) -> list[bool]:
        """Measure figures; whether each succeeded."""
        out = io.StringIO()
        figures = [Figure(f"f.{number}", "s", None, None, each) for number, each in enumerate(measures)]
        harness.run(figures, runs=1, out=out, err=self.err)
        return [f'"{figure.name}"' in out.getvalue() for figure in figures]

    def block(self) -> list[str]:
        """The printed errors of the broker."""
        _, _, told = self.err.getvalue().partition("in the broker's log, each kind once:\n")
        return [line.strip() for line in told.splitlines() if line.startswith("    ")]

    def left(self) -> list[str]:
        return [str(path.relative_to(self.scratch)) for path in self.scratch.rglob("*") if path.is_file()]


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rig:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    made = Rig(tmp_path)
    monkeypatch.setattr(module, "is_up", lambda admin: next(b.stores for b in made.made if b.admin == admin))
    return made


def test_each_kind_of_error_is_listed_once_without_stack_frames() -> None:
    assert last_errors(LOST) == TOLD
    assert last_errors("T1 [a] INFO all is well\n") == []


def test_only_the_last_kinds_of_errors_are_listed_and_long_lines_cut() -> None:
    log = "".join(f"T [x] ERROR {letter * 2 * LINE_LENGTH}\n" for letter in "ghijklmnopqr")
    told = last_errors(log)
    assert [line[12] for line in told] == list("ghijklmnopqr"[-ERRORS:])
    assert {len(line) for line in told} == {LINE_LENGTH}


def test_errors_of_the_broker_are_printed_with_a_failed_figure(rig: Rig) -> None:
    assert rig.run(rig.fail, rig.measure) == [False, True]
    assert rig.block() == TOLD
    assert len(rig.made) == 1  # the broker is healthy and stays
    assert rig.err.getvalue().index("the driver failed") < rig.err.getvalue().index("OutOfDirectMemoryError")


def end(broker: Fake) -> None:
    broker.runs = False


def lose_bookie(broker: Fake) -> None:
    broker.stores = False


@pytest.mark.parametrize("spoil", [end, lose_bookie])
def test_figures_after_a_lost_broker_run_on_a_new_one(rig: Rig, spoil: Callable[[Fake], None]) -> None:
    assert rig.run(rig.measure, lambda: rig.fail(spoil), rig.measure, rig.measure) == [True, False, True, True]
    assert [broker.removed for broker in rig.made] == [True, False]
    assert "get a new one" in rig.err.getvalue()
    rig.brokers.end()
    assert rig.left() == [str(rig.made[0].output.relative_to(rig.scratch))]
    assert rig.made[0].output.read_text() == STARTING + LOST
    assert f"console log is kept: {rig.made[0].output}" in rig.err.getvalue()


def test_log_of_a_broker_without_failures_is_removed(rig: Rig) -> None:
    assert rig.run(rig.measure, rig.measure) == [True, True]
    assert len(rig.made) == 1
    assert f"console log is {rig.made[0].output}" in rig.err.getvalue()
    assert rig.left() != []
    rig.brokers.end()
    rig.brokers.end()
    assert list(rig.scratch.iterdir()) == []


def test_figure_without_a_broker_prints_no_broker_errors(rig: Rig) -> None:
    assert rig.run(rig.measure, lambda: 1 / 0) == [True, False]
    assert rig.block() == []


def test_log_of_a_failed_start_is_kept_and_the_next_figure_retries(rig: Rig) -> None:
    rig.starts = False
    assert rig.run(rig.measure) == [False]
    assert rig.left() == [str(rig.made[0].output.relative_to(rig.scratch))]
    rig.starts = True
    assert rig.run(rig.measure) == [True]


def test_preparation_is_repeated_on_a_new_broker(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = Standalone(), Standalone()
    given: list[tuple[str, int]] = []

    @pulsar_broker.once_per_broker
    def prepared(count: int) -> int:
        given.append((pulsar_broker.broker().url, count))
        return len(given)

    for current in (first, second):
        monkeypatch.setattr(pulsar_broker, "broker", lambda current=current: current)
        assert prepared(1) == prepared(1)
        prepared(2)
    assert given == [(first.url, 1), (first.url, 2), (second.url, 1), (second.url, 2)]


@pytest.mark.parametrize(("machine", "direct"), [(2_000, 1024), (8_192, 2048), (64_000, 4096)])
def test_memory_of_a_broker_is_a_quarter_of_the_machine_up_to_a_limit(machine: int, direct: int) -> None:
    assert pulsar_broker.memory(machine).endswith(f"-XX:MaxDirectMemorySize={direct}m")
