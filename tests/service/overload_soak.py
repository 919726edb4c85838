"""Load a service with ten times what it can do, from many principals of which one misbehaves.

    python tests/service/overload_soak.py --seconds 600 --principals 50

Three phases, with processes of their own for the service, for all principals but one, and for the one that misbehaves:

1. capacity: the principals run transactions without a pause; what they reach together is the capacity.
2. before: each of them runs transactions at a fixed rate, together at LOAD of the capacity.
3. during: the same, while the misbehaving one sends without waiting for anything, so that all of them together offer
   ten times the capacity.

Prints one JSON object: latencies of the others before and during, what was refused, the memory of the service over
time, and what the log has: each acknowledged record must be there, once. The exit code is 1 if any is lost or doubled,
if nothing was refused, or if the memory was not bounded. `run` itself does not demand refusals: a machine that is fast
enough for the short load of a test has nothing to refuse.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from access_world import Tokens  # noqa: E402
from raw_session import OverGrpc, RawSession  # noqa: E402
from service_process import ServiceProcess  # noqa: E402

from broker_io import open_broker  # noqa: E402
from broker_io.batch import Batch, Message  # noqa: E402
from broker_io.rpc.channel import VERSION_METADATA  # noqa: E402
from txnbuffer import connect  # noqa: E402
from txnbuffer.client.client import Client  # noqa: E402
from txnbuffer.client.reading.reader import CommittedReader  # noqa: E402
from txnbuffer.client.transaction import Transaction  # noqa: E402
from txnbuffer.errors import LimitExceeded  # noqa: E402
from txnbuffer.rpc.frames import ClientFrame, Send  # noqa: E402
from txnbuffer.rpc.session_encoding import encode_client_frame  # noqa: E402

TIMES = 10
"""Multiple of the capacity that is offered."""
LOAD = 0.3
"""Part of the capacity that the others use."""
AT_ONCE = 16
"""Transactions of each principal at the same time while the capacity is measured."""
TOPICS = 8
FLOOD = "flood"
FRAME_SENDS, FRAMES = 20, 256
"""Sends of a frame of the misbehaving principal, and its different frames."""
PAYLOAD = 100
"""Bytes of a record."""
MAX_GROWTH_MIB = 256.0
"""The memory that a service may need in addition under overload."""
POLICY = """
[[allow]]
principals = ["p-*", "flood"]
roles = ["write"]
topics = ["orders-*", "flood"]
"""


@dataclass
class Report:
    """Latencies are milliseconds, rates per second, memory is MiB."""

    capacity: float = 0.0
    offered: float = 0.0
    before: dict[str, float] = field(default_factory=dict)
    during: dict[str, float] = field(default_factory=dict)
    ratio_p50: float = 0.0
    ratio_p99: float = 0.0
    refused: dict[str, float] = field(default_factory=dict)
    flood_taken: float = 0.0
    flood_acknowledged: float = 0.0
    flood_refused: int = 0
    others_refused: int = 0
    memory: list[float] = field(default_factory=list)
    acknowledged: int = 0
    lost: int = 0
    doubled: int = 0

    @property
    def problems(self) -> list[str]:
        found = [f"{name} {count}" for name in ("lost", "doubled") if (count := getattr(self, name))]
        grown = max(self.memory) - self.memory[0]
        return found + ([f"the memory grew by {grown:.0f} MiB"] if grown > MAX_GROWTH_MIB else [])


# --- the principals that behave ---


async def run_others(address: str, tokens: Sequence[str], rate: float, seconds: float, diary: Path) -> dict[str, Any]:
    """Run transactions of each token's principal; `rate` of all together, 0: without a pause."""
    clients = [await connect(address, token=token) for token in tokens]
    latencies: list[float] = []
    refused = 0
    end = time.monotonic() + seconds
    run = os.urandom(4).hex()

    async def one(number: int, client: Client, written: Any) -> None:
        nonlocal refused
        count, due = 0, time.monotonic() + random.random() * (len(tokens) / rate if rate else 0.0)
        while (now := time.monotonic()) < end:
            if rate:
                if due > now:
                    await asyncio.sleep(due - now)
                due = max(due, now - 1.0) + random.expovariate(rate / len(tokens))
            count += 1
            values = [f"{run}-{number}-{count}-{part}".ljust(PAYLOAD, ".").encode() for part in range(2)]

            async def work(txn: Transaction, values: list[bytes] = values) -> None:
                for part, value in enumerate(values):
                    await txn.send(f"orders-{(number + part) % TOPICS}", value)

            began = time.monotonic()
            try:
                await client.run(work)
            except LimitExceeded:
                refused += 1
                continue
            latencies.append(time.monotonic() - began)
            written.writelines(value + b"\n" for value in values)

    with diary.open("ab") as written:
        workers = range(len(clients) * (1 if rate else AT_ONCE))
        await asyncio.gather(*(one(number, clients[number % len(clients)], written) for number in workers))
    for client in clients:
        await client.close()
    return {"transactions": len(latencies), "refused": refused, "latencies": latencies}


