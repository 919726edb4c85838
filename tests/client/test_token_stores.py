"""Errors of token stores name the file, and the stream continues once the store works."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from service_setup import engine_on
from streamed import client_of, write

from broker_io.memory import MemoryBroker
from txnbuffer import FileTokens, ResumeToken, SQLiteTokens, TokensFailed, TokenStore, UnreadableToken
from txnbuffer.client.streams.streams import ShardStreams
from txnbuffer.streams.client import ClientConfig

Make = Callable[[Path], TokenStore]


def use(make: Make, path: Path) -> None:
    store = make(path)
    store.load("t")
    store.save("t", "x")


@pytest.mark.parametrize("make", [FileTokens, SQLiteTokens])
@pytest.mark.parametrize("name", ["", "none/tokens", "file/tokens"])
def test_error_names_a_path_that_cannot_be_used(tmp_path: Path, make: Make, name: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(TokensFailed, match=f"cannot read or write resume tokens in {tmp_path / name} "):
        use(make, tmp_path / name)


def test_stores_of_one_file_keep_tokens_of_different_topics(tmp_path: Path) -> None:
    stores, rounds = {topic: FileTokens(tmp_path / "tokens") for topic in "abcd"}, 25

    def keep(topic: str) -> list[str | None]:
        found = []
        for number in range(rounds):
            stores[topic].save(topic, f"{number} {topic * 300 * (ord(topic) - 96)}")
            found.append((stores[topic].load(topic) or "none").split()[0])
        return found

    with ThreadPoolExecutor(len(stores)) as threads:
        kept = [*threads.map(keep, stores)]
    assert kept == [[str(number) for number in range(rounds)]] * len(stores)


def test_files_with_other_content_are_rejected_and_not_changed(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_text("[" * 100_000)
    with pytest.raises(UnreadableToken, match=f"{path} is not a file of resume tokens"):
        use(FileTokens, path)
    with pytest.raises(TokensFailed, match=f"{path} .file is not a database"):
        use(SQLiteTokens, path)
    assert path.read_text() == "[" * 100_000


async def test_stream_continues_once_its_token_can_be_stored(tmp_path):
    """With room for two mutations at a time, which is given back with the token."""
    broker, store = MemoryBroker(), FileTokens(tmp_path / "in" / "tokens")
    (tmp_path / "in").mkdir()
    async with engine_on(broker) as engine, client_of(engine, broker) as client:
        client.streams = ShardStreams(client.streams.connectors, 60.0, ClientConfig(window_items=2))
        await write(client, "t", {str(number): "x" for number in range(6)})
        stream, seqnos = client.stream("t", to="now", store=store), []
        place, away = tmp_path / "in", tmp_path / "away"
        while not seqnos:
            seqnos += [row.seqno for row in await stream.next(timeout=120.0)]
        place.rename(away)
        for _ in range(2):
            with pytest.raises(TokensFailed, match="No such file or directory"):
                await stream.next(timeout=120.0)
        away.rename(place)
        while (item := await stream.next(timeout=120.0)) is not None:
            seqnos += [row.seqno for row in item]
    assert seqnos == [1, 2, 3, 4, 5, 6]
    assert ResumeToken.parse(store.load("t")).seqno == 6


async def test_next_call_continues_after_a_timeout_of_a_slow_store():
    broker, answering = MemoryBroker(), threading.Event()

    class Slow:
        def load(self, topic):
            answering.wait(120.0)

        def save(self, topic, token):
            pass

    async with engine_on(broker) as engine, client_of(engine, broker) as client:
        await write(client, "t", {"k": "x"})
        stream = client.stream("t", to="now", store=Slow(), cursor="c")
        try:
            with pytest.raises(TimeoutError):
                await stream.next(timeout=0.0)
            with pytest.raises(TimeoutError):
                await stream.next(timeout=0.01)
            assert not answering.is_set()
        finally:
            answering.set()
        seqnos = []
        while (item := await stream.next(timeout=120.0)) is not None:
            seqnos += [row.seqno for row in item]
    assert seqnos == [1]
