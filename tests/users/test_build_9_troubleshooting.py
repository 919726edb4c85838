"""The messages that docs/troubleshooting.md quotes are what the product prints."""

from __future__ import annotations

import asyncio
import fnmatch
import logging
import multiprocessing
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from source_tree import ROOT

from bench.service_process import service
from broker_io.testing.contract.base import eventually
from txnbuffer import connect
from txnbuffer.errors import Error

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
QUOTED = [text.strip() for text in re.findall(r"^```text\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)]
OPENED = "from txnbuffer import connect; client = connect({address!r}, read_only={read_only}).open_sync(); "


def is_quoted(message: str) -> bool:
    patterns = [re.sub(r"([\[\]?*])", r"[\1]", text).replace("...", "*") for text in QUOTED]
    return any(fnmatch.fnmatchcase(message, pattern) for pattern in patterns)


def no_topic(address: str) -> None:
    with connect(address) as client:
        client.reader("order").read(timeout=0.0)


def number_again(address: str) -> None:
    with connect(address) as client:
        for number in (2, 1):
            with client.transaction(name="w", number=number) as txn:
                txn.send("orders", b"1")


def fenced(_: str) -> None:
    with service() as address, connect(address) as first, connect(address) as second:
        with first.transaction(name="w", number=1) as txn:
            txn.send("orders", b"1")
        with second.transaction(name="w", number=2) as txn:
            txn.send("orders", b"2")
        with first.transaction(name="w", number=3) as txn:
            txn.send("orders", b"3")


def too_long(address: str) -> None:
    with connect(address) as client, client.transaction(timeout=0.2) as txn:
        txn.send("orders", b"1")
        eventually(lambda: client.outcome(txn.id) is not None)


def not_open(address: str) -> None:
    connect(address).send("orders", b"1")  # type: ignore[attr-defined]  # the fault of the page


def no_service(_: str) -> None:
    connect("txnbuf://127.0.0.1:1", max_unavailable=2).open_sync()


def other_loop(_: str) -> None:
    async def opened() -> Any:
        return await connect("memory:")

    client = asyncio.run(opened())
    asyncio.run(client.send("orders", b"1"))


@pytest.mark.parametrize(
    "fail", [no_topic, number_again, fenced, too_long, not_open, no_service, other_loop], ids=lambda each: each.__name__
)
def test_message_of_an_error_is_quoted(fail: Callable[[str], None], tmp_path: Path) -> None:
    with pytest.raises(Error) as raised:
        fail(f"file:{tmp_path}/log")
    assert is_quoted(str(raised.value)), raised.value


def failed(script: str) -> str:
    """The message of the error with which a program in another process ends."""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    return done.stderr.splitlines()[-1].partition(": ")[2]


def test_messages_in_another_process_are_quoted(tmp_path: Path) -> None:
    address = f"file:{tmp_path}/log"
    with connect(address) as client:
        client.send("orders", b"1")
        assert is_quoted(failed(OPENED.format(address=address, read_only=False)))
        script = "import sys; sys.modules['pandas'] = None; " + OPENED.format(address=address, read_only=True)
        assert is_quoted(failed(script + "client.reader('orders').read(timeout=60).to_pandas()"))
        fork = multiprocessing.get_context("fork")
        answers = fork.SimpleQueue()

        def child() -> None:
            try:
                client.send("orders", b"2")
            except Error as error:
                answers.put(str(error))

        process = fork.Process(target=child)
        process.start()
        process.join()
        assert is_quoted(answers.get())


def test_what_is_held_back_and_dropped_is_quoted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with connect(f"file:{tmp_path}/log") as client:
        open_txn = client.transaction().begin()
        open_txn.send("orders", b"1" * 70_000)
        with client.transaction() as txn:
            txn.send("orders", b"2")
        with client.reader("orders") as reader:
            assert [*reader.records(timeout=0.2)] == []
    assert [each for each in caplog.messages if each.startswith("topic 'orders'") and is_quoted(each)]
    assert [each for each in caplog.messages if each.startswith("the client was closed") and is_quoted(each)]
