"""The session with the service of a shard, or with the engine of this process.

It may import `path` and `lifecycle`.
"""
