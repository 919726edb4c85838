"""What applications ask for, checked before it goes anywhere: one bad argument harms nobody else."""

from __future__ import annotations

import inspect
import math
from typing import TypeVar

from txnbuffer.errors import InvalidRequest

T = TypeVar("T")

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


def check_plain(function: object) -> None:
    """Raises InvalidRequest of a coroutine function, which a plain client can't await."""
    if inspect.iscoroutinefunction(function):
        raise InvalidRequest(_not_plain(function))


def check_done(result: T) -> T:
    """What a plain client's function gave. Raises InvalidRequest if that is still to be awaited: nothing ran yet."""
    if inspect.isawaitable(result):
        if inspect.iscoroutine(result):
            result.close()
        raise InvalidRequest(_not_plain(result))
    return result


def _not_plain(function: object) -> str:
    return f"a plain client can't await {_short(function)}: give it a plain function, or use `async with connect(…)`"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:79] + "…"
