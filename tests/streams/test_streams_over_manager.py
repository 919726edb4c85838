"""Streams with the cursors of the real mutation manager: each topic is in order, also across connections."""

from __future__ import annotations

import random

import pytest
from stream_rigs import LOG

from broker_io.position import Position
from txnbuffer.mutations.batch import Mutation, MutationBatch
from txnbuffer.mutations.cursor import Cursor
from txnbuffer.mutations.manager import MutationManager, ReadLog
from txnbuffer.rpc.streams_encoding import (
    decode_stream_client_frame,
    decode_stream_server_frame,
    encode_stream_client_frame,
    encode_stream_server_frame,
)
from txnbuffer.streams.client import ClientConfig, StreamClient
from txnbuffer.streams.failover import ResumeToken
from txnbuffer.streams.messages import CloseCursor, Completed, Delivered, FindTopic, OpenCursor
from txnbuffer.streams.server import ServerConfig, StreamServer, TopicInfo

TOPICS = ("a", "b")


class Shell:
    """A minimal shell for a server and managers: effects to cursors, slices to messages, reads of the log."""

    def __init__(self, logs: dict[str, list[Mutation]], managers: dict[str, MutationManager]) -> None:
        self.logs, self.managers = logs, managers
        self.server = StreamServer(ServerConfig(), 0.0)
        self.cursors: dict[int, Cursor] = {}

    def settle(self) -> None:
        while effects := self.server.take_effects():
            for effect in effects:
                match effect:
                    case FindTopic(stream, topic):
                        known = TopicInfo("c-1", "i-1", LOG, self.managers[topic].high)
                        self.server.topic_found(stream, known, 0.0)
                    case OpenCursor(stream, topic, start, end, floor):
                        last = end if end <= self.managers[topic].high else None
                        self.cursors[stream] = self.managers[topic].register(
                            f"{id(self)}-{stream}", start, end=last, snapshot_end=floor
                        )
                    case CloseCursor(stream):
                        self.cursors.pop(stream).close()

    def pump(self) -> None:
        for stream, items, size in self.server.wanted():
            for start, end, begins, ends, batch, repeats in self.cursors[stream].take(min(items, 3), size):
                if begins:
                    self.server.snapshot_begins(stream, start, end, repeats=repeats)
                self.server.mutations(stream, batch, 0.0)
                if ends:
                    self.server.snapshot_ends(stream)
            self.settle()
        for topic, manager in self.managers.items():
            for effect in manager.take_effects():
                if isinstance(effect, ReadLog):
                    manager.backfilled(
                        effect.ticket, MutationBatch.of(self.logs[topic][effect.first - 1 : effect.last])
                    )


@pytest.mark.parametrize("seed", range(10))
def test_each_topic_is_in_order(seed: int) -> None:
    chance = random.Random(seed)
    logs: dict[str, list[Mutation]] = {topic: [] for topic in TOPICS}
    managers = {topic: MutationManager() for topic in TOPICS}
    client = StreamClient(ClientConfig("reader", 8, 60, 1e4))
    handles = {client.open(ResumeToken(topic), 0.0): topic for topic in TOPICS}
    tables: dict[str, dict[bytes | None, bytes | None]] = {topic: {} for topic in TOPICS}
    seen = dict.fromkeys(TOPICS, 0)
    completed = dict.fromkeys(TOPICS, 0)
    shell = Shell(logs, managers)
    client.connected(0.0)
    for step in range(120):
        for topic in TOPICS if step < 80 else ():
            for _ in range(chance.randint(0, 3)):
                seqno = len(logs[topic]) + 1
                logs[topic].append(Mutation(seqno, Position(1, seqno), b"k%d" % chance.randint(0, 4), b"%d" % seqno))
            if new := logs[topic][managers[topic].high :]:
                managers[topic].queue_many(MutationBatch.of(new))
                shell.server.advanced(topic, managers[topic].high, 0.0)
        if step < 80 and chance.random() < 0.1:
            shell.server.disconnected()
            shell.settle()
            shell = Shell(logs, managers)
            client.connected(0.0)
        shell.server.receive(decode_stream_client_frame(encode_stream_client_frame(client.take_frame())), 0.0)
        shell.settle()
        shell.pump()
        client.receive(decode_stream_server_frame(encode_stream_server_frame(shell.server.take_frame(10**6, 0.0))), 0.0)
        for event in client.take_events():
            match event:
                case Delivered(handle, mutations, size):
                    topic = handles[handle]
                    client.consumed(handle, len(mutations), size)
                    for row in mutations:
                        assert row.seqno > seen[topic]
                        seen[topic] = row.seqno
                        tables[topic][row.key] = row.value
                case Completed(handle, token):
                    topic = handles[handle]
                    completed[topic] = token.seqno
                    assert tables[topic] == {row.key: row.value for row in logs[topic][: token.seqno]}
    assert completed == {topic: len(logs[topic]) for topic in TOPICS}
