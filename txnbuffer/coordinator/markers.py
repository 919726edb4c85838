"""Markers on their way to the topics, many transactions in each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from pyroaring import BitMap64

from txnbuffer.coordinator.messages import AppendMarker
from txnbuffer.coordinator.progress import Progress
from txnbuffer.coordinator.sizes import marker_items
from txnbuffer.model import Marker, MarkerItem

MAX_ITEMS = 10_000
"""Transactions in one marker, if the topics take messages as large as that."""

Queue = tuple[str, bool]
"""A topic, and whether the decisions stand in the decision log."""


class Markers:
    """Every marker carries the epoch, and the low-water mark that is durable by then; none has over `max_bytes`."""

    def __init__(self, shard: int, epoch: int, progress: Progress, max_bytes: int) -> None:
        self._shard = shard
        self._epoch = epoch
        self._progress = progress
        self._most = min(MAX_ITEMS, marker_items(max_bytes))
        self._waiting: dict[Queue, list[MarkerItem]] = {}
        self._failed: dict[Queue, list[MarkerItem]] = {}
        self._under_way: dict[int, tuple[Queue, tuple[MarkerItem, ...]]] = {}
        self._told: dict[str, BitMap64] = {}
        self._token = 0

    def add(self, topic: str, decided: bool, item: MarkerItem) -> None:
        queue = (topic, decided)
        items = self._waiting.get(queue)
        if items is None:
            self._waiting[queue] = [item]
        else:
            items.append(item)

    def tell(self, topic: str, item: MarkerItem) -> None:
        """Answer a question about what is ongoing in a topic: once, however often it is asked until that is read."""
        told = self._told.setdefault(topic, BitMap64())
        if item.txn.least not in told:
            told.add(item.txn.least)
            self.add(topic, True, item)

    def seen(self, topic: str, ids: Iterable[int]) -> None:
        """The topic's buffer has read how these ended: nobody asks about them any more."""
        told = self._told.get(topic)
        if told is not None:
            told.difference_update(BitMap64(ids))
            if not told:
                del self._told[topic]

    def border(self) -> Marker:
        return Marker(self._shard, self._epoch, self._progress.low_water_mark, True, ())

    def take(self) -> Iterator[AppendMarker]:
        """What is to be appended now."""
        waiting, self._waiting = self._waiting, {}
        mark = self._progress.low_water_mark
        for queue, items in waiting.items():
            topic, decided = queue
            for start in range(0, len(items), self._most):
                some = tuple(items[start : start + self._most])
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
                else:
                    self.seen(topic, (item.txn.least,))  # who still asks is answered again

    def forget_topic(self, topic: str) -> None:
        """The topic is gone, and what was to be written to it."""
        self.tell_again(topic)
        for queues in (self._waiting, self._failed):
            for decided in (False, True):
                queues.pop((topic, decided), None)

    def tell_again(self, topic: str) -> None:
        """The topic is another one: what was told there is gone."""
        self._told.pop(topic, None)
