"""A writer of the soak test: transactions over two topics, and a diary of what it was told.

A line of the diary: `B token id` it began, `O token COMMIT`, `ABORT` or `?` how it ended. The diary is not
synced: this process is killed, the machine is not.
"""

from __future__ import annotations

import asyncio
import random
import signal
import sys
from pathlib import Path

from txnbuffer import Fenced, OutcomeUnknown, TransactionAborted, connect
from txnbuffer.errors import Error

TOPICS = ("soak-a", "soak-b")
AT_ONCE = 8


class Writer:
    def __init__(self, name: str, diary: Path, seed: int) -> None:
        self.name = name
        self.random = random.Random(seed)
        self.stopping = asyncio.Event()
        self._diary = diary.open("a", buffering=1)

    def note(self, *words: object) -> None:
        self._diary.write(" ".join(map(str, words)) + "\n")

    async def run(self, address: str) -> None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self.stopping.set)
        async with connect(address, patience=120.0) as client:
            await asyncio.gather(*(self.work(client, lane) for lane in range(AT_ONCE)))

    async def work(self, client, lane: int) -> None:
        number = 0
        while not self.stopping.is_set():
            number += 1
            token = f"{self.name}.{lane}.{number}"
            try:
                await self.one(client, token)
            except TransactionAborted:
                self.note("O", token, "ABORT")
            except (OutcomeUnknown, Fenced):
                self.note("O", token, "?")
            except Error as error:
                self.note("O", token, "?", error)
                await asyncio.sleep(0.05)
            await asyncio.sleep(self.random.random() * 0.01)

    async def one(self, client, token: str) -> None:
        topics = TOPICS if self.random.random() < 0.7 else TOPICS[:1]
        txn = await client.transaction(timeout=5.0).begin()
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


if __name__ == "__main__":
    _, address, name, diary, seed = sys.argv
    asyncio.run(Writer(name, Path(diary), int(seed)).run(address))
