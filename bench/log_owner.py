"""The owner of a log without a service, for tests and figures."""

from __future__ import annotations

from functools import partial

from txnbuffer.buffer.state import Effect
from txnbuffer.recovery.manager import SnapshotManager

READS_IN_A_ROW = 64
"""Reads of one topic before the next one is read."""
WAIT_STEP = 0.005
"""Seconds that `pump` waits for messages of one topic before it reads the next."""


class LogOwner(SnapshotManager):
    """A snapshot manager that reads its topics itself, and snapshots, trims and deletes on request."""

    def pump(self, timeout: float = 0.0) -> dict[str, list[Effect]]:
        """Apply new messages of all topics, waiting up to `timeout` seconds for the first; write due snapshots.

        Return the effects by topic. Raises as `write`.
        """
        self._owned()
        deadline = self._clock.monotonic() + timeout
        effects = self._read_all(0.0)
        while not effects and (left := deadline - self._clock.monotonic()) > 0 and self._followed:
            effects = self._read_all(min(left, WAIT_STEP))
        now = self._clock.monotonic()
        self._write([followed for followed in self._followed.values() if followed.snapshot_due(now)])
        return effects

    def snapshot(self, topic: str) -> None:
        """Write a snapshot now. Raises as `write`."""
        self._write([self.followed(topic)])

    def trim(self, topic: str, first_ledger: int) -> int:
        """Drop the ledgers below `first_ledger` that nothing needs; return the first ledger that still exists.

        Segments whose markers were all trimmed leave the snapshot. Raises as `write`.
        """
        followed = self.followed(topic)
        self._write([followed])
        self._broker.trim(topic, min(first_ledger, followed.floor()))
        existing = self._broker.ledgers(topic)[0].ledger
        if self._drop_segments(followed):
            self._write([followed])
        return existing

    def delete(self, topic: str) -> None:
        """Delete a topic's snapshot. While the data topic exists, which the caller deletes, one entry records this."""
        followed = self.followed(topic)
        self.settle()
        self._delete_keys(followed.writer)
        followed.close()
        del self._followed[topic]

    def _read_all(self, timeout: float) -> dict[str, list[Effect]]:
        effects: dict[str, list[Effect]] = {}
        for topic, followed in [*self._followed.items()]:
            for _ in range(READS_IN_A_ROW):
                found = self._guarded(topic, partial(followed.read, timeout))
                if found is None:
                    break
                effects.setdefault(topic, []).extend(found)
                timeout = 0.0
            if topic in self._followed:
                self._guarded(topic, followed.sequence_all)
        return effects
