"""The node of a pair: gives the member of the pair its events, in one order, and performs the effects

Any thread may report an event. The core takes it under the node's lock, and each effect joins the queue of its kind:
messages are sent at once, a thread asks the lock outside, another one applies; the journal's tasks are in
`broker_io.filelog.pair.tasks`. What follows from an effect is an event again.

A primary applies its own records: the thread that builds one calls `commit`, which returns once the record is
committed, changes the state, and calls `applied`. Until then nothing else is applied. All other records, those of a
backup and those before an epoch begins, are applied by a thread of the node.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from broker_io.environment import Environment
from broker_io.errors import (
    AppendUnknown,
    CallerError,
    Closed,
    DiskFailed,
    Error,
    LockUnavailable,
    NotInSync,
    NotLive,
    PeerError,
    TooManyFiles,
    TopicNotFound,
    as_error,
)
from broker_io.filelog.log.records import Mark
from broker_io.filelog.pair.link_record import LinkRecord, is_compared
from broker_io.filelog.pair.port import CopyChunk, PairLink, PairLock, PairStore, Transport
from broker_io.filelog.pair.sender import PeerSender
from broker_io.filelog.pair.status import BackupLag, not_promotable, status_of
from broker_io.filelog.pair.tasks import CopyReception, JournalTasks, LockRequests, TaskQueue
from broker_io.filelog.replication import messages as m
from broker_io.filelog.replication.member import PairMember, Role, Settings
from broker_io.filelog.replication.serving import Gate, has_room, lacks_backup, reads, refusal
from broker_io.filelog.replication.states import step

COMMIT_SECONDS = 0.05
"""How often a primary shows its backup, which has nothing else to go by, what is committed."""
RETRY_SECONDS = 0.25
SWITCH_SECONDS = 0.02
"""How often a former primary asks whether the other one has taken its role."""
LACKS_BACKUP = (
    "nothing can be written, because pair.min_in_sync is 2 and the backup is not in sync; a machine that became live "
    "without it serves nobody"
)
JOURNAL_EFFECTS = (m.WriteRecords, m.Cut, m.MarkPartial, m.Replace, m.DropJournal, m.RemoveFiles)
LOCK_EFFECTS = (m.ReadLock, m.SwapLock, m.Renew, m.EndSession)
SEND_EFFECTS = (m.SendMessage, m.SendStored, m.SendCopy)


class CommitWaiter:
    """The record of the thread that waits in `commit`; no mark: there is no room for it yet."""

    def __init__(self) -> None:
        self.mark: Mark | None = None
        self.committed = False
        self.lost: Error | None = None


class PairNode:
    """A node, from `start` to `close`. It implements the events of its store and of its transport.

    `on_role` is called, in a thread of the node, with True when this node becomes live, and with False when it is not
    live any more, or has failed. `on_applied` is called when a thread of the node has applied records, and `on_swap`
    when all have the files of a compaction, to put them in place. `count` gives the number of operations of a record.
    `failure` is the error that has stopped the node.
    """

    def __init__(
        self,
        environment: Environment,
        settings: Settings,
        store: PairStore,
        lock: PairLock,
        transport: Transport,
        *,
        on_role: Callable[[bool], None],
        on_applied: Callable[[], None],
        on_swap: Callable[[m.RewriteFinished], None],
        count: Callable[[bytes], int],
    ) -> None:
        threads = environment.threads
        self.failure: Error | None = None
        self._store_problem = ""
        self._links = LinkRecord(settings)
        self._settings = settings._replace(terms=settings.terms._replace(clocked=lock.clocked))
        self._now = environment.clock.boottime_ns
        self._store = store
        self._lock = lock
        self._transport = transport
        self._on_role = on_role
        self._on_applied, self._on_swap = on_applied, on_swap
        self._mutex = threads.lock()
        self._roles = threads.condition()
        self._building = threads.lock()
        self._ending = threads.lock()
        self._signal = threads.event()
        self._closing = threads.event()
        self._closed = False
        self._opened = self._started = False
        self._member: PairMember
        self._shown_role, self._lacks_backup = Role.BACKUP, False
        self.term = 0
        """The epoch in which this node serves; 0 while it does not."""
        self._writes_itself = False
        self._waiter: CommitWaiter | None = None
        self._own: int | None = None
        self._answered = 0
        self._may_answer = False
        self._lag = BackupLag(count)
        self._copies = 0
        self._requests = LockRequests(threads, lock, settings.terms.ttl / 1e9, lambda: self._member, self.post)
        self._applies: TaskQueue[m.Apply | m.BuildEpoch | m.AppendSwap] = TaskQueue(threads)
        self._changes: TaskQueue[bool] = TaskQueue(threads)
        self._sender = PeerSender(threads, self._mutex, store, lambda: self._member.log.durable, self.failed, self.down)
        self._journal = JournalTasks(threads, store, self.post, self.failed, self._wait_idle)
        self._reception = CopyReception(
            *(self._mutex, lambda: self._member, store, self._journal),
            broken=self.down,
            copied=self._copied,
        )
        self._handlers = self._effects()
        self._threads = [
            threads.thread(self._guarded(loop), name=f"pair {name}", daemon=True) for name, loop in self._loops()
        ]

    def _effects(self) -> dict[type, Callable[..., None]]:
        """What is done with each effect, under the lock, at once."""
        return {
            m.NoteCommit: lambda effect: self._journal.note(effect.lsn),
            m.Apply: self._apply,
            m.BuildEpoch: self._applies.put,
            m.AppendSwap: self._applies.put,
            m.AnswerClients: self._answer,
            m.BreakLink: lambda effect: self._end_link(effect.link),
            m.Serve: lambda _: self._set_live(True),
            m.StepDown: self._step_down,
            m.Stop: self._stop,
            **dict.fromkeys(LOCK_EFFECTS, self._requests.ask),
            **dict.fromkeys(SEND_EFFECTS, self._send),
            **dict.fromkeys(JOURNAL_EFFECTS, self._put_journal),
        }

    def _loops(self) -> list[tuple[str, Callable[[], None]]]:
        """The threads."""
        return [
            ("timer", self._tick_loop),
            ("lock", self._requests.run),
            ("apply", self._apply_loop),
            ("roles", self._role_loop),
            ("journal", self._journal.run),
            ("sender", self._sender.run),
        ]

    def open(self) -> None:
        """Open the store. Raises what that raises."""
        if not self._opened:
            self._member, self._opened = PairMember(self._settings, self._store.open_log(self)), True

    def start(self) -> None:
        """Begin; opens the store before, if need be. Raises EnvironmentFault if the transport can't listen."""
        self.open()
        self._started = True
        for thread in self._threads:
            thread.start()
        self.post(m.Start())
        try:
            self._transport.start(self, self._may_accept, self._may_connect)
        except BaseException:
            self.close()
            raise

    def _guarded(self, loop: Callable[[], None]) -> Callable[[], None]:
        """A loop whose unexpected errors stop the node."""

        def run() -> None:
            try:
                loop()
            except Exception as error:
                self.failed(error)
                self._applies.close()  # nobody may wait for a task that its thread has left

        return run

    # --- events and effects ---

    def post(self, event: m.Event) -> None:
        """Give the core an event, in any thread; what fails then is a defect, or a log that is no chain."""
        try:
            with self._mutex:
                self._step(event)
        except Exception as error:
            self.failed(error)

    def _step(self, event: m.Event) -> None:
        """Give the core an event, under the lock. Raises what the core raises for a request that can't be served."""
        member = self._member
        for effect in step(member, event, self._now()):
            self._handlers[type(effect)](effect)
        if isinstance(event, m.Synced):
            self._sender.synced()
        if self._waiter is not None and self._waiter.mark is None:
            self._signal.set()
        lacking = self._settings.min_in_sync > 1 and lacks_backup(member)
        if member.role is not self._shown_role or lacking is not self._lacks_backup:
            self._shown_role, self._lacks_backup = member.role, lacking
            with self._roles:
                self._roles.notify_all()

    def _put_journal(self, effect: m.WriteRecords | m.Cut | m.MarkPartial | m.Replace | m.DropJournal) -> None:
        if isinstance(effect, m.WriteRecords):
            self._lag.add(effect.records, self._now())
        self._journal.put(effect, wake=not self._writes_itself)

    def _post_and_write(self, event: m.Event) -> None:
        """Give the core an event, and write what it wants written, in this thread if no other one is at it."""
        try:
            with self._mutex, self._writing_itself():
                self._step(event)
        except Exception as error:
            self.failed(error)
        self._journal.write()

    @contextlib.contextmanager
    def _writing_itself(self) -> Iterator[None]:
        self._writes_itself = True
        try:
            yield
        finally:
            self._writes_itself = False

    def _apply(self, effect: m.Apply) -> None:
        waiter = self._waiter
        if waiter is not None and waiter.mark is not None and waiter.mark.lsn <= effect.lsn and waiter.lost is None:
            waiter.committed, self._own = True, effect.lsn
            self._applies.hold(True)
            self._signal.set()
        else:
            self._applies.put(effect)

    def _send(self, effect: m.SendMessage | m.SendStored | m.SendCopy) -> None:
        self._copies += isinstance(effect, m.SendCopy)
        self._sender.send(effect)

    def _answer(self, effect: m.AnswerClients) -> None:
        self._answered = effect.lsn

    def _end_link(self, number: int) -> None:
        self._sender.end(number)
        self._reception.end(number)

    def _set_live(self, live: bool) -> None:
        if live is not self.live:
            self.term = self._member.leading.epoch if live else 0
            self._changes.put(live)

    def _step_down(self, effect: m.StepDown) -> None:
        self._lose_waiter(f"this member of the pair is not live any more ({effect.reason})")
        self._set_live(False)

    def _lose_waiter(self, why: str) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.committed and waiter.lost is None:
            known = NotLive(f"{why}: connect to the other one; nothing was written")
            unknown = AppendUnknown(f"{why}: the append may or may not be in the log")
            waiter.lost = known if waiter.mark is None else unknown
            self._signal.set()

    def _stop(self, effect: m.Stop) -> None:
        self.failure = self.failure or effect.error or DiskFailed(f"the node of the pair has stopped: {effect.reason}")
        if not self.live:
            self._changes.put(False)
        self._retire("the node has stopped")

    def _retire(self, why: str) -> None:
        """Serve nothing any more, and let the other member take over at once."""
        member = self._member
        session, member.role = member.session.number, Role.STOPPED
        self._lose_waiter(why)
        self._set_live(False)
        if (number := self._sender.number) is not None:
            self._end_link(number)
        if session is not None:
            self._requests.end(session)

    def failed(self, error: Exception) -> None:
        """An error after which the state of the store or of the node is unknown."""
        with self._mutex:
            final = DiskFailed(str(error)) if isinstance(error, TooManyFiles) else error  # not one to wait for
            self.failure = self.failure or as_error(final)
            self._step(m.SyncFailed(str(self.failure)))

    # --- events of the store ---

    def checkpointed(self, mark: Mark) -> None:
        with self._mutex:
            self._step(m.Applied(mark.lsn))
            self._step(m.Checkpointed(mark))

    def fetch(self, name: str, offset: int, size: int) -> bytes:
        return self._transport.fetch(name, offset, size)

    # --- events of the transport ---

    def _may_accept(self) -> bool:
        return self._member.serves

    def _may_connect(self) -> bool:
        return self._member.role in (Role.BACKUP, Role.JOINING) and self._links.may_begin(self._now())

    def up(self, link: PairLink) -> None:
        with self._mutex:
            if self._closed or self._member.role is Role.STOPPED:
                link.close()
                return
            if (old := self._sender.number) is not None:
                self._end_link(old)
            self._sender.up(link)
            self._links.up(link.number)
            self._step(m.LinkUp(link.number))

    def received(self, number: int, message: m.Message) -> None:
        self._post_and_write(m.Received(number, message))

    def down(self, number: int, reason: str) -> None:
        """A link has ended, or what it has brought or should send is invalid: begin again with a new one."""
        with self._mutex:
            self._links.ended(number, reason, self._now())
            self._end_link(number)
            self._step(m.LinkDown(number))

    def read_prepared(self, name: str, offset: int, size: int) -> bytes:
        return self._store.read_prepared(name, offset, size)

    def copy_chunk(self, number: int, chunk: CopyChunk) -> None:
        self._reception.receive(number, chunk)

    def copy_end(self, number: int) -> None:
        self._reception.receive(number, None)

    def _copied(self, at: Mark) -> None:
        self._copies += 1
        self._lag.clear()
        self._step(m.Copied(at))

    def _wait_idle(self) -> None:
        """Wait until nothing is being applied, or read for the peer; the state is about to be replaced."""
        self._applies.drop()
        self._sender.wait_idle()

    # --- threads ---

    def _tick_loop(self) -> None:
        slow = self._settings.terms.ttl / 40 / 1e9
        while not self._closing.wait(min(slow, COMMIT_SECONDS) if self.live else slow):
            with self._mutex:
                self._step(m.Tick())
                self._links.tick(self._member, self._now())
                self._lag.applied(self._member)
            self._journal.write_note()

    def _role_loop(self) -> None:
        while (live := self._changes.take()) is not None:
            self._on_role(live)

    def _apply_loop(self) -> None:
        while (task := self._applies.take()) is not None:
            if isinstance(task, m.Apply):
                self._apply_now(task)
            elif isinstance(task, m.BuildEpoch):
                self.post(m.EpochContent(task.epoch, self._store.epoch_content(task)))
            else:
                try:
                    self._on_swap(task.result)
                except (NotLive, AppendUnknown) as error:
                    self._store_problem = str(error)

    def _apply_now(self, task: m.Apply) -> None:
        asked = False
        while True:
            try:
                self._store.apply(task.lsn)
            except (PeerError, TopicNotFound) as error:
                self._store_problem = str(error)
                if isinstance(error, TopicNotFound) and not asked:
                    asked = True
                    self.post(m.FilesMissing())
                if not self._applies.pause(RETRY_SECONDS):
                    return
            else:
                self._store_problem = ""
                self.post(m.Applied(task.lsn))
                self._on_applied()
                return

    # --- what the broker calls ---

    def commit(self, content: bytes, fits: Callable[[], bool]) -> Mark:
        """Return once a record with this content is committed, with its mark; the caller then calls `applied`.

        `fits` says, when everything before it is applied, whether the content still follows from the state: this node
        may have lost its role and won it again since the content was made.

        Raises NotLive and DiskWatermark if nothing was written, AppendUnknown if it may be committed later or never,
        and the error that has stopped the node.
        """
        with self._building:
            waiter = self._begin_commit(content, fits)
            self._journal.write()
            while True:
                self._signal.wait()
                self._signal.clear()
                with self._mutex:
                    if waiter.committed or waiter.lost is not None:
                        self._waiter = None
                        break
        if waiter.lost is not None or waiter.mark is None:
            raise waiter.lost or Error("internal error: there is no commit record")
        return waiter.mark

    def _begin_commit(self, content: bytes, fits: Callable[[], bool]) -> CommitWaiter:
        """Build a record once there is room for it."""
        waiter = CommitWaiter()
        while True:
            with self._mutex:
                self._signal.clear()
                self._waiter = None
                if self.failure is not None:
                    raise self.failure.with_traceback(None)
                if waiter.lost is not None:
                    raise waiter.lost
                member = self._member
                if member.role is not Role.SWITCHING:
                    if (error := refusal(member, self._now())) is not None:
                        raise error
                    if has_room(member):
                        if not fits():
                            raise NotLive("this member of the pair was not live for a while: open another writer")
                        self._build(waiter, content)
                        return waiter
                self._waiter = waiter
            self._signal.wait()

    def _build(self, waiter: CommitWaiter, content: bytes) -> None:
        with self._writing_itself():
            self._step(m.AppendRequested(content))
        waiter.mark, self._waiter = self._member.log.index.end, waiter

    def applied(self) -> None:
        """The caller of `commit` has changed the state, and is about to answer."""
        with self._mutex:
            lsn, self._own = self._own, None
            if lsn is not None:
                self._step(m.Applied(lsn))
                self._may_answer = self._answered >= lsn
        self._applies.hold(False)

    def may_answer(self) -> bool:
        """Whether the lease was valid when the last record was `applied`: its clients may be answered."""
        return self._may_answer

    def compared_link(self) -> int | None:
        """The number of the link, if the logs of both members were compared on it."""
        with self._mutex:
            return self._member.link if is_compared(self._member) else None

    def reads(self) -> Gate:
        """Whether the answer to a read, which was evaluated before this call, may be sent."""
        with self._mutex:
            return reads(self._member, self._now())

    @property
    def live(self) -> bool:
        """Whether this node serves clients."""
        return self.term > 0

    def check(self) -> None:
        """Raises Closed, and the error that has stopped the node."""
        if self.failure is not None:
            raise self.failure.with_traceback(None)
        if self._closed:
            raise Closed("the node of the pair was closed: open the log again")

    def wait_live(self, seconds: float) -> bool:
        """Wait until this node is live; whether it is. Raises what `check` raises."""
        return self._wait_until(lambda: self.live, seconds)

    def wait_writable(self, seconds: float) -> bool:
        """Wait until this node is live and does not lack its backup; whether that is so. Raises what `check` raises."""
        return self._wait_until(lambda: self.live and not self._lacks_backup, seconds)

    def _wait_until(self, wanted: Callable[[], bool], seconds: float) -> bool:
        with self._roles:
            found = self._roles.wait_for(lambda: wanted() or self._closed or self.failure is not None, seconds)
        self.check()
        return found

    def switch(self) -> None:
        """Let the backup be live; returns once it is, as the lock says: this node could be faster after a restart.

        Raises NotLive, NotInSync if there is no backup or it was lost, and LockUnavailable if it is not live in time.
        """
        with self._mutex:
            self._step(m.SwitchRequested())
        with self._roles:
            self._roles.wait_for(lambda: self._shown_role is not Role.SWITCHING or self._closed)
        self.check()
        if self._shown_role is Role.LIVE:
            raise NotInSync(
                "the backup was lost or damaged during the switch: see the status of both, then switch again"
            )
        seconds = self._settings.terms.ttl / 1e9
        if not self._wait_for_other(seconds):
            raise LockUnavailable(
                f"this machine gave up its role, and the other one has not taken it within {seconds:g} s: whichever "
                "reaches the lock first becomes live; see the problem in the status of both"
            )

    def _wait_for_other(self, seconds: float) -> bool:
        """Wait until the lock says that another store is live; whether it does. Raises what `check` raises."""
        until = self._now() + round(seconds * 1e9)
        while self._now() < until and not self._closing.wait(SWITCH_SECONDS):
            self.check()
            with self._mutex:
                known = self._member.known
                if known is not None and known.record.live not in (b"", self._member.store):
                    return True
        self.check()
        return False

    def force(self) -> None:
        """Ask that this store becomes live although acknowledged records may be lost. Raises NotPromotable."""
        with self._mutex:
            self.check()
            if self.live:
                raise CallerError("this member of the pair is live already: there is nothing to force")
            self._step(m.ForceRequested())

    def status(self) -> dict[str, Any]:
        """What operators want to know, in every role: `status_of`, and what this node has counted.

        `swaps` are those of this node that the lock accepted, `copies` those that it has sent or received; `problem` is
        what has stopped it, or what is wrong with lock, link or store and is tried again, and why this store
        may not become live.
        """
        with self._mutex:
            self._lag.applied(self._member)
            found = status_of(self._member, self._lag, self._now())
            lost, why_not = self._member.record_lost, not_promotable(self._member)
        lock, link = self._requests.problem, self._links.problem or ("" if found["linked"] else self._transport.problem)
        known = {"link": link, "lock": lock, "store": self._store_problem}
        problems = [f"{what}: {why}" for what, why in known.items() if why]
        problems += [f"lock: {why_not}" if lost else f"this member can't become live: {why_not}"] if why_not else []
        problems += [LACKS_BACKUP] if found["waits_for_backup"] else []
        problem = str(self.failure) if self.failure is not None else "; ".join(problems)
        if lock and not found["linked"] and found["waits_for"]:
            found["waits_for"] = f"it is not known who is live: {lock}"
        return {**found, "swaps": self._requests.swaps, "copies": self._copies, "problem": problem}

    # --- the end ---

    def close(self) -> None:
        """End all threads and the session with the lock; the store stays open."""
        with self._ending:
            self._close()

    def _close(self) -> None:
        with self._mutex:
            if self._closed:
                return
            self._closed = True
            if self._opened:
                self._retire("the log is being closed")
        with self._roles:
            self._roles.notify_all()
        self._closing.set()
        self._transport.close()
        self._sender.close()
        self._journal.close()
        self._applies.close()
        self._requests.finish()
        self._changes.finish()
        for thread in self._threads if self._started else ():
            thread.join()
        self._lock.close()
