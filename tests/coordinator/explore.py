"""Plays histories of coordinators: `python tests/coordinator/explore.py [how many] [first seed]`.

Prints what they covered. The first history that breaks a promise ends it with its seed; `explore.py 1 SEED`
plays that one again.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from coordinator.coordinator_history import Wrong, explore


def main() -> None:
    count, seed = (int(text) for text in (sys.argv[1:] + ["1000", "0"][len(sys.argv) - 1 :])[:2])
    try:
        covered = explore(seed, count)
    except Wrong as wrong:
        sys.exit(str(wrong))
    for what, times in sorted(covered.items()):
        print(f"{times:>9,}  {what}")


if __name__ == "__main__":
    main()
