"""What access control costs: the same transactions with tokens and a policy, and without"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from bench.figures_embedded import SECONDS
from bench.fresh import fresh
from bench.harness import Pair, figure
from bench.service_process import service

PAIRS = 5
POLICY = """
[[allow]]
principals = ["bench"]
roles = ["write"]
topics = ["a*"]
"""


def _protect(directory: Path) -> tuple[str, tuple[str, ...]]:
    """A token, and the flags of a service that requires it."""
    from txnbuffer.access.tokens import TokenFile, issue, with_token

    text, token = issue("bench", os.urandom(38), 1_764_000_000, None)
    files = {"tokens": with_token(TokenFile({}), token).format(), "policy": POLICY}
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
