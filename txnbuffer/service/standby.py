"""Standing by: wait until whoever owns the decision log is gone, and have read by then what it says.

Nobody is fenced: that the owner is gone is for the cluster to say, which gives its exclusive writer to the next one.
Of several that want it one gets it, and keeps it: a standby waits on, and who does not stand by ends.
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
"""Seconds that are waited for the owner in one go; so long it takes to stop standing by."""
READ_SECONDS = 0.25
PAUSE = 1.0
"""Seconds until what failed is tried again."""
RELEASE_WAIT = 5.0
"""Seconds that who does not stand by gives an owner to go, as one that was just stopped or killed."""


def take_if_free(broker: Broker, shard: Shard = ONLY) -> StandbyState:
    """Become the only writer of a decision log that nobody has. Raises StillHeld, which says who has it."""
    topic = shard.topic(DECISIONS)
    prepare(broker, shard)
    try:
        writer = open_or_make(broker, topic, lambda: broker.writer(topic, exclusive=True, wait=RELEASE_WAIT))
    except StillHeld:
        raise StillHeld(
            f"another service has this log{_newest(broker, topic)}: to wait until it is gone start this one with "
            "--standby, to take the log from it with --fence"
        ) from None
    return read_decisions(broker, topic, writer)


def _newest(broker: Broker, topic: str) -> str:
    """Where the newest owner of a log is, as far as that is told; for people."""
    try:
        return f", which serves at {ServiceDiscovery(broker, '', topic).newest_address()}"
    except Error:
        return ""


class Standby:
    """`problem`: what keeps it from reading or waiting at the moment; it is tried again."""

    def __init__(self, broker: Broker, shard: Shard = ONLY) -> None:
        self.problem: Error | None = None
        self._broker = broker
        self._shard = shard
        self._topic = shard.topic(DECISIONS)
        self._log: DecisionLog | None = None
        self._stopping = threading.Event()

    async def wait(self, stop: asyncio.Event) -> StandbyState | None:
        """The decision log's writer and what the log says, once they are ours; None if `stop` came first.

        Raises what waiting longer can't help against.
        """
        while not await asyncio.to_thread(self._prepared):
            if stop.is_set():
                return None
        reading = asyncio.ensure_future(asyncio.to_thread(self._read_on))
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
        """Whether our topics are there; False where that can't be seen now."""
        try:
            prepare(self._broker, self._shard)
            self._broker.create_topic(self._topic)
        except Error as error:
            self._wait_out(error)
            return False
        return True

    def _acquire(self) -> Writer | None:
        try:
            return self._broker.writer(self._topic, exclusive=True, wait=SLICE)
        except StillHeld:
            return None
        except Error as error:
            self._wait_out(error)
            return None

    def _wait_out(self, error: Error) -> None:
        """Wait a while for what passes. Raises what doesn't."""
        if not error.retryable:
            raise as_log_deleted(error) from error
        self.problem = error
        self._stopping.wait(PAUSE)

    def _read_on(self) -> None:
        """Read the decision log as it grows; from its start where that fails, as when it was trimmed meanwhile."""
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
