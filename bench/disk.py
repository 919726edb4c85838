"""The speed of the disk of the temporary directory, for comparison with the figures."""

from __future__ import annotations

import os
import statistics
import tempfile
import time


def synced_write_ms(writes: int = 20) -> float:
    """Median milliseconds to append a page to a file and sync it."""
    block = bytes(4096)
    times: list[float] = []
    with tempfile.TemporaryFile() as file:
        for _ in range(writes):
            start = time.perf_counter()
            os.write(file.fileno(), block)
            os.fdatasync(file.fileno())
            times.append(time.perf_counter() - start)
    return statistics.median(times) * 1000
