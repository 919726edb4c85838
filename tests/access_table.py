"""The table of what principals may do, generated from a policy, and how each cell is tried over gRPC and HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from itertools import product
from typing import Any, NamedTuple

from http_answers import ask

from broker_io import open_broker
from broker_io.errors import CallerError, NotAuthorized
from txnbuffer.access.policy import ALLOWED, SERVICE, Action, Policy, ResourceKind, ResourceName
from txnbuffer.cli.admin_client import ServiceAddress, call
from txnbuffer.client.connection import PendingConnection
from txnbuffer.rpc.service_access import ServiceAccess

ACTIONS = sorted({cell for cells in ALLOWED.values() for cell in cells}, key=str)
"""All actions and the kinds that they are about, but those on the service."""
OF_SERVICE = (Action.OBSERVE, Action.OPERATE)


class Cell(NamedTuple):
    principal: str
    action: Action
    resource: ResourceName
    allowed: bool

    def __str__(self) -> str:
        return f"{self.principal} {'may' if self.allowed else 'may not'} {self.action.value} {self.resource}"


def table(policy: Policy, principals: Iterable[str], names: Mapping[ResourceKind, Iterable[str]]) -> list[Cell]:
    """Each principal × action × resource of these names, and of the service."""
    tried = [(action, ResourceName(kind, name)) for action, kind in ACTIONS for name in names.get(kind, ())]
    tried += [(action, SERVICE) for action in OF_SERVICE]
    return [
        Cell(principal, action, resource, policy.allows(principal, action, resource))
        for principal, (action, resource) in product(principals, tried)
    ]


Try = Callable[[str], Awaitable[object]]


class GrpcAttempts:
    """Tries what a principal may do at a service, whose tokens are known."""

    def __init__(self, address: str, token: str, client: PendingConnection) -> None:
        self._address = address
        self._token = token
        self._client = client

    async def denied(self, action: Action, resource: ResourceName) -> bool:
        """Whether an attempt is denied. Another error of the caller comes after the check."""
        tries: Mapping[tuple[Action, ResourceKind], Try] = {
            (Action.READ, ResourceKind.TOPIC): self._read,
            (Action.WRITE, ResourceKind.TOPIC): self._write,
            (Action.USE, ResourceKind.PRODUCER): self._use,
            (Action.JOIN, ResourceKind.GROUP): self._join,
            (Action.OPERATE, ResourceKind.TOPIC): self._operate_topic,
            (Action.OPERATE, ResourceKind.GROUP): self._operate_group,
            (Action.OPERATE, ResourceKind.SERVICE): lambda _: self.ask("Sessions"),
            (Action.OBSERVE, ResourceKind.SERVICE): lambda _: self.ask("Status"),
        }
        try:
            await tries[action, resource.kind](resource.name)
        except NotAuthorized:
            return True
        except CallerError:
            return False
        return False

    async def ask(self, request: str, **arguments: Any) -> Any:
        service = ServiceAddress(self._address.removeprefix("txnbuf://"), ServiceAccess(token=self._token))
        return await asyncio.to_thread(call, service, request, **arguments)

    async def _read(self, topic: str) -> None:
        def ledgers() -> None:
            with open_broker(self._address, token=self._token) as remote:
                remote.ledgers(topic)

        await asyncio.to_thread(ledgers)

    async def _write(self, topic: str) -> None:
        async with self._client as client, client.transaction() as txn:
            await txn.send(topic, b"v")

    async def _use(self, name: str) -> None:
        async with self._client as client:
            await client.delete_name(name)

    async def _join(self, group: str) -> None:
        async with self._client as client:
            await client.join(group)

    async def _operate_topic(self, topic: str) -> None:
        await self.ask("SetCompaction", topic=topic, policy=None)

    async def _operate_group(self, group: str) -> None:
        await self.ask("ForgetGroup", group=group)


class HttpAttempts(GrpcAttempts):
    """As GrpcAttempts; requests of operators go to an HTTP port."""

    def __init__(self, port: int, address: str, token: str, client: PendingConnection) -> None:
        super().__init__(address, token, client)
        self._port = port

    async def ask(self, request: str, **arguments: Any) -> Any:
        answer = await asyncio.to_thread(ask, self._port, f"/admin/{request}", arguments, token=self._token)
        if answer.status == 403:
            raise NotAuthorized(answer.json["message"])
        return answer.json


async def wrong_cells(cells: Iterable[Cell], attempts: Callable[[str], GrpcAttempts]) -> list[str]:
    """The cells in which an attempt has another result than the table."""
    return [
        str(cell) for cell in cells if await attempts(cell.principal).denied(cell.action, cell.resource) is cell.allowed
    ]
