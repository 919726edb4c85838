"""The topics of an owner: their records, requests, appends, snapshots, retention and backups.

It may import `door`, `standby`, `loop` and `log_readers`.
"""
