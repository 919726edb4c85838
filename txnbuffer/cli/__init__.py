"""`txnbuf`, the command line: one module a command."""

from txnbuffer.cli.app import main

__all__ = ["main"]
