"""`txnbuf bench`: the figures of this machine."""

from __future__ import annotations

import sys

import click

from broker_io.errors import MissingDependency


@click.command("bench")
@click.argument("prefix", default="")
def command(prefix: str) -> None:
    """Measure all figures, or those whose names start with PREFIX.

    One JSON object a line on stdout: figure, value, unit, goal, and the peer measured in the same run.
    The benchmarks are part of the source tree, not of the installed package.
    """
    try:
        from bench.harness import main
    except ModuleNotFoundError:
        raise MissingDependency("the benchmarks are in the source tree: run `txnbuf bench` from its root") from None
    sys.exit(main([prefix] if prefix else []))
