"""The queues of a pair's node: what its threads do for the core, each kind of effect in order

The journal has a queue whose tasks any thread may perform, one at a time. So the thread that gets a record, from a
client or from the peer, also writes it, and no other thread has to wake up in between. All other tasks of the journal
and of the files are those of one thread, because they may take long. A thread of its own asks the lock, which may not
answer.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, NamedTuple, TypeAlias, TypeVar

from broker_io.environment import Mutex, Thread, Threads
from broker_io.errors import Closed, Damaged, DiskFailed, DiskFull, LockUnavailable, TooManyFiles
from broker_io.filelog.log.records import LogRecord, Mark, Store
from broker_io.filelog.pair.port import CopyChunk, CopyReceiver, PairLock, PairStore
from broker_io.filelog.replication.member import PairMember, Step
from broker_io.filelog.replication.messages import (
    Cut,
    DropJournal,
    EndSession,
    Event,
    LockRead,
    MarkPartial,
    NoteCommit,
    PartialSynced,
    ReadLock,
    RemoveFiles,
    Renew,
    Renewed,
    Replace,
    Replaced,
    SessionEnded,
    SwapAnswered,
    SwapLock,
    Synced,
    WasCut,
    WriteRecords,
)

T = TypeVar("T")


class EndCopy(NamedTuple):
    """Close a receiver that gets no more."""

    receiver: CopyReceiver


JournalTask: TypeAlias = WriteRecords | NoteCommit | Cut | MarkPartial | Replace | DropJournal | RemoveFiles | EndCopy


class TaskQueue(Generic[T]):
    """Tasks for one thread, in order. While it is held the thread takes none."""

    def __init__(self, threads: Threads) -> None:
        self._changed = threads.condition()
        self._tasks: deque[T] = deque()
        self._held = self._busy = self._closed = self._finished = False
        self._unwanted = False

    def put(self, task: T, replaces: Callable[[T], bool] | None = None) -> None:
        """Add a task, in place of those for which `replaces` is true."""
        with self._changed:
            if replaces is not None:
                self._tasks = deque([each for each in self._tasks if not replaces(each)])
            self._tasks.append(task)
            self._changed.notify_all()

    def take(self) -> T | None:
        """Wait for the next task, and say that the one before it is done; None once there will be none."""
        with self._changed:
            self._busy = False
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._closed or self._finished or (self._tasks and not self._held))
            if self._closed or not self._tasks:
                return None
            self._busy, self._unwanted = True, False
            return self._tasks.popleft()

    def hold(self, held: bool) -> None:
        with self._changed:
            self._held = held
            self._changed.notify_all()

    def pause(self, seconds: float) -> bool:
        """Wait within a task before another attempt; whether the task is still wanted."""
        with self._changed:
            return not self._changed.wait_for(lambda: self._closed or self._unwanted, seconds)

    def wait_idle(self) -> None:
        """Wait until the present task has ended."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or not self._busy)

    def drop(self) -> None:
        """Forget all tasks, and wait until the present one has ended, and until it is held no more.

        Raises Closed once the queue is closed: what the thread was doing may not be done.
        """
        with self._changed:
            self._unwanted = True
            self._tasks.clear()
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._closed or not (self._busy or self._held))
            if self._closed:
                raise Closed("the node of the pair was closed: open the log again")

    def finish(self) -> None:
        """Let the thread end once it has done all tasks."""
        with self._changed:
            self._finished = True
            self._changed.notify_all()

    def close(self) -> None:
        """Let the thread end, after its present task."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


class WorkThread(ABC):
    """A thread that exists only while there is work; `_work` sets `_thread` to None, under `_changed`, when it ends."""

    def __init__(self, threads: Threads, name: str) -> None:
        self._threads, self._name = threads, name
        self._changed = threads.condition()
        self._thread: Thread | None = None
        self._closed = False

    @abstractmethod
    def _work(self) -> None: ...

    def _wake(self) -> None:
        """There is work; the caller holds `_changed`."""
        if self._thread is None and not self._closed:
            self._thread = self._threads.thread(self._work, name=self._name, daemon=True)
            self._thread.start()
        self._changed.notify_all()

    def close(self) -> None:
        """End the thread, after the bytes that it waits for."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join()


