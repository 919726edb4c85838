"""Kill concurrent exporters to a Delta table at random times: `delta_kills.py --kills 200 --seed 1`.

Two exporters without a common lock, as on two hosts, compete while the table is optimized and vacuumed. After any kills
the table has the records of each run once.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import itertools
import os
import platform
import random
import subprocess
import sys
import tempfile
from pathlib import Path

from delta_tables import expected, export, values_in
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError

from txnbuffer.pipeline.delta import DeltaDirectory
from txnbuffer.pipeline.exports import LATEST, VERSIONS, ExportFailed, ExportLocked

HOSTS = ("here", "there")
LONGEST = 6.0
"""Maximum seconds before an exporter is killed."""


def exporter(path: str, kind: str, host: str) -> None:
    """Export runs until killed."""
    platform.node = lambda: host
    fcntl.flock = lambda *_: None  # type: ignore[assignment]  # simulates an exporter on another host
    for number in itertools.count():
        with contextlib.suppress(ExportLocked, ExportFailed):
            export(DeltaDirectory(path, kind))
        if number % 5 == 0 and host == HOSTS[0]:  # not both: deltalake would let both commit and double the table
            with contextlib.suppress(DeltaError):
                DeltaTable(path).optimize.compact()
                DeltaTable(path).vacuum(dry_run=False)


def run(kills: int, kind: str, chance: random.Random, directory: Path) -> None:
    path = str(directory / kind)
    with contextlib.ExitStack() as stack:
        running = {host: started(stack, path, kind, host) for host in HOSTS}
        for _ in range(kills):
            host = chance.choice(HOSTS)
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = running[host].wait(chance.uniform(0.5, LONGEST))
                raise SystemExit(f"an exporter ended with exit code {code}")
            running[host].kill()
            running[host].wait()
            running[host] = started(stack, path, kind, host)
    last = DeltaDirectory(path, kind).last()
    if last is None:
        raise SystemExit(f"nothing was exported to {path}")
    if values_in(path) != expected(kind, last.number):
        raise SystemExit(f"{path} is not what {last.number} runs wrote: {values_in(path)}")
    print(f"{kind}: {last.number} runs, each once", file=sys.stderr)


def started(stack: contextlib.ExitStack, path: str, kind: str, host: str) -> subprocess.Popen[bytes]:
    """Start an exporter, which is killed at the end at the latest."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(one for one in sys.path if one)}
    process = subprocess.Popen([sys.executable, __file__, "--exporter", path, kind, host], env=environment)
    stack.callback(process.wait)
    stack.callback(process.kill)
    return process


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--exporter", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.exporter:
        exporter(*given.exporter)
    seed = random.randrange(2**32) if given.seed is None else given.seed
    print(f"seed {seed}", file=sys.stderr)
    with tempfile.TemporaryDirectory() as directory:
        for kind in (VERSIONS, LATEST):
            run(given.kills // 2, kind, random.Random(seed), Path(directory))


if __name__ == "__main__":
    main()
