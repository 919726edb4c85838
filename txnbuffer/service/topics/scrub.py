"""The scrub: all stored data of an embedded log is read and verified, again and again

The first pass after a start reads as fast as it can, so that a topic with a damaged file is stopped before anybody
relies on it. Later passes read a small part at a time, and so few bytes in a second that other work does not notice.
The process of a service runs it on every machine, serving or not. What it finds, it leaves to the broker, to which
every part of the program reports damage.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from broker_io.environment import current
from broker_io.errors import Error, StorageError, TopicNotFound
from broker_io.port import Broker, VerifyingBroker

SCRUB_BYTES = 4 * 1024 * 1024
"""Bytes in a second that later passes read, unless something else is configured."""
PART_BYTES = 1024 * 1024
"""Bytes that are read at a time."""
LEAST_BYTES = 64 * 1024
"""As how many bytes a file counts that has fewer: it has to be opened, too."""
LEAST_SECONDS = 60.0
"""From the beginning of a pass to that of the next one, at least."""
PAUSE = 1.0
"""Seconds until a failed read is repeated."""


class Scrub:
    """Verifies the data of a broker that stores the log itself; `rate` in bytes a second, 0 for the first pass only.

    `passes`: complete ones. `problem`: why the last part could not be read, if that is no damage.
    """

    def __init__(self, broker: Broker, rate: int = SCRUB_BYTES) -> None:
        self.broker = broker if isinstance(broker, VerifyingBroker) else None
        self.passes = 0
        self.problem: Error | None = None
        self._stored = broker
        self._rate = rate
        self._monotonic = current().clock.monotonic
        self._completed = self._monotonic()
        self._done = ""
        self._read = 0

    @property
    def age(self) -> float:
        """Seconds since the last complete pass, or since the start if there was none."""
        return self._monotonic() - self._completed

    @property
    def damaged(self) -> Mapping[str, Error]:
        """The topics with a damaged file."""
        return {} if self.broker is None else self.broker.damaged_topics()

    async def run(self) -> None:
        """Read, forever; cancelled in a pass, it continues that pass when it runs again."""
        broker = self.broker
        while broker is not None and (self._rate or not self.passes):
            began = self._monotonic()
            await self._pass(broker)
            self.passes, self._completed, self._done = self.passes + 1, self._monotonic(), ""
            if self._rate:
                await asyncio.sleep(max(LEAST_SECONDS - (self._completed - began), 0.0))

    async def _pass(self, broker: VerifyingBroker) -> None:
        for name in sorted(await asyncio.to_thread(self._stored.topics)):
            if name > self._done:
                await self._topic(broker, name)
                self._done = name

    async def _topic(self, broker: VerifyingBroker, name: str) -> None:
        try:
            for ledger in await asyncio.to_thread(self._stored.ledgers, name):
                await self._ledger(broker, name, ledger.ledger)
        except TopicNotFound:
            pass  # deleted meanwhile
        except StorageError as error:
            self.problem = None if name in broker.damaged_topics() else error

    async def _ledger(self, broker: VerifyingBroker, name: str, ledger: int) -> None:
        at, size = 0, PART_BYTES if self.passes else None
        while True:
            try:
                following = await asyncio.to_thread(broker.check_stored, name, ledger, at, size)
            except Error as error:
                if not error.retryable:
                    raise
                self.problem = error
                await asyncio.sleep(PAUSE)
                continue
            self.problem = None
            await self._wait(max(following - at, LEAST_BYTES))
            if not following:
                return
            at = following

    async def _wait(self, size: int) -> None:
        """Pause for as long as the bytes that were read may take."""
        self._read += size if self.passes else 0
        if self._read >= PART_BYTES:
            size, self._read = self._read, 0
            await asyncio.sleep(size / self._rate)
