"""`txnbuf bench`: the benchmarks, run on this machine"""

from __future__ import annotations

import sys

import click

from broker_io.errors import MissingDependency


@click.command("bench")
@click.argument("prefix", default="")
def command(prefix: str) -> None:
    """Run all benchmarks, or those whose names start with PREFIX.

    Prints one JSON object per line: figure, value, unit, goal, and the system that it is compared with,
    measured in the same run. The benchmarks are part of the source tree, not of the installed package.
    """
    try:
        from bench.harness import main
    except ModuleNotFoundError:
        raise MissingDependency("the benchmarks are in the source tree: run `txnbuf bench` from its root") from None
    sys.exit(main([prefix] if prefix else []))
