"""The world of the pair's model: two stores on two nodes, a lock, a link, clients and readers; and what must hold.

Everything that happens is an action, a tuple. `World.actions` lists what may happen next, `World.do` does one of them
with the core of the product, and raises Violation as soon as one of these does not hold:

    R1  every store that the lock would promote has every acknowledged record, at its lsn
    R2  and every record that a reader was shown
    R3  an epoch has one primary; a read shows everything that was acknowledged before it
    R4  logs agree up to the commit index, and what is applied is what was committed
    R5  once all faults have ended, both are in sync again (`settle`)

A crash keeps a prefix of what was written and not synced. Links lose nothing until they break. Swaps of the lock may
arrive at any time while their session lives, their answers may be lost. Clocks drift as much as the settings allow.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from broker_io.errors import Error
from broker_io.filelog.log.records import START, Fork, LogRecord, Mark, StoreLog, shown_end
from broker_io.filelog.replication import messages as m
from broker_io.filelog.replication.lease import LockLease, Terms
from broker_io.filelog.replication.lock import NO_RECORD, LockRecord, LockView, accepts
from broker_io.filelog.replication.member import PairMember, Role, Settings
from broker_io.filelog.replication.serving import Gate, has_room, reads, refusal
from broker_io.filelog.replication.states import step

Action: TypeAlias = tuple[Any, ...]
TTL = 1000
QUANTUM = 250
"""How much time passes at once."""
DRIFT = 0.1
SETTINGS = Settings(
    Terms(TTL, DRIFT), founder=True, member_timeout=500, answer_timeout=250, window_bytes=1000, stall=500
)
LIVE_ROLES = (Role.OPENING, Role.LIVE, Role.SWITCHING)


class Violation(AssertionError):
    """A rule that does not hold."""


class Eof(NamedTuple):
    """The end of a link, as the other side sees it."""


class CopyData(NamedTuple):
    """The files of a copy: the marks of everything that is applied."""

    at: Mark
    state: tuple[Mark, ...]
    forks: tuple[Fork, ...]


@dataclass
class Disk:
    """What a directory has: `journal` is durable, from `base` on, `written` is not yet, nor is `noted`.

    `state` are the marks of what is applied up to the manifest.
    """

    store: bytes
    base: Mark = START
    manifest: Mark = START
    journal: list[LogRecord] = field(default_factory=list)
    written: list[LogRecord] = field(default_factory=list)
    noted: int = 0
    partial: bool = False
    forks: tuple[Fork, ...] = ()
    state: tuple[Mark, ...] = ()

    def has(self, lsn: int, mark: Mark) -> bool:
        """Whether a record is durable here."""
        if lsn <= len(self.state):
            return self.state[lsn - 1] == mark
        at = lsn - self.base.lsn - 1
        return 0 <= at < len(self.journal) and self.journal[at].mark == mark


@dataclass
class Node:
    """A machine: its disk, its process if it runs, and what its process waits for.

    `state` are the marks of what is applied in memory. `tasks` of the disk are done in order.
    """

    name: str
    disk: Disk
    rate: int = 1000
    member: PairMember | None = None
    process: int = 0
    paused: bool = False
    state: tuple[Mark, ...] = ()
    tasks: list[Any] = field(default_factory=list)
    applies: list[int] = field(default_factory=list)
    inbound: list[tuple[int, Any]] = field(default_factory=list)
    appended: int = 0
    stores: int = 1


@dataclass
class Lock:
    """The lock: its record and lease, the sessions and when they end, and requests and answers under way."""

    record: LockRecord = NO_RECORD
    lease: LockLease | None = None
    sessions: dict[int, tuple[bytes, int]] = field(default_factory=dict)
    requests: list[tuple[int, int, m.SwapLock]] = field(default_factory=list)
    answers: list[tuple[int, int, m.Event]] = field(default_factory=list)
    begun: int = 0
    cut_off: tuple[int, ...] = ()

    def view(self) -> LockView:
        return LockView(self.record, self.lease)

    def end(self, session: int) -> None:
        self.sessions.pop(session, None)
        if self.lease is not None and self.lease.session == session:
            self.lease = None

    def end_all(self, store: bytes) -> None:
        for session in [each for each, (owner, _) in self.sessions.items() if owner == store]:
            self.end(session)


@dataclass
class World:
    """Both nodes, and the history of what was acknowledged, shown and committed, by lsn."""

    settings: Settings = SETTINGS
    nodes: list[Node] = field(default_factory=lambda: [Node("a", Disk(b"a1")), Node("b", Disk(b"b1"))])
    lock: Lock = field(default_factory=Lock)
    real: int = 0
    links: int = 0
    linked: bool = False
    acked: dict[int, Mark] = field(default_factory=dict)
    shown: dict[int, Mark] = field(default_factory=dict)
    committed: dict[int, Mark] = field(default_factory=dict)
    epochs: dict[int, tuple[int, int]] = field(default_factory=dict)
    forked: tuple[bytes, ...] = ()
    lost: int = 0
    used: Counter[str] = field(default_factory=Counter)
    slow: bool = False
    """Applies are actions of their own."""
    slow_lock: bool = False
    """So are the answers of the lock to reads and renewals."""
    eager: bool = False
    """A primary builds records while others are under way."""

    def now(self, node: Node) -> int:
        return self.real * node.rate // 1000

    # ---- what may happen

    def actions(self, limits: dict[str, int]) -> Iterator[Action]:
        """What may happen next; `limits` bounds appends and faults."""
        yield ("time",)
        for at, node in enumerate(self.nodes):
            yield from self._of_node(at, node, limits)
        for at in range(len(self.lock.requests)):
            yield ("swap", at)
        for at in range(len(self.lock.answers)):
            yield ("answer", at)
            if self._left(limits, "lose"):
                yield ("lose", at)
        both = all(node.member is not None for node in self.nodes)
        if both and not self.linked:
            yield ("link",)
        if self.linked and self._left(limits, "break"):
            yield ("break",)

    def _left(self, limits: dict[str, int], kind: str) -> bool:
        return self.used[kind] < limits.get(kind, 0)

    def _of_node(self, at: int, node: Node, limits: dict[str, int]) -> Iterator[Action]:
        member = node.member
        if member is None:
            yield ("start", at)
            if self._left(limits, "look") and shown_end(*_directory(node.disk)) > len(self.shown):
                yield ("look", at)
            if self._left(limits, "wipe") and set(self.lock.record.in_sync) - {node.disk.store}:
                yield ("wipe", at)
            return
        if node.paused:
            yield ("resume", at)
            return
        if node.tasks:
            yield ("disk", at)
        if node.applies:
            yield ("apply", at)
        if node.inbound:
            yield ("net", at)
        takes = refusal(member, self.now(node)) is None and (self.eager or has_room(member))
        if takes and self._left(limits, "append"):
            yield ("append", at)
        if member.role in LIVE_ROLES and len(node.state) > len(self.shown) and self._left(limits, "read"):
            yield ("read", at)
        yield from self._faults(at, node, member, limits)

    def _faults(self, at: int, node: Node, member: PairMember, limits: dict[str, int]) -> Iterator[Action]:
        for fault in ("crash", "pause", "checkpoint", "isolate"):
            if self._left(limits, fault):
                yield (fault, at) if fault != "isolate" or at not in self.lock.cut_off else ("reach", at)
        if node.disk.written and self._left(limits, "crash"):
            yield ("crash", at, len(node.disk.written))
        if self._left(limits, "switch") and member.role is Role.LIVE:
            yield ("switch", at)
        if self._left(limits, "force") and member.role is Role.BACKUP:
            yield ("force", at)

    # ---- what happens

    def do(self, action: Action) -> None:
        """Do one action, and check the rules."""
        kind, *rest = action
        self.used[kind] += 1
        getattr(self, f"_{kind}")(*rest)
        self.check()

    def _time(self) -> None:
        self.real += QUANTUM
        lock = self.lock
        if self.settings.terms.clocked:
            for session in [each for each, (_, end) in lock.sessions.items() if end <= self.real]:
                lock.end(session)
        for at, node in enumerate(self.nodes):
            if node.member is not None and not node.paused:
                self.give(at, m.Tick())

    def _start(self, at: int) -> None:
        node = self.nodes[at]
        disk = node.disk
        log = StoreLog.open(
            disk.store, disk.manifest, disk.base, disk.journal, disk.noted, disk.forks, partial=disk.partial
        )
        settings = self.settings._replace(founder=self.settings.founder and at == 0)
        node.member, node.state, node.process = PairMember(settings, log), disk.state, node.process + 1
        node.appended = 0
        self.give(at, m.Start())

    def _crash(self, at: int, kept: int = 0) -> None:
        """The process ends; some of what was written and not synced is kept."""
        node = self.nodes[at]
        disk = node.disk
        tasks = [task for task in node.tasks if isinstance(task, m.Cut)]
        if not tasks:
            disk.journal += disk.written[:kept]
        disk.written.clear()
        if kept == 0:
            disk.noted = 0
        node.member, node.paused = None, False
        node.tasks, node.applies, node.inbound = [], [], []
        if self.linked:
            self._break()

    def _wipe(self, at: int) -> None:
        """The disk is replaced; that takes longer than the session lives."""
        node = self.nodes[at]
        self.lock.end_all(node.disk.store)
        node.stores += 1
        node.disk, node.state = Disk(f"{node.name}{node.stores}".encode()), ()

    def _pause(self, at: int) -> None:
        self.nodes[at].paused = True

    def _resume(self, at: int) -> None:
        self.nodes[at].paused = False

    def _isolate(self, at: int) -> None:
        self.lock.cut_off += (at,)

    def _reach(self, at: int) -> None:
        self.lock.cut_off = tuple(each for each in self.lock.cut_off if each != at)

    def _link(self) -> None:
        self.links += 1
        self.linked = True
        for node in self.nodes:
            node.inbound.append((self.links, m.LinkUp(self.links)))

    def _break(self) -> None:
        """The link breaks; everything under way is lost."""
        self.linked = False
        for node in self.nodes:
            if node.member is not None:
                node.inbound = [(self.links, Eof())]

    def _net(self, at: int) -> None:
        node = self.nodes[at]
        link, message = node.inbound.pop(0)
        if isinstance(message, m.LinkUp):
            self.give(at, message)
        elif isinstance(message, Eof):
            self.give(at, m.LinkDown(link))
        elif isinstance(message, CopyData):
            self._receive_copy(at, link, message)
        else:
            self.give(at, m.Received(link, message))

    def _receive_copy(self, at: int, link: int, message: CopyData) -> None:
        """The files of a copy replace what the store has, while they are written."""
        node = self.nodes[at]
        member = node.member
        if member is None or member.link != link or member.joining is None or member.joining.copy_at != message.at:
            return
        disk = node.disk
        if not disk.partial:
            raise Violation("R1: a store that is not marked as partial is overwritten")
        disk.journal, disk.base, disk.manifest, disk.state, disk.noted = [], START, START, (), 0
        node.tasks.append(message)

    def _swap(self, request: int) -> None:
        """A swap arrives at the lock."""
        at, process, effect = self.lock.requests.pop(request)
        lock, swap = self.lock, effect.swap
        accepted = accepts(lock.view(), swap, session_alive=swap.session in lock.sessions)
        if accepted:
            if swap.record.forced is not None and swap.record.forced != lock.record.forced:
                self._forget(at, swap.record.forced)
            lock.record = swap.record
            renewals = lock.lease.renewals if lock.lease is not None else 0
            lock.lease = LockLease(swap.record.live, swap.session, renewals + 1)
        lock.answers.append((at, process, m.SwapAnswered(effect.request, accepted, lock.view())))

    def _forget(self, at: int, cut: Mark) -> None:
        """An operator accepts that what is beyond a mark is lost."""
        for history in (self.acked, self.shown, self.committed):
            for lsn in [each for each in history if each > cut.lsn]:
                del history[lsn]
        self.forked = (*self.forked, self.nodes[1 - at].disk.store)
        self.lost += 1

    def _answer(self, answer: int) -> None:
        at, process, event = self.lock.answers.pop(answer)
        node = self.nodes[at]
        if node.member is not None and node.process == process and not node.paused:
            self.give(at, event)

    def _lose(self, answer: int) -> None:
        self.lock.answers.pop(answer)

    def _append(self, at: int) -> None:
        self.give(at, m.AppendRequested(b"append %d" % self.used["append"]))

    def _switch(self, at: int) -> None:
        self._try(at, m.SwitchRequested())

    def _force(self, at: int) -> None:
        self._try(at, m.ForceRequested())

    def _try(self, at: int, event: m.Event) -> None:
        try:
            self.give(at, event)
        except Error:
            self.used["refused"] += 1

    def _disk(self, at: int) -> None:
        """The next task of a disk is done, durably."""
        node = self.nodes[at]
        disk, task = node.disk, node.tasks.pop(0)
        if isinstance(task, m.WriteRecords):
            assert disk.written[: len(task.records)] == list(task.records)
            del disk.written[: len(task.records)]
            disk.journal += task.records
            self.give(at, m.Synced(task.records[-1].lsn))
        elif isinstance(task, m.MarkPartial):
            disk.partial = task.partial
            self.give(at, m.PartialSynced(task.partial))
        elif isinstance(task, m.Cut):
            del disk.journal[max(0, task.lsn - disk.base.lsn) :]
            disk.noted = min(disk.noted, task.lsn)
            self.give(at, m.WasCut(task.lsn))
        elif isinstance(task, m.Replace):
            node.stores += 1
            node.disk, node.state = Disk(f"{node.name}{node.stores}".encode(), partial=True), ()
            node.applies.clear()
            self.give(at, m.Replaced(node.disk.store))
        else:
            disk.base, disk.manifest, disk.state, disk.journal = task.at, task.at, task.state, []
            node.state, disk.forks = task.state, task.forks
            node.applies.clear()
            self.give(at, m.Copied(task.at))

    def _apply(self, at: int) -> None:
        """Apply what was asked for first."""
        node = self.nodes[at]
        lsn = node.applies.pop(0)
        marks = self.full(node)
        if lsn > len(marks):
            raise Violation(f"R4: {node.name} applies up to {lsn}, and has {len(marks)} records")
        node.state = node.state if lsn <= len(node.state) else marks[:lsn]
        self.give(at, m.Applied(lsn))

    def _checkpoint(self, at: int) -> None:
        """Write a manifest; records before it are removed if they may be."""
        node = self.nodes[at]
        member, disk = node.member, node.disk
        assert member is not None
        lsn = min(len(node.state), member.log.applied, disk.base.lsn + len(disk.journal))
        if member.busy or disk.partial or lsn <= disk.manifest.lsn:
            return
        disk.manifest, disk.state = node.state[lsn - 1], node.state[:lsn]
        disk.forks = tuple(fork for fork in member.log.forks if fork.before.lsn < lsn)
        self.give(at, m.Checkpointed(disk.manifest))

    # ---- readers

    def _read(self, at: int) -> None:
        """A client reads everything at a node: evaluated, then checked, then sent."""
        node = self.nodes[at]
        assert node.member is not None
        seen = node.state
        if reads(node.member, self.now(node)) is not Gate.SEND:
            return
        for lsn, mark in self.acked.items():
            if lsn > len(seen) or seen[lsn - 1] != mark:
                raise Violation(f"R3: a read at {node.name} does not show record {lsn}, which was acknowledged")
        self._show(seen)

    def _look(self, at: int) -> None:
        """A process reads a directory that nobody has open."""
        disk = self.nodes[at].disk
        if disk.store in self.forked or disk.partial:
            return
        manifest, records, noted = _directory(disk)
        marks = (*disk.state, *[each.mark for each in records if each.lsn > manifest.lsn])
        self._show(marks[: shown_end(manifest, records, noted)])

    def _show(self, seen: tuple[Mark, ...]) -> None:
        for lsn, mark in enumerate(seen, 1):
            if self.shown.setdefault(lsn, mark) != mark:
                raise Violation(f"R2: readers were shown two records {lsn}")

    # ---- effects

    def give(self, at: int, event: m.Event) -> None:
        """Give a node's process an event, and carry out what follows from it."""
        events = [event]
        node = self.nodes[at]
        while events and node.member is not None:
            for effect in step(node.member, events.pop(0), self.now(node)):
                events += self._carry(at, node, effect)

    def _carry(self, at: int, node: Node, effect: m.Effect) -> Iterator[m.Event]:
        """Carry out an effect; the events that follow at once."""
        if isinstance(effect, m.ReadLock | m.SwapLock | m.Renew | m.EndSession):
            yield from self._ask_lock(at, node, effect)
        elif isinstance(effect, m.Apply):
            node.applies.append(effect.lsn)
            if not self.slow:
                self._apply(at)
        elif isinstance(effect, m.AnswerClients):
            self._acknowledge(node, effect.lsn)
        elif isinstance(effect, m.BuildEpoch):
            yield m.EpochContent(effect.epoch, b"epoch %d" % effect.epoch)
        elif isinstance(effect, m.DropJournal):
            del node.disk.journal[: effect.lsn - node.disk.base.lsn]
            node.disk.base = node.state[effect.lsn - 1]
        elif isinstance(effect, m.NoteCommit):
            node.disk.noted = max(node.disk.noted, effect.lsn)
        elif isinstance(effect, m.WriteRecords | m.MarkPartial | m.Cut | m.Replace):
            if isinstance(effect, m.WriteRecords):
                node.disk.written += effect.records
            node.tasks.append(effect)
        elif isinstance(effect, m.SendMessage | m.SendStored | m.SendCopy | m.BreakLink):
            self._transmit(at, node, effect)
        elif isinstance(effect, m.Stop):
            self._crash(at)

    def _ask_lock(
        self, at: int, node: Node, effect: m.ReadLock | m.SwapLock | m.Renew | m.EndSession
    ) -> Iterator[m.Event]:
        lock = self.lock
        if isinstance(effect, m.SwapLock):
            lock.requests.append((at, node.process, effect))
        elif isinstance(effect, m.EndSession):
            lock.end(effect.session)
        elif at in lock.cut_off:
            return
        else:
            event: m.Event = (
                m.LockRead(effect.request, lock.view()) if isinstance(effect, m.ReadLock) else self._renewed(at, effect)
            )
            if self.slow_lock:
                lock.answers.append((at, node.process, event))
            else:
                yield event

    def _renewed(self, at: int, effect: m.Renew) -> m.Event:
        lock, session, store = self.lock, effect.session, self.nodes[at].disk.store
        if session is None:
            lock.end_all(store)
            lock.begun += 1
            session = lock.begun
        elif session not in lock.sessions:
            return m.SessionEnded(session)
        lock.sessions[session] = (store, self.real + TTL)
        if lock.lease is not None and lock.lease.session == session:
            lock.lease = lock.lease._replace(renewals=lock.lease.renewals + 1)
        return m.Renewed(session, effect.sent)

    def _transmit(self, at: int, node: Node, effect: m.SendMessage | m.SendStored | m.SendCopy | m.BreakLink) -> None:
        other = self.nodes[1 - at]
        if effect.link != self.links or not self.linked:
            return
        if isinstance(effect, m.BreakLink):
            self.linked = False
            other.inbound.append((effect.link, Eof()))
            node.inbound = [each for each in node.inbound if each[0] != effect.link]
        elif isinstance(effect, m.SendMessage):
            if isinstance(effect.message, m.Rejoin):
                self.used[effect.message.plan.value] += 1
            other.inbound.append((effect.link, effect.message))
        elif isinstance(effect, m.SendStored):
            stored = [*node.disk.journal, *node.disk.written]
            records = tuple(each for each in stored if effect.first < each.lsn <= effect.last)
            assert len(records) == effect.last - effect.first
            other.inbound.append((effect.link, effect.template._replace(records=records)))
        else:
            at = effect.begin.at
            assert node.state[at.lsn - 1] == at if at.lsn else at == START
            data = CopyData(at, node.state[: at.lsn], effect.begin.forks)
            other.inbound += [(effect.link, effect.begin), (effect.link, data)]

    def _acknowledge(self, node: Node, upto: int) -> None:
        for lsn, mark in enumerate(self.full(node)[:upto], 1):
            if lsn > len(node.state):
                raise Violation(f"R2: record {lsn} is acknowledged and can't be read")
            if self.acked.setdefault(lsn, mark) != mark:
                raise Violation(f"R1: two records {lsn} are acknowledged")

    # ---- rules

    def full(self, node: Node) -> tuple[Mark, ...]:
        """The marks of everything that a running node has, durable or not."""
        assert node.member is not None
        index = node.member.log.index
        return (*node.state[: index.base.lsn], *index.marks)

    def check(self) -> None:
        """Raises Violation."""
        for at, node in enumerate(self.nodes):
            disk, member = node.disk, node.member
            if disk.store in self.lock.record.in_sync:
                self._check_promotable(node)
            if member is None or member.log.partial or disk.partial or disk.store in self.forked:
                continue
            self._check_member(at, node, member)

    def _check_promotable(self, node: Node) -> None:
        forced = self.lock.record.forced
        for rule, history in (("R1", self.acked), ("R2", self.shown)):
            for lsn, mark in history.items():
                if not node.disk.has(lsn, mark) and (forced is None or lsn <= forced.lsn):
                    raise Violation(f"{rule}: {node.name} may be promoted and lacks record {lsn}")
        if node.disk.partial:
            raise Violation(f"R1: {node.name} is in sync and partial")

    def _check_member(self, at: int, node: Node, member: PairMember) -> None:
        marks, log = self.full(node), member.log
        if member.role in LIVE_ROLES:
            owner = (at, node.process)
            if self.epochs.setdefault(member.leading.epoch, owner) != owner:
                raise Violation(f"R3: epoch {member.leading.epoch} has two lives")
        if log.commit > len(marks) or len(node.state) > log.commit:
            raise Violation(f"R4: {node.name} has {len(marks)}, applied {len(node.state)}, committed {log.commit}")
        if member.busy:
            return
        for lsn in range(1, log.commit + 1):
            if self.committed.setdefault(lsn, marks[lsn - 1]) != marks[lsn - 1]:
                raise Violation(f"R4: two records {lsn} are committed, one of them at {node.name}")
        if node.state != marks[: len(node.state)]:
            raise Violation(f"R4: {node.name} has applied what is not in its log")

    # ---- R5

    def settle(self, rounds: int = 60) -> None:
        """End all faults; within so many quanta of time both nodes are in sync. Raises Violation."""
        self.lock.cut_off = ()
        for at, node in enumerate(self.nodes):
            if node.member is None:
                self.do(("start", at))
            node.paused = False
        for _ in range(rounds):
            self._work_off()
            if self.in_sync():
                return
            self.do(("time",))
        record = self.lock.record
        roles = [node.member.role.value for node in self.nodes if node.member is not None]
        raise Violation(f"R5: not in sync again: {record}, {roles}")

    def _work_off(self) -> None:
        for _ in range(2000):
            actions = self.actions({})
            action = next((each for each in actions if each[0] not in ("time", "start")), None)
            if action is None:
                return
            self.do(action)
        raise Violation("R5: messages without end")

    def in_sync(self) -> bool:
        members = [node.member for node in self.nodes if node.member is not None]
        stores = {member.store for member in members}
        ends = {member.log.index.end for member in members}
        commits = {member.log.commit for member in members}
        live = [member for member in members if member.role is Role.LIVE]
        whole = len(ends) == len(commits) == 1 and commits == {end.lsn for end in ends}
        return {*self.lock.record.in_sync} == stores and len(live) == 1 and len(stores) == 2 and whole


def _directory(disk: Disk) -> tuple[Mark, list[LogRecord], int]:
    """What a reader of a directory finds: the manifest, the journal after it, the commit index noted by itself."""
    return disk.manifest, [*disk.journal, *disk.written], disk.noted


ATOMS = (int, str, bytes, bool, type(None), Role)


def clone(value: Any) -> Any:
    """A copy that shares what never changes."""
    kind = type(value)
    if kind is list:
        return [clone(each) for each in value]
    if kind is dict or kind is Counter:
        return value.copy()
    if isinstance(value, tuple) or kind in ATOMS or not hasattr(value, "__dict__"):
        return value
    if kind.__module__ == "enum" or not hasattr(value, "__dataclass_fields__"):
        return value
    made = kind.__new__(kind)
    made.__dict__ = {name: clone(each) for name, each in value.__dict__.items()}
    return made


def key(value: Any) -> Any:
    """What two worlds have in common that are the same."""
    kind = type(value)
    if kind is list:
        return tuple([key(each) for each in value])
    if kind is dict or kind is Counter:
        return tuple(value.items())
    if hasattr(value, "__dataclass_fields__"):
        return tuple([key(each) for each in value.__dict__.values()])
    return value
