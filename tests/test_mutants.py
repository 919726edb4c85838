"""The mutants can be planted, and their runner tells caught from survived from broken."""

from pathlib import Path

import pytest
from mutants import run

MUTANTS = run.load()


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_each_mutant_can_be_planted(mutant: run.Mutant) -> None:
    assert run.problems(mutant) == []


def test_names_of_mutants_are_unique() -> None:
    names = [mutant.name for mutant in MUTANTS]
    assert len(names) == len(set(names))


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A tiny repository: one function, one test of it that looks at one argument only."""
    (tmp_path / "bench").mkdir()
    (tmp_path / "tests").mkdir()
    (tmp_path / "bench" / "__init__.py").touch()
    (tmp_path / "bench" / "sums.py").write_text("def double(x):\n    y = x + x\n    return y\n")
    (tmp_path / "tests" / "test_sums.py").write_text(
        "from bench.sums import double\n\ndef test_double():\n    assert double(3) == 6\n"
    )
    (tmp_path / "pyproject.toml").write_text('[tool.pytest.ini_options]\naddopts = ["--import-mode=importlib"]\n')
    return tmp_path


def mutant(old: str, new: str, **other: str | tuple[str, ...]) -> run.Mutant:
    return run.Mutant(
        **{"name": "m", "file": "bench/sums.py", "tests": ("tests/test_sums.py",), **other}, old=old, new=new
    )


def test_verdicts(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    caught, survived, unparsable = mutant("x + x", "x * x"), mutant("x + x", "x * 2"), mutant("return y", "return y)")
    assert run.unchanged_passes([caught], tree)
    assert [run.try_mutant(one, tree)[0] for one in (caught, survived, unparsable)] == ["caught", "survived", "broken"]
    assert not run.run([caught, survived], tree)
    assert capsys.readouterr().out == "1 caught, 1 survived\n"
    assert (tree / "bench" / "sums.py").read_text().count("x + x") == 1


@pytest.mark.parametrize(
    ("bad", "word"),
    [
        (mutant("y", "z"), "2 times"),
        (mutant("nowhere", "z"), "0 times"),
        (mutant("x + x", "x + x"), "changes nothing"),
        (mutant("x + x", "x", file="bench/no.py"), "no such file"),
        (mutant("x + x", "x", tests=()), "names no test"),
        (mutant("x + x", "x", tests=("tests/test_no.py::test_x",)), "no such file"),
    ],
)
def test_what_cannot_be_planted_is_told(tree: Path, bad: run.Mutant, word: str) -> None:
    assert any(word in problem for problem in run.problems(bad, tree))


def test_failing_tests_of_an_unchanged_tree_are_told(tree: Path) -> None:
    (tree / "tests" / "test_sums.py").write_text("def test_no():\n    assert False\n")
    assert not run.unchanged_passes([mutant("x + x", "x")], tree)
