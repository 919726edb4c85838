"""Small instances of the stress checks, on real processes; `make stress` runs the full ones."""

from __future__ import annotations

from pathlib import Path

from stress import clock_jumps, connections, read_only_disk, slow_streams
from stress.clock_jumps import HOUR
from stress.processes import Children, Writers


def test_a_disk_that_fails_under_writing_clients(tmp_path: Path) -> None:
    report = read_only_disk.check(read_only_disk.FileSizeLimit(tmp_path), tmp_path, rounds=1)
    assert report.wrong == []
    assert report.figures["committed"] >= 40
    assert report.figures["errors"] == {"File too large": 1}


def test_connections_up_to_the_limit_and_beyond(tmp_path: Path) -> None:
    report = connections.check(tmp_path, clients=8, processes=2, transactions=2, samples=10, half_dead=False)
    assert (report.wrong, report.missing) == ([], [])
    assert report.figures["begun"] == 32


def test_streams_with_slow_readers(tmp_path: Path) -> None:
    report = slow_streams.check(tmp_path, streams=8, processes=2, written=10, samples=10)
    assert report.wrong == []


def test_a_clock_that_jumps(tmp_path: Path) -> None:
    report = clock_jumps.check(clock_jumps.Shifted(tmp_path), tmp_path, drifts=5, jumps=[-HOUR], restarts=[])
    assert report.wrong == []


def test_writers_report_early_aborts(tmp_path: Path) -> None:
    (tmp_path / "w1.diary").write_text(
        "B a 0:1 soak-a\nO a ABORT\nB b 0:2 soak-a\nO b ABORT 5.20 timed out\nB c 0:3 soak-a\nO c ABORT 0.50 why\n"
    )
    writers = Writers(Children(), tmp_path, "", 0)
    assert writers.aborted_early(5.0) == ["O c ABORT 0.50 why"]
