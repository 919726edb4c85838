"""Refusing appends before the disk is full, while there is still room to decide, compact, trim and take snapshots.

Records are refused below the watermark. What ends transactions, and whatever goes into the service's own topics, is
refused below half of it only: so transactions whose records were refused still end.
"""

from __future__ import annotations

from broker_io.checking import OWN_PREFIX
from broker_io.environment import Environment
from broker_io.errors import DiskWatermark
from broker_io.file.commit import Append
from broker_io.file.options import MIB

BYTES_BETWEEN = 16 * MIB
SECONDS_BETWEEN = 1.0


class Watermark:
    """Looks at the free space every 16 MiB or every second, and each time while there is too little."""

    def __init__(self, environment: Environment, directory: str, watermark_bytes: int) -> None:
        self._disk = environment.disk
        self._clock = environment.clock
        self._directory = directory
        self._watermark_bytes = watermark_bytes
        self._unseen = BYTES_BETWEEN
        self._seen_at = 0.0
        self._low = False
        self._free = watermark_bytes

    def look(self) -> None:
        """Find out how much is free, if that may have changed. Raises OSError."""
        now = self._clock.monotonic()
        if self._low or self._unseen >= BYTES_BETWEEN or now - self._seen_at >= SECONDS_BETWEEN:
            self._free = self._disk.free_bytes(self._directory)
            self._unseen, self._seen_at = 0, now
            self._low = self._free < self._watermark_bytes

    def refusal(self, append: Append) -> DiskWatermark | None:
        """Why an append may not be written, as the last look found it, or None."""
        reserved = append.reserved or append.topic.entry.name.startswith(OWN_PREFIX)
        if not self._low or (reserved and 2 * self._free >= self._watermark_bytes):
            return None
        limit = "half of the watermark" if reserved else "the watermark"
        return DiskWatermark(
            f"{self._directory}: {self._free} bytes are free, fewer than {limit} of {self._watermark_bytes}: "
            "appends are refused until there are more; free some space"
        )

    def count(self, written: int) -> None:
        """Note bytes that were written."""
        self._unseen += written
