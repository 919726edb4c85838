"""The worker threads of a service process."""

from __future__ import annotations

import asyncio
import threading

from txnbuffer.cli.serve import WORKERS, with_workers


def test_a_service_has_the_same_worker_threads_on_each_machine() -> None:
    release = threading.Event()

    async def block_in_threads() -> int:
        calls = [asyncio.ensure_future(asyncio.to_thread(release.wait, 60.0)) for _ in range(2 * WORKERS)]
        await asyncio.sleep(0)
        running = sum(thread.name.startswith("txnbuffer-worker") for thread in threading.enumerate())
        release.set()
        await asyncio.gather(*calls)
        return running

    assert asyncio.run(with_workers(block_in_threads())) == WORKERS
