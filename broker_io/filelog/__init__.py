"""The file log: a log in a directory of files, alone or held by a pair of machines.

`log` is the log itself: records, numbers, operations, journal, ledgers, recovery and compaction; it knows nothing of
pairs. `replication` is the core of a pair, pure; it imports of `log` only its numbers and records. `pair` drives both.
"""
