"""The mutants can be planted, and their runner distinguishes caught, survived and broken ones."""

from dataclasses import replace
from pathlib import Path

import pytest
from mutants import run
from mutants.fragments import NotPlantable, homes, planted
from source_tree import ROOT, Module, within
from test_tidy import PURE

MUTANTS = run.load()
FORMATS = (
    "broker_io.compacted", "broker_io.filelog.log", "broker_io.filelog.pair.link_frames", "broker_io.remote.messages",
    "snapshots.scan", "snapshots.shard_count", "snapshots.writer", "txnbuffer.follow",
)  # fmt: skip
"""Modules that are not pure and that read or write a format, or hold a rule of the protocols."""
MAX_LINES = 4_000


def test_each_mutant_can_be_planted() -> None:
    assert [(mutant.name, found) for mutant in MUTANTS if (found := run.problems(mutant))] == []


def test_mutants_are_of_rules_and_formats() -> None:
    """Elsewhere a mutant costs more changes than it finds faults: the simulator's planted bugs are for these parts."""
    for mutant in MUTANTS:
        paths = homes(ROOT).get(mutant.function.rpartition(":")[2], ())
        assert any(within(Module(path, "").name, *PURE, *FORMATS) for path in paths), mutant
    files = (ROOT / "tests" / "mutants").glob("*.toml")
    assert sum(path.read_text().count("\n") for path in files) <= MAX_LINES


def test_names_of_mutants_are_unique() -> None:
    names = [mutant.name for mutant in MUTANTS]
    assert len(names) == len(set(names))


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A small repository: one function, and a test that checks it for one argument."""
    (tmp_path / "snapshots").mkdir()
    (tmp_path / "tests").mkdir()
    (tmp_path / "snapshots" / "__init__.py").touch()
    (tmp_path / "snapshots" / "sums.py").write_text("def double(x):\n    y = x + x\n    return y\n")
    (tmp_path / "tests" / "test_sums.py").write_text(
        "from snapshots.sums import double\n\ndef test_double():\n    assert double(3) == 6\n"
    )
    (tmp_path / "pyproject.toml").write_text('[tool.pytest.ini_options]\naddopts = ["--import-mode=importlib"]\n')
    return tmp_path


def mutant(old: str, new: str, **other: str | tuple[str, ...]) -> run.Mutant:
    return run.Mutant(
        **{"name": "m", "function": "double", "tests": ("tests/test_sums.py",), **other}, old=old, new=new
    )


def test_outcomes(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    caught, survived, unparsable = mutant("x + x", "x * x"), mutant("x + x", "x * 2"), mutant("x + x", "x)")
    tried = [run.try_mutant(one, tree) for one in (caught, survived, unparsable)]
    assert [one.outcome for one in tried] == ["caught", "survived", "broken"]
    assert tried[0].detail == "tests/test_sums.py::test_double"
    both = [replace(caught, name="a"), replace(survived, name="b")]
    assert not run.run(both, run.Results(tree / "results"), tree)
    assert capsys.readouterr().out == "1 caught, 1 survived\n"
    assert (tree / "snapshots" / "sums.py").read_text().count("x + x") == 1


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
        (mutant("x", "z"), "`old` stands 2 times in double (snapshots/sums.py), not once: write there"),
        (mutant("nowhere", "z"), "`old` stands 0 times in double"),
        (mutant("x + x", "(x +\n x)"), "changes nothing"),
        (mutant("x + x", "z = x"), "`old` stands 0 times in double"),
        (mutant("x + x", "x +"), "not valid Python"),
        (mutant("return y", "break"), "not valid Python"),
        (mutant("x + x", "x", function="triple"), "nothing is named triple: change `function`"),
        (mutant("x + x", "x", function="txnbuffer:double"), "nothing is named txnbuffer:double"),
        (mutant("x + x", "x", tests=()), "names no test"),
        (mutant("x + x", "x", tests=("tests/test_no.py::test_x",)), "no such file"),
    ],
)
def test_mutant_that_cannot_be_planted_is_reported(tree: Path, bad: run.Mutant, word: str) -> None:
    assert any(word in problem for problem in run.problems(bad, tree)), run.problems(bad, tree)


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


SOURCE = """
import os
LIMITS = (1, 2)
class Sums:
    size: int = 3
    @property
    def half(self):
        if self.size > 2 and \\
                self.size < 9:  # why
            for each in self.each:  # all
                # of them
                print(each)
        elif os.sep == 'é':
            return "ü", (1
                + self.size)
        return f"{self.size + 1}"
"""


@pytest.mark.parametrize(
    ("function", "old", "new", "text", "instead"),
    [
        ("LIMITS", "2", "1", ", 2", ", (1)"),
        ("Sums", "1 + ...", "2", "1\n                + self.size", "(2)"),
        ("Sums.size", "3", "1 + 3", "= 3", "= (1 + 3)"),
        ("Sums.half", 'os.sep == "é"', "not os", "os.sep == 'é'", "(not os)"),
        ("Sums.half", "return 'ü', 1 + self.size", "", 'return "ü", (1\n                + self.size)', "pass"),
        ("snapshots:Sums.half", "1 + self.size", "size", "1\n                + self.size", "(size)"),
        ("Sums", "return f'{self.size + 1}'", "self.size", 'return f"{self.size + 1}"', "self.size"),
        (
            "Sums.half",
            "for each in self.each: ...",
            "for one in (): ...",
            "for each in self.each:  # all\n                # of them",
            "for one in ():",
        ),
        (
            "Sums.half",
            "for each in self.each: ...",
            "if each:\n    for each in (): ...\nself.size = 0",
            "for each in self.each:  # all\n                # of them\n                print(each)",
            "if each:\n                for each in ():\n                    print(each)\n            self.size = 0",
        ),
        (
            "Sums.half",
            "if os.sep == 'é': ...",
            "if os.sep: ...",
            "elif os.sep == 'é':\n            return \"ü\", (1\n                + self.size)",
            'else:\n            if os.sep:\n                return "ü", (1\n                    + self.size)',
        ),
    ],
)
def test_only_the_fragment_is_replaced(
    tmp_path: Path, function: str, old: str, new: str, text: str, instead: str
) -> None:
    (tmp_path / "snapshots").mkdir()
    (tmp_path / "snapshots" / "sums.py").write_text(SOURCE)
    assert SOURCE.count(text) == 1
    module = planted(function, old, new, tmp_path)
    assert module.path == "snapshots/sums.py"
    assert module.text == SOURCE.replace(text, instead)


def test_a_mutant_follows_a_function_that_moves_to_another_module(tree: Path) -> None:
    one = mutant("x + x", "x")
    assert one.planted(tree).path == "snapshots/sums.py"
    (tree / "broker_io").mkdir()
    (tree / "snapshots" / "sums.py").rename(tree / "broker_io" / "numbers.py")
    homes.cache_clear()
    assert one.planted(tree).path == "broker_io/numbers.py"


def test_a_name_of_several_packages_needs_the_package(tree: Path) -> None:
    (tree / "broker_io").mkdir()
    (tree / "broker_io" / "sums.py").write_text((tree / "snapshots" / "sums.py").read_text())
    with pytest.raises(NotPlantable, match="write `package:` before a name that several"):
        mutant("x + x", "x").planted(tree)
    assert mutant("x + x", "x", function="broker_io:double").planted(tree).path == "broker_io/sums.py"


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
