"""Refusing appends before the disk is full, while there is still room to compact, trim and take snapshots."""

from __future__ import annotations

from broker_io.environment import Environment
from broker_io.errors import DiskWatermark
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

    def refusal(self) -> DiskWatermark | None:
        """Why nothing may be appended now, or None. Raises OSError."""
        now = self._clock.monotonic()
        if not self._low and self._unseen < BYTES_BETWEEN and now - self._seen_at < SECONDS_BETWEEN:
            return None
        free = self._disk.free_bytes(self._directory)
        self._unseen, self._seen_at = 0, now
        self._low = free < self._watermark_bytes
        if not self._low:
            return None
        return DiskWatermark(
            f"{self._directory}: {free} bytes are free, fewer than the watermark of {self._watermark_bytes}: "
            "appends are refused until there are more; free some space"
        )

    def count(self, written: int) -> None:
        """Note bytes that were written."""
        self._unseen += written
