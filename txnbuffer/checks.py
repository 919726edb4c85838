"""Checks of arguments from applications and operators"""

from __future__ import annotations

import inspect
import math
from collections.abc import Awaitable
from typing import TypeVar

from txnbuffer.errors import InvalidHandler, InvalidRequest
from txnbuffer.model import EARLIEST, Position, TxnId

T = TypeVar("T")

MAX_NAME = 400
"""Maximum bytes, in UTF-8, of the name of a producer or consumer group; the decision log stores these names."""
MAX_NUMBER = 2**63 - 1


def check_name(name: object, what: str) -> str:
    """Return the name of a producer or group; `what` names it in the error. Raises InvalidRequest."""
    if not isinstance(name, str) or not name.isprintable() or not 0 < len(name.encode()) <= MAX_NAME:
        raise InvalidRequest(f"the name of {what} must be 1 to {MAX_NAME} bytes of printable text, got {_short(name)}")
    return name


def check_number(number: object) -> int:
    """Return the sequence number of a named producer's transaction. Raises InvalidRequest."""
    if type(number) is not int or not 1 <= number <= MAX_NUMBER:
        raise InvalidRequest(f"the number of a transaction must be an integer from 1 to 2^63 - 1, got {_short(number)}")
    return number


def check_last_number(number: object) -> int:
    """Return the last number of a deleted producer; 0 for none. Raises InvalidRequest."""
    if type(number) is not int or not 0 <= number <= MAX_NUMBER:
        raise InvalidRequest(f"last_number must be an integer from 0 to 2^63 - 1, got {_short(number)}")
    return number


def check_flag(flag: object, what: str) -> bool:
    """Return a flag; `what` names it in the error. Raises InvalidRequest if it is neither True nor False."""
    if type(flag) is not bool:
        raise InvalidRequest(f"{what} must be True or False, got {_short(flag)}")
    return flag


def check_timeout(timeout: object) -> float | None:
    """Return a timeout in seconds, or None. Raises InvalidRequest."""
    if timeout is None:
        return None
    if type(timeout) not in (int, float) or not isinstance(timeout, (int, float)) or not 0 < timeout < math.inf:
        raise InvalidRequest(f"timeout must be a number of seconds above 0, got {_short(timeout)}")
    return float(timeout)


def check_max_unavailable(seconds: object, what: str) -> float:
    """Return seconds, at least 0; infinity waits forever. Raises InvalidRequest."""
    if type(seconds) not in (int, float) or not isinstance(seconds, (int, float)) or not seconds >= 0:
        raise InvalidRequest(f"{what} must be a number of seconds, at least 0, got {_short(seconds)}")
    return float(seconds)


def check_wait(timeout: object) -> float:
    """Return how many seconds a call may wait; those below 0 count as 0. Raises InvalidRequest."""
    if type(timeout) not in (int, float) or not isinstance(timeout, (int, float)) or math.isnan(timeout):
        raise InvalidRequest(f"timeout must be a number of seconds, got {_short(timeout)}")
    return float(timeout)


def check_attempts(attempts: object) -> int:
    """Return how many times work may be tried. Raises InvalidRequest."""
    if type(attempts) is not int or attempts < 1:
        raise InvalidRequest(f"attempts must be at least 1, got {_short(attempts)}")
    return attempts


def check_limit(limit: object) -> int:
    """Return the maximum number of records of a batch. Raises InvalidRequest."""
    if type(limit) is not int or limit < 1:
        raise InvalidRequest(f"the limit of a batch must be at least 1 record, got {_short(limit)}")
    return limit


def check_position(position: Position, what: str) -> Position:
    """Return a position that a log can have, or EARLIEST; `what` names it in the error. Raises InvalidRequest."""
    ledger, entry, batch = position
    sound = all(type(number) is int and number <= MAX_NUMBER for number in position)
    if position != EARLIEST and not (sound and ledger >= 0 and entry >= -1 and batch >= -1):
        raise InvalidRequest(f"{what} can't be '{position!s:.80}': no ledger or entry has this number")
    return position


def check_txn(txn: object) -> TxnId:
    """Return a transaction id, which may be given as text. Raises InvalidRequest."""
    try:
        return TxnId.parse(txn if isinstance(txn, str) else str(txn) if isinstance(txn, TxnId) else _short(txn))
    except ValueError as error:
        raise InvalidRequest(str(error)) from None


def check_callable(function: object) -> None:
    """Raises InvalidHandler if `function` is not callable, or is a generator function, whose call runs nothing."""
    if not callable(function):
        raise InvalidHandler(f"a handler must be a function, got {_short(function)}")
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise InvalidHandler(_is_generator(function))


def check_sync_function(function: object) -> None:
    """Raises InvalidHandler as `check_callable`, and for a coroutine function, which a sync client cannot await."""
    check_callable(function)
    if inspect.iscoroutinefunction(function):
        raise InvalidHandler(_not_sync(function))


def check_sync_result(result: T) -> T:
    """Return the result of a sync client's function. Raises InvalidHandler if it is a generator or awaitable."""
    if inspect.isgenerator(result) or inspect.isasyncgen(result):
        raise InvalidHandler(_is_generator(result))
    if inspect.isawaitable(result):
        if inspect.iscoroutine(result):
            result.close()
        raise InvalidHandler(_not_sync(result))
    return result


def check_awaitable(result: Awaitable[T]) -> Awaitable[T]:
    """Return the result of an asyncio client's handler. Raises InvalidHandler if it cannot be awaited."""
    if not inspect.isawaitable(result):
        raise InvalidHandler(
            "the handler returned nothing to await: define it with `async def`, or use the sync client"
        )
    return result


def _is_generator(function: object) -> str:
    return f"{_short(function)} is a generator, so calling it runs nothing: give a function without `yield`"


def _not_sync(function: object) -> str:
    return f"a sync client can't await {_short(function)}: give a sync function, or use `async with connect(…)`"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:79] + "…"
