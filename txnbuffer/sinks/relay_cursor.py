"""The durable cursor of a relay: what is not in the target yet is kept in the source's log."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable
from typing import Any

from broker_io.errors import Error
from broker_io.port import Broker
from txnbuffer.streams.errors import SeqnoOutOfRange, UnknownCursor

REST = 1.0
"""Seconds between two moves: each is a question to the service."""

AGAIN = 60.0
"""Seconds after which it is told where it stood before: a service that crashed may have forgotten its last moves."""

Ask = Callable[[Broker, str, dict[str, Any]], Any]
"""Asks the service that owns a broker's topics; raises what it answers."""


class RelayCursor:
    """A cursor of the service that owns the source; one of that name is made if the topic has none."""

    def __init__(self, ask: Ask, topic: str, name: str) -> None:
        self._ask = ask
        self._topic = topic
        self._name = name
        self._broker: Broker
        self._landed = self._told = 0
        self._moved = -math.inf

    def begin(self, broker: Broker, seqno: int | None) -> None:
        """Hold what stands behind a seqno, None: all there is. Raises what the service does."""
        self._broker = broker
        at = "beginning" if seqno is None else seqno
        try:
            self._move("AddCursor", at)
        except SeqnoOutOfRange:
            self._move("AddCursor", "beginning")  # the service has not read as far as the relay has
        self._landed = seqno or 0  # one that was there may stand before it

    def landed(self, seqno: int | None) -> None:
        """All up to a seqno is durable in the target. Raises UnknownCursor."""
        if seqno is not None:
            self._landed = seqno
        self.follow()

    def follow(self) -> None:
        """Called again and again, also while nothing comes. Raises UnknownCursor."""
        if time.monotonic() - self._moved >= REST:
            self._follow()

    def close(self) -> None:
        """Move it a last time, if the service answers: else more is kept than need be."""
        with contextlib.suppress(Error):
            self._follow()

    def _follow(self) -> None:
        now = time.monotonic()
        if self._landed > self._told or (self._landed and now - self._moved >= AGAIN):
            self._moved = now
            landed = self._landed
            try:
                self._move("AdvanceCursor", landed)
            except UnknownCursor:
                raise
            except Error:
                return  # the next move makes up for it
            self._told = landed

    def _move(self, method: str, at: int | str) -> None:
        self._ask(self._broker, method, {"topic": self._topic, "cursor": self._name, "at": at})
