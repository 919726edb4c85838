"""Exports with a simulated kill at each call that changes or syncs a file."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from txnbuffer.pipeline import exports
from txnbuffer.pipeline.exports import ExportDirectory

CALLS = ("rename", "replace", "symlink", "fsync", "makedirs", "remove")


class Killed(BaseException):
    pass


class Attempt:
    """An export that is killed after a number of calls; `ended`: it completed before."""

    def __init__(self, step: int, commit: tuple[type, str] | None) -> None:
        self.step = step
        self.ended = False
        self._left = step
        self._commit = commit

    def run(self, export: Callable[[Any], Any], directory: ExportDirectory) -> None:
        with pytest.MonkeyPatch.context() as patch:
            for name in CALLS:
                patch.setattr(exports.os, name, self._counted(getattr(os, name)))
            if self._commit is not None:
                whole = self._counted(getattr(*self._commit))
                patch.setattr(*self._commit, lambda *arguments: (whole(*arguments), self._count()))
            try:
                export(directory)
                self.ended = True
            except Killed:
                pass

    def _count(self) -> None:
        if self._left == 0:
            raise Killed
        self._left -= 1

    def _counted(self, whole: Callable[..., Any]) -> Callable[..., Any]:
        def count_and_call(*arguments: Any, **named: Any) -> Any:
            self._count()
            return whole(*arguments, **named)

        return count_and_call


def attempts(commit: tuple[type, str] | None = None) -> Iterator[Attempt]:
    """An attempt for each call, until one completes; for the method `commit` one before and one after it."""
    for step in range(100):
        attempt = Attempt(step, commit)
        yield attempt
        if attempt.ended:
            assert step > 5
            return
    raise AssertionError("an export never ends")
