"""Plain consumers in several languages: processes with Pulsar's own clients that print what they get."""

from __future__ import annotations

import base64
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Self

from broker_plugin.build import classpath

HERE = Path(__file__).parent / "plain_clients"
KINDS = ("Exclusive", "Shared", "Failover", "Key_Shared", "reader")
Pair = tuple[bytes | None, bytes]
"""Key and value."""


def python_command() -> list[str]:
    return [sys.executable, str(HERE / "plain_consumer.py")]


def java_command(program: str = "PlainConsumer") -> list[str]:
    """The Java client of the server distribution."""
    quiet = ["-XX:TieredStopAtLevel=1", "-Xmx256m", f"-Dlog4j2.configurationFile={HERE / 'no_log4j2.xml'}"]
    return ["java", *quiet, "-cp", classpath(), str(HERE / f"{program}.java")]


def go_command(directory: Path, package: str = ".") -> list[str]:
    """The Go client, whose modules are downloaded once, built into a directory."""
    program = directory / "go-program"
    subprocess.run(["go", "build", "-o", program, package], cwd=HERE / "go", check=True, timeout=900)
    return [str(program)]


class Repeat(NamedTuple):
    """A message that was delivered again, and the times of both deliveries."""

    kind: str
    first: float
    again: float


class ForeignConsumers:
    """Consumers of all kinds of one topic in a process; `got` has what came, without what was delivered again."""

    def __init__(self, command: Sequence[str], url: str, topic: str, kinds: Sequence[str] = KINDS) -> None:
        self.got: dict[str, list[Pair]] = {kind: [] for kind in kinds}
        self.repeats: list[Repeat] = []
        self._seen: dict[tuple[str, str], float] = {}
        self._command = [*command, url, topic, *kinds]
        self.start()

    def start(self) -> None:
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed in close
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True
        )
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if not line.endswith("\n"):
                return  # it was killed
            kind, place, key, value = line.rstrip("\n").split("\t")
            now = time.monotonic()
            if (kind, place) in self._seen:
                self.repeats.append(Repeat(kind, self._seen[kind, place], now))
            else:
                self._seen[kind, place] = now
                self.got[kind].append((base64.b64decode(key) or None, base64.b64decode(value)))

    def have(self, count: int) -> bool:
        """Whether all have at least so many messages. Raises AssertionError if the process has ended."""
        if self._process.poll() is not None:
            self._errors.seek(0)
            raise AssertionError(f"the consumers ended with {self._process.returncode}:\n{self._errors.read()}")
        return all(len(got) >= count for got in self.got.values())

    def close(self) -> None:
        """Kill the process; `start` continues its subscriptions."""
        self._process.kill()
        self._thread.join()
        with self._process, self._errors:  # closes the pipes too
            pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
