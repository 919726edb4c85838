"""A member repairs its damaged files from the other one, whichever of them is live

What the peer has counts only while the logs of both were compared on the link: before that it may have another history.
Bytes are fetched in the way in which a backup fetches the files of compactions, which every release of a peer answers.
Damage on both members stays, and is tried again: the other one may get a copy, or its file back.
"""

from __future__ import annotations

from collections.abc import Callable

from broker_io.environment import Environment
from broker_io.errors import Error, as_error, disk_error
from broker_io.filelog.log import layout
from broker_io.filelog.log.damage import DamagedSegment
from broker_io.filelog.log.repair import discard_fetched, fetch_segment, is_whole
from broker_io.filelog.pair.copying import name_of
from broker_io.filelog.pair.store import DirectoryStore
from broker_io.filelog.pair.tasks import WorkThread
from broker_io.filelog.replication.messages import DamageNoted

FIRST_PAUSE, LONGEST_PAUSE = 0.5, 60.0
"""Seconds until all that is damaged is tried again: twice as long each time that a repair failed."""


class Repairer(WorkThread):
    """Repairs files in a thread, which exists only while some are damaged.

    `fetch` returns bytes of a file of the peer. `compared` gives a number that changes with the link, and None while
    the logs were not compared. `noted` learns which topics are damaged. `problem`: why the last repair failed.
    """

    def __init__(
        self,
        environment: Environment,
        store: DirectoryStore,
        fetch: Callable[[str, int, int], bytes],
        compared: Callable[[], int | None],
        noted: Callable[[DamageNoted], object],
    ) -> None:
        super().__init__(environment.threads, f"repair {store.directory}")
        self.problem = ""
        self._disk = environment.disk
        self._store = store
        self._fetch, self._compared, self._noted = fetch, compared, noted
        self._woken = False

    def wake(self) -> None:
        """Damage was found, or repaired; returns at once, in any thread."""
        with self._changed:
            self._woken = True
            self._wake()

    def _work(self) -> None:
        failures = 0
        while True:
            with self._changed:
                self._woken = False
            damaged = [] if self._closed else self._damaged()
            self._noted(DamageNoted(tuple(sorted({segment.topic.name for segment in damaged}))))
            problems = [why for segment in damaged if (why := self._try(segment))]
            self.problem, failed = "".join(problems[:1]), bool(problems)
            failures = failures + 1 if failed and self._compared() is not None else 0
            with self._changed:
                if self._closed or not (damaged or self._woken):
                    self._thread, self.problem = None, ""
                    return
                if failed:
                    pause = min(FIRST_PAUSE * 2.0 ** min(failures, 10), LONGEST_PAUSE)
                    self._changed.wait_for(lambda: self._closed or self._woken, pause)

    def _damaged(self) -> list[DamagedSegment]:
        try:
            return self._store.log.damage.segments()
        except Error:
            return []  # closed

    def _try(self, segment: DamagedSegment) -> str:
        """Repair a segment; why it is not whole, and is still needed."""
        try:
            self._repair(segment)
        except OSError as error:
            return str(disk_error(error, self._store.directory, "a damaged file was not repaired"))
        except Exception as error:
            return str(as_error(error))
        return ""

    def _repair(self, segment: DamagedSegment) -> None:
        store, disk, directory = self._store, self._disk, self._store.directory
        log, link = store.log, self._compared()
        path = layout.segment_path(directory, segment.topic, segment.ledger)
        if is_whole(disk, directory, segment):
            log.damage.mended(path)
            return
        if link is None:
            raise Error("the other member of the pair is not connected")
        name = name_of(directory, path)
        fetched = fetch_segment(disk, directory, segment, lambda at, size: self._fetch(name, at, size))
        if self._compared() != link:
            discard_fetched(disk, fetched)
            raise Error("the link to the other member has ended meanwhile")
        store.mend(log, segment, fetched)
