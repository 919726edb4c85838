"""Retention of the decision log: which keys may be deleted, and the low-water mark that allows it"""

from __future__ import annotations

from collections import deque

from pyroaring import BitMap64

from txnbuffer.buffer.state import bitmap_to_bytes
from txnbuffer.coordinator.core import Core
from txnbuffer.coordinator.decisions import ENDED_KEY, FIXED, EndedIds, Lease, LowWaterMark, key_of
from txnbuffer.coordinator.groups import ConsumerGroups
from txnbuffer.coordinator.history import History
from txnbuffer.coordinator.producers import NamedProducers
from txnbuffer.coordinator.transaction import GroupRecord, principal_tag, within


class OutcomeRetention:
    """Raises the low-water mark, and deletes obsolete keys from the decision log."""

    def __init__(
        self, core: Core, producers: NamedProducers, consumer_groups: ConsumerGroups, history: History
    ) -> None:
        self._core = core
        self._producers = producers
        self._consumer_groups = consumer_groups
        self.groups: deque[GroupRecord] = deque()
        """The durable groups of decisions that are not deleted, in order."""
        self._next_mark = history.next_mark
        self._marks = deque((mark.number, mark.raised_at / 1000) for mark in history.marks.values())
        self._leases = deque(history.leases.values())
        self._ended_leases: deque[tuple[float, Lease]] = deque()
        """Leases of known principals up to the low-water mark, with the time until which others may not ask of them."""
        self._ended: BitMap64 = history.ended
        self._mark_under_way = self._ended_under_way = False
        self._marked_at = float("-inf")
        self._covered_at = core.now

    def leased(self, lease: Lease) -> None:
        self._leases.append(lease)

    def tick(self) -> None:
        self._core.outcomes.forget(self._core.now)
        self._raise_mark()
        self._forget_groups()
        self._forget_marks()
        self._forget_leases()

    def _raise_mark(self) -> None:
        """Raise the low-water mark: in the log first; markers carry it once it is durable there."""
        core = self._core
        if self._mark_under_way or core.now < self._marked_at + core.config.low_water_mark_interval:
            return
        mark = core.progress.reachable(core.live)
        if mark == core.progress.low_water_mark:
            return
        self._marked_at = core.now
        self._mark_under_way = True
        aborted, committed = core.progress.passed(mark)
        while self._is_too_large(aborted, committed):
            mark -= (mark - core.progress.low_water_mark) // 2
            aborted, committed = core.progress.passed(mark)
        number, self._next_mark = self._next_mark, self._next_mark + 1
        entry = LowWaterMark(number, mark, int(core.now * 1000), committed, aborted)
        core.journal.put(entry, lambda: self._mark_durable(number, mark))

    def _mark_durable(self, number: int, mark: int) -> None:
        core = self._core
        self._mark_under_way = False
        self._marks.append((number, core.now))
        core.progress.raise_to(mark)
        keys = []
        while self._leases and self._leases[0].first + self._leases[0].size - 1 <= mark:
            lease = self._leases.popleft()
            if principal_tag(lease.session):
                self._ended_leases.append((core.now + core.config.remember, lease))
            else:
                keys.append(key_of(lease))
        if self._ended and self._ended.max() <= mark and not self._ended_under_way:
            self._ended = BitMap64()
            keys.append(ENDED_KEY)
        core.journal.forget(keys)

    def _forget_groups(self) -> None:
        """Delete groups that are settled and no longer remembered, and whose ids a durable entry covers."""
        core, keys = self._core, []
        kept: list[GroupRecord] = []
        uncovered = False
        while self.groups and self.groups[0].decided_at + core.config.remember <= core.now:
            record = self.groups.popleft()
            covered = record.unsettled == 0 and self._covered(record)
            if covered and self._consumer_groups.repeat(record.number, record.consumers):
                self._producers.repeat(record.number, record.names)
                keys.append(f"group-{record.number}")
            else:
                kept.append(record)
                uncovered |= record.unsettled == 0 and not covered
        self.groups.extendleft(reversed(kept))
        oldest = self.groups[0].number if self.groups else core.journal.next_group
        core.journal.forget(keys + self._producers.forgettable(oldest))
        if uncovered:
            self._cover()

    def _covered(self, record: GroupRecord) -> bool:
        mark = self._core.progress.low_water_mark
        if record.ids.max() <= mark:
            return True
        above = record.ids.copy()
        above.remove_range(0, mark + 1)
        return above.issubset(self._ended)

    def _cover(self) -> None:
        """An old open transaction holds back the low-water mark: write which ids above it have ended."""
        core = self._core
        if self._ended_under_way or core.now < self._covered_at + core.config.ended_interval:
            return
        self._covered_at = core.now
        settled = core.progress.settled
        ids, count, covered = settled.copy(), len(settled), settled & self._ended
        while self._is_too_large(ids):  # then the lowest ids, and those of deleted groups
            count //= 2
            if not count:
                return
            up_to = int(settled[count - 1])
            ids = within(core.progress.settled, 0, up_to) | covered
        self._ended_under_way = True
        core.journal.put(EndedIds(ids), lambda: self._ended_durable(ids))

    def _is_too_large(self, *bitmaps: BitMap64) -> bool:
        """Whether they are too large for one message; then they have thousands of ids."""
        return FIXED + sum([len(bitmap_to_bytes(ids)) for ids in bitmaps]) > self._core.config.max_message_bytes

    def _ended_durable(self, ids: BitMap64) -> None:
        self._ended_under_way = False
        self._ended = ids

    def _forget_marks(self) -> None:
        """Delete marks whose outcomes are no longer remembered, but never the newest."""
        core, keys = self._core, []
        while len(self._marks) > 1 and self._marks[0][1] + core.config.remember <= core.now:
            keys.append(f"mark-{self._marks.popleft()[0]}")
        core.journal.forget(keys)

    def _forget_leases(self) -> None:
        """Delete leases of known principals when the outcomes of their transactions are no longer remembered."""
        core, keys = self._core, []
        while self._ended_leases and self._ended_leases[0][0] <= core.now:
            keys.append(key_of(self._ended_leases.popleft()[1]))
        core.journal.forget(keys)
