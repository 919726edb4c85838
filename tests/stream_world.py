"""A naive world for change streams: topics with branches, cursors over them, a reader with a table, a lossy wire.

Histories are lists. The table of a reader at a seqno is compared with the list of the history version in its token.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from broker_io.position import Position
from txnbuffer.mutations.batch import Mutation, MutationBatch
from txnbuffer.rpc.streams_encoding import (
    decode_stream_client_frame,
    decode_stream_server_frame,
    encode_stream_client_frame,
    encode_stream_server_frame,
)
from txnbuffer.streams.client import ClientConfig, StreamClient
from txnbuffer.streams.failover import FailoverLog, ResumeToken
from txnbuffer.streams.messages import (
    CaughtUp,
    ClientEvent,
    ClientMessage,
    CloseCursor,
    Completed,
    Delivered,
    EndConnection,
    FindTopic,
    OpenCursor,
    RollbackReceived,
    ServerMessage,
    StreamEnded,
    StreamOpened,
)
from txnbuffer.streams.server import ServerConfig, StreamServer, TopicInfo

Row = tuple[bytes | None, bytes | None]
Table = dict[object, bytes]
Choose = Callable[[int, int], int]
"""Chooses an integer between two, both included."""

CLUSTER = "c-1"
WINDOW_ITEMS = 5
ROUNDS = 400


def apply(table: Table, seqno: int, key: bytes | None, value: bytes | None) -> None:
    """Apply a mutation: the newest of a key wins; records without a key are all kept."""
    if key is None:
        table[seqno] = value or b""
    elif value is None:
        table.pop(key, None)
    else:
        table[key] = value


@dataclass
class Branch:
    """A node's history of a topic, from which deletions up to `purge` were purged."""

    log: FailoverLog
    rows: list[Row] = field(default_factory=list)
    purge: int = 0
    incarnation: str = "i-1"

    @property
    def high(self) -> int:
        return len(self.rows)

    def table(self, seqno: int) -> Table:
        table: Table = {}
        for number, (key, value) in enumerate(self.rows[:seqno], 1):
            apply(table, number, key, value)
        return table

    def window(self, after: int, end: int) -> deque[Mutation]:
        """The mutations after one seqno up to another, each key once, without purged deletions."""
        newest = {row[0]: seqno for seqno, row in enumerate(self.rows[:end], 1)}
        found = deque[Mutation]()
        for seqno in range(after + 1, end + 1):
            key, value = self.rows[seqno - 1]
            if (key is None or newest[key] == seqno) and not (key and value is None and seqno <= self.purge):
                found.append(Mutation(seqno, Position(1, seqno), key, value))
        return found

    def facts(self) -> TopicInfo:
        return TopicInfo(CLUSTER, self.incarnation, self.log, self.high, self.purge)

    def copy(self) -> Branch:
        return Branch(self.log, self.rows.copy(), self.purge, self.incarnation)


@dataclass
class Cursor:
    """The position of a stream at its server, and the read but unsent mutations of the window up to `end`."""

    branch: Branch
    after: int
    waiting: deque[Mutation] | None = None
    end: int = 0


