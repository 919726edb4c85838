"""Which log a client's service has to serve. Addresses are used again: another log's service may answer at one.

A log is named by the incarnation of its decision log. A connection names it to the service, which refuses to be taken
for that of another log, and the service names its own before anything is asked of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from broker_io.errors import TopicNotFound
from broker_io.port import Broker
from txnbuffer.errors import Error, ServiceUnavailable
from txnbuffer.service.names import LOG_KEY

REMEDY = "give the address of its own service, and connect anew if the log was made anew"


class SameLog:
    """The log of one client. `ask` tells its name, and blocks; without it the first service's log is the one."""

    def __init__(self, ask: Callable[[], str] | None = None) -> None:
        self.name: str | None = None
        self._ask = ask

    async def metadata(self) -> tuple[tuple[str, str], ...]:
        """What a call to the service says of it. Raises ServiceUnavailable if there is no such log yet."""
        if self.name is None and self._ask is not None:
            self.name = await asyncio.to_thread(self._ask)
        return () if self.name is None else ((LOG_KEY, self.name),)

    def check(self, target: str, name: str) -> None:
        """Take the name of what a service serves, before anything is asked of it. Raises ServiceUnavailable."""
        if self.name is None:
            self.name = name
        elif name != self.name:
            raise ServiceUnavailable(f"the service at {target} serves another log than this client's: {REMEDY}")


def log_of(broker: Broker, namespace: str, decisions: str) -> SameLog:
    """The log of a cluster's namespace; `decisions` is its decision log."""

    def ask() -> str:
        try:
            return broker.incarnation(decisions)
        except TopicNotFound:
            raise ServiceUnavailable(
                f"no service has ever taken over namespace {namespace}: run `txnbuf serve --broker …` for it"
            ) from None
        except Error:
            raise
        except Exception as error:  # a session that met it would never dial again
            raise ServiceUnavailable(f"the log of {namespace} could not be asked for: {error!r}") from error

    return SameLog(ask)
