"""Build 7 of what users expect: a whole release, tried on all supported versions of Python, with a changelog."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from packaging.version import Version
from source_tree import ROOT, tracked_files
from users.doc_blocks import blocks_of

import txnbuffer


@pytest.fixture(scope="module")
def dist() -> ModuleType:
    """The script of `make dist`."""
    spec = importlib.util.spec_from_file_location("dist", ROOT / "requirements" / "dist.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def pyproject() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


# The version


def test_version_has_one_source() -> None:
    assert "version" in pyproject()["project"]["dynamic"]
    assert pyproject()["tool"]["hatch"]["version"]["path"] == "txnbuffer/__init__.py"
    line = re.compile(rf"""^.*version.*["']{re.escape(txnbuffer.__version__)}["']""", re.MULTILINE | re.IGNORECASE)
    files = [path for path in tracked_files() or () if Path(path).suffix in (".py", ".toml", ".yml", ".yaml", ".cfg")]
    with_version = [path for path in files if line.search((ROOT / path).read_text())]
    assert with_version in ([], ["txnbuffer/__init__.py"])


def test_command_line_prints_the_version() -> None:
    asked = [sys.executable, "-m", "txnbuffer", "--version"]
    done = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == f"txnbuf, version {txnbuffer.__version__}\n"


# The changelog


def changelog() -> list[tuple[str, str]]:
    """The versions in the changelog with what it says of each."""
    parts = re.split(r"^## \[(\S+)\](?: - \d{4}-\d\d-\d\d)?$", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    return list(zip(parts[1::2], parts[2::2], strict=True))


def test_changelog_has_the_version_first() -> None:
    versions = [version for version, _ in changelog() if version != "Unreleased"]
    assert versions[0] == txnbuffer.__version__
    assert versions == sorted(versions, key=Version, reverse=True)


def test_changelog_is_for_users() -> None:
    """Each version begins with what to know before an upgrade, has its formats, and groups that each say something."""
    for version, text in changelog():
        groups = re.split(r"^### (.+)$", text, flags=re.MULTILINE)
        titles, contents = groups[1::2], groups[2::2]
        assert groups[0].strip() == "", f"{version}: give this a group: {groups[0]}"
        assert titles[0].startswith("Upgrading from "), version
        assert "Formats and protocols" in titles, version
        assert len(titles) == len({*titles}), version
        assert [title for title, content in zip(titles, contents, strict=True) if "\n- " not in content] == []


# What is built


def test_sdist_has_all_that_its_tests_need(tmp_path: Path) -> None:
    from hatchling.builders.sdist import SdistBuilder

    (built,) = SdistBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])
    with tarfile.open(built) as packed:
        names = {name.partition("/")[2] for name in packed.getnames()}
    assert Path(built).name == f"txnbuffer-{txnbuffer.__version__}.tar.gz"
    assert {"tests/conftest.py", "pyproject.toml", "Makefile", "README.md", "LICENSE", "requirements/dev.txt"} <= names
    if (tracked := tracked_files()) is not None:
        there = {path for path in tracked if (ROOT / path).exists()}
        assert there - names == set()


def test_supported_versions_of_python(dist: ModuleType) -> None:
    assert dist.supported() == ["3.11", "3.12", "3.13", "3.14"]
    assert pyproject()["project"]["requires-python"] == f">={dist.supported()[0]}"


def test_make_dist_finds_a_python_on_path(dist: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs of that name which are no Python of the version, as shims of pyenv may be, are passed over."""
    version = "{}.{}".format(*sys.version_info)
    program(tmp_path / "a" / f"python{version}", "echo 'pyenv: not installed' >&2; exit 127")
    program(tmp_path / "b" / f"python{version}", "echo 2.7")
    right = program(tmp_path / "c" / f"python{version}", f'exec "{sys.executable}" "$@"')
    monkeypatch.setenv("PATH", ":".join(str(tmp_path / name) for name in ("a", "b", "c")))
    assert dist.interpreters([version], []) == {version: str(right)}


def test_make_dist_finds_pythons_of_pyenv(dist: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    version = "{}.{}".format(*sys.version_info)
    installed = tmp_path / "versions" / f"{version}.1" / "bin" / f"python{version}"
    program(installed, f'exec "{sys.executable}" "$@"')
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    assert dist.interpreters([version], []) == {version: str(installed)}


def test_make_dist_takes_a_python_that_is_given(dist: ModuleType, tmp_path: Path) -> None:
    version = "{}.{}".format(*sys.version_info)
    given = program(tmp_path / "python", f'exec "{sys.executable}" "$@"')
    assert dist.interpreters([version], [str(given)]) == {version: str(given)}


def test_make_dist_names_missing_pythons(dist: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(SystemExit, match=r"^not found: python4\.7, python4\.8, .*PYTHONS="):
        dist.interpreters(["4.7", "4.8"], [])


def test_failed_step_is_an_error(dist: ModuleType) -> None:
    with pytest.raises(SystemExit, match=r"^nothing\n\nfailed with exit code 3: the step"):
        dist.step("the step", ["/bin/sh", "-c", "echo nothing; exit 3"])
    assert dist.step("the step", ["/bin/sh", "-c", "echo done"]) == "done\n"


def test_pages_run_in_an_environment_without_the_tree(tmp_path: Path) -> None:
    """As in `make dist`: -I gives the runner nothing but what is installed."""
    page = tmp_path / "page.md"
    page.write_text("```python\nimport sys\nprint(sys.flags.isolated)\n```\n```text\n1\n```\n")
    runner = [sys.executable, "-I", ROOT / "tests" / "page_runner.py", page]
    subprocess.run(runner, cwd=tmp_path, check=True)
    page.write_text(page.read_text().replace("\n1\n", "\n2\n"))
    assert subprocess.run(runner, cwd=tmp_path, capture_output=True, check=False).returncode == 1


def test_make_dist_runs_pages_that_have_code(dist: ModuleType) -> None:
    assert {"README.md", "docs/guide.md"} <= {*dist.PAGES}
    assert all(blocks_of(ROOT / page) for page in dist.PAGES)
    assert all((ROOT / path).exists() for path in dist.SDIST_TESTS)
