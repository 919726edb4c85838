"""The checker of the soaks of `make soak` finds the errors that it looks for."""

from __future__ import annotations

from collections import Counter

import pytest
from soak_check import Comparison, compare, read_diaries

DIARY = """\
B w1.0.1 0:1 soak-a soak-b
R w1.0.1 2
O w1.0.1 COMMIT
B w1.0.2 0:2 soak-a soak-b
R w1.0.2 1
O w1.0.2 ABORT
B w1.0.3 0:3 soak-a soak-b
R w1.0.3 1
B w1.0.4 0:4 soak-a
"""
WHOLE = {"soak-a": {b"w1.0.1/0": 1, b"w1.0.1/1": 1}, "soak-b": {b"w1.0.1/0": 1, b"w1.0.1/1": 1}}


@pytest.mark.parametrize(
    ("topic", "value", "count", "wrong"),
    [
        ("soak-a", b"w1.0.1/1", 0, "lost"),
        ("soak-b", b"w1.0.1/0", 2, "doubled"),
        ("soak-b", b"w1.0.2/0", 1, "uncommitted_seen"),
        ("soak-a", b"w1.0.3/0", 1, "half"),
        ("soak-a", b"w1.0.4/0", 1, "half"),
        ("soak-a", b"w9.0.1/0", 1, "uncommitted_seen"),
        ("soak-a", b"w1.0.1/0", 1, None),
    ],
)
def test_the_checker_finds_errors(tmp_path, topic, value, count, wrong) -> None:
    (tmp_path / "w1.diary").write_text(DIARY)
    final = {name: Counter(found) for name, found in WHOLE.items()}
    final[topic][value] = count
    report = Comparison()
    compare(report, read_diaries([tmp_path / "w1.diary"]), {name: +found for name, found in final.items()})
    assert report.good == (wrong is None)
    if wrong is not None:
        assert getattr(report, wrong) == 1
