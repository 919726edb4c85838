"""Checks of the arguments of applications and operators, before anything is done with them."""

from __future__ import annotations

import inspect
import math
from collections.abc import Awaitable, Iterable
from typing import TypeVar

from txnbuffer.errors import InvalidHandler, InvalidRequest
from txnbuffer.model import TxnId

T = TypeVar("T")

MAX_NAME = 400
"""Bytes of UTF-8 that the name of a producer or a consumer group may have; the decision log keeps these names."""
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


def check_max_unavailable(seconds: object, what: str) -> float:
    """Seconds from 0 on, without end if infinite. Raises InvalidRequest."""
    if type(seconds) not in (int, float) or not isinstance(seconds, (int, float)) or not seconds >= 0:
        raise InvalidRequest(f"{what} is a number of seconds from 0 on, not {_short(seconds)}")
    return float(seconds)


def check_limit(limit: object) -> int:
    """How many records a batch may have. Raises InvalidRequest."""
    if type(limit) is not int or limit < 1:
        raise InvalidRequest(f"a batch of {_short(limit)} records can't be: ask for at least 1")
    return limit


def check_txn(txn: object) -> TxnId:
    """The id of a transaction, also as text. Raises InvalidRequest."""
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
        raise InvalidRequest(f"topics are a name, or a list of names, not {_short(topics)}")
    if not names:
        raise InvalidRequest("name at least one topic to read")
    return list(dict.fromkeys(names))


def check_callable(function: object) -> None:
    """Raises InvalidHandler of what can't be called, and of a generator function, whose call does nothing yet."""
    if not callable(function):
        raise InvalidHandler(f"a handler is a function, not {_short(function)}")
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise InvalidHandler(_is_generator(function))


def check_plain(function: object) -> None:
    """Raises InvalidHandler of what `check_callable` refuses, and of what a plain client can't await."""
    check_callable(function)
    if inspect.iscoroutinefunction(function):
        raise InvalidHandler(_not_plain(function))


def check_done(result: T) -> T:
    """What a plain client's function gave. Raises InvalidHandler if nothing of it ran yet."""
    if inspect.isgenerator(result) or inspect.isasyncgen(result):
        raise InvalidHandler(_is_generator(result))
    if inspect.isawaitable(result):
        if inspect.iscoroutine(result):
            result.close()
        raise InvalidHandler(_not_plain(result))
    return result


def check_awaitable(result: Awaitable[T]) -> Awaitable[T]:
    """What an asyncio client's handler gave. Raises InvalidHandler if that can't be awaited."""
    if not inspect.isawaitable(result):
        raise InvalidHandler(
            "the handler gave nothing to await: make it an `async def`, or use a plain client, `with connect(…)`"
        )
    return result


def _is_generator(function: object) -> str:
    return f"{_short(function)} is a generator, of which a call runs nothing: give a function without `yield`"


def _not_plain(function: object) -> str:
    return f"a plain client can't await {_short(function)}: give it a plain function, or use `async with connect(…)`"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:79] + "…"
