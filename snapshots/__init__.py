"""Keyed snapshots of transaction buffers."""
