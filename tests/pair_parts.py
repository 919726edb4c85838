"""Parts for tests of a pair's node: a store in memory, a lock, and a transport between two nodes of one process

All three have faults that a test can set. They use the environment of the code that creates them, so they run on real
threads and on those of the simulator.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import google_crc32c

from broker_io.environment import current
from broker_io.errors import AppendUnknown, Damaged, DiskFailed, LockUnavailable, PeerError, TopicNotFound
from broker_io.filelog.log.records import START, Fork, LogRecord, Mark, Store, StoreLog
from broker_io.filelog.pair.node import PairNode
from broker_io.filelog.pair.port import CopyChunk, LinkEvents, StoreEvents
from broker_io.filelog.replication.lease import LockLease
from broker_io.filelog.replication.lock import NO_RECORD, LockRecord, LockView, Swap, accepts
from broker_io.filelog.replication.member import Settings
from broker_io.filelog.replication.messages import BuildEpoch, CopyBegin, Message, RewriteFinished

NS = 1_000_000_000


@dataclass
class MemoryDisk:
    """What a directory has after a crash. `state` are the marks and contents that the manifest has."""

    store: bytes
    base: Mark = START
    manifest: Mark = START
    journal: list[LogRecord] = field(default_factory=list)
    noted: int = 0
    partial: bool = False
    forks: tuple[Fork, ...] = ()
    state: tuple[tuple[Mark, bytes], ...] = ()
    aside: int = 0
    stores: int = 1
    copies: int = 0
    sync_seconds: float = 0.0
    fails: bool = False
    used: bool = False
    """Whether a process has it open."""


class MemoryStore:
    """A PairStore over a disk in memory; `state` is what is applied: marks and contents, by lsn."""

    def __init__(self, disk: MemoryDisk) -> None:
        self._clock = current().clock
        self._lock = current().threads.reentrant_lock()
        self.disk = disk
        self.state: list[tuple[Mark, bytes]] = []
        self.events: StoreEvents
        self.swapped: list[RewriteFinished] = []
        self.append: Callable[[bytes], object] = lambda _: None
        """What `put_in_place` calls, at a primary."""

    def open_log(self, events: StoreEvents) -> StoreLog:
        disk = self.disk
        assert not disk.used
        disk.used = True
        self.events, self.state = events, [*disk.state]
        return StoreLog.open(
            disk.store, disk.manifest, disk.base, disk.journal, disk.noted, disk.forks, partial=disk.partial
        )

    def _sync(self) -> None:
        if self.disk.fails:
            raise DiskFailed("the disk in memory fails: repair it")
        if self.disk.sync_seconds:
            self._clock.sleep(self.disk.sync_seconds)

    # journal

    def write(self, records: Sequence[LogRecord], synced: int) -> None:
        disk = self.disk
        end = disk.journal[-1].lsn if disk.journal else disk.base.lsn
        assert [each.lsn for each in records] == [*range(end + 1, end + 1 + len(records))]
        assert synced <= end
        if disk.sync_seconds and records[-1].lsn % 2:  # a crash within the sync keeps it, or not
            disk.journal += records
            self._sync()
        else:
            self._sync()
            disk.journal += records

    def note_commit(self, lsn: int) -> None:
        self.disk.noted = max(self.disk.noted, lsn)

    def read(self, first: int, last: int) -> Iterator[LogRecord]:
        found = [each for each in self.disk.journal if first < each.lsn <= last]
        assert len(found) == last - first
        yield from found

    def cut(self, lsn: int) -> None:
        self._sync()
        disk = self.disk
        assert len(self.state) <= lsn
        disk.journal = [each for each in disk.journal if each.lsn <= lsn]
        disk.noted = min(disk.noted, lsn)

    def drop_journal(self, lsn: int) -> None:
        disk = self.disk
        assert lsn <= disk.manifest.lsn
        kept = [each for each in disk.journal if each.lsn > lsn]
        disk.base = next(each.mark for each in disk.journal if each.lsn == lsn)
        disk.journal = kept

    def mark_partial(self, partial: bool) -> None:
        self._sync()
        self.disk.partial = partial

    def replace(self) -> Store:
        self._sync()
        disk = self.disk
        disk.stores += 1
        disk.aside += 1
        disk.store = disk.store[:1] + str(disk.stores).encode()
        disk.base = disk.manifest = START
        disk.journal, disk.noted, disk.forks, disk.state, disk.partial = [], 0, (), (), True
        self.state = []
        return disk.store

    def receive(self) -> MemoryReceiver:
        assert self.disk.partial
        return MemoryReceiver(self)

    def remove_files(self, names: Sequence[str]) -> None:
        pass

    # state

    @property
    def applied(self) -> list[int]:
        """The lsns of what is applied."""
        return [mark.lsn for mark, _ in self.state]

    def apply(self, lsn: int) -> None:
        with self._lock:
            disk = self.disk
            for record in [each for each in disk.journal if len(self.state) < each.lsn <= lsn]:
                assert record.lsn == len(self.state) + 1
                self.state.append((record.mark, record.content))
            assert len(self.state) >= lsn

    def epoch_content(self, effect: BuildEpoch) -> bytes:
        assert len(self.state) == effect.before.lsn, (len(self.state), effect)
        return b"epoch %d" % effect.epoch

    def put_in_place(self, result: RewriteFinished) -> None:
        self.append(b"swap %d" % result.number)
        self.swapped.append(result)

    def checkpoint(self) -> None:
        with self._lock:
            disk, state = self.disk, self.state
            if len(state) <= disk.manifest.lsn:
                return
            disk.state, disk.manifest = tuple(state), state[-1][0]
        self.events.checkpointed(disk.manifest)

    def begin_copy(self) -> MemoryCopy:
        self.checkpoint()
        self.disk.copies += 1
        forks = tuple(_forks(self.disk, self.state))
        return MemoryCopy(self.disk.manifest, forks, self.disk.state)

    def read_prepared(self, name: str, offset: int, size: int) -> bytes:
        if name != "prepared":
            raise TopicNotFound(f"there is no file {name}")
        return b"0123456789"[offset : offset + size]

    def close(self) -> None:
        self.disk.used = False


def _forks(disk: MemoryDisk, state: Sequence[tuple[Mark, bytes]]) -> Iterator[Fork]:
    yield from disk.forks
    for record in disk.journal:
        if record.kind == 2 and record.lsn <= len(state):
            before = state[record.lsn - 2][0] if record.lsn > 1 else START
            if Fork(record.mark.epoch, before) not in disk.forks:
                yield Fork(record.mark.epoch, before)


class MemoryCopy:
    def __init__(self, mark: Mark, forks: tuple[Fork, ...], state: tuple[tuple[Mark, bytes], ...]) -> None:
        self.mark = mark
        self.forks = forks
        self.closed = False
        self._rows = [[*mark, content.decode()] for mark, content in state]

    def __iter__(self) -> Iterator[CopyChunk]:
        offset = 0
        for row in self._rows:
            data = json.dumps(row).encode() + b"\n"
            yield _chunk("state", offset, data)
            offset += len(data)
        yield _chunk("manifest", 0, json.dumps(self.mark).encode())

    def close(self) -> None:
        self.closed = True


def _chunk(name: str, offset: int, data: bytes) -> CopyChunk:
    return CopyChunk(name, offset, data, google_crc32c.value(data))


class MemoryReceiver:
    def __init__(self, store: MemoryStore) -> None:
        self._store = store
        disk = store.disk
        disk.base = disk.manifest = START
        disk.journal, disk.noted, disk.forks, disk.state = [], 0, (), ()
        store.state = []
        self._files: dict[str, bytes] = {}
        self.closed = False

    def add(self, chunk: CopyChunk) -> None:
        assert not self.closed
        data = self._files.get(chunk.name, b"")
        if chunk.offset != len(data) or google_crc32c.value(chunk.data) != chunk.crc:
            raise Damaged(chunk.name, chunk.offset, "a chunk of a copy is damaged")
        self._files[chunk.name] = data + chunk.data

    def finish(self, mark: Mark, forks: tuple[Fork, ...]) -> None:
        assert not self.closed
        rows = [json.loads(line) for line in self._files.get("state", b"").splitlines()]
        if "manifest" not in self._files or Mark(*json.loads(self._files["manifest"])) != mark:
            raise Damaged("manifest", 0, "the copy is not complete")
        self._store._sync()
        disk = self._store.disk
        disk.state = tuple([(Mark(*row[:3]), row[3].encode()) for row in rows])
        disk.base = disk.manifest = mark
        disk.forks = forks
        self._store.state = [*disk.state]

    def close(self) -> None:
        self.closed = True


class LockServer:
    """The lock outside: a record, its lease and sessions; it ends them by its clock, if it has one."""

    def __init__(self, ttl: float, *, clocked: bool = True) -> None:
        environment = current()
        self._now = environment.clock.monotonic
        self._mutex = environment.threads.lock()
        self._ttl = ttl
        self.clocked = clocked
        self.record: LockRecord = NO_RECORD
        self.lease: LockLease | None = None
        self.sessions: dict[int, tuple[bytes, float]] = {}
        self.begun = 0
        self.on_swap: Callable[[LockRecord, LockRecord], None] = lambda _old, _new: None

    def _expire(self) -> None:
        if self.clocked:
            now = self._now()
            for session in [each for each, (_, end) in self.sessions.items() if end <= now]:
                self._end(session)

    def _end(self, session: int) -> None:
        self.sessions.pop(session, None)
        if self.lease is not None and self.lease.session == session:
            self.lease = None

    def view(self) -> LockView:
        with self._mutex:
            self._expire()
            return LockView(self.record, self.lease)

    def swap(self, swap: Swap) -> tuple[bool, LockView]:
        with self._mutex:
            self._expire()
            alive = self.sessions.get(swap.session, (b"", 0.0))[0] == swap.record.live
            accepted = accepts(LockView(self.record, self.lease), swap, session_alive=alive)
            if accepted:
                self.on_swap(self.record, swap.record)
                self.record = swap.record
                renewals = self.lease.renewals if self.lease is not None else 0
                self.lease = LockLease(swap.record.live, swap.session, renewals + 1)
            return accepted, LockView(self.record, self.lease)

    def renew(self, store: Store, session: int | None) -> int | None:
        with self._mutex:
            self._expire()
            if session is None:
                for each in [each for each, (owner, _) in self.sessions.items() if owner == store]:
                    self._end(each)
                self.begun += 1
                session = self.begun
            elif self.sessions.get(session, (b"", 0.0))[0] != store:
                return None
            self.sessions[session] = (store, self._now() + self._ttl)
            if self.lease is not None and self.lease.session == session:
                self.lease = self.lease._replace(renewals=self.lease.renewals + 1)
            return session

    def end(self, session: int) -> None:
        with self._mutex:
            self._end(session)


class MemoryLock:
    """A PairLock. `fault` is called before and after each request, with its name; it may raise LockUnavailable."""

    def __init__(self, server: LockServer, fault: Callable[[str, bool], None] = lambda _name, _after: None) -> None:
        self._server = server
        self._fault = fault
        self.clocked = server.clocked
        self.down = False
        self.closed = False

    def _ask(self, name: str, answer: Callable[[], Any]) -> Any:
        assert not self.closed
        if self.down:
            raise LockUnavailable("the lock in memory is down")
        self._fault(name, False)
        found = answer()
        self._fault(name, True)
        return found

    def read(self) -> LockView:
        view: LockView = self._ask("read", self._server.view)
        return view

    def swap(self, swap: Swap) -> tuple[bool, LockView]:
        answer: tuple[bool, LockView] = self._ask("swap", lambda: self._server.swap(swap))
        return answer

    def renew(self, store: Store, session: int | None, ttl: float) -> int | None:
        assert ttl == self._server._ttl
        number: int | None = self._ask("renew", lambda: self._server.renew(store, session))
        return number

    def end_session(self, session: int) -> None:
        self._ask("end", lambda: self._server.end(session))

    def close(self) -> None:
        self.closed = True


class Net:
    """The network between two transports. `cut` breaks links and prevents others while it is set.

    `fault` is called with each message before it is delivered; if it returns False the link breaks there.
    """

    def __init__(self) -> None:
        self.ends: list[LoopTransport] = []
        self.cut = False
        self.links = 0
        self.fault: Callable[[str, object], bool] = lambda _name, _message: True

    def break_links(self, reason: str = "cut") -> None:
        for end in self.ends:
            end.break_link(reason)

    def peer(self, transport: LoopTransport) -> LoopTransport | None:
        return next((end for end in self.ends if end is not transport), None)


class LoopLink:
    """One side of a link; a thread delivers what the other side sends."""

    def __init__(self, transport: LoopTransport, number: int) -> None:
        threads = transport.threads
        self.number = number
        self.transport = transport
        self.other: LoopLink | None = None
        self._changed = threads.condition()
        self._inbox: deque[Any] = deque()
        self._closed = False
        self._reason = ""
        self._thread = threads.thread(self._run, name=f"loop link {number}", daemon=True)

    def begin(self, other: LoopLink) -> None:
        self.other = other

    def start(self) -> None:
        self._thread.start()

    def send(self, message: Message) -> None:
        other = self.other
        if other is not None and not self._closed:
            other.put(message)

    def send_copy(self, begin: CopyBegin, copy: Any) -> None:
        try:
            self.send(begin)
            for chunk in copy:
                if self.other is not None and not self._closed:
                    self.other.put(chunk)
            if self.other is not None and not self._closed:
                self.other.put("end")
        finally:
            copy.close()

    def put(self, item: object) -> None:
        with self._changed:
            self._inbox.append(item)
            self._changed.notify_all()

    def end(self, reason: str) -> None:
        """This side ends; what has not arrived is lost."""
        with self._changed:
            if self._closed:
                return
            self._closed, self._reason = True, reason
            self._changed.notify_all()

    def close(self) -> None:
        self.end("closed here")
        if self.other is not None:
            self.other.end("closed by the peer")

    def _run(self) -> None:
        events, net = self.transport.events, self.transport.net
        events.up(self)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._inbox)
                if self._closed:
                    break
                item = self._inbox.popleft()
            if not net.fault(self.transport.name, item):
                self.close()
            elif item == "end":
                events.copy_end(self.number)
            elif isinstance(item, CopyChunk):
                events.copy_chunk(self.number, item)
            else:
                events.received(self.number, item)
        self.transport.forget(self)
        events.down(self.number, self._reason)


class LoopTransport:
    """A transport to the other transport of a Net."""

    def __init__(self, net: Net, name: str) -> None:
        environment = current()
        self.net = net
        self.name = name
        self.problem = ""
        self.events: LinkEvents
        self.threads = environment.threads
        self._mutex = environment.threads.lock()
        self._closing = environment.threads.event()
        self.link: LoopLink | None = None
        self._running: list[LoopLink] = []
        self._may_accept: Callable[[], bool]
        self._dialer = environment.threads.thread(self._connect, name=f"connect {name}", daemon=True)
        self._started = False

    def start(self, events: LinkEvents, may_accept: Callable[[], bool], may_connect: Callable[[], bool]) -> None:
        self.events, self._may_accept, self._may_connect = events, may_accept, may_connect
        self._started = True
        self.net.ends = [end for end in self.net.ends if end.name != self.name]
        self.net.ends.append(self)
        self._dialer.start()

    def _connect(self) -> None:
        while not self._closing.wait(0.02):
            peer = self.net.peer(self)
            if self.net.cut or peer is None or self.link is not None or not self._may_connect():
                continue
            if not peer.accepting():
                continue
            self.net.links += 1
            mine, its = LoopLink(self, 2 * self.net.links), LoopLink(peer, 2 * self.net.links + 1)
            mine.begin(its)
            its.begin(mine)
            if peer.accept(its):
                self._take(mine)

    def accepting(self) -> bool:
        return self._started and not self._closing.is_set() and self.link is None and self._may_accept()

    def accept(self, link: LoopLink) -> bool:
        if not self.accepting():
            return False
        self._take(link)
        return True

    def _take(self, link: LoopLink) -> None:
        with self._mutex:
            if self._closing.is_set():
                link.close()
                return
            self.link = link
            self._running.append(link)
            link.start()

    def forget(self, link: LoopLink) -> None:
        with self._mutex:
            if self.link is link:
                self.link = None
            self._running.remove(link)

    def break_link(self, reason: str) -> None:
        if (link := self.link) is not None:
            link.close()

    def fetch(self, name: str, offset: int, size: int) -> bytes:
        peer = self.net.peer(self)
        if self.link is None or peer is None:
            raise PeerError("there is no link")
        return peer.events.read_prepared(name, offset, size)

    def close(self) -> None:
        self._closing.set()
        with self._mutex:
            running = [*self._running]
        for link in running:
            link.close()
        if self._started:
            self._dialer.join()
            for link in running:
                link._thread.join()
        if self in self.net.ends:
            self.net.ends.remove(self)


def node_of(
    settings: Settings, store: MemoryStore, lock: MemoryLock, transport: LoopTransport, on_role: Callable[[bool], Any]
) -> PairNode:
    return PairNode(
        *(current(), settings, store, lock, transport),
        on_role=on_role,
        on_applied=lambda: None,
        on_swap=store.put_in_place,
        count=lambda _: 1,
    )


class Engine:
    """A client of a node: appends as the engine of a log does, and reads."""

    def __init__(self, node: PairNode, store: MemoryStore) -> None:
        self.node = node
        self.store = store
        self._work = current().threads.lock()

    def append(self, content: bytes) -> int:
        """Append, and return the lsn once it is acknowledged. Raises as the node does."""
        with self._work:
            built_on = len(self.store.state)
            mark: Mark = self.node.commit(content, lambda: len(self.store.state) == built_on)
            assert mark.lsn == built_on + 1
            self.store.apply(mark.lsn)
            self.node.applied()
            if not self.node.may_answer():
                raise AppendUnknown("the lease ended before the answer")
            return mark.lsn

    def read(self) -> list[bytes] | None:
        """Contents as a client is shown them, None if it is shown nothing."""
        found = [content for _, content in self.store.state]
        return found if self.node.reads().value == "send" else None
