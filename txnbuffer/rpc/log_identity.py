"""The identity of the log that a client works with: addresses are reused, so another log's service may answer there.

A log is identified by the incarnation of its decision log. A call carries the identity that the client expects, and
the service rejects any other. The service sends its own before it answers, and the client checks that too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from broker_io.errors import TopicNotFound
from broker_io.port import Broker
from txnbuffer.errors import Error, ServiceUnavailable
from txnbuffer.rpc.names import LOG_KEY

REMEDY = "give the address of its own service, and connect anew if the log was made anew"


class LogIdentity:
    """`ask` returns the identity, and blocks; without it the log of the first service is the one of this client."""

    def __init__(self, ask: Callable[[], str] | None = None) -> None:
        self.name: str | None = None
        self._ask = ask

    async def metadata(self) -> tuple[tuple[str, str], ...]:
        """The metadata of a call to the service. Raises ServiceUnavailable if the log does not exist yet."""
        if self.name is None and self._ask is not None:
            self.name = await asyncio.to_thread(self._ask)
        return () if self.name is None else ((LOG_KEY, self.name),)

    def check(self, target: str, name: str) -> None:
        """Check the identity that the service at `target` sent. Raises ServiceUnavailable."""
        if self.name is None:
            self.name = name
        elif name != self.name:
            raise ServiceUnavailable(f"the service at {target} serves another log than this client's: {REMEDY}")


def log_identity_of(broker: Broker, namespace: str, decisions: str) -> LogIdentity:
    """The identity of the log of a cluster's namespace; `decisions` is the topic of its decision log."""

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

    return LogIdentity(ask)
