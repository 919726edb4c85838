"""Golden files: committed bytes that pin a format.

A test calls `committed(name, made)`, decodes the returned bytes and compares. Under `make golden` the bytes of the
test are first written to the file; a changed file is then a new version of the format.
"""

from __future__ import annotations

import os
from pathlib import Path

GOLDEN = Path(__file__).resolve().parent / "golden"


def committed(name: str, made: bytes) -> bytes:
    """The bytes of a golden file. Fails if they differ from `made`."""
    path = GOLDEN / name
    if os.environ.get("UPDATE_GOLDEN"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(made)
    found = path.read_bytes()
    assert found == made, f"{path.name} differs from what this release writes: run `make golden` if that is intended"
    return found
