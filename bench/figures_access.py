"""What access control costs, and what strangers and tenants can take: transactions of a client with and without"""

from __future__ import annotations

import os
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from bench.figures_embedded import SECONDS
from bench.fresh import fresh
from bench.harness import Pair, figure
from bench.service_process import service, started

PAIRS = 5
POLICY = """
[[allow]]
principals = ["bench"]
roles = ["write"]
topics = ["a*"]

[[allow]]
principals = ["reader"]
roles = ["read"]
topics = ["a*"]
"""
READER = "reader"


def _protect(directory: Path, *others: str) -> tuple[str, tuple[str, ...]]:
    """A token, and the flags of a service that requires it; files named as others have their tokens."""
    from txnbuffer.access.tokens import TokenFile, issue, with_token

    text, token = issue("bench", os.urandom(38), 1_764_000_000, None)
    known = with_token(TokenFile({}), token)
    for name in others:
        other, token = issue(name, os.urandom(38), 1_764_000_000, None)
        (directory / name).write_text(other)
        known = with_token(known, token)
    files = {"tokens": known.format(), "policy": POLICY}
    flags: list[str] = []
    for name, content in files.items():
        path = directory / name
        path.touch(mode=0o600)
        path.write_text(content)
        flags += ["--set", f"access.{name}={path}"]
    return text, tuple(flags)


def _per_second(token: str | None, flags: tuple[str, ...]) -> float:
    with service(*flags) as address:
        result = fresh("bench.figures_embedded", "run_lanes", address, ["a"], 512, 1, SECONDS, None, token)
    return float(result["per_second"])


@figure("access.cost", unit="transactions/s", goal=">= 0.97 times the peer", peer="without access control")
def with_tokens_and_a_policy() -> Pair:
    """The pair with the median ratio, of five that were measured one after the other."""
    with tempfile.TemporaryDirectory() as name:
        token, flags = _protect(Path(name))
        pairs = [Pair(_per_second(token, flags), _per_second(None, ())) for _ in range(PAIRS)]
    return sorted(pairs, key=lambda pair: pair.value / pair.peer_value)[PAIRS // 2]


FLOOD_SECONDS = SECONDS + 10.0
"""A flood begins before the client that is measured, and ends after it."""


class Flooded(NamedTuple):
    """Transactions of a client in a second, and the most memory that the service had, in MB."""

    per_second: float
    peak_mb: float


def _flooded(flood: str | None, *, tenant: bool = False) -> Flooded:
    """What a client gets while there is a flood, if one is named; `tenant`: of a principal that may only read."""
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(1) as pool:
        directory = Path(name)
        token, flags = _protect(directory, READER)
        command = [sys.executable, "-m", "txnbuffer", "serve", f"file:{directory}/log"]
        command += ["--listen", "127.0.0.1:0", "--http", "", *flags]
        with started(command) as (process, facts):
            address = str(facts["address"])
            if flood is not None:
                port = int(address.rpartition(":")[2])
                given = [(directory / READER).read_text()] if tenant else []
                flooding = pool.submit(fresh, "bench.floods", flood, port, FLOOD_SECONDS, *given)
            result = fresh("bench.figures_embedded", "run_lanes", address, ["a"], 64, 1, SECONDS, None, token)
            if flood is not None:
                print(f"  flood of {flood}: {flooding.result()}", file=sys.stderr)
            return Flooded(float(result["per_second"]), _peak_mb(process.pid))


def _peak_mb(process: int) -> float:
    (line,) = [line for line in Path(f"/proc/{process}/status").read_text().splitlines() if line.startswith("VmHWM:")]
    return int(line.split()[1]) / 1024


def _compared(flood: str, *, tenant: bool = False) -> Pair:
    during, without = _flooded(flood, tenant=tenant), _flooded(None)
    print(f"  memory: {during.peak_mb:.0f} MB, without the flood {without.peak_mb:.0f} MB", file=sys.stderr)
    return Pair(during.per_second, without.per_second)


HALF = ">= 0.5 times the peer"
NO_FLOOD = "without the flood"


@figure("access.flood.connections", unit="transactions/s", goal=HALF, peer=NO_FLOOD)
def flood_of_connections() -> Pair:
    return _compared("connections")


@figure("access.flood.calls", unit="transactions/s", goal=HALF, peer=NO_FLOOD)
def flood_of_calls() -> Pair:
    return _compared("calls")


@figure("access.flood.watches", unit="transactions/s", goal=HALF, peer=NO_FLOOD)
def flood_of_watches() -> Pair:
    return _compared("watches")


@figure("access.flood.frames", unit="transactions/s", goal=HALF, peer=NO_FLOOD)
def flood_of_frames() -> Pair:
    return _compared("frames", tenant=True)


@figure("access.flood.leases", unit="transactions/s", goal=HALF, peer=NO_FLOOD)
def flood_of_leases() -> Pair:
    return _compared("leases", tenant=True)


@figure("access.flood_mb", unit="MB", goal="<= 1.5 times the peer", peer=NO_FLOOD)
def memory_during_a_flood() -> Pair:
    """Memory of the service during calls that are reset, without a token."""
    return Pair(_flooded("calls").peak_mb, _flooded(None).peak_mb)
