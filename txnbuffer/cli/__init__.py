"""The `txnbuf` command line: one module for each command."""

from txnbuffer.cli.app import main

__all__ = ["main"]
