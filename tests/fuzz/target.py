"""A decoder under test: how it is called, the errors that it documents, valid inputs to change, and its limits."""

from __future__ import annotations

import resource
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

MIB = 1024 * 1024
MEMORY = 64 * MIB
"""Bytes that a decoder may allocate above the size of its input."""
SECONDS = 5.0
"""Processor time that a decoder may take for one input. All inputs are small, so this is far above what any needs."""
ADDRESS_SPACE = 1024 * MIB
"""What the process may map in addition while a decoder runs: a huge allocation fails instead of taking the machine."""

FOUND = Path(__file__).resolve().parent / "found"
"""Inputs that once broke a decoder: `found/TARGET/NAME`, which the tests run again."""

Decode = Callable[[bytes], object]
Errors = tuple[type[BaseException], ...]


@dataclass(frozen=True)
class Target:
    """A decoder.

    `decoders`: dotted names of the functions of the product that it tests. `errors`: the only ones that these functions
    may raise, which their docstrings name. `seeds`: returns valid inputs. `seal`: repairs the checksums of an input, so
    that changed inputs pass them. `size`: of an input, where a compressed part counts with its decompressed size.
    """

    name: str
    decode: Decode
    decoders: tuple[str, ...]
    errors: Errors
    seeds: Callable[[], Sequence[bytes]]
    seal: Callable[[bytes], bytes] | None = None
    size: Callable[[bytes], int] = len


class Finding(AssertionError):
    """An input for which a decoder raises an undocumented error, or exceeds the limits of time or memory."""


def check(target: Target, data: bytes) -> None:
    """Decode an input, as it is and with repaired checksums. Raises Finding."""
    _check(target, data)
    if target.seal is not None and (sealed := target.seal(data)) != data:
        _check(target, sealed)


def _check(target: Target, data: bytes) -> None:
    started = not tracemalloc.is_tracing()
    if started:
        tracemalloc.start(1)
    try:
        tracemalloc.reset_peak()
        before, began = tracemalloc.get_traced_memory()[0], time.thread_time()
        try:
            with _address_space():
                target.decode(data)
        except target.errors:
            pass
        except Exception as error:
            if isinstance(error, MemoryError) and target.size(data) > ADDRESS_SPACE // 4:
                return
            raise Finding(f"{target.name}: {error!r} is not documented, for {len(data)} bytes") from error
        seconds, used = time.thread_time() - began, tracemalloc.get_traced_memory()[1] - before
    finally:
        if started:
            tracemalloc.stop()
    if seconds > SECONDS:
        raise Finding(f"{target.name}: {seconds:.1f} s for {len(data)} bytes")
    if used > MEMORY + target.size(data):
        raise Finding(f"{target.name}: {used // MIB} MiB for {len(data)} bytes")


@contextmanager
def _address_space() -> Iterator[None]:
    """Limit what the process may map; a decoder that needs more gets a MemoryError."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + ADDRESS_SPACE
    resource.setrlimit(resource.RLIMIT_AS, (limit if soft < 0 else min(limit, soft), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def found(target: Target) -> list[bytes]:
    """The inputs that once broke a decoder."""
    directory = FOUND / target.name
    return [path.read_bytes() for path in sorted(directory.iterdir())] if directory.is_dir() else []
