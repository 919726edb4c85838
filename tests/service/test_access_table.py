"""Each cell of principal × action × resource, over gRPC and HTTP, on an embedded log."""

from __future__ import annotations

from pathlib import Path

from access_table import OF_SERVICE, GrpcAttempts, HttpAttempts, table, wrong_cells
from access_world import POLICY, PRINCIPALS, accessed
from service_setup import engine_on

from broker_io.memory import MemoryBroker
from txnbuffer import connect
from txnbuffer.access.policy import ResourceKind, parse_policy

NAMES = {
    ResourceKind.TOPIC: ("a", "abc", "b"),
    ResourceKind.PRODUCER: ("w-1", "x"),
    ResourceKind.GROUP: ("g-1", "x"),
}


async def test_each_cell_of_the_policy_holds_over_grpc_and_http(tmp_path: Path) -> None:
    async with engine_on(MemoryBroker()) as engine, accessed(engine, tmp_path) as service:
        async with service.connect("root") as client:
            for topic in NAMES[ResourceKind.TOPIC]:
                await client.send(topic, b"v")

        def attempts(principal: str) -> GrpcAttempts:
            token = service.tokens.text[principal]
            return GrpcAttempts(service.address, token, connect(service.address, token=token))

        cells = table(parse_policy(POLICY, "policy"), PRINCIPALS, NAMES)
        assert len(cells) == 5 * 17
        assert sum(cell.allowed for cell in cells) == 32
        assert await wrong_cells(cells, attempts) == []

        def over_http(principal: str) -> HttpAttempts:
            token = service.tokens.text[principal]
            return HttpAttempts(service.http.port, service.address, token, connect(service.address, token=token))

        # Nothing is read, written or joined over HTTP.
        cells = [cell for cell in cells if cell.action in OF_SERVICE]
        assert (len(cells), sum(cell.allowed for cell in cells)) == (5 * 7, 14)
        assert await wrong_cells(cells, over_http) == []
