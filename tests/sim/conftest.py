"""Tests of classes with a `stage` run in a thread of its simulated world."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: Any) -> bool | None:
    stage = getattr(pyfuncitem.instance, "stage", None)
    if stage is None:
        return None
    names = pyfuncitem._fixtureinfo.argnames
    stage.call(lambda: pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True
