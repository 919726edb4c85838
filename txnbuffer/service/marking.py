"""Writers for markers, where others write the topics too: opened when a marker waits, and again when one has died."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from typing import Any

from broker_io.errors import Error
from broker_io.port import Broker, Writer
from txnbuffer.service.topic import Topic

FIRST_PAUSE, LONGEST_PAUSE = 0.1, 5.0
"""Seconds between two tries to open a writer."""


class MarkerWriters:
    """`run` runs something beside the loop's turns; `release` lets a topic append that was held back."""

    def __init__(
        self,
        broker: Broker,
        run: Callable[[Coroutine[Any, Any, None]], None],
        release: Callable[[Topic], None],
    ) -> None:
        self._broker = broker
        self._run = run
        self._release = release
        self.opened: Callable[[Topic, Error | None], None] | None = None
        """Told what came of each try to open a writer."""
        self._opening: set[Topic] = set()

    def need(self, topic: Topic) -> None:
        """Open a topic's writer in the background, unless it is open or about to be."""
        if topic.writer is None and topic not in self._opening:
            self._opening.add(topic)
            self._run(self._open(topic))

    def died(self, topic: Topic, error: Error) -> None:
        """A writer failed, and will go on failing: what waits is for the next one."""
        writer, topic.writer = topic.writer, None
        topic.held = True
        topic.trouble = error
        if writer is not None:
            self._run(_close(writer))
        if topic.waiting:
            self.need(topic)

    def let_go(self, topic: Topic) -> bool:
        """Close the writer of a topic that is not used any more; False, and nothing done, if it is still in use."""
        if topic in self._opening or topic.waiting or topic.flights:
            return False
        writer, topic.writer = topic.writer, None
        topic.held = True
        if writer is not None:
            self._run(_close(writer))
        return True

    async def _open(self, topic: Topic) -> None:
        pause = FIRST_PAUSE
        try:
            while topic.problem is None and topic.writer is None:
                # What is under way belongs to the writer that died: its failure must not hit the next one.
                if topic.trouble is not None or topic.flights:
                    await asyncio.sleep(pause)
                    pause = min(2 * pause, LONGEST_PAUSE)
                if topic.flights:
                    continue
                try:
                    topic.writer = await asyncio.to_thread(self._broker.writer, topic.name)
                except Error as error:
                    topic.trouble = error
                else:
                    topic.trouble = None
                if self.opened is not None:
                    self.opened(topic, topic.trouble)
        finally:
            self._opening.discard(topic)
        if topic.writer is not None:
            self._release(topic)


async def _close(writer: Writer) -> None:
    with contextlib.suppress(Error):
        await asyncio.to_thread(writer.close)
