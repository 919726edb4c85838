"""The `txnbuf` command line: a module for each command or group of related commands."""

from txnbuffer.cli.app import main

__all__ = ["main"]
