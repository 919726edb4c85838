"""The simulator finds a service that ends with a wrong error, and an application that gets an error it must not get."""

from __future__ import annotations

import asyncio
from typing import Any, Self

import pytest
from sim import apps, local_apps
from sim.apps import App, Setting
from sim.history import History
from sim.local_apps import LocalLog
from sim.service import embedded
from sim.world import Finding, World

from broker_io.errors import DiskFailed, Error, Locked, PositionTrimmed, ServiceUnavailable
from broker_io.port import Broker
from txnbuffer.errors import CoordinatorStopped


class FailingClient:
    """A client that cannot be opened."""

    def __init__(self, error: Error) -> None:
        self._error = error

    async def __aenter__(self) -> Self:
        raise self._error

    async def __aexit__(self, *_: object) -> None:
        pass


@pytest.mark.parametrize(
    ("error", "found"), [(CoordinatorStopped("a write failed"), "CoordinatorStopped"), (DiskFailed("a write"), "")]
)
def test_a_service_that_seems_to_have_lost_its_own_log_is_found(error: Error, found: str) -> None:
    def fail() -> Broker:
        raise error

    with World(seed=1) as world:
        service = embedded(world.host("alpha"))
        service.open_log = fail
        service.start()
        if found:
            with pytest.raises(Finding, match=found):
                world.run(10.0)
        else:
            world.run(10.0)
            assert service.error is error


@pytest.mark.parametrize(
    ("kind", "error", "found"),
    [
        (App, PositionTrimmed("gone"), "got an error about lost messages"),
        (App, ServiceUnavailable("away"), ""),
        (LocalLog, Locked("held"), "has left its own log open"),
        (LocalLog, ServiceUnavailable("away"), ""),
    ],
)
def test_an_error_that_no_application_must_get_is_found(
    monkeypatch: pytest.MonkeyPatch, kind: type[App], error: Error, found: str
) -> None:
    def connect(*_: Any, **__: Any) -> FailingClient:
        return FailingClient(error)

    monkeypatch.setattr(apps, "connect", connect)
    monkeypatch.setattr(local_apps, "connect", connect)
    with World(seed=1) as world:
        history = History(lambda: world.now, world.fail)
        app = kind("app", world.host("beta"), Setting("", history, (), world.log), world.random("app"))
        app.start()
        if found:
            with pytest.raises(Finding, match=found):
                world.run(5.0)
        else:
            world.run(5.0)


class OpenClient:
    """A client that is opened and closed at once."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass


def test_a_local_log_need_not_show_what_is_behind_the_transactions_of_a_killed_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checked: list[bool] = []

    async def use(_: LocalLog, __: OpenClient, *, whole: bool) -> None:
        checked.append(whole)
        if len(checked) == 2:
            await asyncio.sleep(100.0)

    monkeypatch.setattr(LocalLog, "_use", use)
    monkeypatch.setattr(LocalLog, "_patience", lambda _: None)
    monkeypatch.setattr(local_apps, "connect", lambda _: OpenClient())
    with World(seed=1) as world:
        history = History(lambda: world.now, world.fail)
        app = LocalLog("app", world.host("beta"), Setting("", history, (), world.log), world.random("app"))
        app.start()
        world.run(3.0)
        assert checked == [True, True]
        assert app.process is not None
        app.process.kill()
        app.start()
        world.run(5.0)
    assert len(checked) > 4
    assert not any(checked[2:])
