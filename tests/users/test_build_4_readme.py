"""Build 4: the README's example prints what the page shows, in the first run and in the second one."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from source_tree import ROOT

README = (ROOT / "README.md").read_text()
PROGRAM, SHOWN = re.findall(r"^```(?:python|text)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)[:2]
AGAIN = "orders 2 b'order-1' b'3 apples'\n", "stock 2 b'apples' b'-3'\n"


def run(directory: Path) -> str:
    command = [sys.executable, "-W", "error", "-c", PROGRAM]
    done = subprocess.run(command, cwd=directory, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_build_4_the_example_prints_what_the_readme_shows(tmp_path: Path) -> None:
    assert run(tmp_path) == SHOWN


def test_build_4_a_second_run_prints_what_the_readme_says(tmp_path: Path) -> None:
    run(tmp_path)
    again = run(tmp_path)
    assert sorted(again.splitlines(keepends=True)) == sorted([*SHOWN.splitlines(keepends=True), *AGAIN])


def test_build_4_the_example_is_short() -> None:
    assert len([line for line in PROGRAM.splitlines() if line.strip()]) <= 15