# --- the principal that misbehaves ---


def _frames() -> tuple[list[bytes], list[list[bytes]]]:
    """Frames to send again and again, and the values in them."""
    values = [
        [f"{FLOOD}-{frame}-{send}".ljust(PAYLOAD, ".").encode() for send in range(FRAME_SENDS)]
        for frame in range(FRAMES)
    ]
    sends = [tuple(Send(FLOOD, Batch.of([Message(None, value)])) for value in frame) for frame in values]
    return [encode_client_frame(ClientFrame(sends=frame)) for frame in sends], values


async def run_flood(port: int, token: str, rate: float, seconds: float, diary: Path) -> dict[str, Any]:
    """Send ordinary sends at a rate, without waiting for answers."""
    frames, values = _frames()
    metadata = (*VERSION_METADATA, ("authorization", f"Bearer {token}"))
    link = OverGrpc(port, metadata)
    session = RawSession(link)
    await session.hello()
    began = time.monotonic()
    written, refused, refusals = 0, set[int](), 0

    async def read() -> None:
        nonlocal refusals
        while await session.step():
            refusals += len(session.failures)
            refused.update(failure.send for failure in session.failures)
            assert all(isinstance(failure.error, LimitExceeded) for failure in session.failures), session.failures
            session.failures.clear()

    reading = asyncio.ensure_future(read())
    while (now := time.monotonic() - began) < seconds:
        if written * FRAME_SENDS >= rate * now:
            await asyncio.sleep(0.001)
            continue
        await link.call.write(frames[written % FRAMES])
        written += 1
    deadline = time.monotonic() + 120
    while session.acknowledged < written * FRAME_SENDS and time.monotonic() < deadline and not reading.done():
        await asyncio.sleep(0.01)
    acknowledged = Counter[bytes]()
    for number in range(session.acknowledged):
        if number + 1 not in refused:
            acknowledged[values[number // FRAME_SENDS % FRAMES][number % FRAME_SENDS]] += 1
    reading.cancel()
    await link.cut()
    diary.write_text(json.dumps({value.decode(): count for value, count in acknowledged.items()}))
    settled = session.acknowledged == written * FRAME_SENDS
    return {
        "written": written * FRAME_SENDS,
        "acknowledged": acknowledged.total(),
        "refused": refusals,
        "settled": settled,
        "goodbye": str(session.goodbye or ""),
    }


# --- the run ---


def _worker(*arguments: object, nice: int = 0) -> subprocess.Popen[str]:
    command = [sys.executable, str(HERE / "overload_soak.py"), *map(str, arguments)]
    if nice:  # in reality it has a machine of its own
        command = ["nice", "-n", str(nice), *command]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def _result(process: subprocess.Popen[str]) -> dict[str, Any]:
    output, _ = process.communicate()
    assert process.returncode == 0, f"a worker ended with {process.returncode}"
    found: dict[str, Any] = json.loads(output)
    return found


def _percentiles(latencies: list[float]) -> dict[str, float]:
    ordered = sorted(latencies)
    at = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
    return {name: round(1000 * ordered[int(part * (len(ordered) - 1))], 2) for name, part in at.items()}


def _rss(pid: int) -> float:
    text = Path(f"/proc/{pid}/status").read_text()
    return int(text.partition("VmRSS:")[2].split()[0]) / 1024


def _refused(http: int, token: str) -> dict[str, float]:
    """The refusals of the service by limit."""
    url, headers = f"http://127.0.0.1:{http}/metrics", {"Authorization": f"Bearer {token}"}
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    rows = (line.rpartition(" ") for line in lines if line.startswith("txnbuffer_refused_total{"))
    return {name: float(value) for name, _, value in rows}


def _read(directory: Path, topics: Sequence[str]) -> Iterator[bytes]:
    with open_broker(f"file:{directory}") as broker:
        present = set(broker.topics())
        for topic in topics:
            if topic not in present:
                continue
            with CommittedReader(broker, topic) as reader:
                while (batch := reader.read()) is not None:
                    yield from (value or b"" for value in batch.messages.values)


def run(principals: int, seconds: float, settings: Sequence[str] = ()) -> Report:
    """Run all phases; `seconds` of the last one."""
    report = Report()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        names = tuple(f"p-{number}" for number in range(principals - 1))
        tokens = Tokens(directory, (*names, FLOOD))
        policy = directory / "policy.toml"
        policy.write_text(POLICY)
        policy.chmod(0o644)
        (directory / "others").write_text(json.dumps([tokens.text[name] for name in names]))
        flags = [f"access.policy={policy}", f"access.tokens={tokens.path}", *settings]
        log, diary = directory / "log", directory / "diary"
        with ServiceProcess(log, *(part for flag in flags for part in ("--set", flag))) as service:
            _phases(report, service, directory, tokens, seconds)
            service.terminate()
            service.finish()
        _verify(report, log, diary, json.loads((directory / "flood").read_text()))
    return report


def _phases(report: Report, service: ServiceProcess, directory: Path, tokens: Tokens, seconds: float) -> None:
    address, diary = f"txnbuf://127.0.0.1:{service.port}", directory / "diary"

    def others(rate: float, duration: float) -> subprocess.Popen[str]:
        return _worker("others", address, directory / "others", rate, duration, diary)

    short = max(seconds / 10, 2.0)
    _result(others(0.0, 2.0))  # topics and caches
    report.capacity = round(_result(others(0.0, short))["transactions"] / short, 1)
    load = LOAD * report.capacity
    report.before = _percentiles(_result(others(load, max(seconds / 4, 2.0)))["latencies"])
    report.memory.append(round(_rss(service.process.pid), 1))
    working = others(load, seconds)
    flood = (TIMES - LOAD) * report.capacity
    report.offered = round(load + flood, 1)
    (directory / "flood-token").write_text(tokens.text[FLOOD])
    misbehaving = _worker(
        "flood", service.port, directory / "flood-token", flood, seconds, directory / "flood", nice=19
    )
    with ThreadPoolExecutor() as threads:
        results = [threads.submit(_result, worker) for worker in (working, misbehaving)]
        while not all(result.done() for result in results):
            time.sleep(min(seconds / 20, 10.0))
            report.memory.append(round(_rss(service.process.pid), 1))
        found, flooded = (result.result() for result in results)
    report.during = _percentiles(found["latencies"])
    report.others_refused = found["refused"]
    report.ratio_p50 = round(report.during["p50"] / report.before["p50"], 2)
    report.ratio_p99 = round(report.during["p99"] / report.before["p99"], 2)
    report.flood_taken = round(flooded["written"] / seconds, 1)
    report.flood_acknowledged = round(flooded["acknowledged"] / seconds, 1)
    report.flood_refused = flooded["refused"]
    report.refused = _refused(service.http, tokens.text[FLOOD])
    assert flooded["settled"], flooded


def _verify(report: Report, log: Path, diary: Path, flood: dict[str, int]) -> None:
    """Compare the log with what was acknowledged."""
    stored = Counter(_read(log, [f"orders-{number}" for number in range(TOPICS)]))
    acknowledged = set(diary.read_bytes().splitlines())
    report.lost = len(acknowledged - stored.keys())
    report.doubled = sum(count > 1 for count in stored.values())
    report.acknowledged = len(acknowledged) + sum(flood.values())
    flooded = Counter(_read(log, [FLOOD]))
    for value, count in flood.items():
        report.lost += max(count - flooded[value.encode()], 0)
    report.doubled += sum(max(count - flood.get(value.decode(), 0), 0) for value, count in flooded.items())


def main() -> int:
    if sys.argv[1:2] == ["others"]:
        address, tokens, rate, seconds, diary = sys.argv[2:]
        given = json.loads(Path(tokens).read_text())
        print(json.dumps(asyncio.run(run_others(address, given, float(rate), float(seconds), Path(diary)))))
        return 0
    if sys.argv[1:2] == ["flood"]:
        port, token, rate, seconds, diary = sys.argv[2:]
        text = Path(token).read_text()
        print(json.dumps(asyncio.run(run_flood(int(port), text, float(rate), float(seconds), Path(diary)))))
        return 0
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--principals", type=int, default=50)
    parser.add_argument("--set", action="append", default=[], dest="settings", metavar="SECTION.KEY=VALUE")
    given_options = parser.parse_args()
    report = run(given_options.principals, given_options.seconds, given_options.settings)
    problems = report.problems + ([] if report.flood_refused else ["nothing was refused"])
    print(json.dumps({**asdict(report), "problems": problems}))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
