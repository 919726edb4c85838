"""Transaction ids that the session has leased and not used."""

from __future__ import annotations

from collections import deque

from txnbuffer.frames import IdBlock

SMALLEST, LARGEST = 16, 8192


class Ids:
    """`want`: how many to ask for; it grows when they run out before the next ones are there."""

    def __init__(self) -> None:
        self.want = 64
        self._blocks: deque[list[int]] = deque()
        self._left = 0

    def __len__(self) -> int:
        return self._left

    @property
    def low(self) -> bool:
        """Whether it is time to ask for more."""
        return self._left * 2 < self.want

    def add(self, first: int, size: int, *, ran_out: bool) -> None:
        self._blocks.append([first, first + size])
        self._left += size
        if ran_out:
            self.want = min(self.want * 2, LARGEST)

    def refused(self) -> bool:
        """A lease was refused: ask for fewer. False: fewer make no sense."""
        smaller = self.want > SMALLEST
        self.want = max(self.want // 4, SMALLEST)
        return smaller

    def take(self) -> int:
        """The next id; there must be one."""
        block = self._blocks[0]
        least = block[0]
        block[0] += 1
        self._left -= 1
        if block[0] == block[1]:
            self._blocks.popleft()
        return least

    def clear(self) -> tuple[IdBlock, ...]:
        """Give all of them up."""
        blocks = tuple(IdBlock(first, end - first) for first, end in self._blocks)
        self._blocks.clear()
        self._left = 0
        return blocks
