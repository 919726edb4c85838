"""The page about the service lists its metrics."""

from __future__ import annotations

from pathlib import Path

from pair_of_brokers import Pair
from service_setup import engine_on, on_a_loop

from broker_io.memory import MemoryBroker
from txnbuffer.service.http_server import metrics

PAGE = Path(__file__).parents[2] / "docs" / "service.md"


@on_a_loop
async def test_the_page_lists_the_metrics() -> None:
    async with engine_on(MemoryBroker()) as engine:
        lines = {
            f"| `txnbuffer_{name}{'_total' if kind == 'counter' else ''}` | {kind} | {text.rstrip('.')} |"
            for name, text, _, kind in metrics(engine, pair=Pair().members[0].status())
        }
    assert lines <= set(PAGE.read_text().splitlines())
