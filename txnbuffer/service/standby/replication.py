"""A service on one of a pair: what operators ask of it in every role, and how it hands over on request.

The broker replicates the log and decides with the lock which machine is live. This service waits until its machine
is; then it serves like the service of a log without a pair. It waits again when it has lost that role, in the same
process. `docs/replication.md` describes a pair to users.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from broker_io.environment import current
from broker_io.errors import Error, Fenced, NotInSync, NotLive
from broker_io.port import Broker, ReplicatedBroker
from broker_io.waits import long_waits
from txnbuffer.config import PairConfig
from txnbuffer.errors import CoordinatorStopped, InvalidConfiguration, InvalidRequest, ServiceUnavailable
from txnbuffer.service.loop import from_thread

if TYPE_CHECKING:
    from broker_io.filelog.pair.transport import LinkSettings

SWITCH_DRAIN = 1.0
"""Seconds that open transactions get to end before the other machine becomes live; the others move to it."""
POLL = 0.25
"""Seconds between two checks of the state of the pair."""
STEP_DOWN = 1.0
"""Seconds after the end of an engine in which the broker may still notice that it is no longer live."""
OPENING_SECONDS = 10.0
"""Seconds that a request of an operator waits for a log that is being opened."""
LEAST_LEASE = 1.0
BACKUP_MISSING = (
    "the backup of this pair is not in sync, and pair.min_in_sync is 2, so nothing can be written: start the backup or "
    "wait until it is in sync, or restart this machine with pair.min_in_sync = 1"
)
NOTHING_SERVED = f"{BACKUP_MISSING}. A service begins with an entry in its log, so this one can't answer readers either"


class Replication:
    """The role of a service: `alone`, which on a cluster may be a `standby`, or one of a pair, if that is `configured`.

    `attach` its broker once it is open, then run `watch`. `changed` is set whenever the broker has become live, is no
    longer live, or has failed. `backup_timeout`: for how many seconds a backup that was in sync may be missing until
    writes are refused and a service that stops does not wait for it.
    """

    def __init__(self, backup_timeout: float = 10.0, *, configured: bool = False, standby: bool = False) -> None:
        self._backup_timeout = backup_timeout
        self._monotonic = current().clock.monotonic
        self._in_sync_at = self._missing_since = -math.inf
        self.changed = asyncio.Event()
        self.switch_requested = asyncio.Event()
        self.broker: ReplicatedBroker | None = None
        self._configured, self._standby = configured, standby
        self._attached = asyncio.Event()
        self._requested: asyncio.Future[Error | None] | None = None

    def attach(self, broker: Broker) -> None:
        """Use a broker, if it is one of a pair."""
        if isinstance(broker, ReplicatedBroker):
            loop = asyncio.get_running_loop()
            broker.on_role(lambda: from_thread(loop, self.changed.set))
            self.broker = broker
        self._attached.set()

    def facts(self) -> dict[str, Any]:
        """What the broker says of the pair; empty without a pair."""
        return {} if self.broker is None else dict(self.broker.status())

    @property
    def alone(self) -> bool:
        return self.broker is None

    @property
    def stands_by(self) -> bool:
        """Whether this service waits until it may have the log."""
        return self._standby or self._configured

    @property
    def failure(self) -> Error | None:
        """What has stopped the broker of a pair."""
        return None if self.broker is None else self.broker.failure

    @property
    def problem(self) -> str | None:
        """The last error of the lock or the link."""
        return self.facts().get("problem") or None

    def standby_reason(self, last: str) -> str:
        """What a standby tells clients: who serves, or what it waits for; `last`: where the newest other owner was."""
        facts = self.facts()
        if not facts:
            return "standing by: another service serves"
        if facts["linked"] and last:  # only a primary accepts a link
            return f"standing by: the service at {last} serves"
        text = f"standing by: {facts['waits_for'] or 'this member has just become live'}"
        return f"{text}; the last service was at {last}" if last else text

    @property
    def live(self) -> bool:
        return self.broker is not None and self.broker.live

    @property
    def term(self) -> int:
        """The present term of the broker; 0 while it is not live."""
        return 0 if self.broker is None else self.broker.term

    @property
    def can_switch(self) -> bool:
        """Whether this machine is live and the other one has everything, without damage."""
        return self.live and not self.facts()["cannot_switch"]

    @property
    def lacks_backup(self) -> bool:
        """Whether nothing can be written here, because too few machines are in sync."""
        return bool(self.facts().get("waits_for_backup"))

    @property
    def refusal(self) -> NotInSync | None:
        """The error of writes while the backup has been missing for too long to wait for it."""
        missing = self._missing_since > -math.inf and self._monotonic() >= self._missing_since + self._backup_timeout
        return NotInSync(BACKUP_MISSING) if missing else None

    # For the process

    async def watch(self) -> None:
        """Remember when the backup was in sync last, and since when it is missing, as long as there is a pair."""
        while not self.alone:
            now = self._monotonic()
            if self.can_switch:
                self._in_sync_at = now
            if not self.lacks_backup:
                self._missing_since = -math.inf
            elif self._missing_since == -math.inf:
                self._missing_since = now
            await asyncio.sleep(POLL)

    async def wait_for_backup(self, ended: Callable[[], bool] = lambda: False) -> bool:
        """Wait for a backup that was in sync a moment ago, and is not just now; whether it is again.

        A backup on a busy machine may be silent for long enough to be taken out of `in_sync`.
        """
        while self.live and not self.can_switch and self._monotonic() < self._in_sync_at + self._backup_timeout:
            if ended():
                return False
            await asyncio.sleep(POLL)
        return self.can_switch

    async def lost(self, term: int) -> None:
        """Return once a term of the broker has ended; the one of a service alone does not."""
        while self.alone or (term and self.term == term):
            self.changed.clear()
            if self.term == term:
                await self.changed.wait()

    def may_continue(self, error: Error | None) -> bool:
        """Whether a service may be a standby again after an engine has ended: another one took a cluster's log."""
        return not self.alone or (self._standby and isinstance(error, Fenced | CoordinatorStopped))

    async def continues(self, error: Error | None, term: int) -> bool:
        """Whether to wait again for the log after an engine of a term has ended with an error.

        A machine of a pair that is still live takes over from itself, unless its disk or the engine is at fault.
        """
        if self.broker is None:
            return self.may_continue(error)
        if self.failure is not None:
            return False
        if error is None or error.retryable:
            return True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STEP_DOWN):
                await self.lost(term)
        return self.term != term and self.failure is None

    async def hand_over(self) -> Error | None:
        """Make the other machine live if it can be, with nothing under way here; the error if that failed."""
        requested, self._requested = self._requested, None
        self.switch_requested.clear()
        error: Error | None = None
        try:
            if self.broker is not None and (requested is not None or await self.wait_for_backup()):
                await self._switch_over(self.broker, repeat=requested is None)
        except Error as refused:
            error = refused
        if requested is not None and not requested.done():
            requested.set_result(error)
        return error

    async def _switch_over(self, broker: ReplicatedBroker, *, repeat: bool) -> None:
        """Make the other machine live; with `repeat` try again if it was not in sync for a moment."""
        until = self._monotonic() + self._backup_timeout
        while True:
            try:
                await asyncio.to_thread(broker.switch)
            except NotInSync:
                if not repeat or self._monotonic() >= until or not await self.wait_for_backup():
                    raise
                await asyncio.sleep(POLL)
            else:
                return

    # Requests of operators

    def methods(self) -> dict[str, Callable[[dict[str, Any]], Awaitable[Any]]]:
        """Requests that a service answers in every role, by name."""
        return {"Replication": self._status, "SwitchOver": self._switch, "Promote": self._promote}

    async def _status(self, request: dict[str, Any]) -> dict[str, Any]:
        await self._broker_of(request)
        return self.facts()

    async def _switch(self, request: dict[str, Any]) -> dict[str, Any]:
        """Hand over to the other machine."""
        broker = await self._broker_of(request)
        if not broker.live:
            raise NotLive("this machine is not live: ask the other one to switch")
        if refusal := self.facts()["cannot_switch"]:
            raise NotInSync(f"{refusal} ({problem})" if (problem := self.problem) else refusal)
        self._requested = requested = self._requested or asyncio.get_running_loop().create_future()
        self.switch_requested.set()
        if (error := await asyncio.shield(requested)) is not None:
            raise error
        return self.facts()

    async def _promote(self, request: dict[str, Any]) -> dict[str, Any]:
        """Make this machine live at the price of records that only the other one has."""
        broker = await self._broker_of(request)
        if broker.live:
            raise InvalidRequest("this machine is live already")
        facts = self.facts()
        if facts["linked"] and facts["store"] in facts["in_sync"]:
            raise InvalidRequest("the other machine is live, and this one is in sync: use `txnbuf replication switch`")
        await asyncio.to_thread(broker.promote)
        return self.facts()

    async def _broker_of(self, request: dict[str, Any]) -> ReplicatedBroker:
        """The broker; a log that is being opened is waited for a little."""
        if request:
            raise InvalidRequest(f"unknown keys in the request: {', '.join(sorted(request))}; the request has none")
        if self._configured:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._attached.wait(), OPENING_SECONDS)
        if self.broker is None and self._configured:
            raise ServiceUnavailable("; ".join(["the log of this pair is still being opened", *map(str, long_waits())]))
        if self.broker is None:
            raise InvalidRequest("this service has no pair: start it with --pair-lock, see docs/replication.md")
        return self.broker


