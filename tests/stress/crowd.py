"""Many clients in one process, for `connections`.

    python tests/stress/crowd.py ADDRESS NAME DIARY CLIENTS TRANSACTIONS

Connects so many clients, which each commit so many transactions with the diary of `soak_writer`, and prints "idle".
For each line of input the clients commit as many transactions again, and it prints "idle" once more; at the end of
the input the process ends. A client that cannot connect prints its error.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from soak_writer import Writer

from txnbuffer import Client, connect
from txnbuffer.errors import Error

OPENING_AT_ONCE = 25


async def opened(address: str, gate: asyncio.Semaphore) -> Client | None:
    async with gate:
        try:
            return await connect(address, timeout=120.0, max_unavailable=120.0)
        except Error as error:
            print(f"refused: {error}", flush=True)
            return None


async def main(address: str, name: str, diary: str, clients: int, transactions: int) -> None:
    writer, gate = Writer(name, Path(diary), 1), asyncio.Semaphore(OPENING_AT_ONCE)
    found = await asyncio.gather(*(opened(address, gate) for _ in range(clients)))
    crowd = [client for client in found if client is not None]
    rounds = 0

    async def commit(client: Client, number: int) -> None:
        async with gate:
            for one in range(transactions):
                await writer.attempt(client, f"{name}.{number}.{rounds}.{one}")

    while True:
        await asyncio.gather(*(commit(client, number) for number, client in enumerate(crowd)))
        print("idle", flush=True)
        if not await asyncio.to_thread(sys.stdin.readline):
            break
        rounds += 1
    await asyncio.gather(*(client.close() for client in crowd))


if __name__ == "__main__":
    _, address, name, diary, *numbers = sys.argv
    asyncio.run(main(address, name, diary, *map(int, numbers)))
