"""Requests of the admin service, whichever way they arrive: who may make them, and their answers"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from types import MappingProxyType
from typing import Any

from broker_io.waits import long_waits
from txnbuffer.errors import ServiceUnavailable
from txnbuffer.service.door.access import Permissions
from txnbuffer.service.door.needs import ADMIN_REQUESTS, check_admin, visible
from txnbuffer.service.engine.engine import Engine
from txnbuffer.service.servers.admin import ServiceAdmin

ANSWER = 10.0
"""Seconds within which requests that query the cluster are answered."""
OF_TOPICS = ("List", "Describe")
"""Requests that query the cluster."""

Method = Callable[[dict[str, Any]], Awaitable[Any]]
NO_METHODS: Mapping[str, Method] = MappingProxyType({})


class AdminCalls:
    """Answers from `serve` to `unserve`; the requests `always` are answered without an engine too.

    `waits_for`: what the service waits for until then; errors of earlier calls quote it.
    """

    def __init__(self, always: Mapping[str, Method] = NO_METHODS) -> None:
        self.waits_for = "the service is starting"
        self.names = frozenset(name for name, asked in ADMIN_REQUESTS.items() if asked.method or name in always)
        self._always = always
        self._methods = {**always}
        self._engine: Engine | None = None
        self._asked: dict[asyncio.Future[Any], None] = {}

    def serve(self, engine: Engine, admin: ServiceAdmin) -> None:
        """Start to answer all requests."""
        self._methods = {**self._always, **admin.methods()}
        self._engine = engine

    def unserve(self) -> None:
        """Refuse all requests that need an engine again; those that wait for an answer end."""
        self._engine, self._methods = None, {**self._always}
        for asked in [*self._asked]:
            asked.cancel()

    def not_served(self) -> str:
        """The reason why other requests than those `always` are refused."""
        return "; ".join([f"nothing is served yet: {self.waits_for}", *map(str, long_waits())])

    async def answer(self, name: str, request: dict[str, Any], permissions: Permissions) -> Any:
        """The answer to a request, ready for JSON. Raises an `Error`."""
        engine, on_engine = self._engine, name not in self._always
        check_admin(permissions, name, request)
        if self._engine is not None:
            self._engine.quotas.of(permissions).check_request()
        method = self._methods.get(name)
        if method is None:
            raise ServiceUnavailable(self.not_served())
        try:
            async with asyncio.timeout(ANSWER if name in OF_TOPICS else None):
                found = await self._ask(method, request, ends=on_engine)
        except TimeoutError:
            why = "; ".join(map(str, long_waits())) or "the cluster does not answer"
            raise ServiceUnavailable(f"the service runs but can't answer now: {why}") from None
        if engine is not None and on_engine:
            engine.check_answer()
        return visible(permissions, name, found)

    async def _ask(self, method: Method, request: dict[str, Any], *, ends: bool) -> Any:
        """The answer of a method, which `ends` with the engine. Raises ServiceUnavailable then."""
        asked = asyncio.ensure_future(method(request))
        if ends:
            self._asked[asked] = None
        try:
            return await asked
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if caller is not None and caller.cancelling():
                raise
            raise ServiceUnavailable("this machine serves no more: ask the other one of the pair") from None
        finally:
            self._asked.pop(asked, None)
