"""What may be set of a coordinator."""

from __future__ import annotations

from dataclasses import dataclass

from txnbuffer.coordinator.sizes import LARGEST_LIMIT, SMALLEST_LIMIT
from txnbuffer.errors import InvalidConfiguration


@dataclass(frozen=True, slots=True)
class Config:
    """Times in seconds; the first two are True where this process owns the logs that it writes to.

    `one_phase`: a transaction on a single topic is decided by its marker, without a decision record.
    `verify_counts`: the buffers check the number of records of a commit before it is decided.
    `session_timeout`: so long a client may be away before what it has open is aborted.
    `lease_timeout`: so long an id may be kept without being used.
    `member_timeout`: so long nothing may be heard of a member of a consumer group.
    `visible_timeout`: so long who asked for it waits for a decided commit to be seen.
    `remember`: so long an outcome can be asked for.
    `shards`: how many there are, so that topics may be those of others.
    `max_open_session`, `max_open`: ids leased and not ended, of one session and in all.
    """

    one_phase: bool = True
    verify_counts: bool = True
    transaction_timeout: float = 60.0
    max_transaction_timeout: float = 900.0
    session_timeout: float = 30.0
    lease_timeout: float = 900.0
    member_timeout: float = 8.0
    visible_timeout: float = 120.0
    remember: float = 3600.0
    low_water_mark_interval: float = 1.0
    ended_interval: float = 60.0
    max_open_session: int = 100_000
    max_open: int = 1_000_000
    shards: int = 1
    max_group: int = 10_000
    """Rows of decisions in one message with all their topics; a transaction stays in one message."""
    max_message_bytes: int = LARGEST_LIMIT
    """What a message of the decision log or a marker may have: key, value and properties."""

    def __post_init__(self) -> None:
        for name in ("transaction_timeout", "session_timeout", "lease_timeout", "member_timeout", "remember"):
            if getattr(self, name) <= 0:
                raise InvalidConfiguration(f"{name} is {getattr(self, name)}: give seconds above 0")
        for name in ("max_open_session", "max_open", "max_group"):
            if getattr(self, name) < 1:
                raise InvalidConfiguration(f"{name} is {getattr(self, name)}: give a number above 0")
        if self.max_message_bytes < SMALLEST_LIMIT:
            raise InvalidConfiguration(
                f"max_message_bytes is {self.max_message_bytes}: decisions need {SMALLEST_LIMIT} at least, give that"
            )
        if self.max_transaction_timeout < self.transaction_timeout:
            raise InvalidConfiguration(
                f"max_transaction_timeout ({self.max_transaction_timeout} s) is below transaction_timeout "
                f"({self.transaction_timeout} s): raise the first or lower the second"
            )
        if self.shards > 1 and (self.one_phase or self.verify_counts):
            raise InvalidConfiguration(
                "with several shards a transaction may have records on topics of others, which nobody counts: "
                "verify_counts and one_phase have to be off"
            )
        if self.one_phase and not self.verify_counts:
            raise InvalidConfiguration("one_phase needs verify_counts: a marker that decides can't be taken back")