class Node:
    """The server's side of one connection, over the current topics."""

    def __init__(self, topics: dict[str, Branch]) -> None:
        self.topics = topics
        self.server = StreamServer(ServerConfig(), 0.0)
        self.cursors: dict[int, Cursor] = {}
        self.of_topic: dict[int, str] = {}

    def settle(self) -> None:
        for effect in self.server.take_effects():
            match effect:
                case FindTopic(stream, topic):
                    self.of_topic[stream] = topic
                    self.server.topic_found(stream, self.topics[topic].facts(), 0.0)
                    self.settle()
                case OpenCursor(stream, topic, start):
                    self.cursors[stream] = Cursor(self.topics[topic], start)
                case CloseCursor(stream):
                    self.cursors.pop(stream, None)

    def pump(self, turn: int, choose: Choose) -> bool:
        """Let one stream send messages; whether it had work."""
        wanted = [one for one in self.server.wanted() if self._has_more(one.stream)]
        if not wanted:
            return False
        stream, items, _ = wanted[turn % len(wanted)]
        cursor = self.cursors[stream]
        if cursor.waiting is None or (cursor.after < cursor.branch.high and choose(0, 9) == 9):
            self._enter(stream, cursor, choose)
        if (cursor.waiting is not None) and (count := min(items, len(cursor.waiting), choose(0, 3))):
            rows = [cursor.waiting.popleft() for _ in range(count)]
            cursor.after = rows[-1].seqno
            self.server.mutations(stream, MutationBatch.of(rows), 0.0)
        if cursor.waiting is not None and not cursor.waiting:
            cursor.after, cursor.waiting = cursor.end, None
            self.server.snapshot_ends(stream)
        self.settle()
        return True

    def _has_more(self, stream: int) -> bool:
        cursor = self.cursors.get(stream)
        return cursor is not None and (cursor.waiting is not None or cursor.after < cursor.branch.high)

    def _enter(self, stream: int, cursor: Cursor, choose: Choose) -> None:
        """Start a new window, or drop an incomplete one and read from the current position."""
        branch = cursor.branch
        if cursor.after < branch.purge and not self.server.scan_opens(stream, branch.purge):
            cursor.waiting = None
            return
        cursor.end = choose(max(cursor.after + 1, branch.purge), branch.high)
        cursor.waiting = branch.window(cursor.after, cursor.end)
        self.server.snapshot_begins(stream, cursor.after + 1, cursor.end, disk=cursor.after < branch.purge)


@dataclass
class Stored:
    """The durable state of a reader: its table, earlier tables by seqno for rollbacks, its token as text."""

    table: Table
    points: dict[int, Table]
    token: str

    def copy(self) -> Stored:
        return Stored(dict(self.table), dict(self.points), self.token)


class Reader:
    """Streams of a client, their tables, and their durable state."""

    def __init__(self, world: World, topics: list[str]) -> None:
        self.world = world
        self.topics = topics
        self.now = 0.0
        self.state = {topic: Stored({}, {0: {}}, str(ResumeToken(topic))) for topic in topics}
        self.durable = {topic: stored.copy() for topic, stored in self.state.items()}
        self.caught_up: set[str] = set()
        self.start()

    def start(self) -> None:
        """Start a new client process, which continues from the durable state."""
        self.state = {topic: stored.copy() for topic, stored in self.durable.items()}
        self.client = StreamClient(ClientConfig("reader", WINDOW_ITEMS, 40, 1e4, 0.001, 0.001))
        self.events: deque[ClientEvent] = deque()
        self.handles = {
            self.client.open(ResumeToken.parse(self.state[topic].token), self.now): topic for topic in self.topics
        }

    def store(self) -> None:
        self.durable = {topic: stored.copy() for topic, stored in self.state.items()}

    def read(self, count: int, choose: Choose) -> None:
        """Handle up to `count` pending events."""
        self.events += self.client.take_events()
        for _ in range(min(count, len(self.events))):
            event = self.events.popleft()
            if isinstance(event, EndConnection):
                raise AssertionError(event.error)
            self._handle(self.handles[event.stream], event, choose)

    def _handle(self, topic: str, event: ClientEvent, choose: Choose) -> None:
        state = self.state[topic]
        match event:
            case Delivered(handle, mutations, size, token):
                for row in mutations:
                    apply(state.table, row.seqno, row.key, row.value)
                self.client.consumed(handle, len(mutations), size)
                state.token = str(token)
            case Completed(_, token) | CaughtUp(_, token) | StreamOpened(_, token):
                if token.complete:
                    assert state.table == self.world.truth(token), f"{type(event).__name__} {token}"
                    state.points[token.seqno] = dict(state.table)
                if isinstance(event, CaughtUp):
                    self.caught_up.add(topic)
                state.token = str(token)
            case RollbackReceived(handle, seqno):
                points = sorted(point for point in state.points if point <= seqno)
                self._roll_back(topic, handle, points[choose(0, len(points) - 1)])
            case StreamEnded(_, error):
                raise AssertionError(error)

    def _roll_back(self, topic: str, handle: int, seqno: int) -> None:
        state = self.state[topic]
        state.table = dict(state.points[seqno])
        state.points = {point: table for point, table in state.points.items() if point <= seqno}
        self.client.rolled_back(handle, seqno, self.now)
        state.token = str(self.client.token(handle))


