"""Readers of a broker that has just restarted: they return some messages, and then nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from broker_io.batch import PlacedBatch
from broker_io.port import Broker, Reader
from broker_io.position import EARLIEST, Position


class CutShort:
    def __init__(self, reader: Reader, left: int) -> None:
        self._reader, self._left = reader, left

    def read(self, *, limit: int = 65_536, timeout: float = 0.0) -> PlacedBatch | None:
        placed = self._reader.read(limit=min(limit, self._left)) if self._left else None
        self._left -= 0 if placed is None else len(placed)
        return placed

    def close(self) -> None:
        self._reader.close()

    def __enter__(self) -> CutShort:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def cut_short(
    patch: pytest.MonkeyPatch, broker: Broker, *given: int, which: Callable[[bool], bool] = bool, honest: bool = False
) -> None:
    """Limit readers, chosen by `which` from their `compacted`, to the messages given; later ones return none.

    `honest`: later ones return all.
    """
    opened, left = broker.reader, [*given]

    def reader(topic: str, start: Position = EARLIEST, **options: Any) -> Any:
        made = opened(topic, start, **options)
        if not which(options.get("compacted", False)) or (honest and not left):
            return made
        return CutShort(made, left.pop(0) if left else 0)

    patch.setattr(broker, "reader", reader)
