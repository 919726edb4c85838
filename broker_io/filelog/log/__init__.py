"""The log in a directory: its records, numbers, operations, journal, ledgers, recovery and compaction."""

from broker_io.filelog.log.broker import FileBroker

__all__ = ["FileBroker"]
