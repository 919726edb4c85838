"""Stress checks of real processes: `make stress`, or `make stress ONLY=name` for one of them.

    read_only_disk    the file system becomes read-only under writing clients
    connections       2,000 clients, some of them idle, dead or half dead
    slow_streams      500 change streams with slow readers
    retention_kills   retention, durable cursors, and kills of services and clients; also on a real Pulsar
    clock_jumps       the service's clock is set forward and back, and drifts

Each module says what it promises and what it requires. Prints one JSON object for each check; exit code 1 if a promise
was broken, 2 if this machine lacks something that a check requires.
"""

from __future__ import annotations

import argparse
import importlib
import json
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS), str(TESTS.parent)]

from stress.processes import Report  # noqa: E402

CHECKS = ("read_only_disk", "connections", "slow_streams", "retention_kills", "clock_jumps")


def run(name: str) -> Report:
    with tempfile.TemporaryDirectory(prefix=f"txnbuffer-{name}-") as directory:
        try:
            report: Report = importlib.import_module(f"stress.{name}").full(Path(directory))
        except Exception:
            traceback.print_exc()
            report = Report(wrong=["the check failed"])
    return report


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("only", nargs="?", choices=CHECKS)
    chosen = parser.parse_args().only
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that child processes are ended
    code = 0
    for name in [chosen] if chosen else CHECKS:
        began = time.monotonic()
        report = run(name)
        facts = {"check": name, "seconds": round(time.monotonic() - began), **vars(report)}
        print(json.dumps(facts), flush=True)
        code = 1 if report.wrong else code or (2 if report.missing else 0)
    return code


if __name__ == "__main__":
    sys.exit(main())
