"""A digest of the newest record of each key, whatever the order in which they are added

The digest of a set of records is the sum, modulo 2^128, of a hash of each: of the hash of its key and of its position.
All hashes have one seed, so nobody who does not know it can construct two sets with one digest. A compaction changes
neither which record is the newest of its key nor its position, so the digest after it is the one before. Values are
not part of it: the checksums of blocks protect them.

As text a digest is 48 hexadecimal digits: the seed (16) and the sum (32).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
from numpy.typing import NDArray

from broker_io.position import Int64s

MODULUS = 2**128
_TEXT = re.compile(r"[0-9a-f]{48}")
_LANES = (0x9E3779B97F4A7C15, 0xD1B54A32D192ED03)
"""Each half of a hash begins with the seed and one of these."""
_STEPS = ((np.uint64(0xFF51AFD7ED558CCD), np.uint64(32)), (np.uint64(0xC4CEB9FE1A85EC53), np.uint64(29)))
"""A factor, and a shift that brings the upper bits down, for each step of mixing."""


@dataclass(frozen=True, slots=True)
class KeyDigest:
    """The digest of a set of records; `total` is the sum of their hashes. The seed is that of the key hashes."""

    seed: int
    total: int = 0

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse the output of `str`. Raises ValueError that quotes the text."""
        if not _TEXT.fullmatch(text):
            raise ValueError(f"{text!r} is not a digest of keys: it has 48 hexadecimal digits")
        return cls(int(text[:16], 16), int(text[16:], 16))

    def __str__(self) -> str:
        return f"{self.seed:016x}{self.total_text}"

    @property
    def total_text(self) -> str:
        """The sum alone, as text."""
        return f"{self.total:032x}"

    def add(self, hashes: NDArray[np.uint64], ledgers: Int64s, entries: Int64s) -> Self:
        """The digest with n more records: the first halves of their key hashes, uint64[n], and their positions."""
        words = [hashes, ledgers.astype(np.uint64), entries.astype(np.uint64)]
        high, low = (_sum(_mixed(words, (self.seed + lane) % 2**64)) for lane in _LANES)
        return self._with(self.total + (high << 64) + low)

    def combine(self, other: Self) -> Self:
        """The digest of both sets, which have no record in common. Raises ValueError if their seeds differ."""
        return self._with(self.total + self._same_seed(other).total)

    def subtract(self, other: Self) -> Self:
        """The digest without a set of its records. Raises ValueError if the seeds differ."""
        return self._with(self.total - self._same_seed(other).total)

    def _with(self, total: int) -> Self:
        return replace(self, total=total % MODULUS)

    def _same_seed(self, other: Self) -> Self:
        if other.seed != self.seed:
            raise ValueError(f"digests with the seeds {self.seed:016x} and {other.seed:016x} have nothing in common")
        return other


def _mixed(words: list[NDArray[np.uint64]], start: int) -> NDArray[np.uint64]:
    """uint64[n]: one half of the hashes of n rows of words."""
    mixed = np.full(len(words[0]), start, np.uint64)
    for word in words:
        mixed ^= word
        for factor, shift in _STEPS:
            mixed *= factor
            mixed ^= mixed >> shift
    return mixed


def _sum(numbers: NDArray[np.uint64]) -> int:
    """The exact sum."""
    low = int((numbers & np.uint64(2**32 - 1)).sum())
    return low + (int((numbers >> np.uint64(32)).sum()) << 32)
