"""Long histories from seeds: branches, lost connections, compactions and crashes in quick succession."""

from __future__ import annotations

import random

import pytest
from stream_world import Row, World

from txnbuffer.streams.messages import EndReason

TOPICS = ["a", "b"]


def write(world: World, topic: str, chance: random.Random) -> None:
    if chance.random() < 0.5:
        world.keep(topic)
    world.write(topic, [row(chance) for _ in range(chance.randint(1, 6))])


def flow(world: World, _: str, chance: random.Random) -> None:
    for turn in range(chance.randint(1, 8)):
        world.node.pump(turn, chance.randint)
        world.carry(chance.randint(0, 6))
        world.reader.read(chance.randint(0, 6), chance.randint)


def drain(world: World, _: str, chance: random.Random) -> None:
    for turn in range(30):
        world.node.pump(turn, chance.randint)
        world.carry(20)
        world.reader.read(20, chance.randint)


def cut(world: World, _: str, chance: random.Random) -> None:
    world.carry(chance.randint(0, 5))
    world.connect()


def fail_over(world: World, topic: str, chance: random.Random) -> None:
    world.fail_over(topic, chance.randrange(9), chance.randint(0, 3))
    end(world, topic, EndReason.ROLLBACK, cut=chance.random() < 0.5)


def re_create(world: World, topic: str, chance: random.Random) -> None:
    world.recreate(topic)
    end(world, topic, EndReason.ROLLBACK, cut=chance.random() < 0.5)


def compact(world: World, topic: str, chance: random.Random) -> None:
    world.compact(topic, chance.randint(1, world.topics[topic].high + 1))


def end_streams(world: World, topic: str, chance: random.Random) -> None:
    end(world, topic, chance.choice([EndReason.TOO_SLOW, EndReason.STATE_CHANGED]), cut=False)


def store(world: World, _: str, chance: random.Random) -> None:
    world.reader.store()


def crash(world: World, _: str, chance: random.Random) -> None:
    world.reader.start()
    world.connect()


def retry(world: World, _: str, chance: random.Random) -> None:
    world.reader.now += 1.0
    world.reader.client.tick(world.reader.now)


ACTIONS = {
    write: 8, flow: 14, drain: 3, cut: 2, fail_over: 2, re_create: 0.1, compact: 0.5, end_streams: 0.5, store: 2,
    crash: 1, retry: 3,
}  # fmt: skip


def row(chance: random.Random) -> Row:
    key = chance.choice([b"k", b"l", b"m", b"n", None])
    return key, chance.choice([b"1", b"22", b"333", None if key else b""])


def end(world: World, topic: str, reason: EndReason, *, cut: bool) -> None:
    if cut:
        world.connect()
    else:
        world.node.server.end_topic(topic, reason)
        world.node.settle()


@pytest.mark.parametrize("seed", range(60))
def test_the_table_equals_the_history(seed: int) -> None:
    chance = random.Random(seed)
    world = World(TOPICS)
    for action in chance.choices([*ACTIONS], [*ACTIONS.values()], k=150):
        action(world, chance.choice(TOPICS), chance)
    world.settle()
