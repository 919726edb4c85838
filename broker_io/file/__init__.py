"""The embedded log: a broker in a directory of files."""

from broker_io.file.broker import FileBroker

__all__ = ["FileBroker"]
