"""What applications ask for, checked before it goes anywhere: one bad argument harms nobody else."""

from __future__ import annotations

import math

from txnbuffer.errors import InvalidRequest

MAX_NAME = 400
MAX_NUMBER = 2**63 - 1


def check_name(name: object, what: str) -> str:
    """The name of a producer or group. Raises InvalidRequest."""
    if not isinstance(name, str) or not name.isprintable() or not 0 < len(name.encode()) <= MAX_NAME:
        raise InvalidRequest(f"{what} is named by 1 to {MAX_NAME} bytes of printable text, not {_short(name)}")
    return name


def check_number(number: object) -> int:
    """The number of a named transaction. Raises InvalidRequest."""
    if type(number) is not int or not 1 <= number <= MAX_NUMBER:
        raise InvalidRequest(f"the number of a named transaction is a whole one from 1 on, not {_short(number)}")
    return number


def check_timeout(timeout: object) -> float | None:
    """Seconds, or None. Raises InvalidRequest."""
    if timeout is None:
        return None
    if type(timeout) not in (int, float) or not isinstance(timeout, (int, float)) or not 0 < timeout < math.inf:
        raise InvalidRequest(f"the time-out of a transaction is a number of seconds above 0, not {_short(timeout)}")
    return float(timeout)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:79] + "…"
