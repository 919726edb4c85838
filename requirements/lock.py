"""Write the lock files of this directory from pyproject.toml: `make lock`.

build.txt    what builds the package, installed first
runtime.txt  what the package needs, for those who deploy it
pulsar.txt   what it needs on a Pulsar cluster, for its container
dev.txt      all of that, the demo's data, tests, linters and the documentation site: the environment of this repository
fuzz.txt     the fuzzer, which `make fuzz` installs: it has files only for Linux on x86-64

Every version is pinned with the hashes of all its files, so one lock serves each supported Python and
processor. It is resolved by the oldest supported Python: run this with that one. Nothing in the files
names a place to download from; that is the installer's configuration.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import tomllib
import venv
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
OLDEST = (3, 11)
OPTIONS = [
    "--quiet", "--no-config", "--no-header", "--strip-extras", "--generate-hashes", "--allow-unsafe", "--upgrade",
    "--annotation-style=line", "--no-emit-options", "--no-emit-index-url", "--no-emit-find-links",
    "--no-emit-trusted-host",
]  # fmt: skip


def group(groups: dict[str, list[Any]], name: str) -> list[str]:
    """Requirements of a dependency group and of those it includes."""
    found: list[str] = []
    for item in groups[name]:
        found += [item] if isinstance(item, str) else group(groups, item["include-group"])
    return found


def lock(tool: Path, name: str, requirements: list[str], *, constraints: Path | None = None) -> Path:
    """Resolve requirements into a lock file; with constraints, to the versions that another one holds."""
    target = HERE / f"{name}.txt"
    lines = [*requirements, *([f"-c {constraints}"] if constraints else [])]
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch, f"{name}.in")
        source.write_text("\n".join(lines) + "\n")
        resolved = Path(scratch, f"{name}.txt")
        subprocess.run([tool, *OPTIONS, f"--output-file={resolved}", source], check=True, cwd=scratch)
        lines = [line.partition("#")[0].rstrip() for line in resolved.read_text().splitlines()]
    target.write_text("\n".join(["# Made by requirements/lock.py; don't edit.", *filter(None, lines), ""]))
    return target


def main() -> None:
    if sys.version_info[:2] != OLDEST:
        sys.exit(f"run this with Python {'.'.join(map(str, OLDEST))}, whose lock serves newer ones too")
    document = tomllib.loads((HERE.parent / "pyproject.toml").read_text())
    project, groups = document["project"], document["dependency-groups"]
    build, runtime = group(groups, "build"), project["dependencies"]
    optional = project["optional-dependencies"]
    extras = [item for extra in optional.values() for item in extra]
    with tempfile.TemporaryDirectory() as scratch:
        venv.create(scratch, with_pip=True)
        tools = Path(scratch, "bin")
        subprocess.run([tools / "pip", "install", "--quiet", "pip-tools>=7.5"], check=True)
        os.environ.pop("PIP_FIND_LINKS", None)
        everything = lock(tools / "pip-compile", "dev", build + runtime + extras + group(groups, "dev"))
        lock(tools / "pip-compile", "build", build, constraints=everything)
        lock(tools / "pip-compile", "runtime", runtime, constraints=everything)
        lock(tools / "pip-compile", "fuzz", group(groups, "fuzz"), constraints=everything)
        lock(tools / "pip-compile", "pulsar", runtime + optional["pulsar"], constraints=everything)


if __name__ == "__main__":
    main()