class World:
    """Topics, their present node, older nodes that may take over, and the wire to a reader."""

    def __init__(self, topics: list[str]) -> None:
        self.uuids = 0
        self.branches: dict[int, Branch] = {}
        self.topics = {topic: self._named(Branch(FailoverLog.initial(self._uuid()))) for topic in topics}
        self.old = {topic: [branch.copy()] for topic, branch in self.topics.items()}
        self.reader = Reader(self, topics)
        self.to_server: deque[ClientMessage] = deque()
        self.to_client: deque[ServerMessage] = deque()
        self.connect()

    def truth(self, token: ResumeToken) -> Table:
        return self.branches[token.uuid].table(token.seqno)

    # --- the wire ---

    def connect(self) -> None:
        """Make a new connection; messages on the old one are lost."""
        self.to_server.clear()
        self.to_client.clear()
        self.node = Node(self.topics)
        self.reader.client.connected(self.reader.now)

    def carry(self, count: int) -> bool:
        """Deliver up to `count` messages to each side, encoded and decoded; whether there were any."""
        client, server = self.reader.client, self.node.server
        if frame := client.take_frame():
            self.to_server += decode_stream_client_frame(encode_stream_client_frame(frame))
        upward = [self.to_server.popleft() for _ in range(min(count, len(self.to_server)))]
        server.receive(upward, 0.0)
        self.node.settle()
        while answer := server.take_frame(30, 0.0):
            self.to_client += decode_stream_server_frame(encode_stream_server_frame(answer))
        downward = [self.to_client.popleft() for _ in range(min(count, len(self.to_client)))]
        client.receive(downward, self.reader.now)
        return bool(upward or downward)

    # --- the topics ---

    def write(self, topic: str, rows: list[Row]) -> None:
        branch = self.topics[topic]
        branch.rows += rows
        self.node.server.advanced(topic, branch.high, 0.0)

    def keep(self, topic: str) -> None:
        """Store the present history as that of a lagging node, which may take over later."""
        self.old[topic] = [*self.old[topic][-5:], self.topics[topic].copy()]

    def fail_over(self, topic: str, which: int, lost: int) -> None:
        """An older node takes over, without the last `lost` of its mutations."""
        old = self.old[topic][which % len(self.old[topic])].copy()
        seqno = max(old.purge, old.high - lost)
        branch = Branch(old.log.created(self._uuid(), seqno), old.rows[:seqno], old.purge, old.incarnation)
        self.topics[topic] = self._named(branch)

    def recreate(self, topic: str) -> None:
        """Delete the topic and create it again."""
        branch = Branch(FailoverLog.initial(self._uuid()), [], 0, f"i-{self.uuids}")
        self.topics[topic] = self._named(branch)
        self.old[topic] = [branch.copy()]

    def compact(self, topic: str, purge: int) -> None:
        branch = self.topics[topic]
        branch.purge = max(branch.purge, min(purge, branch.high))

    def settle(self) -> None:
        """Run without faults until the reader has the content of the topics."""
        self.reader.caught_up.clear()
        self.connect()
        for turn in range(ROUNDS):
            self.reader.now += 1.0
            self.reader.client.tick(self.reader.now)
            busy = self.carry(100)
            self.reader.read(100, lambda low, high: high)
            if not self.node.pump(turn, lambda low, high: high) and not busy:
                break
        else:
            raise AssertionError("the streams never become idle")
        for topic, branch in self.topics.items():
            assert self.reader.state[topic].table == branch.table(branch.high), topic
            assert topic in self.reader.caught_up, topic

    def _uuid(self) -> int:
        self.uuids += 1
        return self.uuids

    def _named(self, branch: Branch) -> Branch:
        self.branches[branch.log.current.uuid] = branch
        return branch
