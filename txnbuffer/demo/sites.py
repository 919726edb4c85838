"""Where the demo takes place: on an embedded log with its service, or on a broker with two services beside it."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from broker_io.testing.standalone import SHORT_LIVED, StandaloneProcess
from txnbuffer.demo.processes import PATIENCE
from txnbuffer.demo.service import Service

if TYPE_CHECKING:
    from txnbuffer import Client, PlainClient

PAUSE = 0.5
"""Seconds between two attempts to connect."""


class Way(NamedTuple):
    """What `connect` takes to reach the site."""

    address: str
    options: dict[str, Any]

    async def open(self) -> Client:
        """Connect, once the site answers: a broker may have been killed this very moment."""
        from txnbuffer import ServiceUnavailable, connect

        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                return await connect(self.address, **self.options).open()
            except ServiceUnavailable:
                if time.monotonic() > deadline:
                    raise
                await asyncio.sleep(PAUSE)

    def open_plain(self) -> PlainClient:
        """The same without asyncio."""
        from txnbuffer.client.plain import PlainClient

        return PlainClient.open(self.open)


class Site(Protocol):
    """Services, one of which serves, and what they need. `since`: what a recovery begins with."""

    since: str

    @property
    def serving(self) -> Service:
        """The service that serves, as far as is known."""

    @property
    def broker(self) -> StandaloneProcess | None:
        """What may be killed besides services."""

    def start(self) -> None:
        """Start what services need."""

    def succeed(self) -> None:
        """Let the next service, or the first, be the serving one, which has begun its life then."""

    def way(self) -> Way:
        """To be asked once a service serves."""

    def reinforce(self) -> None:
        """Have a service stand by, where one can."""

    def stop(self) -> None:
        """End what runs."""


class Embedded:
    """A service that owns the log in a directory, started again whenever it was killed."""

    since = "its start"
    broker = None

    def __init__(self, directory: str, scratch: str) -> None:
        self.serving = Service(f"file:{directory}", os.path.join(scratch, "service.log"))

    def start(self) -> None:
        pass

    def way(self) -> Way:
        return Way(f"txnbuf://127.0.0.1:{self.serving.port}", {"timeout": PATIENCE})

    def succeed(self) -> None:
        self.serving.start()

    def reinforce(self) -> None:
        pass

    def stop(self) -> None:
        self.serving.stop()


class BesideBroker:
    """A broker of our own with two services beside it, one of which stands by.

    `home` is that of Pulsar's server distribution; data and logs stand in the directory `scratch`.
    """

    since = "the other one's end"
    serving: Service

    def __init__(self, home: str, scratch: str) -> None:
        self._scratch = scratch
        self._services: list[Service] = []
        self._standby: Service | None = None
        self.broker = StandaloneProcess(Path(home), Path(scratch), environment=SHORT_LIVED)

    def start(self) -> None:
        """Raises NoPulsar if the broker does not start."""
        self.broker.start()
        self._address = f"{self.broker.url}/{self.broker.namespace()}"

    def way(self) -> Way:
        options = {"admin_url": self.broker.admin, "patience": PATIENCE}
        return Way(self._address, {"patience": PATIENCE, "broker_options": options})

    def succeed(self) -> None:
        self.serving, self._standby = self._standby or self._started(), None

    def reinforce(self) -> None:
        if self._standby is None:
            self._standby = self._started()
            self._standby.wait_for("standing by")

    def stop(self) -> None:
        try:
            for service in self._services:
                service.kill()  # to drain would mean to wait for the broker, which may be gone
        finally:
            self.broker.remove()

    def _started(self) -> Service:
        """A service that stands by until nobody serves."""
        log = os.path.join(self._scratch, f"service-{len(self._services)}.log")
        service = Service(self._address, log, "--standby", "--admin-url", self.broker.admin)
        self._services.append(service)
        service.start()
        return service
