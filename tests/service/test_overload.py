"""A service with ten times the load that it can do, from processes of their own; `make soak-overload` runs longer."""

from __future__ import annotations

from overload_soak import Report, run


def test_overloaded_service_refuses_who_misbehaves_and_loses_nothing() -> None:
    report = run(principals=6, seconds=8.0)
    assert report.problems == []
    assert report.acknowledged > 0
    assert report.refused['txnbuffer_refused_total{limit="overload"}'] >= report.flood_refused > 0


def test_problems_are_found() -> None:
    assert Report(memory=[80.0, 90.0], flood_refused=1).problems == []
    bad = Report(memory=[80.0, 900.0], lost=1, doubled=2)
    assert bad.problems == ["lost 1", "doubled 2", "nothing was refused", "the memory grew by 820 MiB"]
