"""Markers on their way to the topics, many transactions in each."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from txnbuffer.coordinator.messages import AppendMarker
from txnbuffer.coordinator.progress import Progress
from txnbuffer.model import Marker, MarkerItem

MAX_ITEMS = 10_000
"""Transactions in one marker."""

Queue = tuple[str, bool]
"""A topic, and whether the decisions stand in the decision log."""


class Markers:
    """Every marker carries the epoch, and the low-water mark that is durable by then."""

    def __init__(self, shard: int, epoch: int, progress: Progress) -> None:
        self._shard = shard
        self._epoch = epoch
        self._progress = progress
        self._waiting: dict[Queue, list[MarkerItem]] = {}
        self._failed: dict[Queue, list[MarkerItem]] = {}
        self._under_way: dict[int, tuple[Queue, tuple[MarkerItem, ...]]] = {}
        self._token = 0

    def add(self, topic: str, decided: bool, item: MarkerItem) -> None:
        queue = (topic, decided)
        items = self._waiting.get(queue)
        if items is None:
            self._waiting[queue] = [item]
        else:
            items.append(item)

    def border(self) -> Marker:
        return Marker(self._shard, self._epoch, self._progress.low_water_mark, True, ())

    def take(self) -> Iterator[AppendMarker]:
        """What is to be appended now."""
        waiting, self._waiting = self._waiting, {}
        mark = self._progress.low_water_mark
        for queue, items in waiting.items():
            topic, decided = queue
            for start in range(0, len(items), MAX_ITEMS):
                some = tuple(items[start : start + MAX_ITEMS])
                self._token += 1
                self._under_way[self._token] = (queue, some)
                yield AppendMarker(self._token, topic, Marker(self._shard, self._epoch, mark, decided, some))

    def durable(self, token: int) -> tuple[Queue, tuple[MarkerItem, ...]] | None:
        """What a marker said that is durable now; None if that is known already."""
        return self._under_way.pop(token, None)

    def failed(self, token: int) -> None:
        """A marker's fate is unknown: it is written again at the next `retry`, which changes nothing if it landed."""
        lost = self._under_way.pop(token, None)
        if lost is not None:
            queue, items = lost
            self._failed.setdefault(queue, []).extend(items)

    def retry(self, wanted: Callable[[str, bool, MarkerItem], bool]) -> None:
        """Queue again what failed and is still wanted."""
        failed, self._failed = self._failed, {}
        for (topic, decided), items in failed.items():
            for item in items:
                if wanted(topic, decided, item):
                    self.add(topic, decided, item)

    def forget_topic(self, topic: str) -> None:
        """The topic is gone, and what was to be written to it."""
        for queues in (self._waiting, self._failed):
            for decided in (False, True):
                queues.pop((topic, decided), None)
