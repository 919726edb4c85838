"""The snapshot manager, which owns the snapshots of all topics: it recovers, follows and snapshots them.

One scan of the snapshot topic recovers all topics. Each is restored from its snapshot and its log is applied up to the
end; nothing is written before.

It is synchronous and not thread-safe: one thread calls. A topic that can't be recovered or followed stops alone:
`problems` has its error by name, every call for it raises that error, and the others continue. When ownership is lost,
everything stops.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import NamedTuple, Protocol, Self, TypeVar

from broker_io.batch import PlacedBatch
from broker_io.environment import Clock, current
from broker_io.errors import Error, TopicNotFound
from broker_io.port import Broker, Ledger
from broker_io.position import Position
from snapshots.errors import NotRegistered, OwnershipLost, SnapshotMissing, stopped_by
from snapshots.format import SNAPSHOT_TOPIC, check_data_topic
from snapshots.scan import SnapshotTable, TopicEntries, scan
from snapshots.writer import MAX_ENTRY_BYTES, SnapshotOwnership, SnapshotPlan, SnapshotWriter, acquire, commit
from txnbuffer.buffer.buffer import SEGMENT_SIZE, TransactionBuffer
from txnbuffer.buffer.state import Effect
from txnbuffer.progress import report
from txnbuffer.recovery.bounds import BoundsCheck, readable_bounds
from txnbuffer.recovery.followed_topic import (
    DEFAULT_POLICY,
    CapturedSnapshot,
    FollowedTopic,
    SnapshotPolicy,
    drop_segments,
)
from txnbuffer.recovery.restore import (
    LOST,
    LoadedTopic,
    deletion_complete,
    exists,
    fresh,
    holds_transactions,
    kept_history,
    readable_end,
    restore,
    restored_topics,
    topic_deleted,
)
from txnbuffer.recovery.warm_topic import WarmTopic

T = TypeVar("T")


class ForEach(Protocol):
    """Calls a function for each of many topics, one by one as `map` does or concurrently; the results are in order."""

    def __call__(self, function: Callable[[str], T], topics: Iterable[str], /) -> Iterable[T]: ...


class ReplayedTopic(NamedTuple):
    """`effects`: of the replay. `notes`: messages for operators. `warm`: a standby had followed it."""

    followed: FollowedTopic
    effects: list[Effect]
    notes: list[str]
    warm: bool = False


class TopicGone(NamedTuple):
    """The topic was deleted, perhaps re-created since, or its deletion was interrupted."""

    why: Error


WriteFirst = Callable[[str], "Position | None"]
"""Writes the first message of an empty log and returns its position; None if the log is not empty, or may stay so."""


class SnapshotManager:
    """Call `recover` first. `each` calls a function for all topics.

    `warm` and `discarded` count the topics of a standby that `recover` has continued, and that it could not trust.
    """

    def __init__(
        self,
        broker: Broker,
        *,
        clock: Clock | None = None,
        policy: SnapshotPolicy = DEFAULT_POLICY,
        snapshot_topic: str = SNAPSHOT_TOPIC,
        segment_size: int = SEGMENT_SIZE,
        max_entry_bytes: int = MAX_ENTRY_BYTES,
        each: ForEach = map,
    ) -> None:
        self.problems: dict[str, Error] = {}
        self.notes: list[str] = []
        self._broker = broker
        self._clock = clock or current().clock
        self._snapshot_topic = snapshot_topic
        self._policy = policy
        self._segment_size = segment_size
        self._max_entry_bytes = max_entry_bytes
        self._each = each
        self._ownership: SnapshotOwnership | None = None
        self._followed: dict[str, FollowedTopic] = {}
        self._unsettled: list[tuple[SnapshotWriter, SnapshotPlan]] = []
        self._fallen_back: list[str] = []
        self._deleted: dict[str, str] = {}
        self._recreated: set[str] = set()
        self._warm: dict[str, WarmTopic] = {}
        self._late_owner: dict[str, str] = {}
        """The topics that could not be recovered, with the owner that begins a version when they are followed."""
        self.warm = self.discarded = 0
        self.raw: bool | None = None
        """Whether snapshots are for readers that ask for the log as it is only; None: each as it is stored."""

    # Queries

    @property
    def epoch(self) -> int:
        """The epoch of this owner; it grows when a failed write had to be settled."""
        return self._owned().epoch

    @property
    def topics(self) -> list[str]:
        """The topics that are followed, sorted."""
        return sorted(self._followed)

    def buffer(self, topic: str) -> TransactionBuffer:
        """Raises NotRegistered, or the error that stopped the topic."""
        return self.followed(topic).buffer

    def followed(self, topic: str) -> FollowedTopic:
        """Raises NotRegistered, or the error that stopped the topic."""
        self._owned()
        if topic in self.problems:
            raise self.problems[topic]
        if topic not in self._followed:
            raise NotRegistered(f"topic {topic} is not followed here: register it first")
        return self._followed[topic]

    # Actions

    def recover(self, owner: str = "", warm: Mapping[str, WarmTopic] | None = None) -> dict[str, list[Effect]]:
        """Become the owner, restore every topic that has a snapshot, and apply its log up to its end.

        `warm`: topics that a standby has followed; one that is in doubt is recovered like all others.

        Return the effects of the replay by topic. Failed topics are in `problems`, messages for operators in `notes`. A
        topic that fell back gets a new snapshot at once. With `owner`, a unique text, all topics get one, and a version
        of their histories begins. Raises OwnershipLost if another owner takes over at the same time and is later, and
        as `write`.
        """
        self._warm = dict(warm or {})
        self._ownership, table = acquire(self._broker, self._snapshot_topic)
        effects: dict[str, list[Effect]] = {}
        topics = restored_topics(table)
        with report("recovery", "topics", len(topics)) as progress:
            for topic, state in zip(topics, self._each(partial(self._replayed, table), topics), strict=True):
                if found := self._guarded(topic, partial(self._recovered, table.topics[topic], topic, state)):
                    effects[topic] = found
                progress.advance()
        for left in self._warm.values():
            left.close()
        self._warm.clear()
        self.discarded = len(warm or ()) - self.warm
        for followed in self._followed.values() if owner else ():
            followed.taken_over(owner)
        self._late_owner = dict.fromkeys(self.problems, owner) if owner else {}
        changed = self._followed if owner else self._fallen_back
        self._write([self._followed[topic] for topic in changed if topic in self._followed])
        return effects

    def check_registered(self, topics: Iterable[str]) -> None:
        """After `recover`, check topics that were registered before: put those without a snapshot into `problems`.

        A re-created topic that holds transactions is among them, with TopicNotFound: `recreate` it.
        """
        for topic in {*topics} - {*self._followed, *self.problems, *self._deleted}:
            if self._guarded(topic, partial(holds_transactions, self._broker, topic)):
                self.problems[topic] = (
                    topic_deleted(topic) if topic in self._recreated else SnapshotMissing(topic, LOST)
                )

    def register(self, topic: str, prepared: FollowedTopic | None = None) -> None:
        """Follow a topic, created if missing; its first snapshot is durable when this returns.

        `prepared`: the result of `prepare`. Raises as `prepare`, the error that stopped the topic if it is known, and
        as `write`: then it is not registered.
        """
        if topic in self._followed or topic in self.problems:
            self.followed(topic)
            return
        followed = prepared or self.prepare(topic)
        try:
            self._write([followed])
        except Error as error:
            followed.close()
            if followed.writer.last is not None:
                self.problems[topic] = error
            raise
        self._follow(followed)

    def prepare(self, topic: str, begin: WriteFirst | None = None) -> FollowedTopic:
        """Create a topic if it is missing, and replay its log, for `register`; may run in any thread.

        Raises InvalidTopicName, SnapshotMissing if the log holds transactions, unless its snapshot was deleted, and
        what `begin` raises.
        """
        check_data_topic(topic)
        self._owned()
        deleted = self._deleted.get(topic)
        self._broker.create_topic(topic)
        end = None if begin is None else begin(topic)
        ledgers = self._broker.ledgers(topic)
        followed = self._whole(topic, TopicEntries(), ledgers)
        followed.buffer.unregistered = deleted is None
        try:
            if any(ledger.entries for ledger in ledgers):
                followed.catch_up(end)
            followed.buffer.unregistered = False
            if followed.buffer.transactional and deleted != followed.writer.incarnation:
                raise SnapshotMissing(topic, LOST)
        except Error:
            followed.close()
            raise
        return followed

    def rebuild(self, topic: str) -> None:
        """Replace the snapshot of a topic, however damaged, by the state that its log still gives.

        The state from trimmed ledgers is lost: for repair of a topic in `problems`.
        """
        check_data_topic(topic)
        entries = scan(self._broker, self._snapshot_topic, topic).topics.get(topic, TopicEntries())
        if (followed := self._followed.pop(topic, None)) is not None:
            followed.close()
        self._begin(self._whole(topic, entries, self._broker.ledgers(topic)), entries)

    def recreate(self, topic: str) -> None:
        """Follow a topic that was missing: the same one from its snapshot, a re-created one from the start of its log.

        Raises as `register`; then it can be tried again. Raises SnapshotMissing if the topic was not missing, but could
        not be checked, and has lost its snapshot.
        """
        check_data_topic(topic)
        self.settle()
        table = scan(self._broker, self._snapshot_topic, topic)
        entries = table.topics.get(topic, TopicEntries())
        try:
            restored = restore(self._broker, table, topic, snapshot_topic=self._snapshot_topic)
            followed = self._restored(restored, entries)
            self.notes += restored.notes
        except SnapshotMissing:
            found_missing = topic in self._recreated or isinstance(self.problems.get(topic), TopicNotFound)
            if not entries and not found_missing and holds_transactions(self._broker, topic):
                raise SnapshotMissing(topic, LOST) from None
            followed = self._whole(topic, entries, self._broker.ledgers(topic))
        self._begin(followed)

    def apply(self, topic: str, placed: PlacedBatch) -> list[Effect] | None:
        """Apply messages just appended to a topic; return None if that stopped it: `problems` has the error."""
        followed = self._followed.get(topic)
        return None if followed is None else self._guarded(topic, partial(followed.apply, placed))

    def stop(self, topic: str, error: Error) -> None:
        """Stop following a topic; `problems` gets the error."""
        self.problems[topic] = stopped_by(topic, error)
        if (followed := self._followed.pop(topic, None)) is not None:
            followed.close()

    def due(self) -> list[str]:
        """The topics whose snapshot is due."""
        now, raw = self._clock.monotonic(), self.raw
        return [
            topic
            for topic, followed in [*self._followed.items()]
            if followed.snapshot_due(now) or raw not in (None, followed.writer.stored_raw)
        ]

    def deleted(self, topic: str) -> None:
        """Forget a topic that was just deleted, and delete its snapshot. Raises as `write`; a recovery repeats it.

        If the topic had stopped, its snapshot is replaced when the topic is created again.
        """
        if (followed := self._followed.pop(topic, None)) is None:
            self.problems[topic] = topic_deleted(topic)
            return
        try:
            self.settle()
            self._delete_keys(followed.writer)
        finally:
            followed.close()

    def close(self) -> None:
        """Write snapshots of changed topics, unless ownership is lost, and release it."""
        ownership, self._ownership = self._ownership, None
        if ownership is None:
            return
        try:
            if not ownership.lost:
                self._ownership = ownership
                self._write([followed for followed in self._followed.values() if followed.unstored])
        finally:
            self._ownership = None
            for followed in self._followed.values():
                followed.close()
            self._followed.clear()
            ownership.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and self._ownership is not None:
            self._ownership.lost = True  # a write may be incomplete: leave it to the next owner
        self.close()

    # Internals

    def _owned(self) -> SnapshotOwnership:
        if self._ownership is None:
            raise NotRegistered("nothing is owned: call recover() first")
        if self._ownership.lost:
            raise OwnershipLost(self._snapshot_topic, self._ownership.epoch)
        return self._ownership

    def _guarded(self, topic: str, work: Callable[[], T]) -> T | None:
        """Call a function for one topic; an error stops only this topic."""
        try:
            return work()
        except OwnershipLost:
            raise
        except Error as error:
            self.stop(topic, error)
            return None

    def _replayed(self, table: SnapshotTable, topic: str) -> ReplayedTopic | TopicGone | Error:
        """Restore and replay a topic with entries; may run in any thread. An error stops only it, so it is returned."""
        if (warm := self._warm.pop(topic, None)) is not None:
            taken = warm.take_over(table, self._snapshot_topic, self._max_entry_bytes, self._policy, self._clock)
            if taken is not None:
                return ReplayedTopic(*taken, [], warm=True)
        try:
            restored = restore(self._broker, table, topic, snapshot_topic=self._snapshot_topic)
        except (SnapshotMissing, TopicNotFound) as error:
            return TopicGone(error)
        except Error as error:
            return error
        try:
            followed = self._restored(restored, table.topics[topic])
        except Error as error:
            return error
        try:
            return ReplayedTopic(followed, followed.catch_up(), restored.notes)
        except Error as error:
            followed.close()
            return error

    def _recovered(self, entries: TopicEntries, topic: str, state: ReplayedTopic | TopicGone | Error) -> list[Effect]:
        if isinstance(state, Error):
            raise state
        if isinstance(state, TopicGone):
            end = readable_end(topic, entries)
            incarnation = "" if end is None else end.incarnation
            if deletion_complete(self._broker, topic, entries):
                self._deleted[topic] = incarnation
                return []
            self._delete_keys(self._writer(topic, incarnation, entries))
            self._recreated.add(topic)
            self.notes.append(f"topic {topic}: removed the rest of its snapshot ({state.why})")
            return []
        self.notes += state.notes
        self._fallen_back += [topic] if state.notes else []
        self._followed[topic] = state.followed
        self.warm += state.warm
        return state.effects

    # A snapshot in steps, for an owner that must not block: `settle` and `write` may run in another thread; everything
    # else belongs to the one thread of this manager. Nothing else is written between `settle` and `finish`.

    def settle(self) -> None:
        """If an earlier write failed, find out what is durable before anything else is written."""
        if not self._unsettled:
            return
        table = self._owned().renew()
        for writer, plan in self._unsettled:
            writer.settle(plan, table.topics.get(writer.topic, TopicEntries()))
        self._unsettled = []

    def begin(self, topics: Iterable[str]) -> list[CapturedSnapshot]:
        """Capture the current state of topics."""
        return [self._capture(self._followed[topic]) for topic in topics if topic in self._followed]

    def _capture(self, followed: FollowedTopic) -> CapturedSnapshot:
        if self.raw is not None:
            followed.writer.raw = self.raw
        return followed.capture(self._owned().epoch)

    def write(self, captured: Sequence[CapturedSnapshot]) -> None:
        """Write captured snapshots.

        Raises OwnershipLost and errors of the broker; then the next snapshots cover the same.
        """
        self._commit([(one.followed.writer, one.plan) for one in captured])

    def finish(self, captured: Sequence[CapturedSnapshot]) -> None:
        """Record that captured snapshots are durable."""
        for followed, _, state, messages, changes in captured:
            followed.written(state, messages, changes)
            if len(followed.generations) > 1:  # a first snapshot has just looked at the ledgers
                self._drop_segments(followed)

    def _write(self, followed_topics: Sequence[FollowedTopic]) -> None:
        if not followed_topics:
            return
        self.settle()
        for followed in followed_topics:
            followed.sequence_all()
        captured = [self._capture(followed) for followed in followed_topics]
        self.write(captured)
        self.finish(captured)

    def _drop_segments(self, followed: FollowedTopic) -> bool:
        """Drop segments whose ledgers are trimmed from the next snapshot."""
        existing = self._broker.ledgers(followed.topic)[0].ledger
        if existing <= max(followed.buffer.first_ledger, followed.origin_ledger):
            return False
        return drop_segments(self._broker, self._snapshot_topic, followed, existing)

    def _commit(self, planned: list[tuple[SnapshotWriter, SnapshotPlan]]) -> None:
        ownership = self._owned()
        self._unsettled = planned
        commit(ownership, planned)
        self._unsettled = []
        if (note := ownership.compact()) is not None:
            self.notes.append(note)

    def _begin(self, followed: FollowedTopic, former: TopicEntries | None = None) -> None:
        """Follow a topic once its snapshot is durable.

        `former`: if the topic was followed from the start of its log again, its entries until now: its readers can
        resume where the history did not change.
        """
        try:
            incarnation = followed.writer.incarnation
            bounds = BoundsCheck([] if former is None else readable_bounds(followed.topic, incarnation, former)[0])
            followed.on_sequenced = partial(bounds.sequenced, followed.buffer)
            followed.catch_up()
            followed.on_sequenced = None
            if former is None and followed.topic in self._late_owner:
                followed.taken_over(self._late_owner[followed.topic])
            elif former is not None:
                ledgers = self._broker.ledgers(followed.topic)
                uuid = followed.failover.current.uuid
                kept = kept_history(followed.topic, incarnation, former, ledgers, followed.numbered, uuid)
                if kept is not None:
                    followed.failover, followed.cursors = kept
                    followed.index = bounds.index()[0].state()
            self._write([followed])
        except BaseException:
            followed.close()
            raise
        self._follow(followed)

    def _whole(self, topic: str, entries: TopicEntries, ledgers: list[Ledger]) -> FollowedTopic:
        """A topic from the start of its log; `entries`: all that it has in the snapshot topic, valid or not."""
        branch = f"{self.epoch}-{self._clock.now_ms()}"  # seqnos start again: older ones cannot be continued
        incarnation = self._broker.incarnation(topic)
        return self._restored(fresh(topic, incarnation, ledgers, self._segment_size, branch), entries)

    def _restored(self, restored: LoadedTopic, entries: TopicEntries) -> FollowedTopic:
        return FollowedTopic.restored(self._broker, restored, entries, self._max_entry_bytes, self._policy, self._clock)

    def _writer(self, topic: str, incarnation: str, entries: TopicEntries) -> SnapshotWriter:
        writer = SnapshotWriter(topic, incarnation, self._max_entry_bytes)
        writer.found(entries)
        return writer

    def _follow(self, followed: FollowedTopic) -> None:
        self.problems.pop(followed.topic, None)
        self._deleted.pop(followed.topic, None)
        self._recreated.discard(followed.topic)
        self._late_owner.pop(followed.topic, None)
        self._followed[followed.topic] = followed

    def _delete_keys(self, writer: SnapshotWriter) -> None:
        keep_end = exists(self._broker, writer.topic, writer.incarnation)
        self._commit([(writer, writer.plan_deletion(self._owned().epoch, keep_end=keep_end))])
        if keep_end:
            self._deleted[writer.topic] = writer.incarnation
