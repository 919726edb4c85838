"""A service with ten times the load that it can do, from processes of their own; `make soak-overload` runs longer.

Whether it gets overloaded depends on the machine. `test_access_limits_grpc` shows a refusal under overload on any one.
"""

from __future__ import annotations

from service.overload_soak import Report, run


def test_service_under_ten_times_its_load_loses_nothing() -> None:
    report = run(principals=6, seconds=3.0)
    assert report.problems == []
    assert report.acknowledged > 0
    assert report.refused.get('txnbuffer_refused_total{limit="overload"}', 0) >= report.flood_refused


def test_problems_are_found() -> None:
    assert Report(memory=[80.0, 90.0], flood_refused=1).problems == []
    bad = Report(memory=[80.0, 900.0], lost=1, doubled=2)
    assert bad.problems == ["lost 1", "doubled 2", "the memory grew by 820 MiB"]
