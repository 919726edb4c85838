"""A writer of soak tests: transactions over two topics, and a diary of their outcomes for `soak_check`.

    python tests/soak_writer.py ADDRESS NAME DIARY SEED [BROKER_OPTIONS as JSON]

The diary is not synced, because only this process is killed, not the machine. A transaction that was aborted by others
has after its outcome the seconds since its begin, and why.
"""

from __future__ import annotations

import asyncio
import json
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

from soak_check import TOPICS

from txnbuffer import Client, Fenced, Outcome, OutcomeUnknown, ServiceUnavailable, TransactionAborted, TxnId, connect
from txnbuffer.errors import Error

AT_ONCE = 8
TRANSACTION_SECONDS = 5.0


class Writer:
    def __init__(self, name: str, diary: Path, seed: int) -> None:
        self.name = name
        self.random = random.Random(seed)
        self.stopping = asyncio.Event()
        self._diary = diary.open("a", buffering=1)

    def note(self, *words: object) -> None:
        self._diary.write(" ".join(map(str, words)) + "\n")

    async def run(self, address: str, options: dict[str, Any]) -> None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self.stopping.set)
        client = await self.connected(address, options)
        try:
            await asyncio.gather(*(self.work(client, lane) for lane in range(AT_ONCE)))
        finally:
            await client.close()

    async def connected(self, address: str, options: dict[str, Any]) -> Client:
        """Connect, with retries while the cluster is unavailable."""
        while True:
            try:
                return await connect(address, max_unavailable=120.0, broker_options=options)
            except ServiceUnavailable:
                await asyncio.sleep(0.2)

    async def work(self, client: Client, lane: int) -> None:
        number = 0
        while not self.stopping.is_set():
            number += 1
            await self.attempt(client, f"{self.name}.{lane}.{number}")
            await asyncio.sleep(self.random.random() * 0.01)

    async def attempt(self, client: Client, token: str) -> None:
        """Run one transaction and write its outcome down."""
        began = time.monotonic()
        try:
            await self.one(client, token)
        except TransactionAborted as error:
            self.note("O", token, "ABORT", f"{time.monotonic() - began:.2f}", error)
        except OutcomeUnknown as error:
            self.note("O", token, await self.asked(client, error.txn))
        except Fenced:
            self.note("O", token, "?")
        except Error as error:
            self.note("O", token, "?", error)
            await asyncio.sleep(0.05)

    async def one(self, client: Client, token: str) -> None:
        topics = TOPICS if self.random.random() < 0.7 else TOPICS[:1]
        txn = await client.transaction(timeout=TRANSACTION_SECONDS).begin()
        self.note("B", token, txn.id, *topics)
        for part in range(self.random.randint(1, 3)):
            for topic in topics:
                await txn.send(topic, f"{token}/{part}", key=token)
            if self.random.random() < 0.1:
                await asyncio.sleep(0.02)
        self.note("R", token, part + 1)
        if self.random.random() < 0.1:
            await txn.abort()
            self.note("O", token, "ABORT")
        else:
            await txn.commit()
            self.note("O", token, "COMMIT")

    async def asked(self, client: Client, txn: TxnId) -> str:
        """The outcome, queried from the service, of a transaction whose commit got no answer."""
        try:
            while (outcome := await client.outcome(txn)) is None and not self.stopping.is_set():
                await asyncio.sleep(0.05)
        except Error:
            return "?"
        return outcome.name if isinstance(outcome, Outcome) else "?"


if __name__ == "__main__":
    _, address, name, diary, seed, *options = sys.argv
    asyncio.run(Writer(name, Path(diary), int(seed)).run(address, *[json.loads(text) for text in options] or [{}]))
