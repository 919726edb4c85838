"""The page about metrics lists them all."""

from __future__ import annotations

from pathlib import Path

from pair_of_brokers import Pair
from service_setup import engine_on

from broker_io.memory import MemoryBroker
from txnbuffer.config import AccessConfig
from txnbuffer.service.door.access import Access
from txnbuffer.service.servers.http_server import metrics

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "metrics.md"


async def test_the_page_lists_the_metrics() -> None:
    access = Access(AccessConfig(), log=print)
    async with engine_on(MemoryBroker()) as engine:
        lines = {
            f"| `txnbuffer_{name}{'_total' if kind == 'counter' else ''}` | {kind} | {text.rstrip('.')} |"
            for name, text, _, kind, _ in metrics(engine, pair=Pair().members[0].status(), access=access)
        }
    assert lines <= set(PAGE.read_text().splitlines())
