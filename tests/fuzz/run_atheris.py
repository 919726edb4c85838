"""Fuzz the decoders with atheris: `make fuzz SECONDS=600`, `make fuzz ONLY=block`.

Each target runs in a process of its own, for an equal part of the time. Inputs are made from valid ones and from those
of earlier runs, which are kept in `.fuzz/corpus`; those that reach new code of the product are added. An input with a
finding is written to `.fuzz/found/TARGET`, and the command that runs it again is printed. Prints one JSON object: the
executions and the findings of each target; exit code 1 after a finding.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import re
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path[:1] = [str(HERE.parent), str(ROOT)]
WORK = ROOT / ".fuzz"
MAX_BYTES = 64 * 1024
"""Bytes of an input."""
HANGS = 60
"""Seconds after which an input counts as hanging."""
RSS_MIB = 4096
"""Memory of a process; a decoder's own limit is checked for each input."""
EXECUTED = re.compile(r"stat::number_of_executed_units:\s*(\d+)")


def fuzz(name: str, seconds: int) -> int:
    """Fuzz one target in this process, which ends then."""
    import atheris

    with atheris.instrument_imports(include=["broker_io", "snapshots", "txnbuffer"]):
        from fuzz.inventory import TARGETS
    from fuzz.mutations import changed
    from fuzz.target import Finding, check, found

    target = TARGETS[name]
    seeds = [*target.seeds(), *found(target)]
    corpus = WORK / "corpus" / name
    corpus.mkdir(parents=True, exist_ok=True)
    for seed in seeds:
        (corpus / hashlib.sha256(seed).hexdigest()[:16]).write_bytes(seed)
    seen: set[str] = set()

    def run(data: bytes) -> None:
        try:
            check(target, data)
        except Finding as finding:
            key = _place(finding)
            if key not in seen:
                seen.add(key)
                _report(name, data, finding)

    def mutated(data: bytes, size: int, seed: int) -> bytes:
        if seed & 1:
            return bytes(atheris.Mutate(data, size))
        return changed(random.Random(seed), bytes(data), seeds)[:size]

    artifacts = WORK / "found" / name
    artifacts.mkdir(parents=True, exist_ok=True)
    options = [
        *(f"-max_total_time={seconds}", f"-max_len={MAX_BYTES}", f"-timeout={HANGS}", f"-rss_limit_mb={RSS_MIB}"),
        f"-report_slow_units={HANGS}",
        *("-print_final_stats=1", "-verbosity=0", f"-artifact_prefix={artifacts}/", str(corpus)),
    ]
    atheris.Setup([sys.argv[0], *options], run, custom_mutator=mutated)
    atheris.Fuzz()
    return 0


def _place(finding: BaseException) -> str:
    """What went wrong and where, so that each finding is reported once."""
    cause = finding.__cause__
    if cause is None:
        return re.sub(r"\d+", "", str(finding))
    frame = traceback.extract_tb(cause.__traceback__)[-1]
    return f"{type(cause).__name__} {frame.filename}:{frame.lineno}"


def _report(name: str, data: bytes, finding: BaseException) -> None:
    path = WORK / "found" / name / f"finding-{hashlib.sha256(data).hexdigest()[:16]}"
    path.write_bytes(data)
    print(f"{str(finding)[:500]}\n    run again: {_command(name, path)}", file=sys.stderr, flush=True)


def _command(name: str, path: Path) -> str:
    return f".venv/bin/python tests/fuzz/run_atheris.py --target {name} --input {path.relative_to(ROOT)}"


def run_all(names: list[str], seconds: int) -> int:
    """Fuzz targets one after another, each in a process of its own."""
    figures: dict[str, Any] = {}
    for name in names:
        known = _artifacts(name)
        command = [sys.executable, __file__, "--target", name, "--seconds", str(max(seconds // len(names), 1))]
        done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
        findings = sorted(_artifacts(name) - known)
        executed = EXECUTED.search(done.stderr)
        figures[name] = {"executions": int(executed[1]) if executed else 0, "findings": len(findings)}
        print(f"{name}: {figures[name]}", file=sys.stderr, flush=True)
        if findings or done.returncode or not executed:
            print(done.stderr[-8000:], file=sys.stderr)
            figures[name]["failed"] = True
        for path in findings:
            print(f"run again: {_command(name, path)}", file=sys.stderr, flush=True)
    total = sum(each["executions"] for each in figures.values())
    print(json.dumps({"targets": len(figures), "executions": total, "figures": figures}))
    return 1 if any("failed" in each for each in figures.values()) else 0


def _artifacts(name: str) -> set[Path]:
    return set((WORK / "found" / name).glob("*"))


def run_again(name: str, path: Path) -> int:
    """Run one input."""
    from fuzz.inventory import TARGETS
    from fuzz.target import check

    check(TARGETS[name], path.read_bytes())
    print(f"{name}: {path} has no finding")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=600, help="seconds of all targets together")
    parser.add_argument("--only", default="", help="fuzz only targets with this text in their name")
    parser.add_argument("--target", help="fuzz this target only, in this process")
    parser.add_argument("--input", type=Path, help="run the input in this file with the target, and fuzz nothing")
    given = parser.parse_args()
    if given.target is not None and given.input is None:
        return fuzz(given.target, given.seconds)  # imports the product itself, to instrument it
    from fuzz.inventory import TARGETS

    if given.input is not None:
        if given.target not in TARGETS:
            parser.error(f"--input requires --target with the name of a target: {', '.join(TARGETS)}")
        return run_again(given.target, given.input)
    names = [name for name in TARGETS if given.only in name]
    if not names:
        parser.error(f"no target has {given.only!r} in its name; the targets are {', '.join(TARGETS)}")
    return run_all(names, given.seconds)


if __name__ == "__main__":
    sys.exit(main())
