"""The state of transactions, restored from snapshots and logs, followed, snapshotted, verified and rebuilt."""
