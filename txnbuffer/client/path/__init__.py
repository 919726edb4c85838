"""The way of records from a send into the logs of their topics: columns, partitions, frames or writers.

It may import `lifecycle` and `serializers` of the client.
"""
