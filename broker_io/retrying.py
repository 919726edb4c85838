"""Retries while a service or a cluster is unavailable: one policy for the clients of both."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import tenacity

from broker_io.errors import ServiceUnavailable
from broker_io.waits import waiting

T = TypeVar("T")

FIRST_PAUSE, LONGEST_PAUSE = 0.05, 1.0


class RetryPolicy:
    """Retries for up to `seconds` after ServiceUnavailable; `check` raises once the result is not needed any more.

    The seconds count from the first failure, because an attempt may be a long read; with `from_start` they count from
    the first attempt. `broker_io.waits` shows the wait meanwhile.
    """

    def __init__(self, seconds: float, check: Callable[[], None], *, from_start: bool = False) -> None:
        self.seconds = seconds
        self._check = check
        self._from_start = from_start

    def __call__(self, what: str, attempt: Callable[[], T]) -> T:
        """The result of `attempt`; `what` names the wait. Raises the last ServiceUnavailable."""
        began = time.monotonic() if self._from_start else None

        def is_over(_: tenacity.RetryCallState) -> bool:
            nonlocal began
            self._check()
            now = time.monotonic()
            began = now if began is None else began
            return now - began >= self.seconds

        with waiting(what) as wait:

            def failed(state: tenacity.RetryCallState) -> None:
                wait.failed(None if state.outcome is None else state.outcome.exception())

            retrying = tenacity.Retrying(
                retry=tenacity.retry_if_exception_type(ServiceUnavailable),
                wait=tenacity.wait_random_exponential(FIRST_PAUSE, LONGEST_PAUSE),
                stop=is_over,
                before_sleep=failed,
                reraise=True,
            )
            return retrying(attempt)
