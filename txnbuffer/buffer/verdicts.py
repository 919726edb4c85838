"""What decides whether a record is visible: asked of a transaction buffer, or of a copy that no longer changes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from broker_io.position import Position
from txnbuffer.buffer.aborts import AbortedSet
from txnbuffer.buffer.suppressed import SuppressedRanges


class Verdicts(Protocol):
    """All up to `max_read_position` is decided, None: nothing is."""

    @property
    def aborted(self) -> AbortedSet: ...

    @property
    def suppressed(self) -> SuppressedRanges: ...

    @property
    def max_read_position(self) -> Position | None: ...


@dataclass(frozen=True, slots=True, eq=False)
class FixedVerdicts:
    """The verdicts of one moment, which can be sent to other processes."""

    aborted: AbortedSet
    suppressed: SuppressedRanges
    max_read_position: Position | None

    @classmethod
    def of(cls, verdicts: Verdicts) -> FixedVerdicts:
        """Shares the sets of a buffer that is not to be applied any further."""
        return cls(verdicts.aborted, verdicts.suppressed, verdicts.max_read_position)
