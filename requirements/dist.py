"""Build the release in dist/ and try it as users do: `make dist`.

A wheel and an sdist are built. For each Python that pyproject.toml lists, both are installed into fresh environments,
with the newest versions of what they require, and `tests/page_runner.py` runs the pages there, and `txnbuf demo`
runs the demo. Nothing of this tree is imported there. Some tests of the sdist run from its files, with .venv.
"""

from __future__ import annotations

import argparse
import glob
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DIST = ROOT / "dist"
JARS = ROOT / "txnbuffer" / "jars"
PAGES = ("README.md", "docs/guide.md", "docs/read.md")
SDIST_TESTS = ("tests/test_tidy.py", "tests/test_golden_files.py", "tests/buffer")
"""Tests that read files of all parts of the tree, and some that don't."""
APPLICATION_TEST = """
from txnbuffer import connect
from txnbuffer.testing import ServiceProcess

def test_application(txnbuf_service: ServiceProcess) -> None:
    with connect(txnbuf_service.address) as client:
        client.send("orders", b"1 book")

def test_data_frame() -> None:
    with connect("memory:") as client:
        client.send("orders", b"1 book", key="a")
        with client.reader("orders") as reader:
            frame = reader.read(timeout=60).to_pandas()
    assert frame[["key", "value", "seqno"]].values.tolist() == [[b"a", b"1 book", 1]]
"""
PLACES = (
    "{pyenv}/versions/{version}*/bin/python{version}",
    "{home}/.local/share/uv/python/cpython-{version}*/bin/python{version}",
    "/usr/local/bin/python{version}",
    "/opt/homebrew/opt/python@{version}/bin/python{version}",
    "/usr/local/opt/python@{version}/bin/python{version}",
    "/Library/Frameworks/Python.framework/Versions/{version}/bin/python{version}",
    "/opt/python/cp{digits}-cp{digits}/bin/python",
)
"""Where interpreters are that PATH does not have: of pyenv, uv, Homebrew, python.org, and the images for wheels."""


def supported() -> list[str]:
    """The versions of Python in the classifiers of the project."""
    classifiers = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["classifiers"]
    return [found[1] for each in classifiers if (found := re.fullmatch(r"Programming .*:: (\d+\.\d+)", each))]


def candidates(version: str, given: Sequence[str]) -> Iterator[str]:
    """Paths at which there may be a Python of a version: those given, PATH, and then PLACES."""
    yield from given
    for directory in os.environ.get("PATH", "").split(os.pathsep):
        yield from (os.path.join(directory, name) for name in (f"python{version}", "python3"))
    pyenv = os.environ.get("PYENV_ROOT", os.path.expanduser("~/.pyenv"))
    for place in PLACES:
        pattern = place.format(
            version=version, digits=version.replace(".", ""), pyenv=pyenv, home=os.path.expanduser("~")
        )
        yield from sorted(glob.glob(pattern), reverse=True)


def is_python(path: str, version: str) -> bool:
    """Whether a program is a Python of this version that can create environments; shims of pyenv may be none."""
    if not (os.path.isfile(path) and os.access(path, os.X_OK)):
        return False
    script = "import ensurepip, sys, venv; print('%d.%d' % sys.version_info[:2])"
    try:
        asked = subprocess.run([path, "-I", "-c", script], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return asked.returncode == 0 and asked.stdout.strip() == version


def interpreters(versions: Iterable[str], given: Sequence[str]) -> dict[str, str]:
    """A Python of each version. Exits with the names of those that are missing."""
    found = {
        version: next((path for path in candidates(version, given) if is_python(path, version)), "")
        for version in versions
    }
    if missing := [f"python{version}" for version, path in found.items() if not path]:
        sys.exit(
            f"not found: {', '.join(missing)}, with its modules venv and ensurepip. Install it (pyenv install VERSION, "
            'uv python install VERSION), or say where it is: make dist PYTHONS="/path/to/python …"'
        )
    return found


def step(what: str, command: Sequence[object], *, cwd: Path | str = ROOT) -> str:
    """Run a command of which nothing is shown, and return what it prints. Exits with all of it if it fails."""
    print(f"  {what}", file=sys.stderr, flush=True)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    environment |= {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [*map(str, command)],
        cwd=cwd,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(f"{done.stdout}\nfailed with exit code {done.returncode}: {what}")
    return done.stdout


def build() -> tuple[Path, Path]:
    """Build wheel and sdist, the only files in dist/, with the jars of the broker plug-in in them."""
    shutil.rmtree(DIST, ignore_errors=True)
    shutil.rmtree(JARS, ignore_errors=True)
    step("build the broker plug-in", [sys.executable, ROOT / "broker_plugin" / "build.py"])
    step("build", [sys.executable, "-m", "hatchling", "build", "--directory", DIST])
    (wheel,), (sdist,) = DIST.glob("*.whl"), DIST.glob("*.tar.gz")
    return wheel, sdist


def try_release(release: Path, python: str, tree: Path, scratch: Path) -> None:
    """Install a wheel or an sdist into a fresh environment and run the pages of `tree` and the demo there."""
    step("create an environment", [python, "-m", "venv", scratch / "env"])
    own = scratch / "env" / "bin"
    step(f"install {release.name}", [own / "python", "-m", "pip", "install", "--quiet", f"{release}[demo]"])
    step("check what it requires", [own / "python", "-m", "pip", "check"])
    shown = step("txnbuf --version", [own / "txnbuf", "--version"], cwd=scratch).split()[-1]
    if shown not in release.name:
        sys.exit(f"{release.name} says that it is version {shown}")
    for page in PAGES:
        step(page, [own / "python", "-I", tree / "tests" / "page_runner.py", tree / page], cwd=scratch)
    step("the broker plug-in", [own / "txnbuf", "plugin", "install", scratch])
    step("the demo", [own / "txnbuf", "demo"], cwd=scratch)
    (scratch / "test_application.py").write_text(APPLICATION_TEST)
    extras = f"{release}[testing,pandas]"
    step("install extras for applications", [own / "python", "-m", "pip", "install", "--quiet", extras])
    step("tests of an application", [own / "python", "-m", "pytest", "-q", "-p", "txnbuffer.testing"], cwd=scratch)


def unpack(sdist: Path, directory: str) -> Path:
    """Return the directory with the files of the sdist, which stay as they are while others work on this tree."""
    with tarfile.open(sdist) as packed:
        packed.extractall(directory, filter="data")
    return Path(directory, sdist.name.removesuffix(".tar.gz"))


def main() -> None:
    parser = argparse.ArgumentParser(description="Build the release and try it on all supported versions of Python.")
    parser.add_argument(
        "--only", metavar="VERSION", action="append", help="try it with these versions only, such as 3.12"
    )
    parser.add_argument("--python", metavar="PATH", action="append", default=[], help="an interpreter to use")
    arguments = parser.parse_args()
    pythons = interpreters(arguments.only or supported(), arguments.python)
    releases = build()
    with tempfile.TemporaryDirectory() as unpacked:
        tree = unpack(releases[1], unpacked)
        step(
            "tests of the sdist",
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *SDIST_TESTS],
            cwd=tree,
        )
        for version, python in pythons.items():
            for release in releases:
                print(f"Python {version} ({python}), {release.name}", file=sys.stderr)
                with tempfile.TemporaryDirectory() as scratch:
                    try_release(release, python, tree, Path(scratch))
    for release in releases:
        print(release)


if __name__ == "__main__":
    main()
