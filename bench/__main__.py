"""`python -m bench [PREFIX…]`: run the figures whose names start with a prefix, or all; see `--help`."""

import signal
import sys

from bench.harness import main

if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that child processes are ended
    sys.exit(main(sys.argv[1:]))
