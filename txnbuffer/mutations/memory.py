"""The memory of all managers of a process, kept below a limit.

Above the upper mark memory is freed down to the lower mark. Each step is applied to all topics, the largest first,
before the next step, so no cursor has to read the log while a cheaper step suffices:

1. free what every cursor has passed, and the indexes that make collapsing faster;
2. collapse adjacent snapshots in which newer mutations replace older ones;
3. evict mutations that the log has and that no cursor needs next;
4. make cursors read the log, the slowest first.

Memory that was freed while a reader still refers to it counts as freed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from txnbuffer.mutations.manager import MAX_SNAPSHOT_BYTES, MutationManager
from txnbuffer.mutations.snapshot import MemoryAccount

UPPER_MARK = 0.9
LOWER_MARK = 0.6
SNAPSHOTS_PER_TOPIC = 10
MIN_SNAPSHOT_BYTES = 64 * 1024

Means: TypeAlias = Callable[[MutationManager, int], None]


@dataclass(frozen=True, slots=True)
class Recovery:
    """Bytes freed by each step; `missing` is still to be freed to reach the lower mark."""

    passed: int = 0
    collapsed: int = 0
    evicted: int = 0
    dropped: int = 0
    missing: int = 0


class MemoryBudget:
    """The memory limit of all managers made with `account`, which sums their bytes; `budget` is in bytes."""

    __slots__ = ("account", "budget", "lower", "managers", "upper")

    def __init__(self, budget: int, *, upper: float = UPPER_MARK, lower: float = LOWER_MARK) -> None:
        if not 0 < lower <= upper <= 1:
            raise ValueError(f"the marks must satisfy 0 < lower <= upper <= 1, got {lower} and {upper}")
        self.account = MemoryAccount()
        self.managers: dict[str, MutationManager] = {}
        self.upper = upper
        self.lower = lower
        self.resize(budget)

    def resize(self, budget: int) -> None:
        """Change the budget, and the size of snapshots accordingly."""
        self.budget = budget
        self._fit()

    def add(self, topic: str, manager: MutationManager) -> None:
        """Add the manager of a topic, which must have been made with this `account`."""
        self.managers[topic] = manager
        self._fit()

    def remove(self, topic: str) -> None:
        """Remove a manager whose cursors were all closed."""
        manager = self.managers.pop(topic)
        self.account.add(-manager.account.bytes)
        manager.account.parent = None
        self._fit()

    @property
    def snapshot_bytes(self) -> int:
        """The size in bytes at which each topic can have ten snapshots."""
        share = self.budget // max(1, len(self.managers)) // SNAPSHOTS_PER_TOPIC
        return min(max(share, MIN_SNAPSHOT_BYTES), MAX_SNAPSHOT_BYTES)

    @property
    def pressed(self) -> bool:
        """Whether more memory is used than the upper mark allows."""
        return self.account.bytes > self.budget * self.upper

    def recover(self) -> Recovery:
        """Free memory down to the lower mark if more is used than the upper mark allows."""
        if not self.pressed:
            return Recovery()
        passed = self._use(lambda manager, _: manager.free_passed())
        collapsed = self._use(lambda manager, _: manager.collapse())
        evicted = self._use(MutationManager.evict)
        dropped = self._use(MutationManager.drop_cursors)
        return Recovery(passed, collapsed, evicted, dropped, max(0, self._missing()))

    def _missing(self) -> int:
        leaving = sum(manager.leaving.bytes for manager in self.managers.values())
        return self.account.bytes - leaving - int(self.budget * self.lower)

    def _use(self, means: Means) -> int:
        before = self._missing()
        biggest = sorted(self.managers.values(), key=lambda manager: manager.chain.account.bytes, reverse=True)
        for manager in biggest:
            missing = self._missing()
            if missing <= 0:
                break
            means(manager, missing)
        return before - self._missing()

    def _fit(self) -> None:
        for manager in self.managers.values():
            manager.chain.limit = self.snapshot_bytes
