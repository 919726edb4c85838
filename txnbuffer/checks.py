"""Checks of the arguments that applications and operators give."""

from __future__ import annotations

import inspect
import math
from collections.abc import Awaitable, Iterable
from typing import TypeVar

from txnbuffer.errors import InvalidHandler, InvalidRequest
from txnbuffer.model import TxnId

T = TypeVar("T")

MAX_NAME = 400
"""The longest name of a producer or consumer group, in bytes of UTF-8; the decision log stores these names."""
MAX_NUMBER = 2**63 - 1


def check_name(name: object, what: str) -> str:
    """The name of a producer or group. Raises InvalidRequest."""
    if not isinstance(name, str) or not name.isprintable() or not 0 < len(name.encode()) <= MAX_NAME:
        raise InvalidRequest(f"the name of {what} must be 1 to {MAX_NAME} bytes of printable text, got {_short(name)}")
    return name


def check_number(number: object) -> int:
    """The sequence number of a named producer's transaction. Raises InvalidRequest."""
    if type(number) is not int or not 1 <= number <= MAX_NUMBER:
        raise InvalidRequest(f"the number of a transaction must be an integer from 1 to 2^63 - 1, got {_short(number)}")
    return number


def check_timeout(timeout: object) -> float | None:
    """Seconds, or None. Raises InvalidRequest."""
    if timeout is None:
        return None
    if type(timeout) not in (int, float) or not isinstance(timeout, (int, float)) or not 0 < timeout < math.inf:
        raise InvalidRequest(f"timeout must be a number of seconds above 0, got {_short(timeout)}")
    return float(timeout)


def check_max_unavailable(seconds: object, what: str) -> float:
    """Seconds, at least 0; infinity waits for ever. Raises InvalidRequest."""
    if type(seconds) not in (int, float) or not isinstance(seconds, (int, float)) or not seconds >= 0:
        raise InvalidRequest(f"{what} must be a number of seconds, at least 0, got {_short(seconds)}")
    return float(seconds)


def check_limit(limit: object) -> int:
    """The most records of a batch. Raises InvalidRequest."""
    if type(limit) is not int or limit < 1:
        raise InvalidRequest(f"the limit of a batch must be at least 1 record, got {_short(limit)}")
    return limit


def check_txn(txn: object) -> TxnId:
    """The id of a transaction, which may be given as text. Raises InvalidRequest."""
    if isinstance(txn, TxnId):
        return txn
    try:
        return TxnId.parse(txn if isinstance(txn, str) else _short(txn))
    except ValueError as error:
        raise InvalidRequest(str(error)) from None


def check_topics(topics: object) -> list[str]:
    """The names of topics to read, each once. Raises InvalidRequest."""
    names = [topics] if isinstance(topics, str) else [*topics] if isinstance(topics, Iterable) else [topics]
    if not all(isinstance(name, str) for name in names):
        raise InvalidRequest(f"topics must be a name or a list of names, got {_short(topics)}")
    if not names:
        raise InvalidRequest("name at least one topic to read")
    return list(dict.fromkeys(names))


def check_callable(function: object) -> None:
    """Raises InvalidHandler unless `function` is callable and no generator function, whose call runs nothing."""
    if not callable(function):
        raise InvalidHandler(f"a handler must be a function, got {_short(function)}")
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise InvalidHandler(_is_generator(function))


def check_sync_function(function: object) -> None:
    """Raises InvalidHandler as `check_callable`, and for a coroutine function, which a sync client can't await."""
    check_callable(function)
    if inspect.iscoroutinefunction(function):
        raise InvalidHandler(_not_sync(function))


def check_sync_result(result: T) -> T:
    """The result of a sync client's function. Raises InvalidHandler if it is a generator or awaitable."""
    if inspect.isgenerator(result) or inspect.isasyncgen(result):
        raise InvalidHandler(_is_generator(result))
    if inspect.isawaitable(result):
        if inspect.iscoroutine(result):
            result.close()
        raise InvalidHandler(_not_sync(result))
    return result


def check_awaitable(result: Awaitable[T]) -> Awaitable[T]:
    """The result of an asyncio client's handler. Raises InvalidHandler if it can't be awaited."""
    if not inspect.isawaitable(result):
        raise InvalidHandler(
            "the handler returned nothing to await: make it an `async def`, or use the sync client, `with connect(…)`"
        )
    return result


def _is_generator(function: object) -> str:
    return f"{_short(function)} is a generator, so calling it runs nothing: give a function without `yield`"


def _not_sync(function: object) -> str:
    return f"a sync client can't await {_short(function)}: give a sync function, or use `async with connect(…)`"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:79] + "…"
