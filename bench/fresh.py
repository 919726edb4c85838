"""Measurements in a new process, without earlier imports and allocations."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import Any


def fresh(module: str, function: str, *arguments: object) -> Any:
    """The result (JSON) of a function of a module, called with these arguments (JSON) in a new process."""
    script = (
        f"import json, sys, {module}\nresult = {module}.{function}(*json.loads(sys.argv[1]))\nprint(json.dumps(result))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, json.dumps(arguments)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{module}.{function} failed in a new process:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def fresh_seconds(module: str, function: str, *arguments: object) -> float:
    """Seconds of a new process that calls a function, from its start to its end."""
    start = time.perf_counter()
    fresh(module, function, *arguments)
    return time.perf_counter() - start


def resident_bytes(process: int | str = "self") -> int:
    """Resident memory of a process."""
    with open(f"/proc/{process}/statm") as file:
        pages = int(file.read().split()[1])
    import resource

    return pages * resource.getpagesize()
