"""PrincipalLimits of principals"""

from typing import NamedTuple


class PrincipalLimits(NamedTuple):
    """PrincipalLimits of one principal; 0: no limit."""

    sessions: int = 0
    open_transactions: int = 0
    bytes_in_flight: int = 0
    streams: int = 0
    requests_per_second: float = 0.0
    topics_created: int = 0
