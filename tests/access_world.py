"""Services with access control for tests: a policy, issued tokens, and clients of principals."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from txnbuffer import connect
from txnbuffer.access.tokens import TokenFile, issue, with_token
from txnbuffer.client.connection import PendingConnection
from txnbuffer.config import AccessConfig
from txnbuffer.service.door.access import Access
from txnbuffer.service.door.tls import ServerTls, WatchedTls
from txnbuffer.service.engine.engine import Engine
from txnbuffer.service.servers.admin import ServiceAdmin
from txnbuffer.service.servers.grpc_server import GrpcServer
from txnbuffer.service.servers.http_server import HttpServer
from txnbuffer.service.standby.replication import Replication

POLICY = """
[[allow]]
principals = ["writer"]
roles = ["write"]
topics = ["a*"]
producers = ["w-*"]

[[allow]]
principals = ["reader"]
roles = ["read"]
topics = ["a*"]

[[allow]]
principals = ["processor"]
roles = ["process"]
topics = ["a*"]
groups = ["g-*"]

[[allow]]
principals = ["operator"]
roles = ["operate"]
topics = ["a*"]
groups = ["g-*"]

[[allow]]
principals = ["root"]
roles = ["read", "write", "process", "operate"]
topics = ["*"]
groups = ["*"]
producers = ["*"]
"""
PRINCIPALS = ("writer", "reader", "processor", "operator", "root")


class Tokens:
    """A file of tokens in a directory; `text` has the token of each principal."""

    def __init__(self, directory: Path, principals: tuple[str, ...]) -> None:
        self.path = directory / "tokens"
        self.text: dict[str, str] = {}
        self._file, self._chance = TokenFile({}), random.Random(1)
        for name in principals:
            self.add(name)

    def add(self, principal: str, expires: int | None = None) -> str:
        text, token = issue(principal, self._chance.randbytes(38), 1_764_000_000, expires)
        self._file = with_token(self._file, token)
        self.text[principal] = text
        self.write()
        return text

    def revoke(self, principal: str) -> None:
        kept = {name: token for name, token in self._file.tokens.items() if token.principal != principal}
        self._file = TokenFile(kept)
        self.write()

    def write(self) -> None:
        new = self.path.with_suffix(".new")
        new.write_text(self._file.format())
        new.chmod(0o600)
        new.rename(self.path)


class AccessedService:
    """A service on an engine in this process, over gRPC and HTTP; `log` has the lines that it logged."""

    def __init__(self, engine: Engine, server: GrpcServer, access: Access, tokens: Tokens, policy: Path) -> None:
        self.engine, self.server, self.access, self.tokens, self.policy = engine, server, access, tokens, policy
        self.http = HttpServer(admin=server.admin, access=access, names=["txn.example.org"])
        self.address = f"txnbuf://127.0.0.1:{server.port}"
        self.log: list[Mapping[str, Any]] = []

    def connect(self, principal: str, **options: Any) -> PendingConnection:
        """A client of a principal."""
        return connect(self.address, token=self.tokens.text[principal], **options)

    def denials(self) -> list[tuple[str | None, str | None, str | None]]:
        """Principal, action and resource of each denial in the log."""
        lines = [line for line in self.log if line["event"] == "denied"]
        return [(line.get("principal"), line.get("action"), line.get("resource")) for line in lines]


@asynccontextmanager
async def accessed(
    engine: Engine, directory: Path, policy: str = POLICY, *, tls: ServerTls | None = None
) -> AsyncIterator[AccessedService]:
    """Serve an engine with a policy, and a token for each of PRINCIPALS."""
    tokens, path = Tokens(directory, PRINCIPALS), directory / "policy.toml"
    path.write_text(policy)
    path.chmod(0o644)
    lines: list[Mapping[str, Any]] = []

    def log(event: str, **facts: Any) -> None:
        lines.append({"event": event, **facts})

    config = AccessConfig(policy=str(path), tokens=str(tokens.path), client_ca=tls.client_ca if tls else "")
    access = Access(config, log, tls=None if tls is None else WatchedTls(tls))
    server = GrpcServer(engine.limits, max_clients=100, methods=Replication().methods(), access=access)
    access.on_change(server.recheck)
    await server.start("127.0.0.1:0", tls)
    await server.serve(engine, ServiceAdmin(engine))
    service = AccessedService(engine, server, access, tokens, path)
    service.log, service.http.engine = lines, engine
    await service.http.start("127.0.0.1:0")
    try:
        yield service
    finally:
        await service.http.stop()
        await server.stop()