class JournalTasks:
    """The tasks of the journal and the files of a store.

    `report` gets the events that follow from them, `fail` the first error, after which nothing more is done.
    `wait_idle` is called before all that is applied is replaced; it waits until nothing is being applied any more.
    """

    def __init__(
        self,
        threads: Threads,
        store: PairStore,
        report: Callable[[Event], None],
        fail: Callable[[Exception], None],
        wait_idle: Callable[[], None],
    ) -> None:
        self._store = store
        self._report = report
        self._fail = fail
        self.wait_idle = wait_idle
        self._changed = threads.condition()
        self._tasks: deque[JournalTask] = deque()
        self._busy = self._closed = False
        self._turns = 0
        self._noted = self._in_journal = 0

    def put(self, task: JournalTask, *, wake: bool) -> None:
        """Add a task; without `wake` the caller calls `write` after that."""
        with self._changed:
            if self._closed:
                return
            self._tasks.append(task)
            if wake:
                self._changed.notify_all()

    def note(self, lsn: int) -> None:
        """Remember a commit index that the journal should have."""
        with self._changed:
            self._noted = max(self._noted, lsn)

    def forget(self) -> None:
        """Another journal has taken the place of this one, within a `turn`."""
        with self._changed:
            self._noted = self._in_journal = 0

    def write_note(self) -> None:
        """Write the commit index unless a record that was written later has it."""
        with self._changed:
            if self._noted > self._in_journal and not (self._tasks or self._closed):
                self._tasks.append(NoteCommit(self._noted))
                self._changed.notify_all()

    def write(self) -> None:
        """Write the records that wait, if nothing else is before them and no thread is at work."""
        while (task := self._take(only_records=True)) is not None:
            self._perform(task)

    def run(self) -> None:
        """Perform tasks until the queue is closed."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or (self._tasks and not self._busy))
                if self._closed:
                    return
            while (task := self._take(only_records=False)) is not None:
                self._perform(task)

    def _take(self, *, only_records: bool) -> JournalTask | None:
        with self._changed:
            if self._busy or self._closed or not self._tasks:
                return None
            if not isinstance(self._tasks[0], WriteRecords):
                if only_records:
                    self._changed.notify_all()
                    return None
                self._busy = True
                return self._tasks.popleft()
            self._busy = True
            first, records = self._tasks[0], list[LogRecord]()
            while self._tasks and isinstance(task := self._tasks[0], WriteRecords):
                records += task.records
                self._tasks.popleft()
            return WriteRecords(tuple(records), first.synced)

    def _perform(self, task: JournalTask) -> None:
        with self._working():
            if (event := self._do(task)) is not None:
                self._report(event)

    @contextlib.contextmanager
    def _working(self) -> Iterator[None]:
        """Run one task; the caller has set `_busy`."""
        try:
            yield
        except Exception as error:
            with self._changed:
                self._closed = True
                self._tasks.clear()
            self._fail(error)
        finally:
            with self._changed:
                self._busy = False
                if self._tasks or self._turns or self._closed:
                    self._changed.notify_all()

    def _do(self, task: JournalTask) -> Event | None:
        store = self._store
        if isinstance(task, WriteRecords):
            store.write(task.records, task.synced)
            self._in_journal = max(self._in_journal, task.records[-1].commit)
            return Synced(task.records[-1].lsn)
        if isinstance(task, NoteCommit):
            store.note_commit(task.lsn)
            self._in_journal = max(self._in_journal, task.lsn)
        elif isinstance(task, Cut):
            store.cut(task.lsn)
            self.forget()
            return WasCut(task.lsn)
        elif isinstance(task, MarkPartial):
            store.mark_partial(task.partial)
            return PartialSynced(task.partial)
        elif isinstance(task, Replace):
            self.wait_idle()
            self.forget()
            return Replaced(store.replace())
        elif isinstance(task, DropJournal):
            store.drop_journal(task.lsn)
        elif isinstance(task, RemoveFiles):
            store.remove_files(task.names)
        else:
            task.receiver.close()
        return None

    @contextlib.contextmanager
    def turn(self) -> Iterator[bool]:
        """Do something else with the journal and the files, after all tasks; False if the queue is closed."""
        with self._changed:
            self._turns += 1
            self._changed.wait_for(lambda: self._closed or not (self._busy or self._tasks))
            self._turns -= 1
            works = not self._closed
            self._busy = self._busy or works
        if not works:
            yield False
            return
        with self._working():
            yield True

    def close(self) -> None:
        """Forget all tasks, wait until the present one has ended, and write the commit index."""
        with self._changed:
            failed, self._closed = self._closed, True
            self._tasks.clear()
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._busy)
        if self._noted > self._in_journal and not failed:
            with contextlib.suppress(DiskFailed):  # it only saves the next start some work
                self._store.note_commit(self._noted)


class CopyReception:
    """The copy of the present link of a `member`; `mutex` is the node's.

    `broken` gets a link whose copy is invalid, `copied` the mark of a copy that is complete, under the mutex.
    """

    def __init__(
        self,
        mutex: Mutex,
        member: Callable[[], PairMember],
        store: PairStore,
        journal: JournalTasks,
        broken: Callable[[int, str], None],
        copied: Callable[[Mark], None],
    ) -> None:
        self._mutex, self._member, self._store, self._journal = mutex, member, store, journal
        self._broken, self._copied = broken, copied
        self._receiver: tuple[int, CopyReceiver] | None = None

    def _copying(self, number: int) -> Mark | None:
        """The mark of the copy that a link brings, if it still counts."""
        member = self._member()
        joining = member.joining
        wanted = number == member.link and member.log.partial and joining is not None and joining.step is Step.COPY
        return joining.copy_at if wanted and joining is not None else None

    def receive(self, number: int, chunk: CopyChunk | None) -> None:
        """Take a part of a copy that a link brings; None: there is no more."""
        problem = ""
        with self._journal.turn() as works:
            with self._mutex:
                at = self._copying(number)
                receiver = self._receiver[1] if self._receiver is not None else None
            if not works or at is None:
                return
            try:
                if receiver is None:
                    receiver = self._begin(number)
                if chunk is not None:
                    receiver.add(chunk)
                else:
                    self._finish(number, receiver, at)
            except (Damaged, DiskFull, TooManyFiles) as error:  # nothing is lost: another copy can be complete
                problem = str(error)
        if problem:
            self._broken(number, problem)

    def _begin(self, number: int) -> CopyReceiver:
        self._journal.wait_idle()
        receiver = self._store.receive()
        with self._mutex:
            self._receiver = (number, receiver)
            if self._member().link != number:
                self.end(number)
        return receiver

    def _finish(self, number: int, receiver: CopyReceiver, at: Mark) -> None:
        with self._mutex:
            joining, self._receiver = self._member().joining, None
            forks = () if joining is None else joining.forks
        try:
            receiver.finish(at, forks)
        finally:
            receiver.close()
        self._journal.forget()
        with self._mutex:
            if self._copying(number) == at:
                self._copied(at)

    def end(self, number: int) -> None:
        """A link has ended; the caller holds the mutex."""
        if self._receiver is not None and self._receiver[0] == number:
            self._journal.put(EndCopy(self._receiver[1]), wake=True)
            self._receiver = None


Asked: TypeAlias = ReadLock | SwapLock | Renew | EndSession


class LockRequest(NamedTuple):
    """A request to the lock, of a store."""

    effect: Asked
    store: Store


class LockRequests:
    """Requests of the present `member` to a lock; `report` gets the answers as events.

    `ttl` is that of sessions, in seconds. `swaps`: how many the lock accepted. `problem`: why it does not answer.
    """

    def __init__(
        self,
        threads: Threads,
        lock: PairLock,
        ttl: float,
        member: Callable[[], PairMember],
        report: Callable[[Event], None],
    ) -> None:
        self.swaps = 0
        self.problem = ""
        self._lock, self._ttl, self._member, self._report = lock, ttl, member, report
        self._requests: TaskQueue[LockRequest] = TaskQueue(threads)

    def ask(self, effect: Asked) -> None:
        """Ask the lock; a newer request of the same kind takes the place of one that was not sent."""
        kind = type(effect)
        repeated = kind is not EndSession
        request = LockRequest(effect, self._member().store)
        self._requests.put(request, lambda each: repeated and type(each.effect) is kind)

    def end(self, session: int) -> None:
        """End a session instead of all that was not sent."""
        self._requests.put(LockRequest(EndSession(session), self._member().store), lambda _: True)

    def finish(self) -> None:
        """Let the thread end once it has sent all requests."""
        self._requests.finish()

    def run(self) -> None:
        """Ask the lock, and report its answers, until `finish`."""
        while (request := self._requests.take()) is not None:
            try:
                event = self._answer(request) if self._counts(request.effect) else None
            except LockUnavailable as error:
                self.problem = str(error)
            else:
                self.problem = ""
                if event is not None and self._counts(request.effect):
                    self._report(event)

    def _counts(self, effect: Asked) -> bool:
        """Whether a renewal is one of the present session: to begin another one would end it."""
        return not isinstance(effect, Renew) or effect.session == self._member().session.number

    def _answer(self, request: LockRequest) -> Event | None:
        lock, effect = self._lock, request.effect
        if isinstance(effect, ReadLock):
            return LockRead(effect.request, lock.read())
        if isinstance(effect, SwapLock):
            accepted, view = lock.swap(effect.swap)
            self.swaps += accepted
            return SwapAnswered(effect.request, accepted, view)
        if isinstance(effect, EndSession):
            lock.end_session(effect.session)
            return None
        number = lock.renew(request.store, effect.session, self._ttl)
        if number is not None:
            return Renewed(number, effect.sent)
        return None if effect.session is None else SessionEnded(effect.session)
