"""Ends the process of a seed that hangs, or whose runner has ended.

A timer of the machine looks every few seconds; the simulated world does not notice it. Nothing but the code of a thread
that does not park keeps a world from going on, however slow the machine is, so a minute of looks is enough. A process
that is stopped looks at nothing meanwhile.
"""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sim.world import World

LOOK_SECONDS = 5.0
"""Real seconds between two looks."""
HANG_LOOKS = 12
"""Looks between which no thread has parked and nothing was checked, so that the seed hangs."""
FRAMES = 12
"""Innermost calls that are named."""


class Watch:
    """Watches the world of this process from `begin` on; `on_hang` gets where it hangs, and then the process ends."""

    def __init__(self, on_hang: Callable[[str], None]) -> None:
        self._on_hang = on_hang
        self._runner = os.getppid()
        self._world: World | None = None
        self._seen = -1
        self._looks = 0

    def begin(self) -> None:
        """Look every LOOK_SECONDS from now on."""
        signal.signal(signal.SIGALRM, self._look)
        signal.setitimer(signal.ITIMER_REAL, LOOK_SECONDS, LOOK_SECONDS)

    def over(self) -> None:
        """Stop looking: the seed has ended."""
        signal.setitimer(signal.ITIMER_REAL, 0.0)

    def world(self, world: World) -> None:
        """The world of the seed is there."""
        self._world = world

    def _look(self, _: int, frame: FrameType | None) -> None:
        if os.getppid() != self._runner:
            os._exit(1)
        runs = 0 if self._world is None else self._world.scheduler.runs
        self._looks = self._looks + 1 if runs == self._seen else 0
        self._seen = runs
        if self._looks >= HANG_LOOKS:
            self.over()
            now = "" if self._world is None else f" at {self._world.now:.3f} s"
            stack = "".join(traceback.format_stack(frame)[-FRAMES:])
            self._on_hang(f"hangs{now}: nothing went on for {HANG_LOOKS * LOOK_SECONDS:g} s in\n{stack}")
            os._exit(0)
