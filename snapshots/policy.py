"""Policy for when the snapshot of a topic is due. Pure: the caller passes the time.

A snapshot is due after enough changes, after enough time with any message, or when a replay from the last snapshot
would take longer than the recovery target. The replay time is estimated from the measured replay rate of the topic.
"""

from __future__ import annotations

from dataclasses import dataclass

ASSUMED_REPLAY_RATE = 200_000.0
"""Messages per second of a replay, until the rate is measured."""

_WEIGHT = 0.2
"""Weight of a new measurement of the replay rate."""


@dataclass(frozen=True, slots=True)
class SnapshotPolicy:
    """`changes`: ended transactions and suppressed ranges; times in milliseconds, `recovery_target` in seconds."""

    changes: int = 1_000
    interval_ms: int = 5_000
    recovery_target: float = 1.0


DEFAULT_POLICY = SnapshotPolicy()


@dataclass(slots=True)
class SnapshotDue:
    """Messages and changes of a topic since its last durable snapshot. Times are monotonic seconds."""

    policy: SnapshotPolicy
    since: float
    changes: int = 0
    messages: int = 0
    replay_rate: float = ASSUMED_REPLAY_RATE

    def applied(self, messages: int, changes: int) -> None:
        self.messages += messages
        self.changes += changes

    def measured(self, messages: int, seconds: float) -> None:
        """Record that a replay of `messages` took `seconds`; replays that are too short to measure are ignored."""
        if messages < 1_000 or seconds <= 0:
            return
        self.replay_rate += _WEIGHT * (messages / seconds - self.replay_rate)

    def due(self, now: float) -> bool:
        if self.changes >= self.policy.changes:
            return True
        if self.messages / self.replay_rate >= self.policy.recovery_target:
            return True
        return self.messages > 0 and (now - self.since) * 1000 >= self.policy.interval_ms

    def written(self, now: float, messages: int, changes: int) -> None:
        """Record that a snapshot of `messages` and `changes` is durable; a failed snapshot changes no counts."""
        self.since = now
        self.messages -= messages
        self.changes -= changes
