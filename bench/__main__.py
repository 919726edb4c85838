"""`python -m bench [PREFIX…]`: run the figures whose names start with a prefix, or all; `--help` tells more."""

import sys

from bench.harness import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
