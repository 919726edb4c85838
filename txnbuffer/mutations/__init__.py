"""The visible mutations of a topic for any number of readers: snapshots in memory, cursors, backfills; pure"""
