"""Brokers of topics behind one port: in memory, in files, and (later) of a running service and of Pulsar."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from broker_io.errors import InvalidAddress

if TYPE_CHECKING:
    from broker_io.port import Broker  # with numpy behind it, which the help of a command line can do without


def open_broker(address: str, **options: Any) -> Broker:
    """The broker of an address: `memory:` a new one, `memory:NAME` one shared in this process, `file:DIR`.

    `options` are those of the backend: `file:` takes what `FileBroker.open` takes, `memory:` what
    `MemoryBroker` takes. Raises InvalidAddress, and what the backend raises.
    """
    scheme, colon, rest = address.partition(":")
    if colon and scheme == "file" and rest:
        from broker_io.file import FileBroker

        file_broker: Broker = FileBroker.open(rest, **options)
        return file_broker
    if colon and scheme == "memory":
        from broker_io.memory import open_memory

        return open_memory(rest, **options)
    raise InvalidAddress(f"{address!r} is no broker address: write memory:, memory:NAME or file:DIR")
