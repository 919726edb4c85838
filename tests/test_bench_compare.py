"""Figures of two trees: which side is better, and what counts as kept."""

from pathlib import Path

import pytest

from bench.compare import compared, main, measure
from bench.harness import Figure


def figure(unit: str) -> Figure:
    return Figure("some.figure", unit, None, None, lambda: 0.0)


@pytest.mark.parametrize(
    ("unit", "pairs", "ratio", "kept"),
    [
        ("records/s", [(100.0, 96.0), (101.0, 97.0), (99.0, 95.0)], 0.96, True),
        ("records/s", [(100.0, 90.0), (101.0, 91.0), (99.0, 89.0)], 0.9, False),
        ("records/s", [(100.0, 90.0), (120.0, 91.0), (85.0, 89.0)], 0.9, True),
        ("s", [(1.0, 1.04), (1.0, 1.04), (1.0, 1.04)], 0.962, True),
        ("s", [(1.0, 1.2), (1.1, 1.2), (0.9, 1.2)], 0.833, False),
        ("s", [(1.0, 0.5), (1.0, 0.5), (1.0, 0.5)], 2.0, True),
    ],
)
def test_a_figure_is_kept_by_ratio_or_within_the_spread(
    unit: str, pairs: list[tuple[float, float]], ratio: float, kept: bool
) -> None:
    line = compared(figure(unit), pairs)
    assert (line["ratio"], line["kept"]) == (ratio, kept)


def tree(path: Path, value: str) -> Path:
    (path / "bench").mkdir(parents=True)
    root = Path(__file__).resolve().parent.parent
    for name in ("__init__.py", "harness.py", "disk.py"):
        (path / "bench" / name).write_text((root / "bench" / name).read_text())
    (path / "bench" / "figures_x.py").write_text(
        f'from bench.harness import figure\n\n\n@figure("x", unit="s")\ndef x() -> float:\n    return {value}\n'
    )
    return path


def test_a_figure_is_measured_on_the_sources_of_its_tree(tmp_path: Path) -> None:
    assert measure(tree(tmp_path / "a", "1.5"), "x") == 1.5
    assert measure(tree(tmp_path / "b", "2.5"), "x") == 2.5
    assert measure(tree(tmp_path / "c", "1 / 0"), "x") is None


def test_a_figure_that_fails_in_one_tree_is_not_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tree(tmp_path, "1.0")), "buffer.visible", "--runs", "1"]) == 1
    assert "could not be measured" in capsys.readouterr().err
