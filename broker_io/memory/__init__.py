"""Topics in memory: the reference that other backends are compared with, with faults on demand.

The address `memory:` is a broker with topics of its own; `memory:NAME` shares topics with every other broker of
that name in this process.
"""

from __future__ import annotations

from broker_io.memory.broker import LEDGER_ENTRIES, MemoryBroker, MemoryLog, MemoryReader, MemoryWriter
from broker_io.memory.faults import Faults, Held
from broker_io.port import MAX_MESSAGE_BYTES

__all__ = ["Faults", "Held", "MemoryBroker", "MemoryLog", "MemoryReader", "MemoryWriter", "open_memory"]

_named: dict[str, MemoryLog] = {}


def open_memory(name: str = "") -> MemoryBroker:
    """A handle on the shared topics of a name; topics without a name are never shared."""
    if not name:
        return MemoryBroker()
    log = MemoryLog(ledger_entries=LEDGER_ENTRIES, max_message_bytes=MAX_MESSAGE_BYTES)
    return MemoryBroker(log=_named.setdefault(name, log))
