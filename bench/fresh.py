"""Measuring in a process of its own, where nothing was imported or allocated before."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import Any


def fresh(module: str, function: str, *arguments: object) -> Any:
    """What a function of a module returns (JSON) when called with these (JSON) in a new Python."""
    script = (
        f"import json, sys, {module}\nresult = {module}.{function}(*json.loads(sys.argv[1]))\nprint(json.dumps(result))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, json.dumps(arguments)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{module}.{function} failed in its own process:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def fresh_seconds(module: str, function: str, *arguments: object) -> float:
    """Seconds from the start of a new Python until a function of it has returned and the process ended."""
    start = time.perf_counter()
    fresh(module, function, *arguments)
    return time.perf_counter() - start


def resident_bytes() -> int:
    """Memory of this process as the kernel counts it."""
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[1])
    import resource

    return pages * resource.getpagesize()
