"""One topic at one moment: how far it is decided, and by what verdicts.

Whoever looks takes the end of a topic first and its snapshot after that. A topic's first snapshot stands
before its first transactional record, so one that has none has no transactions up to that end, and its log
need not be looked at. For all others the log is folded from where the snapshot ends to the end of the log.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from broker_io.errors import PositionTrimmed
from broker_io.port import Broker, Reader
from snapshots.layout import reaches
from txnbuffer.buffer.aborts import AbortedSet
from txnbuffer.buffer.suppressed import SuppressedRanges
from txnbuffer.buffer.verdicts import FixedVerdicts
from txnbuffer.errors import ProtocolStopped, TailStalled
from txnbuffer.model import Position
from txnbuffer.pipeline.ranges import Anchor, Extent, behind
from txnbuffer.recovery.loading import Loaded, Snapshots, load
from txnbuffer.recovery.numbering import Numbering

PATIENCE = 60.0
"""Seconds in which a message that is known to be there must come."""

ATTEMPTS = 5
"""So often a topic is looked at anew where a trim falls between its snapshot and its log."""


@dataclass(frozen=True, slots=True, eq=False)
class Fixed:
    """One topic at one moment: everything below `stop` can be read, by `verdicts`; `last` is the last record there.

    `registered` is False for a topic that had no transactions, whose records have no seqnos.
    """

    topic: str
    incarnation: str
    registered: bool
    verdicts: FixedVerdicts
    stop: Position
    last: Position | None
    extents: tuple[Extent, ...]
    anchors: tuple[Anchor, ...]

    @property
    def origin(self) -> Position:
        """Where the log begins."""
        return Position(self.extents[0].ledger, 0)


class TopicView:
    """Looks at one topic again and again, and folds only what has come since.

    `isolated` is False for every record as it stands in the log; `numbered` keeps track of seqnos.
    """

    def __init__(self, broker: Broker, topic: str, *, isolated: bool = True, numbered: bool = True) -> None:
        self._broker = broker
        self._topic = topic
        self._isolated = isolated
        self._numbered = numbered
        self._loaded: Loaded | None = None
        self._reader: Reader | None = None
        self._numbering: Numbering | None = None

    def look(self, snapshots: Snapshots | None = None) -> Fixed:
        """The topic as it is now, good until the next look; its snapshot is one of those that are read together.

        Raises what reading its snapshot and its log raises, ProtocolStopped and TailStalled.
        """
        if not self._isolated:
            return self._as_it_stands(self._broker.incarnation(self._topic), self._broker.last_position(self._topic))
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return self._look(snapshots)
            except PositionTrimmed:
                self.close()
                if attempt == ATTEMPTS:
                    raise
        raise AssertionError("the last attempt returns or raises")

    def _look(self, snapshots: Snapshots | None) -> Fixed:
        if self._loaded is not None and self._is_old(self._loaded):
            self.close()
        if self._loaded is None:
            end = self._broker.last_position(self._topic)
            loaded = load(self._broker, self._topic) if snapshots is None else snapshots.load(self._topic)
            if not loaded.registered:
                return self._as_it_stands(loaded.incarnation, end)
            self._open(loaded)
        return self._folded()

    def _open(self, loaded: Loaded) -> None:
        self._loaded = loaded
        self._reader = self._broker.reader(self._topic, loaded.resume, inclusive=False)
        if self._numbered:
            self._numbering = Numbering(
                self._broker,
                self._topic,
                loaded.buffer,
                loaded.sequencer,
                renumber=loaded.numbered,
                resume=loaded.resume,
            )

    def _is_old(self, loaded: Loaded) -> bool:
        """Whether another topic has the name now, or the buffer holds aborts whose ledgers are gone since."""
        if self._broker.incarnation(self._topic) != loaded.incarnation:
            return True
        first = self._broker.ledgers(self._topic)[0].ledger
        parts = loaded.buffer.parts.summaries
        return first > loaded.first_ledger and bool(parts) and parts[0].last_ledger < first

    def _folded(self) -> Fixed:
        loaded = self._loaded
        if loaded is None:
            raise AssertionError("the topic was not opened")
        self._fold(loaded, self._broker.last_position(self._topic))
        sequencer = loaded.sequencer
        known = {Position(ledger, 0): seqno for ledger, seqno in sequencer.first_seqnos.items()}
        numbered = loaded.numbered if sequencer.position is None else sequencer.position
        known.setdefault(behind(numbered), sequencer.next_seqno)
        extents = self._extents()
        anchors = tuple(Anchor(at, known[at]) for at in sorted(known) if at >= Position(extents[0].ledger, 0))
        verdicts = FixedVerdicts.of(loaded.buffer)
        last = verdicts.max_read_position
        return Fixed(self._topic, loaded.incarnation, True, verdicts, behind(last), last, extents, anchors)

    def _fold(self, loaded: Loaded, end: Position | None) -> None:
        buffer, reader = loaded.buffer, self._reader
        buffer.replay_until(end)
        while reader is not None and not reaches(buffer.applied, end):
            placed = reader.read(timeout=PATIENCE)
            if placed is None:
                raise TailStalled(f"topic {self._topic}: none of the messages up to {end} came; try again")
            try:
                buffer.apply_batch(placed)
            except ProtocolStopped as error:
                raise error.of_topic(self._topic) from None
            buffer.take_sealed()
            if self._numbering is not None:
                self._numbering.applied(placed)
        if self._numbering is not None:
            self._numbering.advance()

    def _as_it_stands(self, incarnation: str, last: Position | None) -> Fixed:
        verdicts = FixedVerdicts(AbortedSet(), SuppressedRanges(), last)
        return Fixed(self._topic, incarnation, False, verdicts, behind(last), last, self._extents(), ())

    def _extents(self) -> tuple[Extent, ...]:
        return tuple(
            Extent(ledger.ledger, ledger.entries, ledger.bytes, ledger.lasting)
            for ledger in self._broker.ledgers(self._topic)
        )

    def close(self) -> None:
        """Let go of everything; another look begins anew."""
        for held in (self._reader, self._numbering):
            if held is not None:
                held.close()
        self._loaded = self._reader = self._numbering = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def fix_all(
    broker: Broker, topics: Collection[str], *, isolated: bool = True, numbered: bool = True
) -> dict[str, Fixed]:
    """Topics as they are now, with one scan for the snapshots of all of them. Raises as `TopicView.look` does."""
    fixed: dict[str, Fixed] = {}
    with Snapshots(broker, topics) as snapshots:
        for topic in topics:
            with TopicView(broker, topic, isolated=isolated, numbered=numbered) as view:
                fixed[topic] = view.look(snapshots)
    return fixed
