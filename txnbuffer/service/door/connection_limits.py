"""How many connections each port of the service has at most, in all and of one address

The HTTP server refuses more as it accepts them. gRPC does so for the number in all; it knows no limit of one address,
so the service counts its connections every WATCH seconds, and shuts down the newest of an address that has more.
"""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from broker_io.environment import current

WATCH = 1.0
"""Seconds between two counts of the connections of each address."""
HTTP_PART = 8
"""One in this many connections is to the HTTP port."""


class PortLimits(NamedTuple):
    """Connections to a port, in all and of one address; 0: any number."""

    most: int = 0
    of_address: int = 0


NO_LIMITS = PortLimits()


def port_limits(most: int, of_address: int, descriptors: int) -> tuple[PortLimits, PortLimits]:
    """The limits of the gRPC and of the HTTP port, which leave half of the descriptors to the log.

    `of_address` 0: half of the connections. `descriptors` 0: no limits.
    """
    if not descriptors:
        return NO_LIMITS, NO_LIMITS
    total = max(min(most, descriptors // 2), HTTP_PART)
    shares = (total - total // HTTP_PART, total // HTTP_PART)
    grpc, http = (PortLimits(share, min(of_address or max(share // 2, 1), share)) for share in shares)
    return grpc, http


async def keep_within(port: int, of_address: int) -> None:
    """Shut down connections of addresses that have more than `of_address`, until it is cancelled."""
    network = current().network
    while True:
        await asyncio.sleep(WATCH)
        await asyncio.to_thread(network.trim, port, of_address)
