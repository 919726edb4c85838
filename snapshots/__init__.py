"""Snapshots of any state on a compacted topic: keyed entries and their formats, the scan, the owner and its writer."""
