"""Readers of committed records, and what they return.

It may import `lifecycle`, `serializers` and `topic_names`.
"""
