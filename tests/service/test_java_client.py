"""A client in another language, written from docs/wire.md: it commits a transaction and reads it back."""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
from service_setup import starting_service
from source_tree import ROOT

from txnbuffer import connect

SOURCES = ROOT / "tests" / "java_client"
PROTOCOLS = sorted(
    path.relative_to(ROOT) for package in ("broker_io", "txnbuffer") for path in (ROOT / package).rglob("*.proto")
)
SECONDS = 240.0
"""Maximum seconds of the build, which downloads gRPC once, and of a run of the client."""


def built() -> Path:
    """The directory with the client's classes, built once for these sources, outside of the tree."""
    for tool, package in (("mvn", "Maven"), ("java", "Java 17")):
        if shutil.which(tool) is None:
            pytest.fail(f"the client in Java requires {package}: install it ({tool})")
    files = [*PROTOCOLS, *sorted(path.relative_to(ROOT) for path in SOURCES.rglob("*") if path.is_file())]
    digest = hashlib.sha256(b"".join(str(path).encode() + (ROOT / path).read_bytes() for path in files)).hexdigest()
    caches = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "txnbuffer"
    cache = Path(os.environ.get("TXNBUFFER_CACHE", caches))
    target = cache / f"java-client-{digest[:16]}"
    if not target.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache, ignore_cleanup_errors=True) as scratch:
            work = Path(scratch, "client")
            shutil.copytree(SOURCES, work)
            for path in PROTOCOLS:
                (work / "protocols" / path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / path, work / "protocols" / path)
            made = subprocess.run(
                ["mvn", "-q", "-B", "process-classes"], cwd=work, capture_output=True, text=True, timeout=SECONDS
            )
            assert made.returncode == 0, f"Maven can't build the client in Java:\n{made.stdout[-3000:]}{made.stderr}"
            work.rename(target)  # only a complete one is used again
    return target / "target"


async def test_a_client_in_java_commits_a_transaction_and_reads_it_back() -> None:
    client = await asyncio.to_thread(built)
    async with starting_service() as (address, serve):
        await serve()
        records = ["o-1=one", "o-2=two", "o-3=three"]
        process = await asyncio.create_subprocess_exec(
            *("java", "-cp", f"{client / 'classes'}:{client / 'libraries'}/*", "Client"),
            *(address.removeprefix("txnbuf://"), "orders", *records),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        async with asyncio.timeout(SECONDS):
            output = (await process.communicate())[0].decode().splitlines()
        assert output[1:] == records, output
        assert output[0].startswith("committed 0:")
        async with connect(address) as python, await python.reader("orders") as reader:
            batch = await reader.read(timeout=30.0)
            assert batch is not None
            assert [f"{record.key.decode()}={record.value.decode()}" for record in batch] == records
