"""A writer of the soak of a pair: `soak_writer` with ordinary sends between its transactions.

An ordinary send is in the diary as a transaction of one record on the first topic, whose id is `-`.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from soak_check import TOPICS
from soak_writer import Writer

from txnbuffer import Client
from txnbuffer.errors import Error


class PairWriter(Writer):
    async def attempt(self, client: Client, token: str) -> None:
        if self.random.random() < 0.7:
            await super().attempt(client, token)
            return
        self.note("B", token, "-", TOPICS[0])
        self.note("R", token, 1)
        try:
            await client.send(TOPICS[0], f"{token}/0", key=token)
        except Error as error:
            self.note("O", token, "?", error)
            await asyncio.sleep(0.05)
        else:
            self.note("O", token, "COMMIT")


if __name__ == "__main__":
    _, address, name, diary, seed, *options = sys.argv
    asyncio.run(PairWriter(name, Path(diary), int(seed)).run(address, *[json.loads(text) for text in options] or [{}]))
