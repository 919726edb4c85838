"""Builds the jar of the broker plug-in with `javac`, against the jars of Pulsar's server distribution.

`python broker_plugin/build.py` builds one for each supported minor version of Pulsar, or for the distribution in
TXNBUFFER_PULSAR_HOME, into the Python package, which wheels are made of, and prints their paths. The same sources give
the same bytes with any JDK 17: entries are sorted, not compressed, and have a fixed time and mode.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from broker_io.standalone import minor_versions

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
SOURCES = HERE / "java"
TEST_SOURCES = HERE / "tests"
JARS = ROOT / "txnbuffer" / "jars"
PULSARS = ("4.0.8",)
"""A release of each supported minor version of Pulsar."""
RELEASE = "17"
SCHEMAS = [
    *(ROOT / "snapshots" / "schemas" / f"end-{version}.avsc" for version in (1, 2)),
    *(ROOT / "txnbuffer" / "recovery" / "schemas" / f"{name}-1.avsc" for name in ("part", "state")),
]
"""The schemas of the entries that the plug-in reads: the files that the Python packages use."""
SCHEMAS_IN_JAR = Path("txnbuffer") / "schemas"
BUILT = Path("txnbuffer") / "plugin.properties"
"""In the jar: the version of the plug-in, and the minor version of Pulsar that it was built for."""
TIME = (2020, 1, 1, 0, 0, 0)
MANIFEST = "Manifest-Version: 1.0\nCreated-By: txnbuffer\n"
SECONDS = 300.0


class BuildFailed(RuntimeError):
    """The message says what is missing, or has the output of the tool."""


def distribution(version: str = PULSARS[0]) -> Path:
    """The directory of the server distribution: TXNBUFFER_PULSAR_HOME, or the cached one, fetched if necessary."""
    chosen = os.environ.get("TXNBUFFER_PULSAR_HOME")
    return Path(chosen or run([str(ROOT / "docker" / "distribution.sh"), version]).strip())


def minor_version(home: Path) -> str:
    """The minor version of a distribution, such as 4.0. Raises BuildFailed."""
    found = minor_versions(home / "lib")
    if len(found) != 1:
        raise BuildFailed(f"{home}/lib has no pulsar-broker jar: it is not Pulsar's server distribution")
    return found.pop()


def run(command: Sequence[str]) -> str:
    """The output of a tool. Raises BuildFailed."""
    if shutil.which(command[0]) is None:
        raise BuildFailed(f"{command[0]} is missing: install a JDK {RELEASE} (openjdk-{RELEASE}-jdk-headless)")
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=SECONDS)  # noqa: S603 - fixed
    if done.returncode:
        raise BuildFailed(f"{Path(command[0]).name} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def classpath(*directories: Path, home: Path | None = None) -> str:
    """The classpath of directories and the jars of the distribution."""
    return os.pathsep.join([*map(str, directories), str((home or distribution()) / "lib" / "*")])


def compile_into(target: Path, sources: Iterable[Path] = (SOURCES,), home: Path | None = None) -> None:
    """Compile the sources below some directories, and write the resources, into `target`. Raises BuildFailed."""
    home = home or distribution()
    files = sorted(str(path) for directory in sources for path in directory.rglob("*.java"))
    options = [
        "-encoding",
        "UTF-8",
        "-g:source,lines",
        "-Xlint:all,-classfile,-path,-serial,-processing",
        "-proc:none",
        "-Werror",
    ]
    built = {"version": txnbuffer_version(), "pulsar": minor_version(home)}
    run(["javac", "--release", RELEASE, *options, "-cp", classpath(home=home), "-d", str(target), *files])
    (target / SCHEMAS_IN_JAR).mkdir(parents=True, exist_ok=True)
    for schema in SCHEMAS:
        shutil.copyfile(schema, target / SCHEMAS_IN_JAR / schema.name)
    (target / BUILT).write_text("".join(f"{name}={value}\n" for name, value in built.items()))


def txnbuffer_version() -> str:
    (version,) = re.findall(r'^__version__ = "(.+)"$', (ROOT / "txnbuffer" / "__init__.py").read_text(), re.MULTILINE)
    return str(version)


def build(jar: Path | None = None, home: Path | None = None) -> Path:
    """Build the jar for a distribution. Raises BuildFailed."""
    home = home or distribution()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as classes:
        compile_into(Path(classes), home=home)
        return pack(Path(classes), jar or JARS / f"txnbuffer-broker-{minor_version(home)}.jar")


def pack(classes: Path, jar: Path) -> Path:
    """Write the jar of a directory."""
    paths = sorted((path.relative_to(classes).as_posix(), path) for path in classes.rglob("*") if path.is_file())
    contents = [("META-INF/MANIFEST.MF", MANIFEST.encode()), *((name, path.read_bytes()) for name, path in paths)]
    jar.parent.mkdir(parents=True, exist_ok=True)
    made = jar.with_name(f".{jar.name}.{os.getpid()}")
    with zipfile.ZipFile(made, "w") as packed:
        for name, content in contents:
            entry = zipfile.ZipInfo(name, TIME)
            entry.create_system, entry.external_attr = 3, 0o644 << 16
            packed.writestr(entry, content)
    return made.replace(jar)  # a JVM that runs with the former one keeps that


if __name__ == "__main__":
    try:
        for home in dict.fromkeys(map(distribution, PULSARS)):
            print(build(home=home))
    except BuildFailed as error:
        sys.exit(f"the broker plug-in cannot be built: {error}")
