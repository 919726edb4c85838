"""Golden files: committed bytes that pin a format.

A test takes `committed(name, made)`, decodes what it returns, and compares. Under `make golden` the file is
first written with what the test made; a changed file is then a new version of the format.
"""

from __future__ import annotations

import os
from pathlib import Path

GOLDEN = Path(__file__).resolve().parent / "golden"


def committed(name: str, made: bytes) -> bytes:
    """The bytes of a golden file; fails where they are not the ones that were made now."""
    path = GOLDEN / name
    if os.environ.get("UPDATE_GOLDEN"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(made)
    found = path.read_bytes()
    assert found == made, f"{path.name} holds other bytes than this release writes: `make golden` if that is meant"
    return found
