"""Reduces a seed with a finding: leaves out faults, roles and writers as long as the finding is of the same rule.

Each fault, role and writer has its own stream of random numbers, so that the others do as before without it, except
for the order in which threads run.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Self

TRIES = 150
"""Runs that a reduction takes, at most."""


@dataclass(frozen=True, slots=True)
class Part:
    """The part of a seed that a run has; None: everything. `faults` and `writers` are numbers, `roles` names."""

    faults: tuple[int, ...] | None = None
    roles: tuple[str, ...] | None = None
    writers: tuple[int, ...] | None = None
    transactions: int | None = None
    """Transactions of each writer."""
    seconds: float | None = None

    @classmethod
    def of(cls, text: str) -> Self:
        """The part of a text as `str` makes it: `faults=0,3;roles=group,late reader;seconds=8`. Raises ValueError."""
        values: dict[str, Any] = {}
        for name, _, value in (item.partition("=") for item in text.split(";") if item):
            if name not in _DECODERS:
                raise ValueError(f"a part of a seed has no {name!r}: give {', '.join(_DECODERS)}")
            try:
                values[name] = _DECODERS[name](value)
            except ValueError:
                raise ValueError(f"{name} of a part of a seed must be numbers, got {value!r}") from None
        return cls(**values)

    def __str__(self) -> str:
        lists = {"faults": self.faults, "roles": self.roles, "writers": self.writers}
        items = [f"{name}={','.join(map(str, value))}" for name, value in lists.items() if value is not None]
        numbers = {"transactions": self.transactions, "seconds": self.seconds}
        items += [f"{name}={value:g}" for name, value in numbers.items() if value is not None]
        return ";".join(items)


def _texts(value: str) -> tuple[str, ...]:
    return tuple(value.split(",")) if value else ()


def _numbers(value: str) -> tuple[int, ...]:
    return tuple(map(int, _texts(value)))


_DECODERS: dict[str, Callable[[str], Any]] = {
    "faults": _numbers, "roles": _texts, "writers": _numbers, "transactions": int, "seconds": float,
}  # fmt: skip


def smaller(part: Part) -> Iterator[Part]:
    """Parts of a part that names everything, those that leave out most first."""
    faults, roles, writers = part.faults or (), part.roles or (), part.writers or ()
    for role in roles:
        yield replace(part, roles=tuple(name for name in roles if name != role))
    half = len(faults) // 2
    if half:
        yield replace(part, faults=faults[:half])
        yield replace(part, faults=faults[half:])
    for writer in writers:
        yield replace(part, writers=tuple(number for number in writers if number != writer))
    if part.transactions:
        yield replace(part, transactions=part.transactions // 2)
    if part.seconds is not None and part.seconds > 1.0:
        yield replace(part, seconds=round(part.seconds * 0.7, 1))
    for fault in faults:
        yield replace(part, faults=tuple(number for number in faults if number != fault))


def reduced(part: Part, fails: Callable[[Part], bool], tries: int = TRIES) -> Part:
    """The smallest part found that still fails; `part` fails and names everything that it has."""
    tried: set[Part] = set()
    while True:
        for candidate in smaller(part):
            if candidate in tried:
                continue
            if len(tried) == tries:
                return part
            tried.add(candidate)
            if fails(candidate):
                part = candidate
                break
        else:
            return part


def rules(finding: str) -> set[str]:
    """The rules that a finding breaks: its sentences without names and numbers, or the error that nothing handled."""
    lines = [line for line in finding.splitlines() if line.strip()]
    if "Traceback" in finding:
        return {lines[-1].split(":")[0]}
    found = set()
    for line in lines:
        text = re.sub(r"(?<=\w)'s ", " ", line)
        text = re.sub(r"""b?'[^']*'|b?"[^"]*"|\[.*?\]|\{.*?\}|\(.*?\)""", "", text)
        words = [word for word in text.split() if re.fullmatch(r"[a-z]+[,.:;]?", word)]
        found.add(" ".join(words[:8]))
    return found
