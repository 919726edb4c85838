"""`txnbuf` with a wall clock that is as many seconds off as a file says: the short form of libfaketime.

    python tests/stress/set_clock.py FILE serve …

Only what Python code asks for the time is changed, not gRPC and other libraries in C.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path


def shifted(offset: Path) -> Callable[[], int]:
    real = time.time_ns
    return lambda: real() + round(float(offset.read_text()) * 1e9)


if __name__ == "__main__":
    nanoseconds = shifted(Path(sys.argv.pop(1)))
    time.time_ns = nanoseconds
    time.time = lambda: nanoseconds() / 1e9

    from txnbuffer.cli import main

    main()
