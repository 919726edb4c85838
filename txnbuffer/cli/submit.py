"""Script for spark-submit: `spark-submit … submit.py export ADDRESS DIR` runs `txnbuf pipeline export …`"""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Run `txnbuf pipeline` with the arguments after the name of the script."""
    # Spark puts the directory of the script first on the path; its modules would hide others of the same name.
    sys.path[:] = [path for path in sys.path if os.path.abspath(path) != os.path.dirname(os.path.abspath(__file__))]
    from txnbuffer.cli import main as txnbuf

    sys.argv.insert(1, "pipeline")
    txnbuf()


if __name__ == "__main__":
    main()
