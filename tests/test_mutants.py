"""The mutants can be planted, and their runner distinguishes caught, survived and broken ones."""

from dataclasses import replace
from pathlib import Path

import pytest
from mutants import run

MUTANTS = run.load()


def test_each_mutant_can_be_planted() -> None:
    assert [(mutant.name, found) for mutant in MUTANTS if (found := run.problems(mutant))] == []


def test_names_of_mutants_are_unique() -> None:
    names = [mutant.name for mutant in MUTANTS]
    assert len(names) == len(set(names))


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A small repository: one function, and a test that checks it for one argument."""
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


def test_outcomes(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    caught, survived, unparsable = mutant("x + x", "x * x"), mutant("x + x", "x * 2"), mutant("return y", "return y)")
    tried = [run.try_mutant(one, tree) for one in (caught, survived, unparsable)]
    assert [one.outcome for one in tried] == ["caught", "survived", "broken"]
    assert tried[0].detail == "tests/test_sums.py::test_double"
    both = [replace(caught, name="a"), replace(survived, name="b")]
    assert not run.run(both, run.Results(tree / "results"), tree)
    assert capsys.readouterr().out == "1 caught, 1 survived\n"
    assert (tree / "bench" / "sums.py").read_text().count("x + x") == 1


def test_a_run_continues_where_the_last_one_stopped(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mutants = [replace(mutant("x + x", "x * x"), name="a"), replace(mutant("return y", "return 0"), name="b")]
    assert not run.run(mutants, run.Results(tree / "results"), tree, seconds=-1)
    assert capsys.readouterr().out == "2 not tried\n"
    assert run.run(mutants[:1], run.Results(tree / "results"), tree)
    (tree / "tests" / "test_sums.py").touch()
    capsys.readouterr()
    assert not run.run(mutants, run.Results(tree / "results"), tree, seconds=-1)
    assert capsys.readouterr().out == "1 caught, 1 not tried\n"
    with (tree / "tests" / "test_sums.py").open("a") as file:
        file.write("\n# another comment\n")
    assert not run.run(mutants, run.Results(tree / "results"), tree, seconds=-1)
    assert capsys.readouterr().out == "1 caught, 1 not tried\n"
    with (tree / "tests" / "test_sums.py").open("a") as file:
        file.write("\nAPPENDED = True\n")
    assert not run.run(mutants, run.Results(tree / "results"), tree, seconds=-1)
    assert capsys.readouterr().out == "2 not tried\n"


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
def test_mutant_that_cannot_be_planted_is_reported(tree: Path, bad: run.Mutant, word: str) -> None:
    assert any(word in problem for problem in run.problems(bad, tree))


def test_mutant_is_broken_if_its_tests_fail_without_it(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tree / "tests" / "test_sums.py").write_text("def test_no():\n    assert False\n")
    assert not run.unchanged_passes(["tests/test_sums.py"], tree)
    assert not run.run([mutant("x + x", "x")], run.Results(tree / "results"), tree)
    assert capsys.readouterr().out == "1 broken\n"


def test_the_test_that_caught_a_mutant_last_runs_first(tree: Path) -> None:
    with (tree / "tests" / "test_sums.py").open("a") as file:
        file.write("\ndef test_of_zero():\n    assert double(0) == 0\n")
        file.write("\ndef test_of_a_word():\n    assert double('a - b') == 'a - ba - b'\n")
    one, word = mutant("x + x", "x * x"), "tests/test_sums.py::test_of_a_word"
    assert run.try_mutant(one, tree).detail == "tests/test_sums.py::test_double"
    assert run.try_mutant(one, tree, word).detail == word
    for passing in ("tests/test_sums.py::test_of_zero", "tests/test_sums.py::test_renamed"):
        assert run.try_mutant(one, tree, passing).detail == "tests/test_sums.py::test_double"
    results = run.Results(tree / "results")
    results.add(run.Result("m", "another key", "caught", word, 1.0))
    assert results.of(one, tree) is None
    assert results.last_test(one) == word
    assert results.last_test(replace(one, tests=("tests/test_other.py",))) is None


@pytest.mark.parametrize(
    ("line", "test"),
    [
        (
            "FAILED tests/test_x.py::test_y[at once-1] - AssertionError: no - never",
            "tests/test_x.py::test_y[at once-1]",
        ),
        ("FAILED tests/test_x.py::test_y[2^63 - 1] - assert [1] == 2", "tests/test_x.py::test_y[2^63 - 1]"),
        ("ERROR tests/test_x.py::test_y", "tests/test_x.py::test_y"),
        ("ERROR tests/test_x.py", None),
    ],
)
def test_id_of_the_test_that_failed(line: str, test: str | None) -> None:
    assert run.failed_test(f"=== short test summary info ===\n{line}\n1 failed in 0.1 s\n") == test
