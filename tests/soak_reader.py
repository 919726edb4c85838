"""A reader of soak tests: writes each committed value when it becomes visible, `topic value` per line, until SIGTERM.

python tests/soak_reader.py ADDRESS FILE [BROKER_OPTIONS as JSON]
"""

from __future__ import annotations

import json
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from soak_check import TOPICS

from broker_io import open_broker
from txnbuffer import CommittedReader


def follow(address: str, file: Path, options: dict[str, Any], stopping: threading.Event) -> None:
    with open_broker(address, **options) as broker, file.open("a") as seen:
        while not set(TOPICS) <= set(broker.topics()) and not stopping.wait(0.1):
            pass
        with CommittedReader(broker, TOPICS) as reader:
            while not stopping.is_set():
                batch = reader.read(timeout=0.5)
                for record in batch or ():
                    seen.write(f"{batch.topic} {(record.value or b'').decode()}\n")
                seen.flush()


if __name__ == "__main__":
    _, address, file, *options = sys.argv
    over = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: over.set())
    follow(address, Path(file), *[json.loads(text) for text in options] or [{}], over)
