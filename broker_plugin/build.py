"""Builds the jar of the broker plug-in with `javac` and `jar`, against the jars of Pulsar's server distribution.

`python broker_plugin/build.py [JAR]` prints the path of the jar. The same sources give the same bytes with any JDK 17:
entries are sorted and have a fixed time, and the manifest is given.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
SOURCES = HERE / "java"
TEST_SOURCES = HERE / "tests"
JAR = ROOT / "build" / "txnbuffer-broker.jar"
RELEASE = "17"
SCHEMAS = [
    *(ROOT / "snapshots" / "schemas" / f"end-{version}.avsc" for version in (1, 2)),
    *(ROOT / "txnbuffer" / "recovery" / "schemas" / f"{name}-1.avsc" for name in ("part", "state")),
]
"""The schemas of the entries that the plug-in reads: the files that the Python packages use."""
SCHEMAS_IN_JAR = Path("txnbuffer") / "schemas"
TIME = "2020-01-01T00:00:00Z"
MANIFEST = "Manifest-Version: 1.0\nCreated-By: txnbuffer\n"
SECONDS = 300.0


class BuildFailed(RuntimeError):
    """The message says what is missing, or has the output of the tool."""


def distribution() -> Path:
    """The directory of the server distribution: TXNBUFFER_PULSAR_HOME, or the cached one, fetched if necessary."""
    chosen = os.environ.get("TXNBUFFER_PULSAR_HOME")
    return Path(chosen or run([str(ROOT / "docker" / "distribution.sh")]).strip())


def run(command: Sequence[str]) -> str:
    """The output of a tool. Raises BuildFailed."""
    if shutil.which(command[0]) is None:
        raise BuildFailed(f"{command[0]} is missing: install a JDK {RELEASE} (openjdk-{RELEASE}-jdk-headless)")
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=SECONDS)  # noqa: S603 - fixed
    if done.returncode:
        raise BuildFailed(f"{Path(command[0]).name} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def classpath(*directories: Path) -> str:
    """The classpath of directories and the jars of the distribution."""
    return os.pathsep.join([*map(str, directories), str(distribution() / "lib" / "*")])


def compile_into(target: Path, sources: Iterable[Path] = (SOURCES,)) -> None:
    """Compile the sources below some directories, and copy the schemas, into `target`. Raises BuildFailed."""
    files = sorted(str(path) for directory in sources for path in directory.rglob("*.java"))
    options = [
        "-encoding",
        "UTF-8",
        "-g:source,lines",
        "-Xlint:all,-classfile,-path,-serial,-processing",
        "-proc:none",
        "-Werror",
    ]
    run(["javac", "--release", RELEASE, *options, "-cp", classpath(), "-d", str(target), *files])
    (target / SCHEMAS_IN_JAR).mkdir(parents=True, exist_ok=True)
    for schema in SCHEMAS:
        shutil.copyfile(schema, target / SCHEMAS_IN_JAR / schema.name)


def build(jar: Path = JAR) -> Path:
    """Build the jar. Raises BuildFailed."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as classes:
        compile_into(Path(classes))
        return pack(Path(classes), jar)


def pack(classes: Path, jar: Path) -> Path:
    """Write the jar of a directory. Raises BuildFailed."""
    names = sorted(str(path.relative_to(classes)) for path in classes.rglob("*") if path.is_file())
    entries = [word for name in names for word in ("-C", str(classes), name)]
    with tempfile.TemporaryDirectory() as scratch:
        manifest, made = Path(scratch, "manifest"), Path(scratch, "made.jar")
        manifest.write_text(MANIFEST)
        run(["jar", "--create", "--date", TIME, "--file", str(made), "--manifest", str(manifest), *entries])
        jar.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(made, jar)
    return jar


if __name__ == "__main__":
    try:
        print(build(*map(Path, sys.argv[1:2])))
    except BuildFailed as error:
        sys.exit(f"the broker plug-in cannot be built: {error}")
