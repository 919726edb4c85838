"""The harness of figures: registry, medians, the JSON line, and the output on stderr."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator

import pytest

from bench import disk, fresh, harness
from bench.harness import Figure, Pair

KEYS = ["figure", "value", "unit", "goal", "peer", "peer_value", "ratio", "runs"]


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty registry, without the figures of the repository."""
    monkeypatch.setattr(harness, "_registry", {})
    monkeypatch.setattr(harness.pkgutil, "iter_modules", lambda path: [])


def returning(*values: float | Pair) -> Callable[[], float | Pair]:
    turns: Iterator[float | Pair] = iter(values)
    return lambda: next(turns)


def run(*figures: Figure, runs: int = 3) -> tuple[bool, list[dict[str, object]], str]:
    out, err = io.StringIO(), io.StringIO()
    complete = harness.run(figures, runs=runs, out=out, err=err)
    return complete, [json.loads(line) for line in out.getvalue().splitlines()], err.getvalue()


def test_line_has_exactly_these_keys_and_the_median() -> None:
    complete, lines, told = run(Figure("a.b", "s", "<= 1", None, returning(9.0, 0.5, 0.25)))
    assert complete
    assert [list(line) for line in lines] == [KEYS]
    assert lines[0] == {
        "figure": "a.b", "value": 0.5, "unit": "s", "goal": "<= 1",
        "peer": None, "peer_value": None, "ratio": None, "runs": 3,
    }  # fmt: skip
    assert "reached" in told
    assert "synced write" in told


def test_a_peer_gives_a_ratio_of_medians() -> None:
    _, lines, _ = run(Figure("a.b", "1/s", None, "rows", returning(Pair(10, 1), Pair(30, 5), Pair(20, 9))))
    assert (lines[0]["value"], lines[0]["peer"], lines[0]["peer_value"], lines[0]["ratio"]) == (20, "rows", 5, 4)


def test_missed_goal_is_reported_and_is_no_failure() -> None:
    complete, lines, told = run(Figure("a.b", "1/s", ">= 10", None, returning(9, 9, 9)))
    assert complete
    assert lines[0]["value"] == 9
    assert "MISSED" in told


@pytest.mark.parametrize(("peer", "result"), [(5, "reached"), (6, "MISSED")])
def test_goal_of_a_ratio(peer: float, result: str) -> None:
    figure = Figure("a.b", "1/s", ">= 2 times the peer", "rows", returning(*[Pair(10, peer)] * 3))
    assert f"goal >= 2 times the peer: {result}" in run(figure)[2]


def test_goal_that_names_a_missing_peer_is_rejected() -> None:
    with pytest.raises(ValueError, match="peer"):
        harness.figure("a", unit="s", goal=">= 2 times the peer")(returning())


def test_failed_figure_is_reported_and_the_others_are_measured() -> None:
    broken = Figure("a", "s", None, None, returning())
    complete, lines, told = run(broken, Figure("b", "s", None, None, returning(1, 1, 1)))
    assert not complete
    assert [line["figure"] for line in lines] == ["b"]
    assert "StopIteration" in told


@pytest.mark.parametrize(("peer", "value"), [("rows", 1.0), (None, Pair(1, 1))])
def test_a_pair_is_returned_if_and_only_if_there_is_a_peer(peer: str | None, value: float | Pair) -> None:
    complete, lines, told = run(Figure("a", "s", None, peer, returning(value)))
    assert not complete
    assert lines == []
    assert "TypeError" in told


def test_figures_are_chosen_by_prefix_and_sorted() -> None:
    for name in ("log.b", "aborts", "log.a"):
        harness.figure(name, unit="s")(returning())
    assert [one.name for one in harness.figures("log.")] == ["log.a", "log.b"]
    assert [one.name for one in harness.figures()] == ["aborts", "log.a", "log.b"]
    with pytest.raises(ValueError, match=r"'nothing'.*aborts, log.a, log.b"):
        harness.figures("nothing")


def test_a_name_is_registered_once() -> None:
    harness.figure("a", unit="s")(returning())
    with pytest.raises(ValueError, match="twice"):
        harness.figure("a", unit="s")(returning())


@pytest.mark.parametrize("goal", ["1", "< 1", "<= fast", "<=1"])
def test_invalid_goal_is_rejected(goal: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        harness.figure("a", unit="s", goal=goal)(returning())


@pytest.mark.parametrize(
    ("value", "goal", "reached"),
    [(1, "<= 1", True), (1.1, "<= 1", False), (1, ">= 1", True), (0.9, ">= 1", False)],
)
def test_goals(value: float, goal: str, reached: bool) -> None:
    assert harness.reaches(value, goal) is reached


def test_main_lists_the_figures(capsys: pytest.CaptureFixture[str]) -> None:
    harness.figure("a.b", unit="s")(returning(1, 2, 3))
    assert harness.main(["b"]) == 2
    assert "a.b" in capsys.readouterr().err
    assert harness.main(["a"]) == 0
    assert json.loads(capsys.readouterr().out)["value"] == 2
    assert harness.main([]) == 1


def test_main_measures_nothing_for_help_and_list(capsys: pytest.CaptureFixture[str]) -> None:
    harness.figure("a.b", unit="s", goal="<= 1")(returning())
    harness.figure("b.c", unit="1/s")(returning())
    with pytest.raises(SystemExit) as ended:
        harness.main(["--help"])
    assert ended.value.code == 0
    assert "PREFIX" in capsys.readouterr().out
    assert harness.main(["--list", "b", "a"]) == 0
    assert capsys.readouterr().out == "b.c  1/s  -\na.b  s  <= 1\n"


def test_the_disk_is_measured() -> None:
    assert disk.synced_write_ms(writes=3) > 0


def test_result_of_a_function_in_a_new_process() -> None:
    assert fresh.fresh("math", "hypot", 3, 4) == 5
    assert fresh.fresh_seconds("math", "hypot", 3, 4) > 0
    assert fresh.resident_bytes() > 1_000_000
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        fresh.fresh("operator", "truediv", 1, 0)
