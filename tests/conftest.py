"""Hypothesis profiles (HYPOTHESIS_PROFILE: `dev`, the default, `mutants`, `soak`) and how workers share tests."""

import asyncio
import functools
import inspect
import os
import re
from pathlib import Path
from typing import Any

import pytest
import size
from hypothesis import HealthCheck, Phase, settings
from xdist.scheduler import LoadScopeScheduling

from broker_io.environment import set_up_grpc

os.environ["XDG_CONFIG_HOME"] = "/nonexistent"  # no test reads the configuration file of who runs it
for variable in ("TXNBUFFER_CONFIG", "TXNBUFFER_PROFILE"):
    os.environ.pop(variable, None)
set_up_grpc()  # servers run in the process of tests, which starts others

pytest_plugins = ["txnbuffer.testing", "pulsar_fixtures", "spark_session"]

settings.register_profile(
    "dev", max_examples=100, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)  # the same examples in each run
settings.register_profile(
    "mutants",
    settings.get_profile("dev"),
    max_examples=200,
    derandomize=False,  # their runner gives a seed
    phases=(Phase.explicit, Phase.generate),
)
settings.register_profile(
    "soak", settings.get_profile("dev"), max_examples=5000, derandomize=False, print_blob=True
)  # other examples in each run; a failure prints how to run it again
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))

SHARED = ("spark", "mortal", "odd_broker", "java")
"""Session fixtures that take long to start: all modules that use one of them run on one worker."""
PARSING = ("tests/test_tidy.py", "tests/test_layers.py")
"""Modules whose tests parse the whole source: they run on one worker, which does so once."""


class SharingScheduling(LoadScopeScheduling):  # type: ignore[misc]  # xdist has no types
    """Give each worker one test after another, and the tests that share what is slow to one worker."""

    def _split_scope(self, nodeid: str) -> str:
        module = nodeid.partition("::")[0]
        return "parsing" if module in PARSING else shared_fixture(module) or nodeid


@functools.cache
def shared_fixture(module: str) -> str:
    """The first of the slow fixtures that a parameter in the module names; empty if there is none."""
    text = (Path(__file__).parent.parent / module).read_text()
    return next((name for name in SHARED if re.search(rf"\b{name}: ", text)), "")


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> SharingScheduling:
    return SharingScheduling(config, log)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print the size of the project after a whole run."""
    if os.environ.get("PRINT_SIZE"):
        size.record(each for kind in ("", "passed", "failed") for each in terminalreporter.stats.get(kind, []))
        terminalreporter.write_line("\n".join(size.report()))


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = pyfuncitem._fixtureinfo.argnames
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


@pytest.fixture
def early_sends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients in this process send each record of a transaction at once, as those of large transactions."""
    monkeypatch.setattr("txnbuffer.client.session.session_requests.COLLECT_BYTES", 0)
