"""The script for spark-submit: `spark-submit … submit.py export ADDRESS DIR` does what `txnbuf pipeline` does."""

from __future__ import annotations

import os
import sys


def main() -> None:
    """The command line after the script's name is that of `txnbuf pipeline`."""
    # Spark puts the script's directory first, where our modules would hide others of the same name.
    sys.path[:] = [path for path in sys.path if os.path.abspath(path) != os.path.dirname(os.path.abspath(__file__))]
    from txnbuffer.cli import main as txnbuf

    sys.argv.insert(1, "pipeline")
    txnbuf()


if __name__ == "__main__":
    main()