def link_settings(pair: PairConfig) -> LinkSettings:
    """Where the machines of a pair find each other. Raises InvalidAddress for an invalid lock."""
    from broker_io.filelog.pair import pair_name
    from broker_io.filelog.pair.transport import LinkSettings

    return LinkSettings(pair_name(pair.lock), pair.listen, pair.peer, pair.tls_cert, pair.tls_key, pair.tls_ca)


def check_pair(pair: PairConfig, *, embedded: bool) -> None:
    """Raises InvalidConfiguration and InvalidAddress for an invalid section [pair], or a log that can't have a pair."""
    if not pair.lock:
        given = [name for name in ("listen", "peer", "found") if getattr(pair, name)]
        if given:
            raise InvalidConfiguration(f"pair.{given[0]} is given without pair.lock: give --pair-lock too")
        return
    if not embedded:
        raise InvalidConfiguration(
            "--pair-lock is for an embedded log, file:DIR: a cluster replicates its topics itself, use --standby there"
        )
    if not (pair.listen and pair.peer):
        raise InvalidConfiguration(
            "a pair needs --pair-listen and --backup-of on both machines: each connects to the one that is live"
        )
    link_settings(pair).check()
    if pair.lease_seconds < LEAST_LEASE:
        raise InvalidConfiguration(f"pair.lease_seconds must be at least {LEAST_LEASE:g}, got {pair.lease_seconds:g}")
