"""Standby: wait until the owner of the decision log is gone, and keep reading the log meanwhile.

A standby fences nobody: the cluster decides that the owner is gone and gives the exclusive writer to the next process
that waits for it. Of several one gets it; the other standbys keep waiting, a service without `--standby` ends.
"""

from __future__ import annotations

import asyncio
import threading

from broker_io.errors import Error, StillHeld
from broker_io.port import Broker, Writer, open_or_make
from snapshots.shards import ONLY, Shard
from txnbuffer.coordinator.decisions import TOPIC as DECISIONS
from txnbuffer.rpc.discovery import ServiceDiscovery
from txnbuffer.service.cluster import as_log_deleted
from txnbuffer.service.decision_log import DecisionLog
from txnbuffer.service.takeover import StandbyState, prepare, read_decisions

SLICE = 1.0
"""Seconds of one attempt to become the owner; stopping a standby takes as long."""
READ_SECONDS = 0.25
PAUSE = 1.0
"""Seconds until a failed attempt is repeated."""
RELEASE_WAIT = 5.0
"""Seconds that a service without `--standby` waits for an owner that was just stopped or killed."""


def take_if_free(broker: Broker, shard: Shard = ONLY) -> StandbyState:
    """Become the exclusive writer of a decision log without an owner. Raises StillHeld, which names the owner."""
    topic = shard.topic(DECISIONS)
    prepare(broker, shard)
    try:
        writer = open_or_make(broker, topic, lambda: broker.writer(topic, exclusive=True, wait=RELEASE_WAIT))
    except StillHeld:
        raise StillHeld(
            f"another service owns this log{_owner_address(broker, topic)}: start this one with --standby to wait for "
            "its end, or with --fence to take the log from it"
        ) from None
    return read_decisions(broker, topic, writer)


def _owner_address(broker: Broker, topic: str) -> str:
    """The address of a log's newest owner as text for an error; empty if unknown."""
    try:
        return f", which serves at {ServiceDiscovery(broker, '', topic).newest_address()}"
    except Error:
        return ""


class Standby:
    """Waits for the ownership of a log. `problem`: the error of the last attempt, which is repeated."""

    def __init__(self, broker: Broker, shard: Shard = ONLY) -> None:
        self.problem: Error | None = None
        self._broker = broker
        self._shard = shard
        self._topic = shard.topic(DECISIONS)
        self._log: DecisionLog | None = None
        self._stopping = threading.Event()

    async def wait(self, stop: asyncio.Event) -> StandbyState | None:
        """Return the decision log's exclusive writer and its contents once acquired; None if `stop` was set first.

        Raises errors that waiting can't fix.
        """
        while not await asyncio.to_thread(self._prepared):
            if stop.is_set():
                return None
        reading = asyncio.ensure_future(asyncio.to_thread(self._follow_log))
        writer: Writer | None = None
        try:
            while writer is None and not stop.is_set():
                writer = await asyncio.to_thread(self._acquire)
        finally:
            self._stopping.set()
            await reading
            if (writer is None or stop.is_set()) and self._log is not None:
                self._log.close()
        if writer is not None and stop.is_set():
            await asyncio.to_thread(writer.close)
            return None
        if writer is None:
            return None
        try:
            log = self._log
            return StandbyState(
                writer, await asyncio.to_thread(DecisionLog, self._broker, self._topic) if log is None else log
            )
        except BaseException:
            await asyncio.to_thread(writer.close)
            raise

    def _prepared(self) -> bool:
        """Create the internal topics; return False after a temporary error."""
        try:
            prepare(self._broker, self._shard)
            self._broker.create_topic(self._topic)
        except Error as error:
            self._pause_after(error)
            return False
        return True

    def _acquire(self) -> Writer | None:
        try:
            return self._broker.writer(self._topic, exclusive=True, wait=SLICE)
        except StillHeld:
            return None
        except Error as error:
            self._pause_after(error)
            return None

    def _pause_after(self, error: Error) -> None:
        """Pause after a temporary error. Raises any other."""
        if not error.retryable:
            raise as_log_deleted(error) from error
        self.problem = error
        self._stopping.wait(PAUSE)

    def _follow_log(self) -> None:
        """Read the decision log as it grows; after a failure, such as trimming, read it again from the start."""
        while not self._stopping.is_set():
            try:
                if self._log is None:
                    self._log = DecisionLog(self._broker, self._topic)
                self._log.read(READ_SECONDS)
                self.problem = None
            except Error as error:
                self.problem = error
                if self._log is not None:
                    self._log.close()
                    self._log = None
                self._stopping.wait(PAUSE)
